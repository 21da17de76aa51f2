"""What is asked for: real traces, conversations, and loads made to hurt. On the device.

Legend: L most tokens of a request, S conversations that are remembered.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp

from swa_jax.prefix_cache.keys import mix
from swa_jax.serving.config import ServingConfig
from swa_jax.serving.requests import Requests, Sampling

from .dice import bits, one_in, roll, seed_of
from .traces import Traces

# What a request is like.
KINDS = (
    "mooncake",  # a request of that trace, prefixes shared as it says
    "azure",  # lengths of that trace, each text by itself
    "one_token",  # one token asked, one wanted
    "over_page",  # a page or a few, and one token more
    "over_window",  # a window and a token more or less
    "over_pool",  # as many pages as there are, or one more: to be rejected
    "cyclic",  # few short cycles: prompts are prefixes of each other, drafts are found
    "thrash",  # long, with much to generate: the pool is full
    "session",  # the whole conversation so far, and a few words
)
MOONCAKE, AZURE, ONE, PAGE, WINDOW, POOL, CYCLIC, THRASH, SESSION = range(len(KINDS))
TENANTS = 4


@dataclass(frozen=True)
class Shape:
    """What is static about the requests of a loop."""

    columns: int  # L
    new: int  # most tokens wanted
    page: int
    window: int  # tokens
    pool: int  # tokens that the longest request can hold
    vocab: int
    block: int = 1  # tokens here for a block of the trace

    @classmethod
    def of(cls, config: ServingConfig, vocab: int, block: int) -> Shape:
        """Of a serving loop."""
        size = config.pool.page_size
        return cls(
            columns=config.max_context,
            new=config.output_columns,
            page=size,
            window=(config.pool.sliding_window or 0) + 1,
            # Or as long as a request may be, where pools are larger.
            pool=min(config.most_request_pages * size, config.max_context - 1),
            vocab=vocab,
            block=block,
        )


class Talks(NamedTuple):
    """Conversations that can go on."""

    tokens: jax.Array  # int32[S, L]
    lens: jax.Array  # int32[S] 0: nothing said yet
    namespace: jax.Array  # int32[S]


def new_talks(count: int, columns: int) -> Talks:
    """Nobody has said anything."""
    none = jnp.zeros(count, jnp.int32)
    return Talks(jnp.zeros((count, columns), jnp.int32), none, none)


class Asked(NamedTuple):
    """One request, or several with a leading axis."""

    tokens: jax.Array  # int32[L]
    prompt_len: jax.Array  # int32[]
    new: jax.Array  # int32[]
    namespace: jax.Array  # int32[]
    ignore_eos: jax.Array  # bool[]
    kind: jax.Array  # int32[] of KINDS


def pick_kind(seed: jax.Array, weights: jax.Array) -> jax.Array:
    """int32[] a kind by int32[K] weights."""
    drawn = roll(seed, 1, 0, jnp.sum(weights, dtype=jnp.int32))
    return jnp.sum(jnp.cumsum(weights, dtype=jnp.int32) <= drawn, dtype=jnp.int32)


def ask(
    shape: Shape,
    traces: Traces,
    talks: Talks,
    seed: jax.Array,
    weights: jax.Array,
    turn: jax.Array,
) -> Asked:
    """One request.

    Args:
      shape: static.
      traces: both.
      talks: that can go on.
      seed: uint32[] it follows from this alone.
      weights: int32[K] how often each kind comes.
      turn: int32[] requests so far: where the traces are.
    """
    kind = pick_kind(seed, weights)
    talk = roll(seed, 2, 0, talks.lens.shape[0])
    said = talks.lens[talk]
    goes_on = (kind == SESSION) & (said > 0)
    moon = jax.lax.rem(turn, jnp.int32(traces.mooncake_prompts.shape[0]))
    code = jax.lax.rem(turn, jnp.int32(traces.azure_prompts.shape[0]))
    lens, news = _lengths(shape, seed)
    lens = lens.at[MOONCAKE].set(traces.mooncake_prompts[moon] * shape.block)
    lens = lens.at[AZURE].set(traces.azure_prompts[code])
    lens = lens.at[SESSION].set(said + roll(seed, 3, 1, 4))
    news = news.at[MOONCAKE].set(traces.mooncake_outputs[moon])
    news = news.at[AZURE].set(traces.azure_outputs[code])
    new = jnp.clip(news[kind], 0, shape.new)
    room = jnp.where(kind == POOL, shape.columns, shape.columns - new)
    prompt_len = jnp.clip(lens[kind], 1, room)
    place = jnp.arange(shape.columns, dtype=jnp.int32)
    tokens = _tokens(shape, traces, seed, kind, moon)
    tokens = jnp.where(goes_on & (place < said), talks.tokens[talk], tokens)
    drawn = roll(seed, 4, 0, TENANTS)
    return Asked(
        tokens=jnp.where(place < prompt_len, tokens, 0),
        prompt_len=prompt_len,
        new=new,
        namespace=jnp.where(goes_on, talks.namespace[talk], drawn),
        ignore_eos=one_in(seed, 5, 2),
        kind=kind,
    )


def _lengths(shape: Shape, seed: jax.Array) -> tuple[jax.Array, jax.Array]:
    """int32[K] tokens of a prompt and tokens wanted, of the kinds that no trace or talk gives."""
    some = roll(seed, 6, 1, shape.new + 1)
    few = roll(seed, 7, 1, max(2, shape.pool // shape.page // 2))
    # The last token generated is never read, so it takes no place.
    most = shape.pool - (some - 1) * one_in(seed, 8, 2).astype(jnp.int32)
    zero = jnp.int32(0)
    lens = {
        ONE: jnp.int32(1),
        PAGE: few * shape.page + 1,
        WINDOW: shape.window + roll(seed, 9, 0, 3) - 1,
        POOL: most + one_in(seed, 10, 2).astype(jnp.int32),
        CYCLIC: roll(seed, 11, 1, shape.pool * 2 // 3),
        THRASH: roll(seed, 12, shape.pool // 3, shape.pool * 2 // 3),
    }
    news = {ONE: jnp.int32(1), POOL: jnp.minimum(some, shape.pool + 1 - most), THRASH: shape.new}
    kinds = range(len(KINDS))
    return (
        jnp.stack([jnp.asarray(lens.get(kind, zero), jnp.int32) for kind in kinds]),
        jnp.stack([jnp.asarray(news.get(kind, some), jnp.int32) for kind in kinds]),
    )


def _tokens(
    shape: Shape, traces: Traces, seed: jax.Array, kind: jax.Array, moon: jax.Array
) -> jax.Array:
    """int32[L] words: of trace blocks, of a cycle, or of one of few beginnings and then its own."""
    place = jnp.arange(shape.columns, dtype=jnp.int32)
    block = (
        traces.blocks[moon]
        .at[jax.lax.div(place, jnp.int32(shape.block))]
        .get(mode="fill", fill_value=0)
    )
    of_trace = seed_of(block, jax.lax.rem(place, jnp.int32(shape.block)))
    period = roll(seed, 13, 1, 7)
    of_cycle = seed_of(jax.lax.rem(place, period) + period * 16)
    begins = roll(seed, 14, 0, shape.columns)
    common = place < jnp.where(one_in(seed, 15, 3), begins, 0)
    stream = jnp.where(common, roll(seed, 16, 0, 6).astype(jnp.uint32), seed)
    by_itself = mix(stream + seed_of(place))
    words = jnp.where(kind == MOONCAKE, of_trace, jnp.where(kind == CYCLIC, of_cycle, by_itself))
    return jax.lax.rem((words >> 1).astype(jnp.int32), jnp.int32(shape.vocab))


def greedy(count: int) -> Sampling:
    """So many requests take the likeliest token."""
    none = jnp.zeros(count, jnp.int32)
    return Sampling(none.astype(jnp.float32), none, jnp.ones(count, jnp.float32), none)


def sampled(seeds: jax.Array) -> Sampling:
    """How each of uint32[M] `seeds` draws its tokens; one in four takes the likeliest."""

    def chosen(salt: int, values: jax.Array) -> jax.Array:
        return values[roll(seeds, salt, 0, values.shape[0])]

    return Sampling(
        temperature=chosen(50, jnp.array([0, 0.5, 1, 2], jnp.float32)),
        top_k=chosen(51, jnp.array([0, 0, 3], jnp.int32)),
        top_p=chosen(52, jnp.array([1, 1, 0.9], jnp.float32)),
        seed=bits(seeds, 53),
    )


def as_requests(asked: Asked, wanted: jax.Array, sampling: Sampling | None = None) -> Requests:
    """Requests [M]; those that bool[M] `wanted` leaves out are none. Greedy by default."""
    return Requests(
        tokens=asked.tokens,
        prompt_lens=jnp.where(wanted, asked.prompt_len, 0),
        max_new_tokens=asked.new,
        sampling=greedy(asked.new.shape[0]) if sampling is None else sampling,
        namespace=asked.namespace,
        ignore_eos=asked.ignore_eos,
    )


def keep_talk(
    talks: Talks,
    wanted: jax.Array,
    asked_tokens: jax.Array,
    length: jax.Array,
    space: jax.Array,
    seed: jax.Array,
) -> Talks:
    """Remembers int32[L] what was said so far, in place of some other talk, where `wanted`."""
    count, columns = talks.tokens.shape
    fits = wanted & (length + 6 <= columns)
    at = jnp.where(fits, roll(seed, 20, 0, count), count)
    return Talks(
        tokens=talks.tokens.at[at].set(asked_tokens, mode="drop"),
        lens=talks.lens.at[at].set(length, mode="drop"),
        namespace=talks.namespace.at[at].set(space, mode="drop"),
    )
