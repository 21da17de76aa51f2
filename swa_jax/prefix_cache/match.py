"""The longest cached prefix that a new request can start from."""

import functools
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from swa_jax.inputs import Ints, as_int32
from swa_jax.paging import look_up
from swa_jax.prefix_cache.arguments import check_pair
from swa_jax.prefix_cache.find import Chain, find_prompt
from swa_jax.prefix_cache.keys import ReadTokens, reader
from swa_jax.prefix_cache.tree import LEAST, ROOT, CacheConfig, PrefixCache
from swa_jax.rank import rank
from swa_jax.state import UNMAPPED, AllocatorState
from swa_jax.window import frontier

_LAST_TIME = 2**31 - 1


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["length", "slots", "node"], meta_fields=[]
)
@dataclass(frozen=True)
class Match:
    """What of a prompt is cached."""

    length: jax.Array  # int32[] tokens, whole pages
    slots: jax.Array  # int32[T] full slots of these tokens, then 0
    node: jax.Array  # int32[] the last page's node, 0 (the root) for no match


def match_prefix(
    cache: PrefixCache,
    state: AllocatorState,
    tokens: Ints,
    length: ArrayLike,
    *,
    namespace: ArrayLike = 0,
) -> tuple[PrefixCache, Match]:
    """Finds the longest prefix whose full KV is cached and whose last window is live in SWA.

    Lock the match before anything else may evict: until then it is only an answer.

    Args:
      cache: the tree.
      state: the allocator it stands beside.
      tokens: int32[T] the prompt, padded with anything.
      length: int32[] tokens of it that count. To recompute at least the last token, or to drop a
        page for a draft model, give a smaller one.
      namespace: int32[] prefixes of other namespaces (tenant, LoRA, salt) are not seen.

    Returns:
      The cache, with the use of the path noted, and `Match`.

    Rule R9; public reports B36, B37, B38, B40.
    """
    check_pair(cache, state)
    row = as_int32("tokens", tokens, 1)
    count = as_int32("length", length, 0)
    return _match(cache, state, row, count, as_int32("namespace", namespace, 0))


@jax.jit
def _match(
    cache: PrefixCache,
    state: AllocatorState,
    tokens: jax.Array,
    length: jax.Array,
    namespace: jax.Array,
) -> tuple[PrefixCache, Match]:
    size, room = cache.config.pool.page_size, tokens.shape[0]
    cache, nodes, pages = match_path(cache, state, reader(tokens), room, length, namespace)
    slots = path_slots(nodes, pages, size, room)
    node = jnp.where(pages > 0, look_up(nodes, jnp.maximum(pages - 1, 0), ROOT), ROOT)
    return cache, Match(pages * jnp.int32(size), slots, node)


def match_path(
    cache: PrefixCache,
    state: AllocatorState,
    read: ReadTokens,
    room: int,
    length: jax.Array,
    namespace: jax.Array,
) -> tuple[PrefixCache, jax.Array, jax.Array]:
    """`match_prefix`, page by page: the cache, int32[N] nodes, int32[] how many are the match.

    Args:
      cache: the tree.
      state: beside it.
      read: the prompt's tokens.
      room: most tokens of it, static.
      length: int32[] as for `match_prefix`.
      namespace: int32[] likewise.
    """
    chain = find_prompt(cache, read, room, length, namespace)
    pages = usable_pages(cache.config, state, chain)
    return note_use(cache, chain.nodes, pages, hit=True), chain.nodes, pages


def usable_pages(config: CacheConfig, state: AllocatorState, chain: Chain) -> jax.Array:
    """int32[] pages of a chain up to the last one that has a live window behind it."""
    place = jnp.arange(chain.nodes.shape[0], dtype=jnp.int32)
    dead = look_up(state.full_to_swa, chain.nodes, UNMAPPED) == UNMAPPED
    before, _ = rank(dead)  # dead pages before each
    start = jnp.minimum(window_start(config, place + 1), place)
    in_window = before + dead.astype(jnp.int32) - look_up(before, start, 0)
    good = (place < chain.count) & (in_window == 0)
    return jnp.max(jnp.where(good, place + 1, 0), initial=0)


def window_start(config: CacheConfig, pages: jax.Array) -> jax.Array:
    """int32: the first page that a prefix of `pages` pages must have live in SWA."""
    size = jnp.int32(config.pool.page_size)
    if config.pool.sliding_window is None:
        return jnp.zeros_like(pages)
    tokens = pages * size
    return jax.lax.div(frontier(config.pool, tokens, tokens), size)


def path_slots(nodes: jax.Array, pages: jax.Array, size: int, room: int) -> jax.Array:
    """int32[room] slots of the tokens of the first `pages` nodes, then 0."""
    token = jnp.arange(room, dtype=jnp.int32)
    page = jax.lax.div(token, jnp.int32(size))
    slot = look_up(nodes, page, ROOT) * jnp.int32(size) + token - page * jnp.int32(size)
    return jnp.where(page < pages, slot, 0)


def note_use(cache: PrefixCache, nodes: jax.Array, pages: jax.Array, *, hit: bool) -> PrefixCache:
    """Stamps the first `pages` nodes of a path with a new time; counts a match for "lfu".

    Times and counts stay at their most instead of wrapping: what is new would leave before what is
    old, for ever. Nodes of the last time then leave in the order of their pages.
    """
    place = jnp.arange(nodes.shape[0], dtype=jnp.int32)
    used = jnp.where((place < pages) & (nodes > ROOT), nodes, cache.in_tree.shape[0])
    clock = jnp.minimum(cache.clock, jnp.int32(_LAST_TIME - 1)) + 1
    rank = cache.rank
    if cache.config.policy == "lfu" and hit:
        count = jnp.minimum(look_up(rank, used, 0), jnp.int32(-LEAST - 1)) + 1
        rank = rank.at[used].set(count, mode="drop")
    last_use = cache.last_use.at[used].set(clock, mode="drop")
    return replace(cache, last_use=last_use, rank=rank, clock=clock)
