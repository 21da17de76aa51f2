"""One pool of the two by itself, as callers use who reach for an engine's inner allocators.

Full pages alone are `alloc_extend_swa_tail` with a tail of 0, and `free_full`. SWA pages alone
need these two, from the parts that the core's own transitions are made of.
"""

import jax
import jax.numpy as jnp

import swa_jax as swa
from swa_jax.faults import fault_counts
from swa_jax.grant import commit_grant, judge, make_plan
from swa_jax.paging import first_places, look_up, offset_of, page_of
from swa_jax.plan_free import FreePlan, commit_free
from swa_jax.pool import holders_of, nowhere, peek
from swa_jax.state import NOBODY, PAD_SLOT


def alloc_swa_side(
    state: swa.AllocatorState, num_tokens: jax.Array, *, capacity: int
) -> tuple[swa.AllocatorState, swa.Grant]:
    """Grants whole SWA pages that no full page maps to.

    Args:
      state: allocator of two pools before the call.
      num_tokens: int32[] tokens, from 0 to `capacity`, a multiple of the page.
      capacity: room for slots in the answer, static.

    Returns:
      The allocator after the call, and `Grant` with int32[capacity] *SWA* slots. They are held
      until `free_swa_side`, or until `set_full_to_swa_mapping` gives them a full page.

    Refused: as for `swa_jax.alloc`, with no full page ever missing.
    """
    size = state.config.page_size
    bad = (num_tokens < 0) | (num_tokens > capacity)
    count = jnp.where(bad, 0, num_tokens)
    odd = offset_of(count, size) != 0
    num_pages = page_of(count, size)
    verdict = judge(state, ~bad & ~odd, jnp.int32(0), num_pages)
    ranks = jnp.arange(-(-capacity // size), dtype=jnp.int32)
    pages = peek(state.swa, ranks)
    tokens = jnp.arange(capacity, dtype=jnp.int32)
    offsets = jnp.arange(size, dtype=jnp.int32)
    slots = (pages[:, None] * jnp.int32(size) + offsets[None, :]).reshape(-1)[:capacity]
    no_full = jnp.full(ranks.shape, nowhere(state.full), jnp.int32)
    plan = make_plan(
        state,
        verdict,
        slots=jnp.where(tokens < count, slots, PAD_SLOT),
        count=count,
        new_pages=no_full,
        takes_full=jnp.zeros(ranks.shape, bool),
        swa_pages=pages,
        takes_swa=ranks < num_pages,
        map_pages=no_full,
        num_full=jnp.int32(0),
        num_swa=num_pages,
        faults=fault_counts(bad_length=bad, misaligned=odd),
        scratch=state.scratch,
    )
    return commit_grant(state, plan)


def free_swa_side(state: swa.AllocatorState, swa_slots: jax.Array) -> swa.AllocatorState:
    """Frees the SWA page of every *SWA* slot. A full page that maps to it is unmapped (law 7).

    Costs one pass over the mapping, since nothing leads from an SWA page to its full page.

    Args:
      state: allocator of two pools before the call.
      swa_slots: int32[T] SWA slots; 0 (any slot of the padding page) in unused places.

    Returns:
      The allocator after the call. Full pages stay held.

    Refused, counted, and nothing else changed:
      double_free: a page that is free or pending already, once a page.
      out_of_range: a slot below 0 or past the pool, once a place.
    """
    config = state.config
    size = config.page_size
    no_full, no_swa = jnp.int32(nowhere(state.full)), jnp.int32(nowhere(state.swa))
    of_swa = (nowhere(state.swa),)
    inside = (swa_slots >= 0) & (swa_slots < jnp.int32(config.swa_tokens + size))
    real = inside & (swa_slots >= jnp.int32(size))
    named = jnp.where(real, page_of(swa_slots, size), no_swa)
    first, _, _ = first_places(jnp.full(of_swa, NOBODY, jnp.int32), named)
    holders = jnp.where(first, holders_of(state.swa, named), 0)
    left = jnp.maximum(holders - 1, 0)
    released = jnp.where(holders == 1, named, no_swa)
    gone = jnp.zeros(of_swa, bool).at[released].set(True, mode="drop")
    full_pages = jnp.arange(nowhere(state.full), dtype=jnp.int32)
    plan = FreePlan(
        full_pages=jnp.full(named.shape, no_full),
        full_left=left,
        swa_pages=jnp.where(holders > 0, named, no_swa),
        swa_left=left,
        unmap=jnp.where(look_up(gone, state.full_to_swa, False), full_pages, no_full),
        faults=fault_counts(double_free=first & real & (holders == 0), out_of_range=~inside),
        scratch=state.scratch,
    )
    return commit_free(state, plan, defer=state.group_open, moves_full=False)
