"""Giving pages back: both sides, the SWA side alone, the full side alone."""

import functools

import jax
import jax.numpy as jnp

from swa_jax.free_blocks import Plan, free_in_blocks, pays
from swa_jax.inputs import Ints, as_int32
from swa_jax.owners import as_owner, keep_own, keep_own_as_of
from swa_jax.paging import not_alone
from swa_jax.plan_free import (
    commit_free,
    name_pages,
    plan_free,
    plan_free_full,
    plan_free_swa,
    plan_free_swa_as_of,
)
from swa_jax.state import AllocatorState, must_be_state


def free(state: AllocatorState, slots: Ints, *, by: Ints | None = None) -> AllocatorState:
    """Frees the full page of every slot, and its SWA page where it still has one.

    Frees are whole pages: one slot of a page is enough, several are no fault. In an open group
    the pages are queued; what they are is settled here and now (law 6). Of a page that several
    hold (`share`) one share is given up, once a call: two holders in one call are two calls.

    Args:
      state: allocator before the call.
      slots: int32[T] full slots; 0 (any slot of the padding page) in unused places.
      by: int32[] or int32[T] owner of the pages, 0 by default; only with owner tags.

    Returns:
      The allocator after the call.

    Refused, counted, and nothing else changed:
      double_free: a page that is free or pending already, once a page.
      out_of_range: a slot below 0 or past the pool, once a place.
      foreign: a page of another owner, once a page.

    Laws 4, 5 and 6; public reports B01 and B12.
    """
    must_be_state(state)
    places = as_int32("slots", slots, 1)
    return _free(state, places, as_owner(state, by, slots=places))


@functools.partial(jax.jit, static_argnames="segment")
def _free(
    state: AllocatorState, slots: jax.Array, by: jax.Array | None, segment: bool = False
) -> AllocatorState:
    return _give_up(state, slots, by, plan_free, defer=state.group_open, segment=segment)


def _give_up(
    state: AllocatorState,
    slots: jax.Array,
    by: jax.Array | None,
    plan: Plan,
    *,
    defer: jax.Array,
    segment: bool = False,
    moves_full: bool = True,
    moves_swa: bool = True,
) -> AllocatorState:
    """Plans and commits for the pages that int32[T] slots name: at once, or by blocks if many."""
    how = {"defer": defer, "moves_full": moves_full, "moves_swa": moves_swa}
    step = state.config.page_size if segment else 1
    state, slots = keep_own(state, slots, by, step=step)
    slots = not_alone(slots, step)
    if not segment and pays(state, slots):
        return free_in_blocks(state, slots, plan, **how)
    return commit_free(state, plan(state, name_pages(state, slots, segment=segment)), **how)


def free_segment(state: AllocatorState, slots: Ints, *, by: Ints | None = None) -> AllocatorState:
    """Frees as `free` does, looking only at every page_size-th place.

    Args:
      state: allocator before the call.
      slots: int32[T] full slots of one request in token order, the first on a page boundary;
        0 in unused places.
      by: int32[] or int32[T] owner of the pages, 0 by default; only with owner tags.

    Returns:
      The allocator after the call.

    Refused, counted, and nothing else changed:
      misaligned: a looked-at slot that is not the first of its page, once a place.
      double_free, out_of_range, foreign: as for `free`, of the places looked at.

    Laws 4, 5 and 6; public report B05 (every free path needs the same filters).
    """
    must_be_state(state)
    places = as_int32("slots", slots, 1)
    return _free(state, places, as_owner(state, by, slots=places), segment=True)


def free_swa(
    state: AllocatorState,
    slots: Ints,
    owner: AllocatorState | None = None,
    *,
    by: Ints | None = None,
) -> AllocatorState:
    """Frees the SWA page of every slot and clears the mapping of the whole full page.

    Args:
      state: allocator before the call.
      slots: int32[T] full slots; 0 (any slot of the padding page) in unused places.
      owner: an earlier state to read ownership from (a snapshot barrier, the other answer to the
        group race). Released are the SWA pages that the slots had there, where the same full
        page has them still or where no full page maps to them now; a mapping is cleared only
        where it still points there. Costs one pass over the mapping. A page that was freed and
        granted again in between, with the same SWA page, cannot be told apart: take the snapshot
        where the group begins.
      by: int32[] or int32[T] owner of the pages, 0 by default; only with owner tags.

    Returns:
      The allocator after the call. The full pages stay held (but see `share` for pure SWA pools).
      Of an SWA page that several hold one share is given up, and the mapping stays.

    Refused, counted, and nothing else changed:
      unmapped: a held page that has no SWA side, once a page.
      double_free: a page that is not held (with `owner`: was not, or its SWA page is released).
      out_of_range: a slot below 0 or past the pool, once a place.
      foreign: a page of another owner, once a page.

    Laws 4 to 7; public reports B01 and B03.
    """
    must_be_state(state)
    slots = as_int32("slots", slots, 1)
    whose = as_owner(state, by, slots=slots)
    if owner is None:
        return _free_swa(state, slots, whose)
    must_be_state(owner, "owner")
    if owner.config != state.config:
        raise ValueError(
            f"owner must be an earlier state of the same allocator, got {owner.config} for "
            f"{state.config}"
        )
    return _free_swa_as_of(state, slots, owner, whose)


@functools.partial(jax.jit, static_argnames="segment")
def _free_swa(
    state: AllocatorState, slots: jax.Array, by: jax.Array | None, segment: bool = False
) -> AllocatorState:
    pure, defer = state.config.pure_swa_pool, state.group_open
    return _give_up(state, slots, by, plan_free_swa, defer=defer, segment=segment, moves_full=pure)


@jax.jit
def _free_swa_as_of(
    state: AllocatorState, slots: jax.Array, owner: AllocatorState, by: jax.Array | None
) -> AllocatorState:
    state, slots = keep_own_as_of(state, owner, slots, by)
    plan = plan_free_swa_as_of(state, owner, name_pages(state, slots))
    return commit_free(state, plan, defer=state.group_open, moves_full=state.config.pure_swa_pool)


def free_swa_segment(
    state: AllocatorState, slots: Ints, *, by: Ints | None = None
) -> AllocatorState:
    """Frees as `free_swa` does, looking only at every page_size-th place.

    Args:
      state: allocator before the call.
      slots: int32[T] full slots of one request in token order, the first on a page boundary;
        0 in unused places.
      by: int32[] or int32[T] owner of the pages, 0 by default; only with owner tags.

    Returns:
      The allocator after the call. The full pages stay held.

    Refused, counted, and nothing else changed:
      misaligned: a looked-at slot that is not the first of its page, once a place.
      unmapped, double_free, out_of_range, foreign: as for `free_swa`, of the places looked at.

    Laws 4 to 7; public report B05.
    """
    must_be_state(state)
    places = as_int32("slots", slots, 1)
    return _free_swa(state, places, as_owner(state, by, slots=places), segment=True)


def free_full(state: AllocatorState, slots: Ints, *, by: Ints | None = None) -> AllocatorState:
    """Frees the full page of every slot whose SWA side is gone already.

    Args:
      state: allocator before the call.
      slots: int32[T] full slots; 0 (any slot of the padding page) in unused places.
      by: int32[] or int32[T] owner of the pages, 0 by default; only with owner tags.

    Returns:
      The allocator after the call.

    Refused, counted, and nothing else changed:
      still_mapped: a page whose SWA side is there, once a page; use `free`, or `free_swa` first.
        Where several hold the page: one whose SWA side all of them hold still.
      double_free: a page that is free or pending already, once a page.
      out_of_range: a slot below 0 or past the pool, once a place.
      foreign: a page of another owner, once a page.

    Laws 4 to 6; public report B08.
    """
    must_be_state(state)
    places = as_int32("slots", slots, 1)
    return _free_full(state, places, as_owner(state, by, slots=places))


@jax.jit
def _free_full(state: AllocatorState, slots: jax.Array, by: jax.Array | None) -> AllocatorState:
    return _give_up(state, slots, by, plan_free_full, defer=state.group_open, moves_swa=False)


def free_swa_grouped(
    state: AllocatorState, slots: Ints, *, by: Ints | None = None
) -> AllocatorState:
    """Queues the SWA page of every slot for `free_group_end`, whether a group is open or not.

    The mapping is cleared and the physical page queued at the call (law 6): a fence for pages
    that a dispatched step may still write.

    Args:
      state: allocator before the call.
      slots: int32[T] full slots; 0 (any slot of the padding page) in unused places.
      by: int32[] or int32[T] owner of the pages, 0 by default; only with owner tags.

    Returns:
      The allocator after the call; available sizes are as before.

    Refused, counted, and nothing else changed: as for `free_swa`.
    """
    must_be_state(state)
    places = as_int32("slots", slots, 1)
    return _free_swa_grouped(state, places, as_owner(state, by, slots=places))


@jax.jit
def _free_swa_grouped(
    state: AllocatorState, slots: jax.Array, by: jax.Array | None
) -> AllocatorState:
    pure, defer = state.config.pure_swa_pool, jnp.ones((), bool)
    return _give_up(state, slots, by, plan_free_swa, defer=defer, moves_full=pure)
