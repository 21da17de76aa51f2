"""The mapping from full to SWA pages: read it, set it, clear it.

Kept by page, so a mapping is for whole pages (law 5) and keeps the offset in the page (law 8).
"""

from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp

from swa_jax.faults import add_faults, fault_counts
from swa_jax.inputs import Ints, as_int32, check_lengths
from swa_jax.owners import as_owner, count_foreign, is_foreign, is_foreign_side, keep_own
from swa_jax.paging import first_places, look_up, not_alone, offset_of, page_of, put
from swa_jax.plan_free import holders_here, name_pages, swa_side
from swa_jax.pool import holders_of, nowhere
from swa_jax.state import NOBODY, PAD_SLOT, UNMAPPED, AllocatorState, PagePool, must_be_state


def translate_full_to_swa(state: AllocatorState, slots: Ints) -> jax.Array:
    """SWA slots of full slots, as attention kernels of window layers need them.

    Args:
      state: any state.
      slots: int32[...] full slots, of any shape.

    Returns:
      int32 of the same shape: the SWA slot; 0 where the page has none, for padding and for slots
      outside the pool; -1 for -1 (no location).

    Raises:
      ValueError: a pool with request rings, where `ring_slots` says it.
    """
    must_be_state(state)
    state.config.needs_mapping("translate_full_to_swa")
    return _translate(state, as_int32("slots", slots, None))


@jax.jit
def _translate(state: AllocatorState, slots: jax.Array) -> jax.Array:
    config = state.config
    size = config.page_size
    inside = (slots >= 0) & (slots < jnp.int32(config.full_tokens + size))
    known = jnp.where(inside, slots, 0)
    page = look_up(state.full_to_swa, page_of(known, size), UNMAPPED)
    swa_slots = page * jnp.int32(size) + offset_of(known, size)
    mapped = jnp.where(page != UNMAPPED, swa_slots, PAD_SLOT)
    return jnp.where(slots == -1, jnp.int32(-1), mapped)


@dataclass(frozen=True)
class Pairs:
    """Full and SWA pages to join, one past the end where a place joins none."""

    full_pages: jax.Array  # int32[T]
    swa_pages: jax.Array  # int32[T]
    faults: jax.Array  # int32[7]
    foreign: jax.Array | None  # int32[]; None without owner tags
    scratch: jax.Array


def set_full_to_swa_mapping(
    state: AllocatorState, full_slots: Ints, swa_slots: Ints, *, by: Ints | None = None
) -> AllocatorState:
    """Maps the full page of each place to the SWA page of the same place.

    Setting moves: a full page that mapped to that SWA page before is unmapped, so the mapping
    stays one-to-one (law 8). A full page that mapped elsewhere leaves that SWA page held by the
    caller. All places act together, so two pages can swap. Costs one pass over the mapping.

    Args:
      state: allocator before the call.
      full_slots: int32[T] full slots; 0 in unused places.
      swa_slots: int32[T] SWA slots at the same offset in their pages; 0 in unused places.
      by: int32[] or int32[T] owner of both pages, 0 by default; only with owner tags.

    Returns:
      The allocator after the call.

    Refused, counted, and nothing else changed for that place:
      out_of_range: padding on one side only, a slot outside its pool, a page that is not held.
      misaligned: unequal offsets, or a place that contradicts the first one that names its full
        page or its SWA page.
      still_mapped: a full or an SWA page that several hold: it is not one caller's to move.
      foreign: a full or an SWA page of another owner.

    Raises:
      ValueError: in a pure SWA pool, where a page is its own SWA side.

    Laws 7 and 8; public reports B03 and B07.
    """
    must_be_state(state)
    _needs_two_pools(state, "set_full_to_swa_mapping")
    full_slots = as_int32("full_slots", full_slots, 1)
    swa_slots = as_int32("swa_slots", swa_slots, 1)
    check_lengths(full_slots=full_slots, swa_slots=swa_slots)
    return _set(state, full_slots, swa_slots, as_owner(state, by, full_slots=full_slots))


def _held_pages(
    slots: jax.Array, pool: PagePool, tokens: int, size: int
) -> tuple[jax.Array, jax.Array]:
    """int32[T] page ids (0 where unusable) and int32[T] how many hold the slot's page."""
    inside = (slots >= jnp.int32(size)) & (slots < jnp.int32(tokens + size))
    pages = page_of(jnp.where(inside, slots, PAD_SLOT), size)
    return pages, jnp.where(inside, holders_of(pool, pages), 0)


def pair_pages(
    state: AllocatorState,
    full_slots: jax.Array,
    swa_slots: jax.Array,
    by: jax.Array | None = None,
) -> Pairs:
    """Decides which places join pages: those that agree with the first place that names either."""
    config = state.config
    size = config.page_size
    no_full, no_swa = jnp.int32(nowhere(state.full)), jnp.int32(nowhere(state.swa))
    full, full_holders = _held_pages(full_slots, state.full, config.full_tokens, size)
    swa, swa_holders = _held_pages(swa_slots, state.swa, config.swa_tokens, size)
    top = jnp.int32(size)
    unused = (full_slots >= 0) & (full_slots < top) & (swa_slots >= 0) & (swa_slots < top)
    both = (full_holders > 0) & (swa_holders > 0)
    lost, foreign, tags = ~both & ~unused, None, state.owner_tags
    if by is not None and tags is not None:
        foreign = is_foreign(tags, full, full_holders, by) | is_foreign_side(tags, swa, by)
        foreign = both & foreign
        both = both & ~foreign
    shared = both & ((full_holders > 1) | (swa_holders > 1))
    both = both & ~shared
    straight = both & (offset_of(full_slots, size) == offset_of(swa_slots, size))

    named_full = jnp.where(straight, full, no_full)
    named_swa = jnp.where(straight, swa, no_swa)
    _, by_full, scratch = first_places(state.scratch, named_full)
    by_swa = first_places(jnp.full(state.swa.holders.shape, NOBODY, jnp.int32), named_swa)[1]
    agrees = straight
    agrees = agrees & (look_up(named_swa, by_full, 0) == named_swa)
    agrees = agrees & (look_up(named_full, by_swa, 0) == named_full)
    faults = fault_counts(
        out_of_range=lost,
        misaligned=both & ~agrees,
        still_mapped=shared,
    )
    joined_full = jnp.where(agrees, named_full, no_full)
    foreign = None if foreign is None else jnp.sum(foreign, dtype=jnp.int32)
    return Pairs(joined_full, jnp.where(agrees, named_swa, no_swa), faults, foreign, scratch)


@jax.jit
def _set(
    state: AllocatorState, full_slots: jax.Array, swa_slots: jax.Array, by: jax.Array | None
) -> AllocatorState:
    pairs = pair_pages(state, full_slots, swa_slots, by)
    # Who owns each SWA page from now on: whoever else maps to it is unmapped.
    owner = jnp.zeros_like(state.swa.holders)
    owner = owner.at[pairs.swa_pages].set(pairs.full_pages, mode="drop")
    new_owner = look_up(owner, state.full_to_swa, 0)
    page = jnp.arange(state.full_to_swa.shape[0], dtype=jnp.int32)
    moved = (new_owner != 0) & (new_owner != page)
    mapping = jnp.where(moved, jnp.int32(UNMAPPED), state.full_to_swa)
    return replace(
        state,
        full_to_swa=mapping.at[pairs.full_pages].set(pairs.swa_pages, mode="drop"),
        faults=add_faults(state.faults, pairs.faults),
        scratch=pairs.scratch,
        owner_tags=count_foreign(state.owner_tags, pairs.foreign),
    )


def clear_full_to_swa_mapping(
    state: AllocatorState, full_slots: Ints, *, by: Ints | None = None
) -> AllocatorState:
    """Unmaps the full page of every slot; the SWA page stays held by the caller.

    Args:
      state: allocator before the call.
      full_slots: int32[T] full slots; 0 in unused places. Unmapped pages are no fault.
      by: int32[] or int32[T] owner of the pages, 0 by default; only with owner tags.

    Returns:
      The allocator after the call.

    Refused, counted, and nothing else changed:
      double_free: a page that is not held, once a page.
      out_of_range: a slot below 0 or past the pool, once a place.
      still_mapped: a mapped page that several hold, once a page.
      foreign: a page of another owner, once a page.

    Raises:
      ValueError: in a pure SWA pool, where a page is its own SWA side.

    Laws 5 and 7; public report B03.
    """
    must_be_state(state)
    _needs_two_pools(state, "clear_full_to_swa_mapping")
    places = as_int32("full_slots", full_slots, 1)
    return _clear(state, places, as_owner(state, by, full_slots=places))


@jax.jit
def _clear(state: AllocatorState, full_slots: jax.Array, by: jax.Array | None) -> AllocatorState:
    state, full_slots = keep_own(state, full_slots, by)
    named = name_pages(state, not_alone(full_slots))
    holders = holders_here(state, named)
    shared = (holders > 1) & (swa_side(state, named)[0] != UNMAPPED)
    unmap = jnp.where((holders > 0) & ~shared, named.pages, jnp.int32(nowhere(state.full)))
    faults = fault_counts(
        double_free=named.first & (holders == 0),
        out_of_range=named.out_of_range,
        still_mapped=shared,
    )
    return replace(
        state,
        full_to_swa=put(state.full_to_swa, unmap, jnp.int32(UNMAPPED)),
        faults=add_faults(state.faults, faults),
        scratch=named.scratch,
    )


def _needs_two_pools(state: AllocatorState, call: str) -> None:
    state.config.needs_mapping(call)
    if state.config.pure_swa_pool:
        raise ValueError(f"{call} needs two pools: in a pure SWA pool a page is its own SWA side")
