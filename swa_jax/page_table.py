"""Page tables as attention kernels read them, made from the state on the device.

Legend: R rows, N pages a row (padded), L tokens a row (padded), P page_size, W the allocator's
window in past tokens, Q most new tokens a row.

The form is that of JAX's ragged paged attention. Its kernel fetches a first page for every row
below `num_seqs` and waits for it only where `kv_lens` is above 0, so a row that is off must not
hold 0 tokens: it gets one token of the padding page and no query. Rows keep their order, and
`num_seqs` ends at the last row that is on.
"""

import functools
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from swa_jax.config import PoolConfig
from swa_jax.inputs import Ints, as_int32, check_rows
from swa_jax.paging import look_up, page_of, pages_for
from swa_jax.state import PAD_PAGE, AllocatorState, must_be_state
from swa_jax.window import frontier


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["full_page_indices", "swa_page_indices", "kv_lens", "cu_q_lens", "num_seqs"],
    meta_fields=[],
)
@dataclass(frozen=True)
class PageTables:
    """Both sides of a batch. 0 stands for no page: past a row's end, or gone from the window."""

    full_page_indices: jax.Array  # int32[R, N]
    swa_page_indices: jax.Array  # int32[R, N]
    kv_lens: jax.Array  # int32[R] tokens held; 1 for a row that is off
    cu_q_lens: jax.Array  # int32[R + 1] new tokens of the rows before
    num_seqs: jax.Array  # int32[1] rows up to the last one that is on


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["swa_page_indices", "kv_lens", "cu_q_lens", "num_seqs", "shift"],
    meta_fields=[],
)
@dataclass(frozen=True)
class WindowPageTables:
    """The SWA side of a batch, cut down to the pages that its window can reach.

    Token t of a row is token t - shift here. Attention over a window only looks at differences
    of places, so a kernel may be given these as they are.
    """

    swa_page_indices: jax.Array  # int32[R, M], M = min(N, ceil((W + Q) / P) + 1)
    kv_lens: jax.Array  # int32[R] tokens from the shift on; 1 for a row that is off
    cu_q_lens: jax.Array  # int32[R + 1] new tokens of the rows before
    num_seqs: jax.Array  # int32[1] rows up to the last one that is on
    shift: jax.Array  # int32[R] tokens left out, a multiple of the page


def first_slots(req_to_token: Ints, *, page_size: int) -> jax.Array:
    """The first slot of each page, of a table that holds the slots of all tokens.

    Args:
      req_to_token: int32[R, L] full slots in token order; 0 in unused places.
      page_size: tokens in a page, static.

    Returns:
      int32[R, ceil(L / page_size)], as `page_tables` takes it.
    """
    if page_size < 1:
        raise ValueError(f"page_size must be at least 1, got {page_size!r}")
    return as_int32("req_to_token", req_to_token, 2)[:, ::page_size]


def page_tables(
    state: AllocatorState, req_to_page_slot: Ints, kv_lens: Ints, q_lens: Ints
) -> PageTables:
    """The page tables of a batch for full and for SWA layers.

    Args:
      state: allocator; read only.
      req_to_page_slot: int32[R, N] first full slot of each page of each row, 0 where there is
        none. `first_slots` makes it from a table of tokens.
      kv_lens: int32[R] tokens that each row holds, the new ones included.
      q_lens: int32[R] new tokens of each row; 0: the row is off.

    Returns:
      `PageTables`. A row with more tokens than the table is wide ends with the table.

    Raises:
      ValueError: a pool with request rings.
    """
    must_be_state(state)
    state.config.needs_mapping("page_tables")
    return _page_tables(state, *_inputs(req_to_page_slot, kv_lens, q_lens))


@jax.jit
def _page_tables(
    state: AllocatorState, slots: jax.Array, kv_lens: jax.Array, q_lens: jax.Array
) -> PageTables:
    full, swa = _both_sides(state, slots, kv_lens, q_lens)
    return PageTables(full, swa, *ragged_rows(kv_lens, q_lens))


def window_page_tables(
    state: AllocatorState,
    req_to_page_slot: Ints,
    kv_lens: Ints,
    q_lens: Ints,
    *,
    max_queries: int,
) -> WindowPageTables:
    """The SWA page tables of a batch without the pages that its window has left behind.

    A kernel walks a row from its first page; with these it does not walk dead ones.

    Args:
      state: allocator; its configuration says what the window is. Without one nothing is cut.
      req_to_page_slot: int32[R, N] as for `page_tables`.
      kv_lens: int32[R] tokens that each row holds, the new ones included.
      q_lens: int32[R] new tokens of each row; 0: the row is off.
      max_queries: Q, the most new tokens a row, static: the width of the answer follows it.

    Returns:
      `WindowPageTables`.

    Raises:
      ValueError: a pool with request rings, or no room for queries.
    """
    must_be_state(state)
    state.config.needs_mapping("window_page_tables")
    if max_queries < 1:
        raise ValueError(f"max_queries must be at least 1, got {max_queries!r}")
    return _window_page_tables(state, *_inputs(req_to_page_slot, kv_lens, q_lens), max_queries)


@functools.partial(jax.jit, static_argnums=4)
def _window_page_tables(
    state: AllocatorState,
    slots: jax.Array,
    kv_lens: jax.Array,
    q_lens: jax.Array,
    max_queries: int,
) -> WindowPageTables:
    config = state.config
    size, width = config.page_size, slots.shape[1]
    if config.sliding_window is not None:
        width = reach(config.sliding_window + max_queries, size, width)
    first = _first_pages(config, kv_lens, q_lens)
    pages = columns_from(_both_sides(state, slots, kv_lens, q_lens)[1], first, width)
    shift = first * jnp.int32(size)
    return WindowPageTables(pages, *ragged_rows(kv_lens - shift, q_lens), shift)


def ragged_rows(kv_lens: jax.Array, q_lens: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """`kv_lens`, `cu_q_lens` and `num_seqs` of a batch as ragged paged attention takes them.

    Args:
      kv_lens: int32[R] tokens held.
      q_lens: int32[R] new tokens, 0: the row is off.

    Returns:
      int32[R] tokens, 1 where the row is off; int32[R + 1] new tokens of the rows before;
      int32[1] rows up to the last one that is on.
    """
    count = q_lens.shape[0]
    is_on = q_lens > 0
    ends = jnp.cumsum(jnp.maximum(q_lens, 0), dtype=jnp.int32)
    place = jnp.arange(1, count + 1, dtype=jnp.int32)
    num_seqs = jnp.max(jnp.where(is_on, place, 0), keepdims=True)
    return jnp.where(is_on, kv_lens, 1), jnp.concatenate([jnp.zeros(1, jnp.int32), ends]), num_seqs


def reach(tokens: int, page_size: int, most: int) -> int:
    """Pages that `tokens` tokens in a row touch wherever they start, and one spare; `most` at most.

    The spare makes the width ceil(tokens / P) + 1 for every page size.
    """
    return min(most, -(-tokens // page_size) + 1)


def columns_from(table: jax.Array, first: jax.Array, width: int) -> jax.Array:
    """`width` columns of each row of an int32[R, N] table from column `first` >= 0 on, then 0."""
    rows = jnp.arange(table.shape[0], dtype=jnp.int32)[:, None]
    columns = first[:, None] + jnp.arange(width, dtype=jnp.int32)[None, :]
    return table.at[rows, columns].get(mode="fill", fill_value=PAD_PAGE)


def _inputs(slots: Ints, kv_lens: Ints, q_lens: Ints) -> tuple[jax.Array, jax.Array, jax.Array]:
    table = as_int32("req_to_page_slot", slots, 2)
    held, new = as_int32("kv_lens", kv_lens, 1), as_int32("q_lens", q_lens, 1)
    check_rows(req_to_page_slot=table, kv_lens=held, q_lens=new)
    return table, held, new


def _both_sides(
    state: AllocatorState, slots: jax.Array, kv_lens: jax.Array, q_lens: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """int32[R, N] full and SWA pages of the slots in use, 0 elsewhere and for foreign slots."""
    config = state.config
    held = jnp.where(q_lens > 0, pages_for(jnp.maximum(kv_lens, 0), config.page_size), 0)
    place = jnp.arange(slots.shape[1], dtype=jnp.int32)[None, :]
    inside = (slots > 0) & (slots < jnp.int32(config.full_tokens + config.page_size))
    used = inside & (place < held[:, None])
    full = page_of(jnp.where(used, slots, 0), config.page_size)
    # A page behind the window may have a new owner, which in a pure SWA pool the map cannot tell.
    seen = place >= _first_pages(state.config, kv_lens, q_lens)[:, None]
    return full, look_up(state.full_to_swa, jnp.where(seen, full, PAD_PAGE), PAD_PAGE)


def _first_pages(config: PoolConfig, kv_lens: jax.Array, q_lens: jax.Array) -> jax.Array:
    """int32[R] pages that lie behind the window of the first new token; 0 for a row that is off."""
    if config.sliding_window is None:
        return jnp.zeros_like(kv_lens)
    behind = page_of(frontier(config, kv_lens - q_lens), config.page_size)
    return jnp.where(q_lens > 0, behind, 0)
