"""Large frees: the pages are found once, the rest is done a block of pages at a time.

Many slots name few pages. Finding them takes a pass over the slots; everything after it would be
spent on places that name nothing, were it done as wide as the slots are.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import TypeAlias

import jax
import jax.numpy as jnp

from swa_jax.faults import add_faults, fault_counts
from swa_jax.once import once
from swa_jax.paging import look_up, put
from swa_jax.plan_free import FreePlan, NamedPages, commit_free, slots_to_pages
from swa_jax.pool import nowhere
from swa_jax.rank import rank
from swa_jax.state import NOBODY, AllocatorState

BLOCK = 4096  # pages
LARGE = 4 * BLOCK  # slots from which on it pays

Plan: TypeAlias = Callable[[AllocatorState, NamedPages], FreePlan]


def pays(state: AllocatorState, slots: jax.Array) -> bool:
    """Whether to go by blocks: static. With pages of one token every slot is a page of its own."""
    return slots.shape[0] >= LARGE and state.config.page_size > 1


def free_in_blocks(
    state: AllocatorState,
    slots: jax.Array,
    plan: Plan,
    *,
    defer: jax.Array,
    moves_full: bool = True,
    moves_swa: bool = True,
) -> AllocatorState:
    """Plans and commits for the pages of int32[T] slots, in the order of their first mention.

    Args:
      state: allocator before the call.
      slots: int32[T] full slots, 0 in unused places.
      plan: what to release of the pages of a block.
      defer: as for `commit_free`.
      moves_full: as for `commit_free`.
      moves_swa: as for `commit_free`.

    Returns:
      The allocator after the call, the same as if all had been planned and committed at once. (The
      order among pages that were pending before may differ: a free outside a group turns them.)
    """
    pages, count, state = _distinct(state, slots)

    def block(carry: tuple[AllocatorState, jax.Array]) -> tuple[AllocatorState, jax.Array]:
        state, done = carry
        named = _block(state, jax.lax.dynamic_slice(pages, (done,), (BLOCK,)))
        how = {"defer": defer, "moves_full": moves_full, "moves_swa": moves_swa}
        return commit_free(state, plan(state, named), **how), done + BLOCK

    return jax.lax.while_loop(lambda carry: carry[1] < count, block, (state, jnp.int32(0)))[0]


def _distinct(
    state: AllocatorState, slots: jax.Array
) -> tuple[jax.Array, jax.Array, AllocatorState]:
    """int32[N] the pages that slots name, each once, then one past the end; int32[] how many.

    In the state that comes back `scratch` is still marked at just these pages, and slots outside
    the pool are counted.
    """
    pages, outside, _ = slots_to_pages(state, slots)
    place = jnp.arange(slots.shape[0], dtype=jnp.int32)
    marked = state.scratch.at[pages].min(place, mode="drop")
    first = once(look_up(marked, pages, slots.shape[0]) == place)
    to, count = rank(first)
    room = -(-slots.shape[0] // BLOCK) * BLOCK
    found = jnp.full(room, jnp.int32(nowhere(state.full)))
    found = put(found, jnp.where(first, once(to), room), pages)
    faults = add_faults(state.faults, fault_counts(out_of_range=outside))
    return found, count, replace(state, scratch=marked, faults=faults)


def _block(state: AllocatorState, pages: jax.Array) -> NamedPages:
    """Pages that are distinct already, with their part of `scratch` put to rest."""
    named = pages < jnp.int32(nowhere(state.full))
    none = jnp.zeros_like(named)
    scratch = put(state.scratch, pages, jnp.int32(NOBODY))
    place = jnp.arange(pages.shape[0], dtype=jnp.int32)
    return NamedPages(pages, named, place, none, none, scratch)
