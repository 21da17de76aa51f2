"""Positions among marked places, without a serial loop.

Bits are ranked by counting them in 32-bit words; only the word counts are summed, by small
triangular products. A running sum over all places costs an order of magnitude more on a CPU, and
a chain of additions is fused into its consumer there and computed again for every place.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from swa_jax.once import once
from swa_jax.paging import fetch, put

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


def _words(marks: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """For bool[M, N]: uint32[M, W] its words, uint32[M, W] marks before each, int32[M] in all."""
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
    return word, before.astype(jnp.uint32), before[:, -1] + in_word[:, -1]


def _of_places(word: jax.Array, before: jax.Array, n: int, *, itself: bool) -> jax.Array:
    """uint32[M, N] marks before each place, or up to it where it counts `itself`."""
    place = jnp.arange(_WORD, dtype=jnp.uint32)[None, None, :]
    below = (jnp.uint32(2 if itself else 1) << place) - jnp.uint32(1)
    of_place = before[:, :, None] + jax.lax.population_count(word[:, :, None] & below)
    return of_place.reshape(word.shape[0], -1)[:, :n]


def ranks(marks: jax.Array) -> tuple[jax.Array, jax.Array]:
    """For bool[M, N], row by row: int32[M, N] marked places before each, int32[M] how many."""
    word, before, total = _words(marks)
    return _of_places(word, before, marks.shape[1], itself=False).astype(jnp.int32), total


def rank(marks: jax.Array) -> tuple[jax.Array, jax.Array]:
    """For bool[N]: int32[N] marked places before each place, and int32[] how many in all."""
    of_place, total = ranks(marks[None, :])
    return of_place[0], total[0]


@dataclass(frozen=True)
class Marked:
    """The marked places of bool[N] marks, to be read by number: cheap where they are few."""

    words: jax.Array  # uint32[W]
    before: jax.Array  # int32[W] marks before each word
    count: jax.Array  # int32[]
    places: int  # N

    def read(self, nth: jax.Array) -> jax.Array:
        """int32[K] place of each int32[K] `nth` mark, from 0; N past the last."""
        word = jnp.searchsorted(self.before, nth, side="right").astype(jnp.int32) - 1
        bits = self.words.at[word].get(mode="fill", fill_value=0)
        left = nth - self.before.at[word].get(mode="fill", fill_value=0)
        place = jnp.zeros_like(nth)
        width = _WORD // 2
        while width:  # which half has it, and which half of that
            low = (bits >> place.astype(jnp.uint32)) & jnp.uint32(2**width - 1)
            fewer = jax.lax.population_count(low).astype(jnp.int32)
            beyond = left >= fewer
            place = place + jnp.where(beyond, jnp.int32(width), 0)
            left = left - jnp.where(beyond, fewer, 0)
            width //= 2
        return jnp.where(nth < self.count, word * jnp.int32(_WORD) + place, self.places)


def read_marks(marks: jax.Array) -> Marked:
    """bool[N] marks as `Marked`."""
    word, before, count = _words(marks[None, :])
    words, before = once(word[0], _WORD), once(before[0].astype(jnp.int32), _WORD)
    return Marked(words, before, count[0], marks.shape[0])


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
    row, some = jnp.arange(count, dtype=jnp.int32), lengths > 0
    nth, _ = rank(some)
    # By the number of runs, other than empty ones, that begin up to a place.
    nth_run = put(jnp.zeros(count + 1, jnp.int32), jnp.where(some, nth + 1, count + 1), row)
    begins = put(jnp.zeros(places, bool), jnp.where(some, start, places), some)
    word, before, _ = _words(begins[None, :])
    begun = _of_places(word, once(before[0])[None, :], places, itself=True)[0]
    run = once(fetch(nth_run, begun))
    place = jnp.arange(places, dtype=jnp.int32)
    within = place - fetch(start, run)
    real = place < start[-1] + lengths[-1]
    return Runs(run, within, start, real)
