"""Grants: whole pages, a batch that extends, a batch with an SWA tail, a decode step."""

import functools

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from swa_jax.faults import fault_counts
from swa_jax.grant import Grant, GrantPlan, commit_grant, judge, make_plan
from swa_jax.inputs import Ints, as_active, as_int32, as_rows, check_capacity
from swa_jax.owners import as_owner, tag_slots
from swa_jax.paging import offset_of, page_of
from swa_jax.plan_decode import plan_decode
from swa_jax.plan_extend import plan_extend
from swa_jax.pool import peek
from swa_jax.state import PAD_SLOT, AllocatorState, must_be_state


def alloc(
    state: AllocatorState, num_tokens: Ints, *, capacity: int, by: Ints | None = None
) -> tuple[AllocatorState, Grant]:
    """Grants whole pages for `num_tokens` tokens in both pools, or none at all.

    Args:
      state: allocator before the call.
      num_tokens: int32[] tokens, a multiple of the page.
      capacity: room for slots in the answer, static; each value compiles once.
      by: int32[] owner of the pages, 0 by default; only with owner tags (`swa_jax.owners`).

    Returns:
      The allocator after the call, and `Grant` with int32[capacity] full slots in token order.

    Refused (`ok` False, the state bit for bit as it was but for the counters):
      too few free pages in a pool: `full_short` / `swa_short` say how many are missing.
      bad_length: `num_tokens` below 0 or above `capacity`.
      misaligned: `num_tokens` is no multiple of the page.

    Laws 1, 2, 3 and 7; public reports B12 and B13.
    """
    must_be_state(state)
    count, owner = as_int32("num_tokens", num_tokens, 0), as_owner(state, by)
    return _alloc(state, count, owner, check_capacity(capacity))


@functools.partial(jax.jit, static_argnums=3)
def _alloc(
    state: AllocatorState, num_tokens: jax.Array, by: jax.Array | None, capacity: int
) -> tuple[AllocatorState, Grant]:
    state, grant = commit_grant(state, plan_alloc(state, num_tokens, capacity))
    return tag_slots(state, grant.slots, by), grant


def plan_alloc(state: AllocatorState, num_tokens: jax.Array, capacity: int) -> GrantPlan:
    """The plan of `alloc`."""
    size = state.config.page_size
    bad = (num_tokens < 0) | (num_tokens > capacity)
    count = jnp.where(bad, 0, num_tokens)
    odd = offset_of(count, size) != 0
    num_pages = page_of(count, size)
    verdict = judge(state, ~bad & ~odd, num_pages, num_pages)
    ranks = jnp.arange(-(-capacity // size), dtype=jnp.int32)
    used = ranks < num_pages
    swa_pages = peek(state.swa, ranks)
    pages = swa_pages if state.config.pure_swa_pool else peek(state.full, ranks)
    offsets = jnp.arange(size, dtype=jnp.int32)
    slots = (pages[:, None] * jnp.int32(size) + offsets[None, :]).reshape(-1)[:capacity]
    tokens = jnp.arange(capacity, dtype=jnp.int32)
    return make_plan(
        state,
        verdict,
        slots=jnp.where(tokens < count, slots, PAD_SLOT),
        count=count,
        new_pages=pages,
        takes_full=used,
        swa_pages=swa_pages,
        takes_swa=used,
        map_pages=pages,
        num_full=num_pages,
        num_swa=num_pages,
        faults=fault_counts(bad_length=bad, misaligned=odd),
        scratch=state.scratch,
    )


def alloc_extend(
    state: AllocatorState,
    prefix_lens: Ints,
    seq_lens: Ints,
    last_loc: Ints,
    *,
    capacity: int,
    by: Ints | None = None,
) -> tuple[AllocatorState, Grant]:
    """Grants full and SWA slots for the tokens that each row adds, or none at all.

    Row b grows from `prefix_lens[b]` to `seq_lens[b]` tokens. New tokens that still fit the page
    of its last token go there; the rest take new pages in both pools, row by row. A page of a
    last token that has lost its SWA side gets a new one, since the new tokens need it.

    Args:
      state: allocator before the call.
      prefix_lens: int32[B] tokens held before, 0 for a new request.
      seq_lens: int32[B] tokens held after; equal to the prefix where a row adds nothing.
      last_loc: int32[B] full slot of token `prefix_lens - 1`, -1 for an empty prefix. Looked at
        only where that token's page is partly filled.
      capacity: room for slots in the answer, static; each value compiles once.
      by: int32[] owner of all rows or int32[B] of each, 0 by default; only with owner tags.

    Returns:
      The allocator after the call, and `Grant` with int32[capacity] full slots, request by
      request in token order.

    Refused (`ok` False, the state bit for bit as it was but for the counters):
      too few free pages in a pool: `full_short` / `swa_short` say how many are missing.
      bad_length: a prefix below 0 or above its length (once a row), or more than `capacity` new
        tokens (once).
      out_of_range: a `last_loc` that names no held page, once a row.
      misaligned: a `last_loc` at another place of its page than the prefix ends, or in the page
        of an earlier row, once a row.
      still_mapped: a `last_loc` in a partly filled page that others hold too, once a row:
        `copy_on_write` comes first.
      foreign: a `last_loc` in a partly filled page of another owner, once a row.

    Laws 1, 2, 3 and 7; public reports B06, B09 and B12.
    """
    must_be_state(state)
    rows = as_rows(prefix_lens=prefix_lens, seq_lens=seq_lens, last_loc=last_loc)
    owners = as_owner(state, by, seq_lens=rows[1])
    return _extend(state, *rows, None, owners, check_capacity(capacity))


def alloc_extend_swa_tail(
    state: AllocatorState,
    prefix_lens: Ints,
    seq_lens: Ints,
    last_loc: Ints,
    swa_tail_lens: Ints,
    *,
    capacity: int,
    by: Ints | None = None,
) -> tuple[AllocatorState, Grant]:
    """Grants full slots for the whole extension, SWA slots only for the end of each row.

    For KV that arrives from elsewhere: layers with a window need no more than that window. The
    tail begins at the start of the page that its first token lies in, so both pools keep one
    offset in the page. New pages before it are unmapped, whatever their last owner left (law 7);
    the page that the prefix holds already keeps the SWA side it has.

    Args:
      state: allocator before the call.
      prefix_lens: int32[B] tokens held before, 0 for a new request.
      seq_lens: int32[B] tokens held after; equal to the prefix where a row adds nothing.
      last_loc: int32[B] full slot of token `prefix_lens - 1`, -1 for an empty prefix.
      swa_tail_lens: int32[B] tokens at the end of the extension that need an SWA side:
        0 (none) up to `seq_lens - prefix_lens` (all).
      capacity: room for slots in the answer, static; each value compiles once.
      by: int32[] owner of all rows or int32[B] of each, 0 by default; only with owner tags.

    Returns:
      The allocator after the call, and `Grant` as for `alloc_extend`. In a pure SWA pool tokens
      before the tail get slot 0: no layer keeps them.

    Refused: as for `alloc_extend`; also bad_length for a tail below 0 or longer than the row's
    extension, once a row.

    Laws 1, 2, 3, 7 and 8; public reports B02, B05 and B54.
    """
    must_be_state(state)
    rows = as_rows(
        prefix_lens=prefix_lens,
        seq_lens=seq_lens,
        last_loc=last_loc,
        swa_tail_lens=swa_tail_lens,
    )
    owners = as_owner(state, by, seq_lens=rows[1])
    return _extend(state, *rows, owners, check_capacity(capacity))


@functools.partial(jax.jit, static_argnums=6)
def _extend(
    state: AllocatorState,
    prefix_lens: jax.Array,
    seq_lens: jax.Array,
    last_loc: jax.Array,
    tail_lens: jax.Array | None,
    by: jax.Array | None,
    capacity: int,
) -> tuple[AllocatorState, Grant]:
    plan = plan_extend(state, prefix_lens, seq_lens, last_loc, tail_lens, capacity, by)
    state, grant = commit_grant(state, plan)
    if by is not None:  # of the row that each token is added to
        by = jnp.repeat(by, jnp.maximum(seq_lens - prefix_lens, 0), total_repeat_length=capacity)
    return tag_slots(state, grant.slots, by), grant


def alloc_decode(
    state: AllocatorState,
    seq_lens: Ints,
    last_loc: Ints,
    active: ArrayLike | list[bool] | None = None,
    *,
    by: Ints | None = None,
) -> tuple[AllocatorState, Grant]:
    """Grants one token for every active row, or none at all.

    Args:
      state: allocator before the call.
      seq_lens: int32[B] tokens of each row, the new one included.
      last_loc: int32[B] full slot of the token before it, -1 where there is none.
      active: bool[B] rows that take part, all by default; the others are not looked at.
      by: int32[] owner of all rows or int32[B] of each, 0 by default; only with owner tags.

    Returns:
      The allocator after the call, and `Grant` with int32[B] full slots, one a row, 0 for
      inactive rows; `count` is the number of active rows.

    Refused: as for `alloc_extend` (a last page that others hold too included); bad_length where
    an active row's length is below 1.

    Laws 1, 2, 3 and 7; public reports B06 and B09.
    """
    must_be_state(state)
    lens, last = as_rows(seq_lens=seq_lens, last_loc=last_loc)
    rows = as_active(active, seq_lens=lens)
    return _decode(state, lens, last, rows, as_owner(state, by, seq_lens=lens))


@jax.jit
def _decode(
    state: AllocatorState,
    seq_lens: jax.Array,
    last_loc: jax.Array,
    active: jax.Array,
    by: jax.Array | None,
) -> tuple[AllocatorState, Grant]:
    state, grant = commit_grant(state, plan_decode(state, seq_lens, last_loc, active, by))
    return tag_slots(state, grant.slots, by), grant
