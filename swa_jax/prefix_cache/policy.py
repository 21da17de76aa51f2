"""Who leaves first: keys to compare nodes by, the least first.

A node's key is never below that of a node under it, so leaves come before what holds them up.
"""

import jax
import jax.numpy as jnp

from swa_jax.prefix_cache.select import over_subtrees
from swa_jax.prefix_cache.tree import PrefixCache

_SCALE = 2.0**20


def leaving_order(cache: PrefixCache, live: jax.Array) -> tuple[jax.Array, ...]:
    """int32[F+1] keys of the cache's policy; ties are broken by the last use.

    Args:
      cache: the tree.
      live: bool[F+1] nodes with an SWA side.
    """
    policy = cache.config.policy
    if policy == "lru":
        return (cache.last_use,)
    if policy == "cost":
        return (_worth(cache, live), cache.last_use)
    return (cache.rank, cache.last_use)  # what they count is kept by match and insert


def _worth(cache: PrefixCache, live: jax.Array) -> jax.Array:
    """Recency plus compute saved for each byte, both scaled to 0 .. 1 over the tree.

    The idea is Marconi's (arXiv 2411.19379), there for recurrent state: what costs much to
    compute again and little to keep should stay longer. Here a page at depth d saves the linear
    work of its tokens and their attention to the d pages before it; a tombstone saves the same
    for the bytes of one side instead of two.
    """
    work = cache.depth.astype(jnp.float32) * jnp.where(live, jnp.float32(0.5), jnp.float32(1))
    used = cache.last_use.astype(jnp.float32)

    def scaled(values: jax.Array) -> jax.Array:
        low = jnp.min(jnp.where(cache.in_tree, values, jnp.inf))
        high = jnp.max(jnp.where(cache.in_tree, values, -jnp.inf))
        return jnp.clip((values - low) / jnp.maximum(high - low, jnp.float32(1)), 0, 1)

    worth = ((scaled(used) + scaled(work)) * jnp.float32(_SCALE)).astype(jnp.int32)
    deepest = jnp.max(jnp.where(cache.in_tree, cache.depth, 0))
    return over_subtrees(cache.parent, jnp.where(cache.in_tree, worth, -1), deepest, 0)
