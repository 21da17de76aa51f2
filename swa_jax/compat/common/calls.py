"""The core's calls as the shells make them: state donated, what the host asks for in one array.

Each takes the state over: after the call the caller holds the one that is returned.
"""

import functools
from collections.abc import Callable
from typing import TypeAlias

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

import swa_jax as swa
from swa_jax.compat.common import one_side

Free: TypeAlias = Callable[[swa.AllocatorState, ArrayLike], swa.AllocatorState]
NEWS = 5  # ok, full pages short, SWA pages short, full tokens available, SWA tokens available


def _news(state: swa.AllocatorState, grant: swa.Grant) -> jax.Array:
    """int32[capacity + NEWS]: the slots, then the news in the order given above."""
    rest = [grant.ok.astype(jnp.int32), grant.full_short, grant.swa_short]
    sizes = [swa.full_available_size(state), swa.swa_available_size(state)]
    return jnp.concatenate([grant.slots, jnp.stack(rest + sizes)])


_donating = functools.partial(jax.jit, donate_argnums=0)


@functools.partial(_donating, static_argnames="capacity")
def alloc(
    state: swa.AllocatorState, num_tokens: jax.Array, *, capacity: int
) -> tuple[swa.AllocatorState, jax.Array]:
    """`swa_jax.alloc`, and its news."""
    state, grant = swa.alloc(state, num_tokens, capacity=capacity)
    return state, _news(state, grant)


@functools.partial(_donating, static_argnames="capacity")
def alloc_extend(
    state: swa.AllocatorState, rows: jax.Array, *, capacity: int
) -> tuple[swa.AllocatorState, jax.Array]:
    """`swa_jax.alloc_extend` of int32[3, B] prefixes, lengths and last slots, and its news."""
    state, grant = swa.alloc_extend(state, rows[0], rows[1], rows[2], capacity=capacity)
    return state, _news(state, grant)


@functools.partial(_donating, static_argnames="capacity")
def alloc_extend_swa_tail(
    state: swa.AllocatorState, rows: jax.Array, *, capacity: int
) -> tuple[swa.AllocatorState, jax.Array]:
    """`swa_jax.alloc_extend_swa_tail` of int32[4, B], the tails last, and its news."""
    columns = (rows[0], rows[1], rows[2], rows[3])
    state, grant = swa.alloc_extend_swa_tail(state, *columns, capacity=capacity)
    return state, _news(state, grant)


@_donating
def alloc_decode(
    state: swa.AllocatorState, rows: jax.Array
) -> tuple[swa.AllocatorState, jax.Array]:
    """`swa_jax.alloc_decode` of int32[2, B] lengths and last slots, and its news.

    A length of 0 is a row that takes no part.
    """
    state, grant = swa.alloc_decode(state, rows[0], rows[1], rows[0] != 0)
    return state, _news(state, grant)


@functools.partial(_donating, static_argnames="capacity")
def alloc_swa_side(
    state: swa.AllocatorState, num_tokens: jax.Array, *, capacity: int
) -> tuple[swa.AllocatorState, jax.Array]:
    """`one_side.alloc_swa_side`, and its news."""
    state, grant = one_side.alloc_swa_side(state, num_tokens, capacity=capacity)
    return state, _news(state, grant)


def _unpair_and_free_full(state: swa.AllocatorState, slots: jax.Array) -> swa.AllocatorState:
    """The full page of every slot; its SWA page, if any, stays held by whoever frees it there."""
    return swa.free_full(swa.clear_full_to_swa_mapping(state, slots), slots)


FREES: dict[str, Free] = {
    name: _donating(function)
    for name, function in {
        "free": swa.free,
        "free_swa": swa.free_swa,
        "free_full": swa.free_full,
        "free_segment": swa.free_segment,
        "free_swa_segment": swa.free_swa_segment,
        "free_full_side": _unpair_and_free_full,
        "free_swa_side": one_side.free_swa_side,
        "clear_mapping": swa.clear_full_to_swa_mapping,
    }.items()
}


@_donating
def set_mapping(state: swa.AllocatorState, pairs: jax.Array) -> swa.AllocatorState:
    """`swa_jax.set_full_to_swa_mapping` of int32[2, T] full and SWA slots."""
    return swa.set_full_to_swa_mapping(state, pairs[0], pairs[1])


begin = _donating(swa.free_group_begin)
end = _donating(swa.free_group_end)


@jax.jit
def sizes(state: swa.AllocatorState) -> jax.Array:
    """int32[2] tokens that the full and the SWA pool can grant."""
    return jnp.stack([swa.full_available_size(state), swa.swa_available_size(state)])
