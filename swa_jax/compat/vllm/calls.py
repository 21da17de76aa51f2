"""What the shell asks of the core: each call one program, with what the host needs in one array.

The allocator and the tree are taken over and come back.

Legend: T tokens of a request (padded), N = T / P its pages.
"""

import functools
from dataclasses import dataclass
from typing import TypeAlias

import jax
import jax.numpy as jnp

import swa_jax as swa
from swa_jax import prefix_cache
from swa_jax.paging import look_up
from swa_jax.prefix_cache import PrefixCache, Receipt
from swa_jax.prefix_cache.find import find_chain
from swa_jax.prefix_cache.keys import cut_pages
from swa_jax.prefix_cache.leaving import may_leave, may_lose_swa
from swa_jax.prefix_cache.receipts import standing
from swa_jax.state import UNMAPPED


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["tokens", "length", "namespace"], meta_fields=[]
)
@dataclass(frozen=True)
class Text:
    """What a request is looked up by."""

    tokens: jax.Array  # int32[T] padded
    length: jax.Array  # int32[] tokens that count
    namespace: jax.Array  # int32[]


Both: TypeAlias = tuple[PrefixCache, swa.AllocatorState]

_donating = functools.partial(jax.jit, donate_argnums=(0, 1))


def _sides(state: swa.AllocatorState, pages: jax.Array) -> jax.Array:
    """int32[N] the SWA side of each page, 0 for none."""
    return look_up(state.full_to_swa, pages, UNMAPPED)


@_donating
def look(cache: PrefixCache, state: swa.AllocatorState, text: Text) -> tuple[Both, jax.Array]:
    """The longest usable prefix: int32[1 + 2 N] its tokens, its pages and their SWA sides."""
    size = state.config.page_size
    cache, match = prefix_cache.match_prefix(
        cache, state, text.tokens, text.length, namespace=text.namespace
    )
    pages = jax.lax.div(match.slots[::size], jnp.int32(size))
    news = jnp.concatenate([match.length[None], pages, _sides(state, pages)])
    return (cache, state), news


@_donating
def stand(
    cache: PrefixCache, state: swa.AllocatorState, page: jax.Array, shares: jax.Array
) -> tuple[Both, Receipt]:
    """Locks the prefix that ends with a page, and takes a share in int32[N] pages of it."""
    cache, receipt = prefix_cache.lock(cache, state, page)
    state = swa.share(state, shares * jnp.int32(state.config.page_size))
    return (cache, state), receipt


@jax.jit
def leaving(cache: PrefixCache, state: swa.AllocatorState) -> jax.Array:
    """bool[2, F+1] cached pages that eviction can free, and those whose SWA side it can."""
    full = may_leave(cache, state)
    if state.config.pure_swa_pool:  # a page goes whole
        return jnp.stack([full, full])
    return jnp.stack([full, may_lose_swa(cache, state)])


@jax.jit
def room(cache: PrefixCache, state: swa.AllocatorState) -> jax.Array:
    """int32[4] full and SWA pages that are free, and that eviction can free beside them."""
    free = state.swa.num_free if state.config.pure_swa_pool else state.full.num_free
    can_go = jnp.sum(leaving(cache, state), axis=1, dtype=jnp.int32)
    return jnp.concatenate([jnp.stack([free, state.swa.num_free]), can_go])


@_donating
def evict(cache: PrefixCache, state: swa.AllocatorState, lacking: jax.Array) -> Both:
    """Evicts int32[2] full and SWA pages."""
    full, of_swa = lacking * jnp.int32(state.config.page_size)
    cache, state, _ = prefix_cache.evict(cache, state, full_tokens=full, swa_tokens=of_swa)
    return cache, state


@functools.partial(_donating, static_argnames="capacity")
def grant(
    cache: PrefixCache,
    state: swa.AllocatorState,
    held: jax.Array,
    tail: jax.Array,
    wanted: jax.Array,
    *,
    capacity: int,
) -> tuple[Both, jax.Array]:
    """Whole pages up to int32[] `wanted` tokens after `held`, the last `tail` with an SWA side.

    int32[1 + 2 capacity / P]: granted, the pages, their SWA sides.
    """
    size = state.config.page_size
    row = [values[None] for values in (held, wanted, jnp.int32(-1), tail)]
    state, answer = swa.alloc_extend_swa_tail(state, *row, capacity=capacity)
    pages = jax.lax.div(answer.slots[::size], jnp.int32(size))
    ok = answer.ok.astype(jnp.int32)[None]
    return (cache, state), jnp.concatenate([ok, pages, _sides(state, pages)])


@_donating
def give(
    cache: PrefixCache,
    state: swa.AllocatorState,
    text: Text,
    pages: jax.Array,
    receipt: Receipt,
    behind: jax.Array,
) -> tuple[Both, Receipt, jax.Array]:
    """Makes int32[N] `pages` of a request nodes as well: the tree gets a share, it keeps its own.

    Where the tree has another page of the same text the request goes on with its own, as a block
    table never changes. Then nothing is given: a node below that page would keep it from leaving
    the tree, while nobody uses it. The lock moves to the last page that became a node, so it is
    on pages of the request alone; in SWA on none before int32[] `behind` tokens. 0 for a page
    that is not to be given.

    Returns:
      The two, the receipt, and int32[2] pages: where nodes of this call begin and end.
    """
    page_size = state.config.page_size
    size = jnp.int32(page_size)
    chain = find_chain(cache, cut_pages(cache.config, text.tokens, text.length, text.namespace))
    place = jnp.arange(pages.shape[0], dtype=jnp.int32)
    there = place < chain.count
    has_copy = jnp.any(there & (pages > 0))
    first = jnp.where(there | has_copy, 0, pages * size)
    state = swa.share(state, first)
    cache, state, inserted = prefix_cache.insert(
        cache, state, text.tokens, text.length, _tokens(first, page_size), namespace=text.namespace
    )
    end = jax.lax.div(inserted.length, size)
    state = swa.free(state, jnp.where(place >= end, first, 0))
    before = standing(cache, receipt)
    cache, new = prefix_cache.lock(
        cache, state, jnp.where(end > chain.count, inserted.node, before)
    )
    cache, new = prefix_cache.release_swa_lock(cache, new, behind)
    return (prefix_cache.unlock(cache, receipt), state), new, jnp.stack([chain.count, end])


def _tokens(first: jax.Array, size: int) -> jax.Array:
    """int32[T] slots of all tokens, from the first of each page; 0 where there is no page."""
    offset = jnp.arange(size, dtype=jnp.int32)
    return jnp.where(first[:, None] > 0, first[:, None] + offset[None, :], 0).reshape(-1)


@_donating
def leave(
    cache: PrefixCache,
    state: swa.AllocatorState,
    receipt: Receipt,
    tokens: jax.Array,
    shares: jax.Array,
    own: jax.Array,
) -> tuple[Both, Receipt]:
    """A window moved on: int32[N] pages of the tree are given up, others lose their SWA side."""
    size = jnp.int32(state.config.page_size)
    cache, receipt = prefix_cache.release_swa_lock(cache, receipt, tokens)
    return (cache, swa.free_swa(swa.free(state, shares * size), own * size)), receipt


@_donating
def end(
    cache: PrefixCache,
    state: swa.AllocatorState,
    text: Text,
    own: jax.Array,
    shares: jax.Array,
    receipt: Receipt,
) -> Both:
    """A request ends: int32[N] pages of its own, by their place, and of the tree that it shares.

    What others cached in the meantime is given up, and where the tree has lost an SWA side that
    this request still has, it gets that. The last pages are freed first.
    """
    page_size = state.config.page_size
    size = jnp.int32(page_size)
    slots = _tokens(own * size, page_size)
    cache, state, inserted = prefix_cache.insert(
        cache, state, text.tokens, text.length, slots, namespace=text.namespace
    )
    place = jnp.arange(own.shape[0], dtype=jnp.int32)
    rest = jnp.where(place * size >= inserted.length, own, 0)
    state = swa.free(state, jnp.where(shares > 0, shares, rest)[::-1] * size)
    return prefix_cache.unlock(cache, receipt), state


@functools.partial(jax.jit, donate_argnums=0)
def free(state: swa.AllocatorState, pages: jax.Array) -> swa.AllocatorState:
    """Gives one share in each of int32[N] pages up, in this order."""
    return swa.free(state, pages * jnp.int32(state.config.page_size))


@functools.partial(jax.jit, donate_argnums=0)
def share(state: swa.AllocatorState, pages: jax.Array) -> swa.AllocatorState:
    """One more holder for each of int32[N] pages."""
    return swa.share(state, pages * jnp.int32(state.config.page_size))
