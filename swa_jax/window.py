"""The frontier below which SWA pages are dead, and freeing what has passed it.

W counts the past tokens that stay live below the n committed ones, for the next token to see. A
family whose window includes the query itself gives W = its window - 1, or keeps one token more.
"""

import functools
from dataclasses import replace

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from swa_jax.config import MAX_SLOTS, PoolConfig
from swa_jax.faults import add_faults, fault_counts
from swa_jax.inputs import Ints, as_active, as_int32, check_rows
from swa_jax.owners import as_owner, keep_own
from swa_jax.paging import floor_to_page, offset_of, pages_for
from swa_jax.plan_free import commit_free, name_pages, plan_free_swa
from swa_jax.state import PAD_SLOT, AllocatorState, must_be_state


def frontier(
    config: PoolConfig, seq_lens: jax.Array, insert_lens: jax.Array | None = None
) -> jax.Array:
    """Tokens below which SWA pages are dead, always on a page boundary.

    Sliding: the last W of the n committed tokens stay. Chunked: the chunk that the next token
    lies in stays.

    Args:
      config: gives the window, its shape and the page.
      seq_lens: int32[B] committed tokens n; a chunk in flight counts from its real start.
      insert_lens: int32[B] tokens of a page-aligned prefix that goes into a prefix cache; what
        its last window needs stays too.

    Returns:
      int32[B] tokens.

    Rule R8; public reports B24, B25, B29, B30, B33.
    """
    edge = _dead_below(config, jnp.maximum(seq_lens, 0))
    if insert_lens is not None:
        kept = jnp.maximum(insert_lens, 0)
        # A prefix that ends where a chunk ends must not lose its last chunk.
        kept = jnp.maximum(kept - 1, 0) if config.chunked else kept
        edge = jnp.minimum(edge, _dead_below(config, kept))
    return floor_to_page(edge, config.page_size)


def _dead_below(config: PoolConfig, tokens: jax.Array) -> jax.Array:
    if config.sliding_window is None:
        raise ValueError("this configuration has no window: give PoolConfig a sliding_window")
    window = jnp.int32(config.sliding_window)
    if config.chunked:
        return tokens - jax.lax.rem(tokens, window)
    return jnp.maximum(tokens - window, 0)


def most_swa_pages(config: PoolConfig, tokens: jax.Array) -> jax.Array:
    """SWA pages that a request of int32[...] tokens can hold at once when it recycles them."""
    pages = pages_for(tokens, config.page_size)
    if config.sliding_window is None:
        return pages
    return jnp.minimum(pages, jnp.int32(config.min_swa_pages))


def free_out_of_window(
    state: AllocatorState,
    req_to_token: Ints,
    seq_lens: Ints,
    evicted_lens: Ints,
    *,
    insert_lens: Ints | None = None,
    active: ArrayLike | list[bool] | None = None,
    max_pages: int | None = None,
    stride: int = 1,
    by: Ints | None = None,
) -> tuple[AllocatorState, jax.Array]:
    """Frees the SWA pages of each row that have left its window since the last call.

    Pages without an SWA side are passed over and are no fault. In an open group the pages are
    queued.

    Args:
      state: allocator before the call.
      req_to_token: int32[B, L] full slots of each row in token order; 0 in unused places.
      seq_lens: int32[B] committed tokens of each row.
      evicted_lens: int32[B] tokens whose pages earlier calls gave back, on a page boundary; start
        with 0, or with the length of a prefix that belongs to a cache.
      insert_lens: int32[B] as for `frontier`, none by default.
      active: bool[B] rows that take part, all by default.
      max_pages: most pages freed for a row in this call, static; by default as many as the row
        can hold. The cost follows it. What is left over is freed by the next call.
      stride: tokens between two columns of `req_to_token`, static: 1 for a table of slots,
        page_size for a table with the first slot of each page.
      by: int32[] owner of all rows or int32[B] of each, 0 by default; only with owner tags.

    Returns:
      The allocator after the call, and int32[B] the new evicted_lens.

    Refused, counted, and the row left as it was:
      bad_length: `evicted_lens` below 0, or, where something is left to free, a frontier past the
        width of the table, once a row.
      misaligned: `evicted_lens` inside a page, once a row.

    Refused and counted, of the table's slots as for `free_swa`, and passed over for good: the row's
    frontier goes on.
      double_free, out_of_range; foreign: a page of another owner, with or without an SWA side.

    Rule R8; public reports B18, B24, B25, B29, B30, B34, B35, B52.
    """
    must_be_state(state)
    table = as_int32("req_to_token", req_to_token, 2)
    lens = as_int32("seq_lens", seq_lens, 1)
    evicted = as_int32("evicted_lens", evicted_lens, 1)
    check_rows(req_to_token=table, seq_lens=lens, evicted_lens=evicted)
    rows = as_active(active, seq_lens=lens)
    kept = None if insert_lens is None else as_int32("insert_lens", insert_lens, 1)
    if kept is not None:
        check_rows(seq_lens=lens, insert_lens=kept)
    if table.shape[1] == 0:
        raise ValueError(f"req_to_token must have at least one column, got shape {table.shape}")
    size = state.config.page_size
    if stride not in (1, size):
        raise ValueError(f"stride must be 1 or the page size {size}, got {stride!r}")
    most = min(max(1, table.shape[1] * stride // size), MAX_SLOTS // size)
    if max_pages is not None and max_pages < 1:
        raise ValueError(f"max_pages must be at least 1, got {max_pages!r}")
    pages = most if max_pages is None else min(int(max_pages), most)
    owners = as_owner(state, by, seq_lens=lens)
    return _free_out_of_window(state, table, lens, evicted, kept, rows, owners, pages, stride)


@functools.partial(jax.jit, static_argnums=(7, 8))
def _free_out_of_window(
    state: AllocatorState,
    table: jax.Array,
    seq_lens: jax.Array,
    evicted_lens: jax.Array,
    insert_lens: jax.Array | None,
    active: jax.Array,
    by: jax.Array | None,
    max_pages: int,
    stride: int,
) -> tuple[AllocatorState, jax.Array]:
    size = state.config.page_size
    edge = frontier(state.config, seq_lens, insert_lens)
    short = active & (evicted_lens < 0)
    start = jnp.where(short, 0, evicted_lens)
    odd = active & (offset_of(start, size) != 0)
    wide = active & (edge > jnp.int32(min(table.shape[1] * stride, MAX_SLOTS))) & (edge > start)
    takes_part = active & ~short & ~odd & ~wide
    # Tokens are counted from the start: near 2^31 a sum with it would pass int32.
    ahead = jnp.minimum(jnp.maximum(edge, start) - start, jnp.int32(max_pages * size))
    ahead = jnp.where(takes_part, ahead, 0)
    new = jnp.where(takes_part, start + ahead, evicted_lens)

    step = jnp.arange(max_pages, dtype=jnp.int32) * jnp.int32(size)
    dead = step[None, :] < ahead[:, None]
    tokens = start[:, None] + step[None, :]
    columns = jnp.where(dead, jax.lax.div(tokens, jnp.int32(stride)), table.shape[1])
    rows = jnp.arange(table.shape[0], dtype=jnp.int32)[:, None]
    slots = table.at[rows, columns].get(mode="fill", fill_value=PAD_SLOT).reshape(-1)

    if by is not None:
        state, slots = keep_own(state, slots, jnp.repeat(by, max_pages))
    named = name_pages(state, slots)
    plan = plan_free_swa(state, named, unmapped_is_fault=False, each_place_a_holder=True)
    after = commit_free(state, plan, defer=state.group_open, moves_full=state.config.pure_swa_pool)
    row_faults = fault_counts(bad_length=short | wide, misaligned=odd)
    return replace(after, faults=add_faults(after.faults, row_faults)), new
