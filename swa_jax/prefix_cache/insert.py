"""Giving a request's pages to the tree."""

import functools
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from swa_jax.faults import add_faults, fault_counts
from swa_jax.free import free
from swa_jax.inputs import Ints, as_int32, check_lengths
from swa_jax.owners import (
    TREE_OWNER,
    as_owner,
    count_foreign,
    is_foreign,
    leave_to_tree,
    tag_pages,
    tag_sides,
)
from swa_jax.paging import first_places, look_up, offset_of, page_of, pages_for
from swa_jax.pool import count_holders, holders_of, nowhere
from swa_jax.prefix_cache.arguments import check_pair
from swa_jax.prefix_cache.arrival import note_arrival
from swa_jax.prefix_cache.find import BLOCK, Chain, find_chain, part_of
from swa_jax.prefix_cache.keys import Keys, at_least, cut_pages
from swa_jax.prefix_cache.match import note_use, path_slots
from swa_jax.prefix_cache.table import name_nodes
from swa_jax.prefix_cache.tree import LEAST, ROOT, PrefixCache
from swa_jax.state import PAD_PAGE, PAD_SLOT, UNMAPPED, AllocatorState


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["length_already_cached", "length", "slots", "node"],
    meta_fields=[],
)
@dataclass(frozen=True)
class Inserted:
    """What the tree holds of a request after an insert."""

    length_already_cached: jax.Array  # int32[] tokens that were there before
    length: jax.Array  # int32[] tokens that are there now; pages past it stay the caller's
    slots: jax.Array  # int32[T] the tree's slots up to `length`, the caller's own after it
    node: jax.Array  # int32[] the last page's node, 0 for none


@dataclass(frozen=True)
class Entered:
    """The caller's pages as the tree has them now."""

    nodes: jax.Array  # int32[N] node of each page, ROOT past `pages`
    pages: jax.Array  # int32[] how many the tree holds
    already: jax.Array  # int32[] how many it held before


@dataclass(frozen=True)
class _Own:
    """The caller's pages, page by page of the prompt."""

    pages: jax.Array  # int32[N] full page ids, one past the end where neither usable nor shared
    usable: jax.Array  # bool[N] held, not in the tree, named by no earlier place
    shared: jax.Array  # bool[N] in the tree, and by a share of the caller's its own as well
    live: jax.Array  # bool[N] has its SWA side
    alone: jax.Array  # bool[N] nobody else holds it
    foreign: jax.Array | None  # int32[] pages of other owners; None without owner tags
    faults: jax.Array  # int32[7]
    scratch: jax.Array


def insert(
    cache: PrefixCache,
    state: AllocatorState,
    tokens: Ints,
    length: ArrayLike,
    slots: Ints,
    *,
    namespace: ArrayLike = 0,
    priority: ArrayLike = 0,
    owned_from: ArrayLike | None = None,
    by: Ints | None = None,
) -> tuple[PrefixCache, AllocatorState, Inserted]:
    """Takes over the whole pages of a request, finished or not.

    Where a page's content is cached already, the caller's page is freed and the tree's is the
    one to use from here on; a tombstone gets the SWA page of the caller's copy first. Pages
    that are new become nodes, up to the last one that is live in SWA: a leaf is no tombstone.

    Of a page that others hold too (`share`) the tree takes over the caller's share. Its SWA page
    is theirs as well and does not move to a tombstone, nor does a tombstone come back that others
    hold, who would give that SWA page up as their own: the insert ends before a page where it
    would. A new node that is live by the shares of others gets one of its own.

    Args:
      cache: the tree.
      state: the allocator it stands beside.
      tokens: int32[T] prompt and output so far, padded with anything.
      length: int32[] tokens of it whose KV is in the slots.
      slots: int32[T] full slots of these tokens, those of an earlier match included.
      namespace: int32[] as for `match_prefix`.
      priority: int32[] for the "priority" policy: higher stays longer. Kept between -2^30 and 2^30.
      owned_from: int32[] tokens that stand on the tree's pages, held there by a lock; pages that
        begin at or after it are the caller's own. Needed where forks of one request insert: the
        second one's page may be the tree's by then, through the first one, and its share is given
        up. None: a page that is in the tree already is taken for a matched one.
      by: int32[] owner of the caller's pages, 0 by default; only with owner tags. What the tree
        takes over is `TREE_OWNER`'s; where others hold a page too, the last share is.

    Returns:
      The cache, the allocator and `Inserted`. An unfinished request goes on with
      `Inserted.slots` and locks `Inserted.node`; the pages past `Inserted.length` are still its
      own. In an open free group the freed copies are queued.

    Not taken: pages from the first one on that is not held, is in the tree under another prefix,
    or comes twice.

    Refused, counted, and nothing else changed:
      double_free: a page at or after `owned_from` that nobody but the tree holds, once a page.
      foreign: a page of another owner, once a page.

    Rules R8, R9 and R11; public reports B07, B24, B31, B40.
    """
    check_pair(cache, state)
    row, own = as_int32("tokens", tokens, 1), as_int32("slots", slots, 1)
    check_lengths(tokens=row, slots=own)
    count, space = as_int32("length", length, 0), as_int32("namespace", namespace, 0)
    rank = as_int32("priority", priority, 0)
    start = None if owned_from is None else as_int32("owned_from", owned_from, 0)
    return _insert(cache, state, row, count, own, space, rank, start, as_owner(state, by))


@jax.jit
def _insert(
    cache: PrefixCache,
    state: AllocatorState,
    tokens: jax.Array,
    length: jax.Array,
    slots: jax.Array,
    namespace: jax.Array,
    priority: jax.Array,
    owned_from: jax.Array | None,
    by: jax.Array | None,
) -> tuple[PrefixCache, AllocatorState, Inserted]:
    size = cache.config.pool.page_size
    keys = cut_pages(cache.config, tokens, length, namespace)
    first_slots = at_least(size, slots)[: keys.hash.shape[0] * size : size]
    cache, state, entered = enter(cache, state, keys, first_slots, owned_from, by)
    nodes, pages = entered.nodes, entered.pages
    cache = note_use(cache, nodes, pages, hit=False)
    cache = note_arrival(cache, nodes, entered.already, pages, priority)
    token = jnp.arange(tokens.shape[0], dtype=jnp.int32)
    length_now = pages * jnp.int32(size)
    canonical = path_slots(nodes, pages, size, tokens.shape[0])
    node = jnp.where(pages > 0, look_up(nodes, jnp.maximum(pages - 1, 0), ROOT), ROOT)
    return (
        cache,
        state,
        Inserted(
            length_already_cached=entered.already * jnp.int32(size),
            length=length_now,
            slots=jnp.where(token < length_now, canonical, slots),
            node=node,
        ),
    )


def enter(
    cache: PrefixCache,
    state: AllocatorState,
    keys: Keys,
    first_slots: jax.Array,
    owned_from: jax.Array | None = None,
    by: jax.Array | None = None,
) -> tuple[PrefixCache, AllocatorState, Entered]:
    """What `insert` does to the tree and the pools, for pages that hang from any node.

    The time of use is not noted: that is for the whole path to do.

    Args:
      cache: the tree.
      state: beside it.
      keys: N pages.
      first_slots: int32[N] the caller's first slot of each.
      owned_from: int32[] tokens of these pages, as for `insert`.
      by: int32[] as for `insert`.
    """
    own = _read_own(cache, state, first_slots, keys, owned_from, by)
    chain, keys = _end_before_shared(state, find_chain(cache, keys), keys, own)
    pages = _new_length(chain, keys, own)
    state = _give_up_copies(state, chain, own, by)
    state = _take_shares(state, chain, own, pages)
    state = _tag(state, chain, own, pages)
    cache, nodes = _add_nodes(cache, keys, chain, own, pages)
    return cache, state, Entered(nodes, pages, chain.count)


def _read_own(
    cache: PrefixCache,
    state: AllocatorState,
    slot: jax.Array,
    keys: Keys,
    owned_from: jax.Array | None,
    by: jax.Array | None,
) -> _Own:
    config = cache.config.pool
    size, count = config.page_size, keys.hash.shape[0]
    outside = nowhere(state.full)
    inside = (slot >= jnp.int32(size)) & (slot < jnp.int32(config.full_tokens + size))
    place = jnp.arange(count, dtype=jnp.int32)
    named = inside & (place < keys.count)
    named = named & (offset_of(jnp.where(inside, slot, 0), size) == 0)
    page = jnp.where(named, page_of(jnp.where(named, slot, 0), size), outside)
    first, _, scratch = first_places(state.scratch, page)
    holders = holders_of(state.full, page)
    held = named & first & (holders > 0)
    in_tree = look_up(cache.in_tree, page, True)
    live = look_up(state.full_to_swa, page, UNMAPPED) != UNMAPPED
    if config.pure_swa_pool:  # a page that left its window is nobody's
        held = held & live
    shared, trees_alone = jnp.zeros_like(held), jnp.zeros_like(held)
    if owned_from is not None:
        own = held & in_tree & (place >= pages_for(jnp.maximum(owned_from, 0), size))
        shared, trees_alone = own & (holders > 1), own & (holders == 1)
    usable, foreign, tags = held & ~in_tree, None, state.owner_tags
    if by is not None and tags is not None:
        others = (usable | shared) & is_foreign(tags, page, holders, by)
        usable, shared = usable & ~others, shared & ~others
        foreign = jnp.sum(others, dtype=jnp.int32)
    return _Own(
        pages=jnp.where(usable | shared, page, outside),
        usable=usable,
        shared=shared,
        live=(usable | shared) & live,
        alone=usable & (holders == 1),
        foreign=foreign,
        faults=fault_counts(double_free=trees_alone),
        scratch=scratch,
    )


def _end_before_shared(
    state: AllocatorState, chain: Chain, keys: Keys, own: _Own
) -> tuple[Chain, Keys]:
    """Both cut before the first tombstone that the caller's copy cannot bring back.

    Its SWA page is that of others too, or the tombstone is held by others, who would give the SWA
    side up when they leave their windows. The caller may stand inside its own window there: the
    tree's page is none to go on with.
    """
    place = jnp.arange(chain.nodes.shape[0], dtype=jnp.int32)
    dead = look_up(state.full_to_swa, chain.nodes, UNMAPPED) == UNMAPPED
    alone = own.alone & (holders_of(state.full, chain.nodes) == 1)
    stuck = (place < chain.count) & dead & own.live & ~alone
    end = jnp.min(jnp.where(stuck, place, keys.count), initial=2**31 - 1)
    end = jnp.minimum(end, keys.count)
    nodes = jnp.where(place < end, chain.nodes, ROOT)
    return Chain(nodes, jnp.minimum(chain.count, end)), replace(keys, count=end)


def _new_length(chain: Chain, keys: Keys, own: _Own) -> jax.Array:
    """int32[] pages of the prompt that the tree holds afterwards."""
    place = jnp.arange(keys.hash.shape[0], dtype=jnp.int32)
    wanted = (place >= chain.count) & (place < keys.count)
    end = jnp.min(jnp.where(wanted & ~own.usable, place, keys.count), initial=2**31 - 1)
    end = jnp.minimum(end, keys.count)
    ends = wanted & (place < end) & own.live
    return jnp.maximum(chain.count, jnp.max(jnp.where(ends, place + 1, 0), initial=0))


def _give_up_copies(
    state: AllocatorState, chain: Chain, own: _Own, by: jax.Array | None
) -> AllocatorState:
    """Frees the caller's copies of cached pages; tombstones keep the copies' SWA pages."""
    size = jnp.int32(state.config.page_size)
    outside = nowhere(state.full)
    place = jnp.arange(chain.nodes.shape[0], dtype=jnp.int32)
    copy = (own.usable | own.shared) & (place < chain.count)
    node_swa = look_up(state.full_to_swa, chain.nodes, UNMAPPED)
    swa = look_up(state.full_to_swa, own.pages, UNMAPPED)
    if state.config.pure_swa_pool:  # a node without its page cannot be
        recovers = jnp.zeros_like(copy)
    else:
        # A stale mapping of the node that names the copy's own page is no live side of its own.
        recovers = copy & own.live & own.alone & ((node_swa == UNMAPPED) | (node_swa == swa))
    to = jnp.where(recovers, chain.nodes, outside)
    bare = jnp.where(recovers, own.pages, outside)
    pages = jnp.concatenate([to, bare])
    values = jnp.concatenate([swa, jnp.full_like(bare, UNMAPPED)])
    moved = replace(
        state,
        full_to_swa=state.full_to_swa.at[pages].set(values, mode="drop"),
        faults=add_faults(state.faults, own.faults),
        scratch=own.scratch,
        owner_tags=count_foreign(state.owner_tags, own.foreign),
    )
    moved = tag_sides(moved, to)
    return free(moved, jnp.where(copy, own.pages * size, PAD_SLOT), by=by)


def _tag(state: AllocatorState, chain: Chain, own: _Own, pages: jax.Array) -> AllocatorState:
    """The tree is the owner of every page that it alone holds by now."""
    if state.owner_tags is None:
        return state
    place = jnp.arange(own.pages.shape[0], dtype=jnp.int32)
    is_new = own.usable & (place >= chain.count) & (place < pages)
    alone = holders_of(state.full, own.pages) == 1
    taken = (is_new | own.shared) & alone
    state = tag_pages(state, jnp.where(taken, own.pages, PAD_PAGE), TREE_OWNER)
    return leave_to_tree(state, jnp.where(is_new & ~alone, own.pages, PAD_PAGE))


def _take_shares(
    state: AllocatorState, chain: Chain, own: _Own, pages: jax.Array
) -> AllocatorState:
    """Makes the tree a holder of the SWA side of each new node that is live.

    Where everybody who holds the page holds its SWA side, the caller's share is the tree's now.
    Where fewer do, the caller may have left its window, and without a share of its own a locked
    node would lose its SWA page with the last of the others.
    """
    if state.config.pure_swa_pool:  # who left his window there has no share left to give
        return state
    place = jnp.arange(own.pages.shape[0], dtype=jnp.int32)
    is_new = own.usable & own.live & (place >= chain.count) & (place < pages)
    swa = look_up(state.full_to_swa, jnp.where(is_new, own.pages, nowhere(state.full)), UNMAPPED)
    holders = holders_of(state.swa, swa)
    adds = is_new & (holders < holders_of(state.full, own.pages))
    named = jnp.where(adds, swa, jnp.int32(nowhere(state.swa)))
    return replace(state, swa=count_holders(state.swa, named, holders + 1))


def _add_nodes(
    cache: PrefixCache, keys: Keys, chain: Chain, own: _Own, pages: jax.Array
) -> tuple[PrefixCache, jax.Array]:
    """Enters the new pages under the chain; also int32[N] the whole path."""
    place = jnp.arange(keys.hash.shape[0], dtype=jnp.int32)
    is_new = (place >= chain.count) & (place < pages)
    nodes = jnp.where(is_new, own.pages, chain.nodes)
    if nodes.shape[0] <= BLOCK:
        return _write_nodes(cache, keys, nodes, is_new), nodes

    def block(carry: tuple[PrefixCache, jax.Array]) -> tuple[PrefixCache, jax.Array]:
        cache, done = carry
        part, start = part_of(keys, nodes, done)
        here = jax.lax.dynamic_slice_in_dim(nodes, start, BLOCK)
        at = start + jnp.arange(BLOCK, dtype=jnp.int32)
        return _write_nodes(cache, part, here, (at >= done) & (at < pages)), done + BLOCK

    start = (cache, chain.count)
    return jax.lax.while_loop(lambda carry: carry[1] < pages, block, start)[0], nodes


def _write_nodes(
    cache: PrefixCache, keys: Keys, nodes: jax.Array, is_new: jax.Array
) -> PrefixCache:
    """Enters those of int32[N] nodes that are new, each under the one before it."""
    outside = cache.in_tree.shape[0]
    node = jnp.where(is_new, nodes, outside)
    before = jnp.concatenate([keys.above[None], nodes[:-1]])
    above = jnp.where(is_new & (before > ROOT), before, outside)
    depth = keys.depth + 1 + jnp.arange(nodes.shape[0], dtype=jnp.int32)

    def put(values: jax.Array, new: jax.Array | int) -> jax.Array:
        return values.at[node].set(new, mode="drop")

    cache = replace(
        cache,
        in_tree=put(cache.in_tree, True),
        parent=put(cache.parent, before),
        depth=put(cache.depth, depth),
        namespace=put(cache.namespace, keys.namespace),
        tokens=put(cache.tokens, keys.tokens),
        children=put(cache.children, 0).at[above].add(1, mode="drop"),
        full_locks=put(cache.full_locks, 0),
        swa_locks=put(cache.swa_locks, 0),
        rank=put(cache.rank, LEAST if cache.config.policy == "priority" else 0),
        born=put(cache.born, cache.clock),
        hash=put(cache.hash, keys.hash),
    )
    return name_nodes(cache, node)
