"""Making room: tombstones where only SWA is short, whole leaves where full pages are.

Which pages leave is decided for all of a call at once, so evicting k pages costs a fixed number of
passes over the tree and not k walks.
"""

import functools
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from swa_jax.inputs import as_int32
from swa_jax.once import once
from swa_jax.paging import look_up, pages_for
from swa_jax.plan_free import FreePlan, commit_free
from swa_jax.pool import is_held, nowhere
from swa_jax.prefix_cache.arguments import check_pair
from swa_jax.prefix_cache.kept_windows import in_kept_window, window_pages
from swa_jax.prefix_cache.leaving import may_leave, may_lose_swa
from swa_jax.prefix_cache.policy import leaving_order
from swa_jax.prefix_cache.select import least_k, over_subtrees, up_from
from swa_jax.prefix_cache.table import lay_out_when_worn, strike_out
from swa_jax.prefix_cache.tree import ROOT, PrefixCache
from swa_jax.rank import read_marks
from swa_jax.state import UNMAPPED, AllocatorState

_FAR = 2**20  # more levels than matter
_FEW_LEVELS = 32  # which leaves are walked up from, level by level
_BLOCK = 4096


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["full_tokens", "swa_tokens"], meta_fields=[]
)
@dataclass(frozen=True)
class Evicted:
    """What an eviction gave back, in tokens."""

    full_tokens: jax.Array  # int32[]
    swa_tokens: jax.Array  # int32[]


def evict(
    cache: PrefixCache,
    state: AllocatorState,
    *,
    full_tokens: ArrayLike = 0,
    swa_tokens: ArrayLike = 0,
) -> tuple[PrefixCache, AllocatorState, Evicted]:
    """Gives pages of unlocked prefixes back until as much is free as was asked for.

    Full pages go from the leaves up. SWA pages go first where few prefixes need them: those
    further than a window from the end of every branch, and of these the windows that are kept at
    regular depths last (`kept_windows`), so that a branch stays usable, and can be parted from, as
    long as any page can be had elsewhere. A leaf whose SWA page goes leaves the tree, and so do the
    tombstones above it that nothing live hangs from. Unlocked tombstones that nothing live or
    locked hangs from leave first, whatever the amounts, 0 and below included.

    Args:
      cache: the tree.
      state: the allocator it stands beside.
      full_tokens: int32[] full tokens wanted, rounded up to pages.
      swa_tokens: int32[] SWA tokens wanted, those of the full pages that leave included.

    Returns:
      The cache, the allocator, and `Evicted`: less than wanted where the rest is locked, or held by
      others beside the tree (`share`), more where a page drew others with it. In an open free
      group the pages are queued.

    Rules R9 to R11; public reports B39, B44, B46.
    """
    check_pair(cache, state)
    full = as_int32("full_tokens", full_tokens, 0)
    return _evict(cache, state, full, as_int32("swa_tokens", swa_tokens, 0))


@jax.jit
def _evict(
    cache: PrefixCache, state: AllocatorState, full_tokens: jax.Array, swa_tokens: jax.Array
) -> tuple[PrefixCache, AllocatorState, Evicted]:
    size = cache.config.pool.page_size
    live = cache.in_tree & (state.full_to_swa != UNMAPPED)
    unlocked = may_leave(cache, state)
    depth_last = jnp.int32(_FAR) - cache.depth
    ids = jnp.arange(cache.in_tree.shape[0], dtype=jnp.int32)
    order = leaving_order(cache, live)

    # What nothing live hangs from is of no use to anybody and goes before all else.
    bare = unlocked & ~live & (cache.children == 0)
    dangling = _fallen(cache, live | (cache.in_tree & ~unlocked), jnp.any(bare))
    full_pages = pages_for(jnp.maximum(full_tokens, 0), size)
    full_pages = full_pages - jnp.sum(dangling, dtype=jnp.int32)
    goes = dangling | least_k(unlocked & ~dangling, (*order, depth_last, ids), full_pages)
    swa_pages = pages_for(jnp.maximum(swa_tokens, 0), size)
    swa_pages = swa_pages - jnp.sum(goes & live, dtype=jnp.int32)
    loses = may_lose_swa(cache, state) & ~goes
    if cache.config.pool.pure_swa_pool:  # there is no page without its SWA side: leaves go whole
        more = least_k(unlocked & ~goes, (*order, depth_last, ids), swa_pages)
        goes, loses = goes | more, jnp.zeros_like(loses)
    else:
        loses = _losing(cache, goes, loses, order, swa_pages)

    keeps = cache.in_tree & ~goes & ((live & ~loses) | ~unlocked)
    gone = _fallen(cache, keeps, jnp.any(goes | (loses & (cache.children == 0))), goes)
    return _commit(cache, state, gone, (gone | loses) & live)


def _losing(
    cache: PrefixCache,
    goes: jax.Array,
    may: jax.Array,
    order: tuple[jax.Array, ...],
    pages: jax.Array,
) -> jax.Array:
    """bool[F+1] those of `may` whose SWA page goes, `pages` of them.

    Shallow pages first where few are missed, those of kept windows after all others; in a branch's
    last window the leaf first, so that a short branch is cut shorter and not cut through.
    """
    nodes, most = may.shape[0], min(cache.config.pool.swa_pages, may.shape[0])

    def choose() -> jax.Array:
        near = _near_leaf(cache, goes)
        # There are no more of them than SWA pages: what is compared is those alone.
        some = read_marks(may).read(jnp.arange(most, dtype=jnp.int32))
        real = some < nodes
        down = look_up(cache.depth, some, 0)
        close = look_up(near, some, False)
        depth = jnp.where(close, jnp.int32(_FAR) - down, down)
        worth = jnp.where(close, 2, in_kept_window(cache.config.pool, down).astype(jnp.int32))
        keys = (worth, *(look_up(key, some, 0) for key in order), depth, some)
        chosen = least_k(real, keys, pages)
        return jnp.zeros(nodes, bool).at[jnp.where(chosen, some, nodes)].set(True, mode="drop")

    return jax.lax.cond(pages > 0, choose, lambda: jnp.zeros(nodes, bool))


def _near_leaf(cache: PrefixCache, goes: jax.Array) -> jax.Array:
    """bool[F+1]: a leaf below is less than a window away, so its match needs this page.

    Leaves as they are when the pages of `goes` have gone.
    """
    pages = window_pages(cache.config.pool)
    leaf = cache.in_tree & ~goes & (_children_left(cache, goes) == 0)
    if pages > _FEW_LEVELS:
        start = jnp.where(leaf, 0, jnp.int32(_FAR))
        return over_subtrees(cache.parent, start, jnp.int32(pages), 1, least=True) < pages
    return up_from(leaf, cache.parent, pages)


def _children_left(cache: PrefixCache, gone: jax.Array) -> jax.Array:
    """int32[F+1] children of each node that are not marked."""

    def without(children: jax.Array) -> jax.Array:
        above = jnp.where(gone, cache.parent, gone.shape[0])
        return children.at[above].add(-1, mode="drop")

    return jax.lax.cond(jnp.any(gone), without, lambda children: children, cache.children)


def _fallen(
    cache: PrefixCache, keeps: jax.Array, some: jax.Array, gone: jax.Array | None = None
) -> jax.Array:
    """bool[F+1]: nodes with none of `keeps` at or below them, which are of no use any more.

    A run is what hangs in one line between two nodes that are kept or fork. It falls from its lower
    end, all of it, if nothing hangs there; then the fork above it may be the end of another one.

    Args:
      cache: the tree.
      keeps: bool[F+1] nodes that stay.
      some: bool[], False where none falls: then nothing is looked at.
      gone: bool[F+1] nodes that are known to fall, with all that is below them.
    """
    nodes = keeps.shape[0]
    loose = cache.in_tree & ~keeps

    def fall(carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        fallen, _ = carry
        left = _children_left(cache, fallen)
        inside = once(loose & ~fallen & (left < 2), 3)
        above = jnp.where(inside & look_up(inside, cache.parent, False), cache.parent, 0)
        ids = jnp.arange(nodes, dtype=jnp.int32)
        top = _ends(jnp.where(above > ROOT, above, ids))
        ends = jnp.zeros(nodes, bool).at[jnp.where(inside & (left == 0), top, nodes)]
        more = inside & look_up(ends.set(True, mode="drop"), top, False)
        return fallen | more, jnp.any(more)

    start = (jnp.zeros(nodes, bool) if gone is None else gone, some)
    return jax.lax.while_loop(lambda carry: carry[1], fall, start)[0] & some


def _ends(above: jax.Array) -> jax.Array:
    """int32[N]: where each node comes to by going up, where nodes at an end point at themselves."""

    def further(carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        twice = look_up(carry[0], carry[0], 0)
        return twice, jnp.any(twice != carry[0])

    start = (above, jnp.ones((), bool))
    return jax.lax.while_loop(lambda carry: carry[1], further, start)[0]


def _commit(
    cache: PrefixCache, state: AllocatorState, gone: jax.Array, swa_gone: jax.Array
) -> tuple[PrefixCache, AllocatorState, Evicted]:
    """Gives marked pages back, a block at a time: most evictions are small beside the pool."""
    width = min(_BLOCK, gone.shape[0])
    marks = gone | swa_gone
    ids = jnp.arange(marks.shape[0], dtype=jnp.int32)
    leaving = read_marks(marks)

    def block(carry: tuple[AllocatorState, jax.Array, jax.Array, jax.Array]) -> tuple:
        state, table, children, done = carry
        page = leaving.read(done + jnp.arange(width, dtype=jnp.int32))
        whole = look_up(gone, page, False)
        state = _release(state, page, whole, look_up(swa_gone, page, False))
        table = strike_out(cache, table, jnp.where(whole, page, gone.shape[0]))
        above = jnp.where(whole, look_up(cache.parent, page, 0), gone.shape[0])
        return state, table, children.at[above].add(-1, mode="drop"), done + width

    start = (state, cache.table, cache.children, jnp.int32(0))
    state, table, children, _ = jax.lax.while_loop(
        lambda carry: carry[3] < leaving.count, block, start
    )
    went = jnp.sum(gone, dtype=jnp.int32)
    cache = replace(
        cache,
        in_tree=cache.in_tree & ~gone,
        children=jnp.where(gone | (ids == ROOT), 0, children),
        table=table,
        num_deleted=cache.num_deleted + went,
    )
    size = jnp.int32(cache.config.pool.page_size)
    lost = jnp.sum(swa_gone, dtype=jnp.int32)
    return lay_out_when_worn(cache), state, Evicted(went * size, lost * size)


def _release(
    state: AllocatorState, page: jax.Array, whole: jax.Array, swa_side: jax.Array
) -> AllocatorState:
    """Frees int32[K] pages that the tree alone holds: both sides where `whole`, or the SWA side."""
    no_full, no_swa = jnp.int32(nowhere(state.full)), jnp.int32(nowhere(state.swa))
    swa = look_up(state.full_to_swa, page, UNMAPPED)
    nobody = jnp.zeros_like(page)
    plan = FreePlan(
        full_pages=jnp.where(whole & is_held(state.full, page), page, no_full),
        full_left=nobody,
        swa_pages=jnp.where(swa_side & is_held(state.swa, swa), swa, no_swa),
        swa_left=nobody,
        unmap=jnp.where(swa != UNMAPPED, page, no_full),
        faults=jnp.zeros_like(state.faults),
        scratch=state.scratch,
    )
    return commit_free(state, plan, defer=state.group_open)
