"""Pages for a prefix that comes back from the host, as one transition on the device.

The device's tree is looked at again: what the host saw may have changed since. What is missing now
is granted by one plan, both pools or neither: full pages behind the chain that is there, and SWA
pages for the end's window, those of tombstones included. Nothing is taken for pages that are there.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np

from swa_jax.counts import free_pages
from swa_jax.faults import zero_faults
from swa_jax.grant import GrantPlan, commit_grant, judge, make_plan
from swa_jax.only_if import only_if
from swa_jax.owners import tag_pages, the_tree
from swa_jax.paging import look_up, page_of
from swa_jax.pool import holders_of, nowhere, peek
from swa_jax.prefix_cache.evict_lacking import evict_lacking
from swa_jax.prefix_cache.find import Chain, find_chain
from swa_jax.prefix_cache.insert import insert
from swa_jax.prefix_cache.keys import cut_pages
from swa_jax.prefix_cache.match import path_slots, usable_pages, window_start
from swa_jax.prefix_cache.sizes import full_evictable_size, swa_evictable_size
from swa_jax.prefix_cache.tree import PrefixCache
from swa_jax.rank import rank
from swa_jax.rebalance import split_for
from swa_jax.state import PAD_PAGE, UNMAPPED, AllocatorState


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["ok", "full", "swa", "full_short", "swa_short", "node"],
    meta_fields=[],
)
@dataclass(frozen=True)
class Claim:
    """Pages that stand in the tree and whose KV is to be written now."""

    ok: jax.Array  # bool[]
    full: jax.Array  # int32[N] full page granted for each page of the prompt, 0 for none
    swa: jax.Array  # int32[N] SWA page granted, likewise
    full_short: jax.Array  # int32[] pages that neither are free nor can be evicted
    swa_short: jax.Array  # int32[]
    node: jax.Array  # int32[] where the prefix ends, 0 when refused


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["count", "live", "usable"],
    meta_fields=[],
)
@dataclass(frozen=True)
class Seen:
    """What the device has of a prompt."""

    count: jax.Array  # int32[] pages whose full KV is there
    live: jax.Array  # bool[N] of these: the SWA side is there, too
    usable: jax.Array  # int32[] pages that a match would give


@jax.jit
def see(
    cache: PrefixCache,
    state: AllocatorState,
    tokens: jax.Array,
    length: jax.Array,
    namespace: jax.Array,
) -> Seen:
    """Looks a prompt up. Arguments as for `match_prefix`; no use is noted."""
    chain = find_chain(cache, cut_pages(cache.config, tokens, length, namespace))
    return Seen(chain.count, _live(state, chain), usable_pages(cache.config, state, chain))


@functools.partial(jax.jit, donate_argnums=(0, 1))
def claim(
    cache: PrefixCache,
    state: AllocatorState,
    tokens: jax.Array,
    length: jax.Array,
    namespace: jax.Array,
    pages: jax.Array,
    has_full: jax.Array,
    has_swa: jax.Array,
) -> tuple[PrefixCache, AllocatorState, Claim]:
    """Makes the first `pages` pages of a prompt usable, given KV for what is missing of them.

    Args:
      cache: taken over, as the state.
      state: the allocator it stands beside.
      tokens: int32[T] the prompt, padded.
      length: int32[] tokens of it that count.
      namespace: int32[].
      pages: int32[] to make usable.
      has_full: bool[N] pages of the prompt whose full KV the caller can write.
      has_swa: bool[N] likewise the SWA side.

    Returns:
      The cache and the allocator with these pages in the tree, and `Claim`.

    Refused, and nothing changed: a page is missing that the caller cannot write, a tombstone of the
    window is held by a request too (`share`), or there are too few pages that are free or can be
    evicted. In an open free group nothing is evicted.
    """
    config = cache.config
    keys = cut_pages(config, tokens, length, namespace)
    chain = find_chain(cache, keys)
    place = jnp.arange(chain.nodes.shape[0], dtype=jnp.int32)
    in_path = place < pages
    in_window = in_path & (place >= window_start(config, pages))
    new = in_path & (place >= chain.count)
    lacks = in_window & ~_live(state, chain)
    known = (pages > 0) & (pages <= keys.count)
    known = known & ~jnp.any((new & ~has_full) | (lacks & ~has_swa))
    # A tombstone that a request holds too stays one: it would give the SWA side up as its own.
    known = known & ~jnp.any(lacks & (holders_of(state.full, chain.nodes) > 1))
    num_full, num_swa = jnp.sum(new, dtype=jnp.int32), jnp.sum(lacks, dtype=jnp.int32)

    held = _hold(cache, chain, in_path, in_window & _live(state, chain), 1)
    full_short, swa_short = _short(held, split_for(state, num_full, num_swa), num_full, num_swa)
    ok = known & (full_short <= 0) & (swa_short <= 0)
    if state.config.unified_layout is not None:
        state = only_if(ok, lambda state: split_for(state, num_full, num_swa), state)
    held, state = _evict(held, state, num_full, num_swa, ok)
    cache = _hold(held, chain, in_path, in_window & _live(state, chain), -1)

    plan = _plan(state, chain, new, lacks, ok)
    state, grant = commit_grant(state, plan)
    state = tag_pages(state, plan.map_pages, the_tree(state))
    nodes = jnp.where(
        plan.full_pages < jnp.int32(nowhere(state.full)), plan.full_pages, chain.nodes
    )
    node = jnp.where(grant.ok, look_up(nodes, jnp.maximum(pages - 1, 0), 0), 0)
    cache, state = _insert(cache, state, tokens, namespace, pages, nodes, grant.ok)
    return (
        cache,
        state,
        Claim(
            ok=grant.ok,
            full=jnp.where(grant.ok & new, nodes, PAD_PAGE),
            swa=jnp.where(grant.ok & lacks, plan.map_values, PAD_PAGE),
            full_short=jnp.where(known, jnp.maximum(full_short, 0), 0),
            swa_short=jnp.where(known, jnp.maximum(swa_short, 0), 0),
            node=node,
        ),
    )


def _live(state: AllocatorState, chain: Chain) -> jax.Array:
    """bool[N] pages of the chain with an SWA side: the root has none."""
    return look_up(state.full_to_swa, chain.nodes, UNMAPPED) != UNMAPPED


def _hold(
    cache: PrefixCache, chain: Chain, path: jax.Array, window: jax.Array, change: int
) -> PrefixCache:
    """Locks what is there of the prefix for the time of an eviction, or undoes that."""
    outside = cache.in_tree.shape[0]
    there = jnp.arange(chain.nodes.shape[0], dtype=jnp.int32) < chain.count
    full = jnp.where(path & there, chain.nodes, outside)
    of_swa = jnp.where(window & there, chain.nodes, outside)
    return replace(
        cache,
        full_locks=cache.full_locks.at[full].add(change, mode="drop"),
        swa_locks=cache.swa_locks.at[of_swa].add(change, mode="drop"),
    )


def _short(
    cache: PrefixCache, state: AllocatorState, full: jax.Array, of_swa: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """int32[] pages that are wanted beyond what is free or can be evicted; below 0: to spare."""
    size = cache.config.pool.page_size
    full_free, swa_free = free_pages(state)
    may_evict = ~state.group_open

    def evictable(tokens: jax.Array) -> jax.Array:
        return jnp.where(may_evict, page_of(tokens, size), 0)

    return (
        full - full_free - evictable(full_evictable_size(cache, state)),
        of_swa - swa_free - evictable(swa_evictable_size(cache, state)),
    )


def _evict(
    cache: PrefixCache, state: AllocatorState, full: jax.Array, of_swa: jax.Array, ok: jax.Array
) -> tuple[PrefixCache, AllocatorState]:
    full_free, swa_free = free_pages(state)
    full, of_swa = full - full_free, of_swa - swa_free

    def evict(both: tuple[PrefixCache, AllocatorState]) -> tuple[PrefixCache, AllocatorState]:
        return evict_lacking(*both, full, of_swa)[:2]

    return only_if(ok & ((full > 0) | (of_swa > 0)), evict, (cache, state))


def _plan(
    state: AllocatorState, chain: Chain, new: jax.Array, lacks: jax.Array, ok: jax.Array
) -> GrantPlan:
    """Full pages for what is new and SWA pages for what lacks them, whoever's page it is."""
    full_rank, num_full = rank(new)
    swa_rank, num_swa = rank(lacks)
    pages = jnp.where(new, peek(state.full, jnp.where(new, full_rank, 0)), chain.nodes)
    return make_plan(
        state,
        judge(state, ok, num_full, num_swa),
        slots=jnp.zeros_like(pages),
        count=jnp.int32(0),
        new_pages=pages,
        takes_full=new,
        swa_pages=peek(state.swa, jnp.where(lacks, swa_rank, 0)),
        takes_swa=lacks,
        map_pages=pages,
        num_full=num_full,
        num_swa=num_swa,
        faults=zero_faults(),
        scratch=state.scratch,
    )


def _insert(
    cache: PrefixCache,
    state: AllocatorState,
    tokens: jax.Array,
    namespace: jax.Array,
    pages: jax.Array,
    nodes: jax.Array,
    ok: jax.Array,
) -> tuple[PrefixCache, AllocatorState]:
    """Enters the prefix into the tree: the pages that were granted become nodes."""
    size = cache.config.pool.page_size
    length = pages * jnp.int32(size) + jnp.int32(cache.config.key_tokens - size)
    slots = path_slots(nodes, pages, size, tokens.shape[0])

    by = the_tree(state)

    def enter(both: tuple[PrefixCache, AllocatorState]) -> tuple[PrefixCache, AllocatorState]:
        cache, state, _ = insert(*both, tokens, length, slots, namespace=namespace, by=by)
        return cache, state

    return only_if(ok, enter, (cache, state))


def marks_of(pages: Sequence[int], places: int) -> np.ndarray:
    """bool[N] marks of some pages of a prompt. On the host."""
    marks = np.zeros(places, bool)
    marks[list(pages)] = True
    return marks


def count_pages(pages: jax.Array) -> jax.Array:
    """int32[] how many of int32[N] pages are pages."""
    return jnp.sum(pages > PAD_PAGE, dtype=jnp.int32)
