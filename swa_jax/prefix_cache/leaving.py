"""Which pages of the tree may leave: not locked, and held by nobody beside the tree."""

import jax
import jax.numpy as jnp

from swa_jax.pool import holders_of
from swa_jax.prefix_cache.select import over_subtrees
from swa_jax.prefix_cache.tree import PrefixCache
from swa_jax.state import UNMAPPED, AllocatorState


def held_by_others(cache: PrefixCache, state: AllocatorState) -> jax.Array:
    """bool[F+1]: nodes with a page at or below them that somebody holds beside the tree (`share`).

    Evicting one would give no page back, and what is above it cannot go before it. Where there is
    none, as without forks, this is one look at the counts.
    """
    shared = cache.in_tree & (state.full.holders > 1)
    deepest = jnp.max(jnp.where(cache.in_tree, cache.depth, 0))
    reach = jnp.where(jnp.any(shared), deepest, 0)
    above = over_subtrees(cache.parent, shared.astype(jnp.int32), reach, 0)
    return cache.in_tree & (above > 0)


def may_leave(cache: PrefixCache, state: AllocatorState) -> jax.Array:
    """bool[F+1] nodes whose page an eviction may give back."""
    return cache.in_tree & (cache.full_locks == 0) & ~held_by_others(cache, state)


def may_lose_swa(cache: PrefixCache, state: AllocatorState) -> jax.Array:
    """bool[F+1] live nodes whose SWA page an eviction may give back: the tree alone holds it."""
    swa = jnp.where(cache.in_tree, state.full_to_swa, UNMAPPED)
    alone = (swa != UNMAPPED) & (holders_of(state.swa, swa) == 1)
    return alone & (cache.swa_locks == 0)
