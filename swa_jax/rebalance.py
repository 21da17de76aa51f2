"""Moving the split of a unified budget: whole free blocks go to the pool that lacks pages.

Legend: F full pages, S SWA pages, B blocks, A full pages of a block, C SWA pages of a block.

Rare, like an eviction: a pass over both pools. The calls that grant and free know nothing of it.
"""

import functools
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from swa_jax.inputs import as_int32
from swa_jax.paging import page_of, pages_for
from swa_jax.rank import exclusive_sum, rank
from swa_jax.state import AllocatorState, PagePool, must_be_state
from swa_jax.unified import UnifiedLayout


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["blocks", "full_pages", "swa_pages"],
    meta_fields=["layout"],
)
@dataclass(frozen=True)
class Room:
    """What could be granted if the split were the best one for it."""

    blocks: jax.Array  # int32[] blocks that nobody needs, for either kind
    full_pages: jax.Array  # int32[] free pages of blocks that stay full, since others are in use
    swa_pages: jax.Array  # int32[] the same of blocks that stay SWA
    layout: UnifiedLayout  # static


def rebalance(state: AllocatorState, full_pages: ArrayLike, swa_pages: ArrayLike) -> AllocatorState:
    """Moves free blocks to the pool that can grant fewer pages than it should.

    A pool gives away only blocks of which every page can be granted, and never falls below what
    it should be able to grant itself. Grants afterwards fill blocks that are in use before they
    open others, so that whole blocks stay free.

    Args:
      state: of a unified budget, also in an open group: pages that are pending stay where they are.
      full_pages: int32[] full pages that should be grantable, those that are already included.
      swa_pages: int32[] SWA pages, likewise.

    Returns:
      The state: as much of it as could be had. No page that is held or pending has moved; only
      the order in which pages will be granted and whose the free blocks are has changed.

    Raises:
      ValueError: a state with two pools of fixed sizes.

    Laws 3 and 9.
    """
    must_be_state(state)
    _layout_of(state)
    full = as_int32("full_pages", full_pages, 0)
    return _rebalance(state, full, as_int32("swa_pages", swa_pages, 0))


def split_for(state: AllocatorState, full_pages: jax.Array, swa_pages: jax.Array) -> AllocatorState:
    """`rebalance` where there is one budget; pools of fixed sizes stay as they are."""
    if state.config.unified_layout is None:
        return state
    return _rebalance(state, full_pages, swa_pages)


def unified_available(state: AllocatorState) -> tuple[jax.Array, jax.Array]:
    """int32[] full tokens and SWA tokens that can be granted at most, each if the other gives way.

    The two are not there together: both count the same free blocks.

    Args:
      state: of a unified budget.

    Raises:
      ValueError: a state with two pools of fixed sizes.
    """
    must_be_state(state)
    layout, size = _layout_of(state), jnp.int32(state.config.page_size)
    room = room_of(state)
    full = room.full_pages + room.blocks * jnp.int32(layout.full_pages)
    of_swa = room.swa_pages + room.blocks * jnp.int32(layout.swa_pages)
    return full * size, of_swa * size


def room_of(
    state: AllocatorState,
    also_full: jax.Array | None = None,
    also_swa: jax.Array | None = None,
) -> Room:
    """What could be granted with the best split.

    Args:
      state: of a unified budget.
      also_full: bool[F+1] full pages that count as free too, such as those that may be evicted.
      also_swa: bool[S+1] SWA pages, likewise.
    """
    layout, is_full = _layout_of(state), state.block_is_full
    assert is_full is not None
    full, of_swa = _grantable(state.full), _grantable(state.swa)
    full = full if also_full is None else full | also_full
    of_swa = of_swa if also_swa is None else of_swa | also_swa
    full_free = jnp.where(is_full, _by_block(full, layout.full_pages), 0)
    swa_free = jnp.where(is_full, 0, _by_block(of_swa, layout.swa_pages))
    free_full = full_free == jnp.int32(layout.full_pages)
    free_swa = swa_free == jnp.int32(layout.swa_pages)
    return Room(
        blocks=jnp.sum(free_full | free_swa, dtype=jnp.int32),
        full_pages=jnp.sum(jnp.where(free_full, 0, full_free), dtype=jnp.int32),
        swa_pages=jnp.sum(jnp.where(free_swa, 0, swa_free), dtype=jnp.int32),
        layout=layout,
    )


def blocks_lacking(room: Room, full_pages: jax.Array, swa_pages: jax.Array) -> jax.Array:
    """int32[] blocks that are missing for so many pages of both kinds; 0 or below: they fit."""
    layout = room.layout
    full = pages_for(jnp.maximum(full_pages - room.full_pages, 0), layout.full_pages)
    of_swa = pages_for(jnp.maximum(swa_pages - room.swa_pages, 0), layout.swa_pages)
    return full + of_swa - room.blocks


def most_of_both(room: Room, most: jax.Array) -> jax.Array:
    """int32[] the most pages, up to `most`, that can be had of either kind at once."""

    def halve(bounds: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        low, high = bounds
        middle = low + jax.lax.div(high - low + 1, jnp.int32(2))
        fits = blocks_lacking(room, middle, middle) <= 0
        return jnp.where(fits, middle, low), jnp.where(fits, high, middle - 1)

    start = (jnp.int32(0), jnp.maximum(most, 0))
    return jax.lax.while_loop(lambda bounds: bounds[0] < bounds[1], halve, start)[0]


@jax.jit
def _rebalance(
    state: AllocatorState, full_pages: jax.Array, swa_pages: jax.Array
) -> AllocatorState:
    layout, is_full = _layout_of(state), state.block_is_full
    assert is_full is not None
    of_full, of_swa = _grantable(state.full), _grantable(state.swa)
    full_free = _by_block(of_full, layout.full_pages) == jnp.int32(layout.full_pages)
    swa_free = _by_block(of_swa, layout.swa_pages) == jnp.int32(layout.swa_pages)
    to_full, to_swa = _moves(state, layout, full_pages, swa_pages)
    # From either end, so that blocks of a kind lie together.
    to_full = _first(~is_full & swa_free, to_full)
    to_swa = _first((is_full & full_free)[::-1], to_swa)[::-1]
    owner = (is_full | to_full) & ~to_swa
    own_full, own_swa = jnp.repeat(owner, layout.full_pages), jnp.repeat(owner, layout.swa_pages)
    comes = jnp.repeat(to_full, layout.full_pages), jnp.repeat(to_swa, layout.swa_pages)
    return replace(
        state,
        full=_refill(state.full, (of_full[1:] & own_full) | comes[0], layout.full_pages),
        swa=_refill(state.swa, (of_swa[1:] & ~own_swa) | comes[1], layout.swa_pages),
        block_is_full=owner,
    )


def _moves(
    state: AllocatorState, layout: UnifiedLayout, full_pages: jax.Array, swa_pages: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """int32[] blocks that should go to the full pool, and to the SWA pool: one of them is 0."""
    full_spare = state.full.num_free - jnp.maximum(full_pages, 0)
    swa_spare = state.swa.num_free - jnp.maximum(swa_pages, 0)

    def blocks(lacking: jax.Array, size: int, spare: jax.Array, others: int) -> jax.Array:
        wanted = pages_for(jnp.maximum(lacking, 0), size)
        return jnp.minimum(wanted, page_of(jnp.maximum(spare, 0), others))

    a, c = layout.full_pages, layout.swa_pages
    return blocks(-full_spare, a, swa_spare, c), blocks(-swa_spare, c, full_spare, a)


def _first(marks: jax.Array, count: jax.Array) -> jax.Array:
    """bool[B] the first `count` of the marked blocks."""
    place, _ = rank(marks)
    return marks & (place < count)


def _grantable(pool: PagePool) -> jax.Array:
    """bool[N+1] pages that the pool can grant."""
    used, offset = _used(pool)
    page = jnp.where(used & (offset < pool.num_free), pool.ring, pool.holders.shape[0])
    return jnp.zeros(pool.holders.shape, bool).at[page].set(True, mode="drop")


def _used(pool: PagePool) -> tuple[jax.Array, jax.Array]:
    """bool[N] places of the ring that name a page, and int32[N] how far from the head each is."""
    size = jnp.int32(pool.ring.shape[0])
    place = jnp.arange(pool.ring.shape[0], dtype=jnp.int32)
    offset = jnp.where(place < pool.head, place + (size - pool.head), place - pool.head)
    return offset < pool.num_free + pool.num_pending, offset


def _by_block(marks: jax.Array, pages: int) -> jax.Array:
    """int32[B] marked pages of each block, from bool[N+1] by page id."""
    return jnp.sum(marks[1:].reshape(-1, pages), axis=1, dtype=jnp.int32)


def _refill(pool: PagePool, free: jax.Array, pages: int) -> PagePool:
    """Lays the ring anew: bool[N] free pages, blocks in use first, then what is pending.

    Among blocks in use those with the fewest free pages come first: what is opened last fills last.
    """
    size, used = pool.ring.shape[0], _used(pool)
    in_block = free.reshape(-1, pages)
    count = jnp.sum(in_block, axis=1, dtype=jnp.int32)
    order = jnp.argsort(count, stable=True)  # whole blocks last, by place
    before = jnp.zeros_like(count).at[order].set(exclusive_sum(count[order]), mode="drop")
    within = jnp.cumsum(in_block, axis=1, dtype=jnp.int32) - in_block.astype(jnp.int32)
    place = jnp.where(in_block, before[:, None] + within, size).reshape(-1)
    ring = jnp.zeros_like(pool.ring)
    ring = ring.at[place].set(jnp.arange(1, size + 1, dtype=jnp.int32), mode="drop")
    total = jnp.sum(count, dtype=jnp.int32)
    waits = used[0] & (used[1] >= pool.num_free)
    to = jnp.where(waits, total + (used[1] - pool.num_free), size)
    ring = ring.at[to].set(pool.ring, mode="drop")
    return replace(pool, ring=ring, head=jnp.zeros_like(pool.head), num_free=total)


def _layout_of(state: AllocatorState) -> UnifiedLayout:
    layout = state.config.unified_layout
    if layout is None:
        raise ValueError(
            f"only a unified budget has a split that moves, and this state has two pools of fixed "
            f"sizes, {state.config}; use PoolConfig.unified(bytes, model)"
        )
    return layout
