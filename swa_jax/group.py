"""Free groups: frees in between are queued, the end releases them without another look-up."""

from dataclasses import replace

import jax
import jax.numpy as jnp

from swa_jax.faults import add_faults, fault_counts
from swa_jax.pool import settle
from swa_jax.state import AllocatorState, must_be_state


def free_group_begin(state: AllocatorState) -> AllocatorState:
    """Opens a group: pages freed from here on are queued until `free_group_end`.

    Args:
      state: allocator before the call.

    Returns:
      The allocator with its group open.

    Refused, counted, and nothing else changed:
      nested_group: a group is open already; what it queued stays queued.

    Law 6; public report B04.
    """
    must_be_state(state)
    return _begin(state)


@jax.jit
def _begin(state: AllocatorState) -> AllocatorState:
    return replace(
        state,
        group_open=jnp.ones_like(state.group_open),
        faults=add_faults(state.faults, fault_counts(nested_group=state.group_open)),
    )


def free_group_end(state: AllocatorState) -> AllocatorState:
    """Closes the group and makes every queued page grantable.

    Also releases what `free_swa_grouped` queued without a group. An addition to two counters:
    the pages themselves were settled when they were queued.

    Args:
      state: allocator before the call.

    Returns:
      The allocator with no group open and nothing pending. Nothing is refused.

    Law 6; public reports B03 and B04.
    """
    must_be_state(state)
    return _end(state)


@jax.jit
def _end(state: AllocatorState) -> AllocatorState:
    return replace(
        state,
        full=settle(state.full),
        swa=settle(state.swa),
        group_open=jnp.zeros_like(state.group_open),
    )
