"""What a free releases: decided for both pools from the state alone, then committed at once."""

from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp

from swa_jax.faults import add_faults, fault_counts
from swa_jax.once import once
from swa_jax.paging import first_places, look_up, offset_of, page_of, put
from swa_jax.pool import count_holders, give_back, holders_of, nowhere
from swa_jax.state import PAD_PAGE, UNMAPPED, AllocatorState


@dataclass(frozen=True)
class NamedPages:
    """The full pages that an array of slots names, each at the first place that names it."""

    pages: jax.Array  # int32[T] full page ids; one past the end where a place names none
    first: jax.Array  # bool[T]
    speaker: jax.Array  # int32[T] the first place that names this place's page; T for none
    out_of_range: jax.Array  # bool[T] places outside the pool
    misaligned: jax.Array  # bool[T] places of a segment that are not the first of their page
    scratch: jax.Array


@dataclass(frozen=True)
class FreePlan:
    """Shares to give up and mappings to clear. int32[T] each; one past the end means none."""

    full_pages: jax.Array
    full_left: jax.Array  # how many hold the full page afterwards; at 0 it is released
    swa_pages: jax.Array
    swa_left: jax.Array  # likewise
    unmap: jax.Array  # full page ids
    faults: jax.Array  # int32[7] to add
    scratch: jax.Array


def slots_to_pages(
    state: AllocatorState, slots: jax.Array, *, segment: bool = False
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The page of each slot (law 5); padding slots name nothing and are no fault.

    Returns:
      int32[T] full page ids, one past the end where a place names none; bool[T] places outside the
      pool; bool[T] places of a segment that are not the first of their page.
    """
    config = state.config
    size, nobodys = config.page_size, jnp.int32(nowhere(state.full))
    outside = (slots < 0) | (slots >= jnp.int32(config.full_tokens + size))
    pages = page_of(slots, size)
    pages = once(jnp.where((pages > PAD_PAGE) & (pages < nobodys), pages, nobodys))
    if not segment:
        return pages, outside, jnp.zeros_like(outside)
    odd = once((pages < nobodys) & (offset_of(slots, size) != 0))
    return once(jnp.where(odd, nobodys, pages)), outside, odd


def name_pages(state: AllocatorState, slots: jax.Array, *, segment: bool = False) -> NamedPages:
    """Finds the pages that slots name and which place speaks for each."""
    if segment:
        slots = once(slots[:: state.config.page_size])
    pages, outside, odd = slots_to_pages(state, slots, segment=segment)
    first, speaker, scratch = first_places(state.scratch, pages)
    named = pages < jnp.int32(nowhere(state.full))
    return NamedPages(pages, once(first & named), speaker, outside, odd, scratch)


def _plan(
    state: AllocatorState,
    named: NamedPages,
    *,
    full: jax.Array,
    full_left: jax.Array,
    swa: jax.Array,
    swa_pages: jax.Array,
    swa_left: jax.Array,
    unmap: jax.Array,
    faults: jax.Array,
) -> FreePlan:
    no_full, no_swa = jnp.int32(nowhere(state.full)), jnp.int32(nowhere(state.swa))
    return FreePlan(
        full_pages=jnp.where(full, named.pages, no_full),
        full_left=full_left,
        swa_pages=jnp.where(swa, swa_pages, no_swa),
        swa_left=swa_left,
        unmap=jnp.where(unmap, named.pages, no_full),
        faults=faults,
        scratch=named.scratch,
    )


def holders_here(state: AllocatorState, named: NamedPages) -> jax.Array:
    """int32[T] how many hold the full page, at the first place that names it; 0 elsewhere."""
    return once(jnp.where(named.first, holders_of(state.full, named.pages), 0))


def swa_side(state: AllocatorState, named: NamedPages) -> tuple[jax.Array, jax.Array]:
    """int32[T] SWA page of each named page (0 = none), and int32[T] how many hold that page.

    The count is asked as well as the mapping: whatever the mapping says, a page that is
    released already is never released again.
    """
    pages = once(look_up(state.full_to_swa, named.pages, UNMAPPED))
    return pages, once(jnp.where(pages != UNMAPPED, holders_of(state.swa, pages), 0))


def plan_free(state: AllocatorState, named: NamedPages) -> FreePlan:
    """One share in both sides of every held page.

    Who of several holders has left the window is not known here. So the SWA side is lowered only
    as far as the full side goes: it may stay a little longer than needed, and is never taken from
    under a holder who still reads it.
    """
    holders = holders_here(state, named)
    held, full_left = holders > 0, jnp.maximum(holders - 1, 0)
    swa_pages, swa_holders = swa_side(state, named)
    faults = fault_counts(
        double_free=named.first & ~held,
        out_of_range=named.out_of_range,
        misaligned=named.misaligned,
    )
    return _plan(
        state,
        named,
        full=held,
        full_left=full_left,
        swa=held & (swa_holders > full_left),
        swa_pages=swa_pages,
        swa_left=full_left,
        unmap=(holders == 1) & (swa_pages != UNMAPPED),
        faults=faults,
    )


def _both_at_once(state: AllocatorState, leaves: jax.Array) -> jax.Array:
    """bool[T] full sides that are given up with the SWA side: in a pure SWA pool it is all one.

    Whoever left his window there does not name the page again. The last one leaves the full side
    as it is, as a lone holder does.
    """
    return leaves if state.config.pure_swa_pool else jnp.zeros_like(leaves)


def plan_free_swa(
    state: AllocatorState,
    named: NamedPages,
    *,
    unmapped_is_fault: bool = True,
    each_place_a_holder: bool = False,
) -> FreePlan:
    """One share in the SWA side of every held page that has one.

    With `each_place_a_holder` a page that several places name loses as many shares: for calls in
    which every place is another holder's, as it is row by row.
    """
    held = holders_here(state, named) > 0
    swa_pages, swa_holders = swa_side(state, named)
    leave = jnp.int32(1)
    if each_place_a_holder:
        leave = jnp.zeros_like(named.pages).at[named.speaker].add(1, mode="drop")
    left = jnp.maximum(swa_holders - leave, 0)
    bare = held & (swa_pages == UNMAPPED)
    unmapped_is_fault = unmapped_is_fault and not state.config.has_rings
    faults = fault_counts(
        double_free=named.first & ~held,
        out_of_range=named.out_of_range,
        misaligned=named.misaligned,
        unmapped=bare if unmapped_is_fault else jnp.int32(0),
    )
    return _plan(
        state,
        named,
        full=_both_at_once(state, held & (swa_holders > 0) & (left > 0)),
        full_left=left,
        swa=held & (swa_holders > 0),
        swa_pages=swa_pages,
        swa_left=left,
        unmap=held & ~bare & (left == 0),
        faults=faults,
    )


def plan_free_full(state: AllocatorState, named: NamedPages) -> FreePlan:
    """One share in the full side of every held page, where no holder of the SWA side loses his."""
    holders = holders_here(state, named)
    held = holders > 0
    swa_pages, swa_holders = swa_side(state, named)
    mapped = held & (swa_pages != UNMAPPED) & (jnp.maximum(swa_holders, 1) >= holders)
    faults = fault_counts(
        double_free=named.first & ~held,
        out_of_range=named.out_of_range,
        still_mapped=mapped,
    )
    none = jnp.zeros_like(held)
    return _plan(
        state,
        named,
        full=held & ~mapped,
        full_left=holders - 1,
        swa=none,
        swa_pages=swa_pages,
        swa_left=swa_holders,
        unmap=none,
        faults=faults,
    )


def plan_free_swa_as_of(
    state: AllocatorState, owner: AllocatorState, named: NamedPages
) -> FreePlan:
    """The SWA pages that the named pages had in `owner`, unless somebody else maps them now.

    Finding out whether any full page maps to an SWA page now takes one pass over the mapping:
    the only free whose cost follows the pool. The enqueue-time rule of `free_swa` needs none.
    """
    held_then = holders_here(owner, named) > 0
    pages_then, _ = swa_side(owner, named)
    had = held_then & (pages_then != UNMAPPED)
    mapped_now = jnp.zeros(state.swa.holders.shape, bool)
    mapped_now = mapped_now.at[state.full_to_swa].set(True, mode="drop")
    still_here = had & (look_up(state.full_to_swa, named.pages, UNMAPPED) == pages_then)
    nobodys = had & ~look_up(mapped_now, pages_then, True)
    holders = holders_of(state.swa, pages_then)
    released, left = holders == 0, jnp.maximum(holders - 1, 0)
    faults = fault_counts(
        double_free=(named.first & ~held_then) | (had & released),
        out_of_range=named.out_of_range,
        unmapped=jnp.int32(0) if state.config.has_rings else held_then & (pages_then == UNMAPPED),
    )
    return _plan(
        state,
        named,
        full=_both_at_once(state, (still_here | nobodys) & (left > 0)),
        full_left=left,
        swa=(still_here | nobodys) & ~released,
        swa_pages=pages_then,
        swa_left=left,
        unmap=still_here & (left == 0),
        faults=faults,
    )


def commit_free(
    state: AllocatorState,
    plan: FreePlan,
    *,
    defer: jax.Array | bool,
    moves_full: bool = True,
    moves_swa: bool = True,
) -> AllocatorState:
    """Writes a plan: one scatter for each array.

    What `unmap` names must have been found by reading the mapping, as all plans here do: the
    compiler then writes after it has read and needs no copy of the whole mapping.

    Args:
      state: the state that the plan was made from.
      plan: what to release.
      defer: queue the pages instead of making them grantable.
      moves_full: False (static) where the plan releases no full page at all.
      moves_swa: False (static) where it releases no SWA page and unmaps nothing.
    """
    full = state.full
    if moves_full and state.config.pure_swa_pool:
        full = count_holders(full, plan.full_pages, plan.full_left)
    elif moves_full:
        full = give_back(full, plan.full_pages, plan.full_left, defer)
    after = replace(
        state, full=full, faults=add_faults(state.faults, plan.faults), scratch=plan.scratch
    )
    if not moves_swa or state.config.has_rings:  # a ring goes back by a call of its own
        return after
    return replace(
        after,
        swa=give_back(state.swa, plan.swa_pages, plan.swa_left, defer),
        full_to_swa=put(state.full_to_swa, plan.unmap, jnp.int32(UNMAPPED)),
    )
