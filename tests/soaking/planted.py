"""Mistakes made on purpose, so that a test can see that a soak notices them.

Each is what a careless caller would do, from a chosen step on: as soon as there is a page for it.
"""

from dataclasses import replace
from typing import NamedTuple

import jax
import jax.numpy as jnp

import swa_jax as swa
from swa_jax.pool import peek
from swa_jax.state import PAD_SLOT, UNMAPPED, AllocatorState

NOTHING, LEAK, STALE_MAPPING, DOUBLE_FREE, TAKEN_BLOCK = range(5)


class Plant(NamedTuple):
    """What, and from which step on."""

    kind: jax.Array  # int32[] one of the above
    step: jax.Array  # int32[]


def no_plant() -> Plant:
    """Nothing is done wrong."""
    return Plant(jnp.int32(NOTHING), jnp.int32(0))


def spoil(state: AllocatorState, plant: Plant, step: jax.Array, slots: jax.Array) -> AllocatorState:
    """The allocator after the mistake, if it is time for it.

    Args:
      state: before the call.
      plant: what is to be done.
      step: int32[] now.
      slots: int32[T] full slots that some row holds and goes on with, 0 where unused.
    """
    due = jnp.where(step >= plant.step, plant.kind, NOTHING)
    # A page that nobody will remember.
    leaked = jnp.where(due == LEAK, state.config.page_size, 0)
    state, _ = swa.alloc(state, leaked, capacity=state.config.page_size)
    # Pages that their row goes on with.
    state = swa.free(state, jnp.where(due == DOUBLE_FREE, slots, PAD_SLOT))
    # A free page that maps to a side which is another's by now.
    page = peek(state.full, jnp.zeros(1, jnp.int32))
    target = jnp.max(state.full_to_swa)
    at = jnp.where((due == STALE_MAPPING) & (target != UNMAPPED), page, state.full_to_swa.shape[0])
    mapping = state.full_to_swa.at[at].set(target, mode="drop")
    state = replace(state, full_to_swa=mapping)
    if state.block_is_full is None:
        return state
    # A block of one budget that goes to the other pool with all that is in it.
    is_full = state.block_is_full
    taken = is_full.at[0].set(is_full[0] ^ (due == TAKEN_BLOCK))
    return replace(state, block_is_full=taken)
