"""Room for a step where both pools draw from one budget: the split moves before anybody gives way.

Legend: F full pages, S SWA pages, A full pages of a block, C SWA pages of a block.

What is evicted first is what no prefix needs, SWA pages far from the end of every branch, even when
full pages are short: in one budget they are room for either kind.
"""

from dataclasses import replace

import jax
import jax.numpy as jnp

from swa_jax.counts import held_pages
from swa_jax.only_if import only_if, while_any
from swa_jax.paging import page_of, pages_for
from swa_jax.pool import nowhere
from swa_jax.prefix_cache import PrefixCache
from swa_jax.prefix_cache.evict_lacking import evict_lacking
from swa_jax.prefix_cache.leaving import may_leave, may_lose_swa
from swa_jax.rebalance import blocks_lacking, most_of_both, rebalance, room_of
from swa_jax.serving.world import World, add_stats, running
from swa_jax.state import AllocatorState

_MOST_DOUBLINGS = 20


def share_budget(world: World, wanted: jax.Array) -> World:
    """Has both pools able to grant int32[] `wanted` pages, or as many as they can.

    Args:
      world: of a unified budget.
      wanted: pages of either kind.

    Returns:
      The world: free blocks have moved to the pool that lacked them, and only if all of them are
      not enough, the cache has given up what nobody uses.
    """
    full, of_swa = _asked(world.allocator, wanted)
    allocator = world.allocator
    short = (full > allocator.full.num_free) | (of_swa > allocator.swa.num_free)
    return only_if(short, lambda world: _share(world, wanted), world)


def _asked(allocator: AllocatorState, wanted: jax.Array) -> tuple[jax.Array, jax.Array]:
    """What a fence has queued will be free: moving more would not help this step either."""
    return wanted - allocator.full.num_pending, wanted - allocator.swa.num_pending


def _lacking(world: World, wanted: jax.Array) -> jax.Array:
    return blocks_lacking(room_of(world.allocator), *_asked(world.allocator, wanted))


def _share(world: World, wanted: jax.Array) -> World:
    def go_on(carry: tuple[World, jax.Array, jax.Array]) -> jax.Array:
        world, turn, some = carry
        return (_lacking(world, wanted) > 0) & ((turn < 2) | some)

    def give_way(
        carry: tuple[World, jax.Array, jax.Array],
    ) -> tuple[World, jax.Array, jax.Array]:
        world, turn, _ = carry
        world, some = _evict(world, _lacking(world, wanted), turn)
        return world, turn + 1, some

    if world.cache is not None:
        start = (world, jnp.int32(0), jnp.ones((), bool))
        world = while_any(go_on, give_way, start)[0]
    allocator = world.allocator
    room, asked = room_of(allocator), _asked(allocator, wanted)
    fits = blocks_lacking(room, *asked) <= 0
    both = most_of_both(room, wanted)
    full, of_swa = (jnp.where(fits, pages, both) for pages in asked)
    return replace(world, allocator=rebalance(allocator, full, of_swa))


def _evict(world: World, blocks: jax.Array, turn: jax.Array) -> tuple[World, jax.Array]:
    """Evicts for int32[] blocks, and says whether anything was left to go.

    At first SWA pages alone; then of both kinds, twice as much each turn: pages that leave may lie
    in blocks that others are in.
    """
    cache, pool = world.cache, world.allocator.config
    layout = pool.unified_layout
    assert cache is not None
    assert layout is not None
    times = jnp.left_shift(jnp.int32(1), jnp.clip(turn - 1, 0, _MOST_DOUBLINGS))
    every = jnp.int32(layout.blocks)
    blocks = jnp.where(blocks > jax.lax.div(every, times), every, blocks * times)
    full = jnp.where(turn > 0, blocks * jnp.int32(layout.full_pages), 0)
    cache, allocator, gone = evict_lacking(
        cache, world.allocator, full, blocks * jnp.int32(layout.swa_pages)
    )
    evicted_full = page_of(gone.full_tokens, pool.page_size)
    evicted_swa = page_of(gone.swa_tokens, pool.page_size)
    world = add_stats(
        replace(world, cache=cache, allocator=allocator),
        evicted_full=evicted_full,
        evicted_swa=evicted_swa,
    )
    return world, evicted_full + evicted_swa > 0


def budget_fits(world: World, full_pages: jax.Array, swa_pages: jax.Array) -> jax.Array:
    """bool[] what is free or may be evicted covers int32[] pages of both kinds at once."""
    state, also_full, also_swa = world.allocator, None, None
    if world.cache is not None:
        also_full, also_swa = _evictable(world.cache, state)
    return blocks_lacking(room_of(state, also_full, also_swa), full_pages, swa_pages) <= 0


def _evictable(cache: PrefixCache, state: AllocatorState) -> tuple[jax.Array, jax.Array]:
    """bool[F+1] and bool[S+1] pages of the tree that may leave."""
    page = jnp.where(may_lose_swa(cache, state), state.full_to_swa, nowhere(state.swa))
    return may_leave(cache, state), jnp.zeros_like(state.swa.free).at[page].set(True, mode="drop")


def is_alone(world: World) -> jax.Array:
    """bool[] nobody but one running request and the cache holds pages or locks."""
    rows, size = world.rows, world.allocator.config.page_size
    held, _ = held_pages(world.allocator)
    of_row = pages_for(rows.length, size) - page_of(rows.owned_from, size)
    mine = jnp.sum(of_row, dtype=jnp.int32)
    alone = jnp.sum(running(rows), dtype=jnp.int32) == 1
    if world.cache is None:
        return alone & (held == mine)
    locks = jnp.sum(rows.receipts.serial > 0, dtype=jnp.int32)
    in_tree = jnp.sum(world.cache.in_tree, dtype=jnp.int32)
    return alone & (held == mine + in_tree) & (world.cache.num_receipts == locks)


def start_over(world: World) -> World:
    """Empties the cache and brings the free pages into order, when nobody runs any more.

    A request that runs alone may lie in so many blocks, and what is cached beside it, that none is
    left for the kind it needs. Begun again it lies close together, and fits.
    """
    pool = world.allocator.config
    cache, allocator = world.cache, world.allocator
    if cache is not None:
        everything = jnp.int32(pool.full_pages)
        cache, allocator, _ = evict_lacking(cache, allocator, everything, jnp.int32(0))
    return replace(world, cache=cache, allocator=rebalance(allocator, 0, 0))
