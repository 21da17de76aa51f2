"""The tree's laws: on the device, and loud on the host."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from swa_jax.check import InvariantError
from swa_jax.paging import look_up
from swa_jax.prefix_cache.arguments import check_pair
from swa_jax.prefix_cache.select import sum_over_subtrees
from swa_jax.prefix_cache.tree import ROOT, PrefixCache
from swa_jax.state import UNMAPPED, AllocatorState


def invariants(cache: PrefixCache, state: AllocatorState) -> dict[str, jax.Array]:
    """Checks tree and allocator against each other. Pure; works under jit.

    Args:
      cache: any tree.
      state: the allocator it stands beside.

    Returns:
      bool[] by name, True where the law holds.
    """
    check_pair(cache, state)
    return _invariants(cache, state)


@jax.jit
def _invariants(cache: PrefixCache, state: AllocatorState) -> dict[str, jax.Array]:
    return {name: law(cache, state) for name, law in LAWS.items()}


def _pages_are_held(cache: PrefixCache, state: AllocatorState) -> jax.Array:
    """A cached page is held, and the root is no page."""
    return jnp.all(~cache.in_tree | ~state.full.free) & ~cache.in_tree[ROOT]


def _links(cache: PrefixCache, state: AllocatorState) -> jax.Array:
    """Every node hangs from the root or from a node one page shorter, in its namespace."""
    top = cache.parent == ROOT
    above = look_up(cache.in_tree, cache.parent, False) | top
    deeper = cache.depth == jnp.where(top, 0, look_up(cache.depth, cache.parent, 0)) + 1
    same = top | (look_up(cache.namespace, cache.parent, 0) == cache.namespace)
    return jnp.all(~cache.in_tree | (above & deeper & same))


def _child_counts(cache: PrefixCache, state: AllocatorState) -> jax.Array:
    """`children` counts the nodes that hang from each node."""
    at = jnp.where(cache.in_tree, cache.parent, cache.in_tree.shape[0])
    count = jnp.zeros_like(cache.children).at[at].add(1, mode="drop").at[ROOT].set(0, mode="drop")
    return jnp.all(jnp.where(cache.in_tree, count == cache.children, True))


def _table(cache: PrefixCache, state: AllocatorState) -> jax.Array:
    """The table names every node once, at its place, and nothing else."""
    ids = jnp.arange(cache.in_tree.shape[0], dtype=jnp.int32)
    named = ~cache.in_tree | (look_up(cache.table, cache.place, ROOT) == ids)
    count = jnp.sum(cache.table > ROOT, dtype=jnp.int32)
    struck = jnp.sum(cache.table < ROOT, dtype=jnp.int32) == cache.num_deleted
    return jnp.all(named) & (count == jnp.sum(cache.in_tree, dtype=jnp.int32)) & struck


def _locks(cache: PrefixCache, state: AllocatorState) -> jax.Array:
    """Locks are never negative, SWA locks never above full locks, a parent's full never less."""
    good = (cache.full_locks >= cache.swa_locks) & (cache.swa_locks >= 0)
    top = cache.parent == ROOT
    good = good & (top | (look_up(cache.full_locks, cache.parent, 0) >= cache.full_locks))
    return jnp.all(jnp.where(cache.in_tree, good, True))


def _receipts(cache: PrefixCache, state: AllocatorState) -> jax.Array:
    """Each entry of the receipts is out or spare, and full locks are those of the receipts out."""
    out = cache.receipt_serial > 0
    place = jnp.arange(out.shape[0], dtype=jnp.int32)
    unused = jnp.where(place < cache.num_receipts, out.shape[0], cache.spare_receipts)
    spare = jnp.zeros_like(out).at[unused].set(True, mode="drop")
    count = jnp.sum(out, dtype=jnp.int32) == cache.num_receipts
    bottom = jnp.where(out, cache.receipt_node, cache.in_tree.shape[0])
    locks = jnp.zeros_like(cache.full_locks).at[bottom].add(1, mode="drop")
    same = sum_over_subtrees(cache.parent, locks, jnp.max(cache.depth)) == cache.full_locks
    return jnp.all(spare != out) & count & jnp.all(jnp.where(cache.in_tree, same, True))


def _locked_is_live(cache: PrefixCache, state: AllocatorState) -> jax.Array:
    """What an SWA lock holds is live."""
    live = state.full_to_swa != UNMAPPED
    return jnp.all(~(cache.in_tree & (cache.swa_locks > 0)) | live)


LAWS: dict[str, Callable[[PrefixCache, AllocatorState], jax.Array]] = {
    "pages_are_held": _pages_are_held,
    "links": _links,
    "child_counts": _child_counts,
    "table": _table,
    "locks": _locks,
    "receipts": _receipts,
    "locked_is_live": _locked_is_live,
}


def check(cache: PrefixCache, state: AllocatorState) -> None:
    """Raises if the tree breaks a law. On the host: waits for the device.

    Raises:
      InvariantError: names each broken law and counts the nodes.
    """
    broken = [name for name, holds in jax.device_get(invariants(cache, state)).items() if not holds]
    if broken:
        laws = "; ".join(f"{name} ({(LAWS[name].__doc__ or '').strip()})" for name in broken)
        nodes = np.flatnonzero(jax.device_get(cache.in_tree))
        raise InvariantError(f"broken: {laws}. {nodes.size} nodes, the first {nodes[:8].tolist()}")
