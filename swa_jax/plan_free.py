"""What a free releases: decided for both pools from the state alone, then committed at once."""

from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp

from swa_jax.faults import add_faults, fault_counts
from swa_jax.paging import first_places, look_up, offset_of, page_of
from swa_jax.pool import give_back, mark, nowhere
from swa_jax.state import UNMAPPED, AllocatorState


@dataclass(frozen=True)
class NamedPages:
    """The full pages that an array of slots names, each at the first place that names it."""

    pages: jax.Array  # int32[T] full page ids; one past the end where a place names none
    first: jax.Array  # bool[T]
    out_of_range: jax.Array  # bool[T] places outside the pool
    misaligned: jax.Array  # bool[T] places of a segment that are not the first of their page
    scratch: jax.Array


@dataclass(frozen=True)
class FreePlan:
    """Pages to release and mappings to clear. int32[T] each; one past the end means none."""

    full_pages: jax.Array
    swa_pages: jax.Array
    unmap: jax.Array  # full page ids
    faults: jax.Array  # int32[7] to add
    scratch: jax.Array


def name_pages(state: AllocatorState, slots: jax.Array, *, segment: bool = False) -> NamedPages:
    """Reads full slots as whole pages (law 5). Padding slots name nothing and are no fault."""
    config = state.config
    size = config.page_size
    if segment:
        slots = slots[::size]
    inside = (slots >= 0) & (slots < jnp.int32(config.full_tokens + size))
    real = inside & (slots >= jnp.int32(size))
    odd = real & (offset_of(slots, size) != 0) if segment else jnp.zeros_like(real)
    named = real & ~odd
    pages = jnp.where(named, page_of(slots, size), jnp.int32(nowhere(state.full)))
    first, _, scratch = first_places(state.scratch, pages)
    return NamedPages(pages, first & named, ~inside, odd, scratch)


def _plan(
    state: AllocatorState,
    named: NamedPages,
    *,
    full: jax.Array,
    swa: jax.Array,
    swa_pages: jax.Array,
    unmap: jax.Array,
    faults: jax.Array,
) -> FreePlan:
    no_full, no_swa = jnp.int32(nowhere(state.full)), jnp.int32(nowhere(state.swa))
    return FreePlan(
        full_pages=jnp.where(full, named.pages, no_full),
        swa_pages=jnp.where(swa, swa_pages, no_swa),
        unmap=jnp.where(unmap, named.pages, no_full),
        faults=faults,
        scratch=named.scratch,
    )


def held_here(state: AllocatorState, named: NamedPages) -> jax.Array:
    """bool[T]: first places whose full page is held."""
    return named.first & ~look_up(state.full.free, named.pages, True)


def swa_side(state: AllocatorState, named: NamedPages) -> tuple[jax.Array, jax.Array]:
    """int32[T] SWA page of each named page (0 = none), and bool[T] that this page is held.

    The bitmap is asked as well as the mapping: whatever the mapping says, a page that is
    released already is never released again.
    """
    pages = look_up(state.full_to_swa, named.pages, UNMAPPED)
    return pages, (pages != UNMAPPED) & ~look_up(state.swa.free, pages, True)


def plan_free(state: AllocatorState, named: NamedPages) -> FreePlan:
    """Both sides of every held page."""
    held = held_here(state, named)
    swa_pages, swa_held = swa_side(state, named)
    faults = fault_counts(
        double_free=named.first & ~held,
        out_of_range=named.out_of_range,
        misaligned=named.misaligned,
    )
    return _plan(
        state,
        named,
        full=held,
        swa=held & swa_held,
        swa_pages=swa_pages,
        unmap=held & (swa_pages != UNMAPPED),
        faults=faults,
    )


def plan_free_swa(
    state: AllocatorState, named: NamedPages, *, unmapped_is_fault: bool = True
) -> FreePlan:
    """The SWA side of every held page that has one."""
    held = held_here(state, named)
    swa_pages, swa_held = swa_side(state, named)
    bare = held & (swa_pages == UNMAPPED)
    faults = fault_counts(
        double_free=named.first & ~held,
        out_of_range=named.out_of_range,
        misaligned=named.misaligned,
        unmapped=bare if unmapped_is_fault else jnp.int32(0),
    )
    release = held & swa_held
    return _plan(
        state,
        named,
        full=jnp.zeros_like(held),
        swa=release,
        swa_pages=swa_pages,
        unmap=held & ~bare,
        faults=faults,
    )


def plan_free_full(state: AllocatorState, named: NamedPages) -> FreePlan:
    """The full side of every held page whose SWA side is gone."""
    held = held_here(state, named)
    swa_pages, _ = swa_side(state, named)
    mapped = held & (swa_pages != UNMAPPED)
    faults = fault_counts(
        double_free=named.first & ~held,
        out_of_range=named.out_of_range,
        still_mapped=mapped,
    )
    none = jnp.zeros_like(held)
    return _plan(
        state, named, full=held & ~mapped, swa=none, swa_pages=swa_pages, unmap=none, faults=faults
    )


def plan_free_swa_as_of(
    state: AllocatorState, owner: AllocatorState, named: NamedPages
) -> FreePlan:
    """The SWA pages that the named pages had in `owner`, unless somebody else maps them now.

    Finding out whether any full page maps to an SWA page now takes one pass over the mapping:
    the only free whose cost follows the pool. The enqueue-time rule of `free_swa` needs none.
    """
    held_then = held_here(owner, named)
    pages_then, _ = swa_side(owner, named)
    had = held_then & (pages_then != UNMAPPED)
    mapped_now = jnp.zeros(state.swa.free.shape, bool)
    mapped_now = mapped_now.at[state.full_to_swa].set(True, mode="drop")
    still_here = had & (look_up(state.full_to_swa, named.pages, UNMAPPED) == pages_then)
    nobodys = had & ~look_up(mapped_now, pages_then, True)
    released = look_up(state.swa.free, pages_then, True)
    faults = fault_counts(
        double_free=(named.first & ~held_then) | (had & released),
        out_of_range=named.out_of_range,
        unmapped=held_then & (pages_then == UNMAPPED),
    )
    return _plan(
        state,
        named,
        full=jnp.zeros_like(had),
        swa=(still_here | nobodys) & ~released,
        swa_pages=pages_then,
        unmap=still_here,
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
        full = mark(full, plan.full_pages, released=True)
    elif moves_full:
        full = give_back(full, plan.full_pages, defer)
    after = replace(
        state, full=full, faults=add_faults(state.faults, plan.faults), scratch=plan.scratch
    )
    if not moves_swa:
        return after
    return replace(
        after,
        swa=give_back(state.swa, plan.swa_pages, defer),
        full_to_swa=state.full_to_swa.at[plan.unmap].set(UNMAPPED, mode="drop"),
    )
