"""Which rank a request goes to: where its prefix is, unless that rank is too busy."""

import functools
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from swa_jax.config import PoolConfig
from swa_jax.counts import free_pages, held_pages
from swa_jax.inputs import Ints, as_int32, whole_number
from swa_jax.paging import look_up, pages_for
from swa_jax.prefix_cache import (
    PrefixCache,
    full_evictable_size,
    swa_evictable_size,
)
from swa_jax.prefix_cache.arguments import check_pair
from swa_jax.prefix_cache.keys import ReadTokens, reader
from swa_jax.prefix_cache.leaving import may_leave
from swa_jax.prefix_cache.match import match_path
from swa_jax.state import AllocatorState
from swa_jax.window import most_swa_pages

_LEAST = -(2**31)


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["full_room", "swa_room", "busy"],
    meta_fields=[],
)
@dataclass(frozen=True)
class Loads:
    """What each rank has left, in tokens. int32[R] each."""

    full_room: jax.Array  # full tokens that are free or may be evicted
    swa_room: jax.Array  # SWA tokens likewise
    busy: jax.Array  # full tokens held and not evictable: by running requests and locks


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["rank", "hit", "fits"],
    meta_fields=[],
)
@dataclass(frozen=True)
class Placement:
    """Where a request should go."""

    rank: jax.Array  # int32[]
    hit: jax.Array  # int32[R] tokens of its prompt that each rank has cached
    fits: jax.Array  # bool[R] ranks that have room for it now; `rank` is the best of them, if any


def loads(states: AllocatorState, caches: PrefixCache | None = None) -> Loads:
    """The global view: what each rank has left.

    Args:
      states: leaves [R, ...], from `new_ranks`.
      caches: likewise, the trees beside them; None where there are none.

    Raises:
      ValueError: no states of ranks, or trees of others.
    """
    _count_ranks(states, caches)
    return _loads(states, caches)


def _count_ranks(states: AllocatorState, caches: PrefixCache | None) -> int:
    if not isinstance(states, AllocatorState):
        raise ValueError(f"states must be an AllocatorState, got {type(states).__name__}")
    if states.group_open.ndim != 1:
        raise ValueError(
            "states must have one leading axis of ranks, as new_ranks makes it, got "
            f"{states.group_open.ndim} of them"
        )
    ranks = states.group_open.shape[0]
    if caches is not None:
        check_pair(caches, states)
        if caches.clock.shape != (ranks,):
            raise ValueError(
                f"caches must have the {ranks} ranks of the states, got {list(caches.clock.shape)}"
            )
    return ranks


@jax.jit
def _loads(states: AllocatorState, caches: PrefixCache | None) -> Loads:
    return jax.vmap(load_of)(states, caches)


def load_of(state: AllocatorState, cache: PrefixCache | None) -> Loads:
    """`loads` of one rank: int32[] each."""
    size = jnp.int32(state.config.page_size)
    full, swa = (pages * size for pages in free_pages(state))
    busy = held_pages(state)[0] * size
    if cache is not None:
        evictable = full_evictable_size(cache, state)
        full, busy = full + evictable, busy - evictable
        swa = swa + swa_evictable_size(cache, state)
    return Loads(full, swa, busy)


def place(
    states: AllocatorState,
    caches: PrefixCache,
    tokens: Ints,
    length: ArrayLike,
    *,
    max_tokens: ArrayLike | None = None,
    waiting: Ints | None = None,
    slack: int | None = None,
    per_token: int | None = None,
    namespace: ArrayLike = 0,
) -> Placement:
    """Chooses a rank for a request.

    Of the ranks that have room for it, and whose load is at most `slack` above the least loaded
    one's: the one with the longest usable prefix, then the least loaded, then the first. Where none
    has room, all are asked. Nothing changes: the match counts as a use only where the request is
    admitted.

    Args:
      states: leaves [R, ...].
      caches: likewise.
      tokens: int32[T] the prompt, padded with anything.
      length: int32[] tokens of it that count. At least the last one is computed again.
      max_tokens: int32[] the most tokens that the request can come to; its length by default.
      waiting: int32[R] tokens of requests that were sent to each rank and hold nothing yet; none
        by default, and below 0 none. Add this request's where it goes.
      slack: how many tokens of load a longer prefix may cost, static, 0 or more; a quarter of a
        rank's full pool by default.
      per_token: how many tokens of load one token more of prefix may cost, static, 1 or more,
        within `slack`; no such bound by default. `swa-jax replay --dp` takes 8.
      namespace: int32[] as for `prefix_cache.match_prefix`.

    Returns:
      `Placement`.

    Raises:
      ValueError: as for `loads`; a slack or `per_token` that is no number of tokens, or not one
        `waiting` a rank.
    """
    ranks = _count_ranks(states, caches)
    behind = jnp.zeros(ranks, jnp.int32) if waiting is None else as_int32("waiting", waiting, 1)
    if behind.shape[0] != ranks:
        raise ValueError(f"waiting must have one entry a rank, {ranks}, got {behind.shape[0]}")
    row, count = as_int32("tokens", tokens, 1), as_int32("length", length, 0)
    most = count if max_tokens is None else as_int32("max_tokens", max_tokens, 0)
    room = states.config.full_tokens // 4 if slack is None else whole_number("slack", slack, 0)
    # Half of int32 is more than any pool has, and leaves the sums below within it.
    behind = jnp.clip(behind, 0, 2**30)
    bound = None if per_token is None else whole_number("per_token", per_token, 1)
    spaces = as_int32("namespace", namespace, 0)
    return _place(states, caches, row, count, most, behind, spaces, slack=room, per_token=bound)


@functools.partial(jax.jit, static_argnames=("slack", "per_token"))
def _place(
    states: AllocatorState,
    caches: PrefixCache,
    tokens: jax.Array,
    length: jax.Array,
    most: jax.Array,
    waiting: jax.Array,
    namespace: jax.Array,
    *,
    slack: int,
    per_token: int | None,
) -> Placement:
    def look(state: AllocatorState, cache: PrefixCache) -> tuple[jax.Array, jax.Array]:
        may_go = may_leave(cache, state)
        return look_at(state, cache, may_go, reader(tokens), tokens.shape[0], length, namespace)

    hits, kept = jax.vmap(look)(states, caches)
    need = jnp.maximum(most, length)
    load = _loads(states, caches)
    return choose(states.config, load, hits, kept, need, waiting, slack, per_token=per_token)


def look_at(
    state: AllocatorState,
    cache: PrefixCache,
    may_go: jax.Array,
    read: ReadTokens,
    room: int,
    length: jax.Array,
    namespace: jax.Array | int = 0,
) -> tuple[jax.Array, jax.Array]:
    """What one rank has of a prompt: int32[] tokens, and how many of them could be evicted.

    Args:
      state: of one rank.
      cache: likewise.
      may_go: bool[F+1] `may_leave` of the two.
      read: the prompt's tokens.
      room: most tokens of it, static.
      length: int32[] tokens of it that count.
      namespace: int32[] as for `prefix_cache.match_prefix`.
    """
    size = jnp.int32(state.config.page_size)
    known = jnp.maximum(length - 1, 0)
    _, nodes, pages = match_path(cache, state, read, room, known, jnp.int32(namespace))
    found = jnp.arange(nodes.shape[0], dtype=jnp.int32) < pages
    keeps = found & look_up(may_go, nodes, False)
    return pages * size, jnp.sum(keeps, dtype=jnp.int32) * size


def choose(
    config: PoolConfig,
    load: Loads,
    hits: jax.Array,
    kept: jax.Array,
    tokens: jax.Array,
    waiting: jax.Array,
    slack: int,
    coming: jax.Array | None = None,
    per_token: int | None = None,
) -> Placement:
    """The rule of `place`, from what the ranks said.

    Args:
      config: of one rank's pools.
      load: of all ranks.
      hits: int32[R] tokens of the prompt that each has cached.
      kept: int32[R] how many of them could be evicted.
      tokens: int32[] the most that the request can come to.
      waiting: int32[R] as for `place`.
      slack: likewise.
      coming: int32[R] tokens of the prompt that each rank will have cached once it has served what
        waits there; none by default. They are worth what cached ones are, and are no room.
      per_token: most tokens of load that a token of prefix may cost, beyond what the least loaded
        rank has of it; within `slack`, whatever it saves, by default.
    """
    size = jnp.int32(config.page_size)
    full_need = pages_for(tokens, config.page_size) * size
    swa_need = most_swa_pages(config, tokens) * size
    # What of the hit could be evicted will not be: it is no room for the rest.
    full_room = load.full_room - kept - waiting
    fits = (full_need - hits <= full_room) & (swa_need <= load.swa_room)
    asked = fits | ~jnp.any(fits)
    busy = load.busy + waiting
    least = jnp.min(jnp.where(asked, busy, 2**31 - 1))
    worth = hits if coming is None else jnp.maximum(hits, coming)
    bound = jnp.int32(slack)
    if per_token is not None:
        there = jnp.max(jnp.where(asked & (busy == least), worth, 0))
        more = jnp.clip(worth - there, 0, slack // per_token + 1)  # so that no product wraps
        bound = jnp.minimum(more * jnp.int32(per_token), bound)
    near = asked & (busy - least <= bound)
    longest = near & (worth == jnp.max(jnp.where(near, worth, jnp.int32(_LEAST))))
    lightest = longest & (busy == jnp.min(jnp.where(longest, busy, 2**31 - 1)))
    return Placement(jnp.argmax(lightest).astype(jnp.int32), hits, fits)
