"""Locks: what a running request reads must not leave.

A full lock is on every page from the root to a node; an SWA lock on the pages at its end that hold
one window. Pages never split, so a path stays what it was however much is inserted around it.
"""

from dataclasses import fields, replace

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from swa_jax.inputs import as_int32
from swa_jax.paging import look_up
from swa_jax.prefix_cache import receipts
from swa_jax.prefix_cache.arguments import check_pair
from swa_jax.prefix_cache.match import window_start
from swa_jax.prefix_cache.receipts import Receipt
from swa_jax.prefix_cache.tree import ROOT, PrefixCache
from swa_jax.state import UNMAPPED, AllocatorState


def lock(cache: PrefixCache, state: AllocatorState, node: ArrayLike) -> tuple[PrefixCache, Receipt]:
    """Locks the path to a node, and SWA for one window at its end.

    To pin a prefix (a system prompt, say) lock it and keep the receipt.

    Args:
      cache: the tree.
      state: the allocator it stands beside.
      node: int32[] from `Match` or `Inserted`; 0, the root, locks nothing. A node that is not in
        the tree locks nothing either and gives an empty receipt.

    Returns:
      The cache and the receipt that `unlock` takes. Only live pages are locked in SWA: where a
      tombstone lies in the window, those below it. While `cache.config.most_receipts` (one for
      each full page and 1,024 more) are out, nothing is locked and the receipt is empty.

    Rule R10; public reports B41, B45.
    """
    check_pair(cache, state)
    return _lock(cache, state, as_int32("node", node, 0))


@jax.jit
def _lock(
    cache: PrefixCache, state: AllocatorState, node: jax.Array
) -> tuple[PrefixCache, Receipt]:
    inside = (node > ROOT) & (node < cache.in_tree.shape[0])
    known = inside & cache.in_tree[jnp.where(inside, node, ROOT)]
    node = jnp.where(known & receipts.room_is_left(cache), node, ROOT)
    start = window_start(cache.config, cache.depth[node])

    def covers(above: jax.Array) -> jax.Array:
        live = state.full_to_swa[above] != UNMAPPED
        return (above > ROOT) & (cache.depth[above] > start) & live

    top = jax.lax.while_loop(covers, lambda above: cache.parent[above], node)
    boundary = jnp.where(top > ROOT, cache.depth[top], 0)
    return receipts.take(_add(cache, node, boundary, 1), node, boundary)


def unlock(cache: PrefixCache, receipt: Receipt) -> PrefixCache:
    """Undoes the lock that gave this receipt, whatever was inserted or evicted since.

    Args:
      cache: the tree.
      receipt: of `lock`, or the last one of `release_swa_lock`. A receipt that was used before,
        or is from before a `reset`, changes nothing.

    Returns:
      The cache.
    """
    return _unlock(cache, as_receipts(receipt, 0))


def as_receipts(receipt: Receipt, ndim: int) -> Receipt:
    """One receipt (`ndim` 0) or a batch of them (1); ValueError for anything else."""
    if not isinstance(receipt, Receipt):
        raise ValueError(f"receipt must be a Receipt, got {type(receipt).__name__}")
    names = [field.name for field in fields(Receipt)]
    parts = {f"receipt.{name}": getattr(receipt, name) for name in names}
    return Receipt(*(as_int32(name, part, ndim) for name, part in parts.items()))


@jax.jit
def _unlock(cache: PrefixCache, receipt: Receipt) -> PrefixCache:
    node = receipts.standing(cache, receipt)
    return receipts.give_back(_add(cache, node, receipt.boundary, -1), receipt, node)


def release_swa_lock(
    cache: PrefixCache, receipt: Receipt, tokens: ArrayLike | None = None
) -> tuple[PrefixCache, Receipt]:
    """Gives up the SWA part of a lock early, as far as the request has left that window.

    Args:
      cache: the tree.
      receipt: of `lock`; use the returned one from here on, this one is spent.
      tokens: int32[] the frontier: only pages wholly below it are given up. All by default.

    Returns:
      The cache, and a receipt that holds what is still locked: nothing, if this one was spent.

    Public report B45: the later release must not lower anybody's SWA lock again.
    """
    most = 2**31 - 1 if tokens is None else tokens
    return _release_swa(cache, as_receipts(receipt, 0), as_int32("tokens", most, 0))


@jax.jit
def _release_swa(
    cache: PrefixCache, receipt: Receipt, tokens: jax.Array
) -> tuple[PrefixCache, Receipt]:
    pages = jax.lax.div(jnp.maximum(tokens, 0), jnp.int32(cache.config.pool.page_size))
    bottom = receipts.standing(cache, receipt)
    boundary = jnp.maximum(jnp.minimum(pages, cache.depth[bottom]), receipt.boundary)

    def up(carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        node, locks = carry
        released = (cache.depth[node] <= boundary).astype(jnp.int32)
        locks = locks.at[node].add(-released, mode="drop")
        return cache.parent[node], locks

    def inside(carry: tuple[jax.Array, jax.Array]) -> jax.Array:
        return (carry[0] > ROOT) & (cache.depth[carry[0]] > receipt.boundary)

    _, locks = jax.lax.while_loop(inside, up, (bottom, cache.swa_locks))
    return receipts.renew(replace(cache, swa_locks=locks), receipt, bottom, boundary)


def move_lock(
    cache: PrefixCache, state: AllocatorState, receipt: Receipt, path: jax.Array, pages: jax.Array
) -> tuple[PrefixCache, Receipt]:
    """Locks a path and undoes another lock on it, both at once: what they share is not touched.

    With an empty receipt it is `lock`, with no pages `unlock`; the path is known, so nobody walks.

    Args:
      cache: the tree.
      state: the allocator it stands beside.
      receipt: of a lock on the beginning of the path, or longer than `pages`; spent afterwards.
      path: int32[C] nodes from the root down, as far as either lock goes.
      pages: int32[] how many of them to lock, 0 for none.

    Returns:
      The cache and the receipt; as for `lock`, empty where no more may be out.
    """
    held_by = receipts.standing(cache, receipt)
    held, before = cache.depth[held_by], jnp.where(held_by > ROOT, receipt.boundary, 0)
    pages = jnp.where(receipts.room_is_left(cache) | (held_by > ROOT), pages, 0)
    depth = jnp.arange(1, path.shape[0] + 1, dtype=jnp.int32)
    dead = look_up(state.full_to_swa, path, UNMAPPED) == UNMAPPED
    ends = (depth <= pages) & (dead | (depth <= window_start(cache.config, pages)))
    boundary = jnp.max(jnp.where(ends, depth, 0), initial=0)

    def change(locks: jax.Array, now: jax.Array, then: jax.Array) -> jax.Array:
        by = now.astype(jnp.int32) - then.astype(jnp.int32)
        return locks.at[jnp.where(by != 0, path, locks.shape[0])].add(by, mode="drop")

    within = depth <= pages
    cache = replace(
        cache,
        full_locks=change(cache.full_locks, within, depth <= held),
        swa_locks=change(
            cache.swa_locks, within & (depth > boundary), (depth <= held) & (depth > before)
        ),
    )
    node = jnp.where(pages > 0, look_up(path, jnp.maximum(pages - 1, 0), ROOT), ROOT)
    return receipts.take(receipts.give_back(cache, receipt, held_by), node, boundary)


def _add(cache: PrefixCache, node: jax.Array, boundary: jax.Array, change: int) -> PrefixCache:
    """Walks up from a node: SWA counts below the boundary, full counts to the root."""

    def up(carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        node, full_locks, swa_locks = carry
        in_window = (cache.depth[node] > boundary).astype(jnp.int32)
        swa_locks = swa_locks.at[node].add(in_window * change, mode="drop")
        full_locks = full_locks.at[node].add(change, mode="drop")
        return cache.parent[node], full_locks, swa_locks

    start = (node, cache.full_locks, cache.swa_locks)
    walk = jax.lax.while_loop(lambda carry: carry[0] > ROOT, up, start)
    _, full_locks, swa_locks = walk
    return replace(cache, full_locks=full_locks, swa_locks=swa_locks)
