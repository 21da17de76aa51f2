"""How much of the tree may leave and how much is locked, in tokens (rule R11)."""

import jax
import jax.numpy as jnp

from swa_jax.prefix_cache.arguments import check_pair
from swa_jax.prefix_cache.leaving import may_leave, may_lose_swa
from swa_jax.prefix_cache.tree import PrefixCache
from swa_jax.state import UNMAPPED, AllocatorState


def _tokens(cache: PrefixCache, marks: jax.Array) -> jax.Array:
    return jnp.sum(marks, dtype=jnp.int32) * jnp.int32(cache.config.pool.page_size)


def full_evictable_size(cache: PrefixCache, state: AllocatorState | None = None) -> jax.Array:
    """int32[] full tokens of pages that no lock holds, and nobody beside the tree.

    Without `state` the latter is not looked at: right where no page is shared.
    """
    if state is None:
        return _tokens(cache, cache.in_tree & (cache.full_locks == 0))
    check_pair(cache, state)
    return _tokens(cache, may_leave(cache, state))


def full_protected_size(cache: PrefixCache, state: AllocatorState | None = None) -> jax.Array:
    """int32[] full tokens of locked pages; `state` is only checked to be the tree's."""
    if state is not None:
        check_pair(cache, state)
    return _tokens(cache, cache.in_tree & (cache.full_locks > 0))


def swa_evictable_size(cache: PrefixCache, state: AllocatorState) -> jax.Array:
    """int32[] SWA tokens of live pages that no SWA lock holds, and nobody beside the tree."""
    check_pair(cache, state)
    return _tokens(cache, may_lose_swa(cache, state))


def swa_protected_size(cache: PrefixCache, state: AllocatorState) -> jax.Array:
    """int32[] SWA tokens of live pages that an SWA lock holds."""
    check_pair(cache, state)
    live = cache.in_tree & (state.full_to_swa != UNMAPPED)
    return _tokens(cache, live & (cache.swa_locks > 0))
