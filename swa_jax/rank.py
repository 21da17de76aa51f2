"""Positions among marked places, without a serial loop.

Bits are ranked by counting them in 32-bit words; only the word counts are summed, by small
triangular products. A running sum over all places costs an order of magnitude more on a CPU, and
a chain of additions is fused into its consumer there and computed again for every place.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp

_WORD = 32
_BLOCK = 64
_FEW = 16
_EXACT = 2**24  # float32 counts are exact below


def exclusive_sum(values: jax.Array) -> jax.Array:
    """int32[..., N]: for each place the sum of the places before it (along the last axis)."""
    total = values
    step = 1
    while step < values.shape[-1]:  # doubling: log2(N) vector additions
        pad = jnp.zeros((*values.shape[:-1], step), values.dtype)
        total = total + jnp.concatenate([pad, total[..., :-step]], axis=-1)
        step *= 2
    return total - values


def _before(counts: jax.Array) -> jax.Array:
    """float32[M, N]: exclusive sums of counts whose total is below 2^24 (exact in float32)."""
    rows, n = counts.shape
    width = min(n, _BLOCK)
    earlier = jnp.triu(jnp.ones((width, width), jnp.float32), 1)
    if n <= _FEW:  # a handful of words: no product worth a call
        return jnp.sum(counts[:, :, None] * earlier[None, :, :], axis=1)
    blocks = jnp.pad(counts, ((0, 0), (0, -n % width))).reshape(rows, -1, width)
    # HIGHEST: counts above 256 would be rounded in bfloat16, the default on some devices.
    inside = jnp.matmul(blocks, earlier, precision=jax.lax.Precision.HIGHEST)
    if blocks.shape[1] > 1:
        inside = inside + _before(jnp.sum(blocks, axis=2))[:, :, None]
    return inside.reshape(rows, -1)[:, :n]


def ranks(marks: jax.Array) -> tuple[jax.Array, jax.Array]:
    """For bool[M, N], row by row: int32[M, N] marked places before each, int32[M] how many."""
    rows, n = marks.shape
    words = max(1, -(-n // _WORD))
    bits = jnp.pad(marks, ((0, 0), (0, words * _WORD - n))).reshape(rows, words, _WORD)
    place = jnp.arange(_WORD, dtype=jnp.uint32)[None, None, :]
    word = jnp.sum(bits.astype(jnp.uint32) << place, axis=2, dtype=jnp.uint32)
    in_word = jax.lax.population_count(word).astype(jnp.int32)
    if n < _EXACT:
        before = _before(in_word.astype(jnp.float32)).astype(jnp.int32)
    else:
        before = jax.lax.associative_scan(jnp.add, in_word, axis=1) - in_word
    below = word[:, :, None] & ((jnp.uint32(1) << place) - jnp.uint32(1))
    of_place = before[:, :, None] + jax.lax.population_count(below).astype(jnp.int32)
    return of_place.reshape(rows, -1)[:, :n], before[:, -1] + in_word[:, -1]


def rank(marks: jax.Array) -> tuple[jax.Array, jax.Array]:
    """For bool[N]: int32[N] marked places before each place, and int32[] how many in all."""
    of_place, total = ranks(marks[None, :])
    return of_place[0], total[0]


def latest_mark(marks: jax.Array) -> jax.Array:
    """For bool[N]: int32[N] the number of the last mark up to each place, from 0; 0 before all."""
    before, _ = rank(marks)
    return jnp.maximum(before + marks.astype(jnp.int32) - 1, 0)


@dataclass(frozen=True)
class Runs:
    """A concatenation of runs, read place by place."""

    run: jax.Array  # int32[K] which run a place belongs to (any where not real)
    within: jax.Array  # int32[K] its place in that run
    start: jax.Array  # int32[B] place of the first member of each run
    real: jax.Array  # bool[K]


def read_runs(lengths: jax.Array, places: int, start: jax.Array | None = None) -> Runs:
    """Lays runs of int32[B] `lengths` >= 0 end to end over `places` places (static).

    Args:
      lengths: int32[B]; empty runs are passed over. Their sum must not pass `places`.
      places: room.
      start: int32[B] the exclusive sum of `lengths`, where the caller has it already.
    """
    count = lengths.shape[0]
    start = exclusive_sum(lengths) if start is None else start
    some = lengths > 0
    nth, _ = rank(some)
    filled = jnp.zeros(count, jnp.int32)
    filled = filled.at[jnp.where(some, nth, count)].set(
        jnp.arange(count, dtype=jnp.int32), mode="drop"
    )
    # The r-th mark is where the r-th run that is not empty begins.
    marks = jnp.zeros(places, bool).at[jnp.where(some, start, places)].set(True, mode="drop")
    run = filled.at[latest_mark(marks)].get(mode="fill", fill_value=0)
    place = jnp.arange(places, dtype=jnp.int32)
    within = place - start.at[run].get(mode="fill", fill_value=0)
    real = place < start[-1] + lengths[-1]
    # Callers look much up by run: without a barrier each of them would find it anew.
    run, within, real = jax.lax.optimization_barrier((run, within, real))
    return Runs(run, within, start, real)
