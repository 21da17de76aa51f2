"""swa_jax inside one compiled loop: steps of a `lax.scan`, no host in between."""

import functools
from collections.abc import Callable
from typing import TypeAlias

import jax
import jax.numpy as jnp

import swa_jax as swa

Release: TypeAlias = Callable[[swa.AllocatorState, jax.Array], swa.AllocatorState]
# int32[B] each: prefix_lens, seq_lens, last_loc.
Rows: TypeAlias = tuple[jax.Array, jax.Array, jax.Array]


@functools.partial(jax.jit, donate_argnums=0, static_argnames="steps")
def decode_loop(
    state: swa.AllocatorState, seq_lens: jax.Array, last_loc: jax.Array, *, steps: int
) -> tuple[swa.AllocatorState, jax.Array, jax.Array]:
    """Grants one token a row, `steps` times.

    Returns:
      The state, int32[steps, batch] slots, bool[] whether every step was granted.
    """

    def step(
        carry: tuple[swa.AllocatorState, jax.Array, jax.Array], _: None
    ) -> tuple[tuple[swa.AllocatorState, jax.Array, jax.Array], tuple[jax.Array, jax.Array]]:
        state, seq_lens, last_loc = carry
        seq_lens = seq_lens + jnp.int32(1)
        state, grant = swa.alloc_decode(state, seq_lens, last_loc)
        return (state, seq_lens, grant.slots), (grant.slots, grant.ok)

    carry, (slots, granted) = jax.lax.scan(step, (state, seq_lens, last_loc), None, length=steps)
    return carry[0], slots, jnp.all(granted)


@functools.partial(jax.jit, donate_argnums=0, static_argnames=("steps", "num_tokens"))
def extend_loop(
    state: swa.AllocatorState,
    rows: Rows,
    tails: jax.Array | None = None,
    *,
    steps: int,
    num_tokens: int,
) -> tuple[swa.AllocatorState, jax.Array, jax.Array]:
    """Grants a batch of prompts, `steps` times; SWA slots for int32[B] `tails` where given.

    Returns:
      The state, int32[steps, num_tokens] slots, bool[] whether every step was granted.
    """

    def step(
        state: swa.AllocatorState, _: None
    ) -> tuple[swa.AllocatorState, tuple[jax.Array, jax.Array]]:
        if tails is None:
            state, grant = swa.alloc_extend(state, *rows, capacity=num_tokens)
        else:
            state, grant = swa.alloc_extend_swa_tail(state, *rows, tails, capacity=num_tokens)
        return state, (grant.slots, grant.ok)

    state, (slots, granted) = jax.lax.scan(step, state, None, length=steps)
    return state, slots, jnp.all(granted)


@functools.partial(jax.jit, donate_argnums=0, static_argnames="release")
def release_loop(
    state: swa.AllocatorState, sets: jax.Array, *, release: Release
) -> swa.AllocatorState:
    """Releases int32[N, T] sets of slots that were granted before, one after the other."""

    def step(state: swa.AllocatorState, slots: jax.Array) -> tuple[swa.AllocatorState, None]:
        return release(state, slots), None

    return jax.lax.scan(step, state, sets)[0]


@functools.partial(jax.jit, donate_argnums=0, static_argnames=("release", "steps", "num_tokens"))
def turnover_loop(
    state: swa.AllocatorState, rows: Rows, *, release: Release, steps: int, num_tokens: int
) -> tuple[swa.AllocatorState, jax.Array]:
    """Grants a batch of prompts and releases it again, `steps` times.

    Returns:
      The state, bool[] whether every step was granted.
    """

    def step(state: swa.AllocatorState, _: None) -> tuple[swa.AllocatorState, jax.Array]:
        state, grant = swa.alloc_extend(state, *rows, capacity=num_tokens)
        return release(state, grant.slots), grant.ok

    state, granted = jax.lax.scan(step, state, None, length=steps)
    return state, jnp.all(granted)


def release_by_side(state: swa.AllocatorState, slots: jax.Array) -> swa.AllocatorState:
    """The window passes, then the request ends."""
    return swa.free_full(swa.free_swa(state, slots), slots)


def release_in_group(state: swa.AllocatorState, slots: jax.Array) -> swa.AllocatorState:
    """The request ends within a free group."""
    return swa.free_group_end(swa.free(swa.free_group_begin(state), slots))
