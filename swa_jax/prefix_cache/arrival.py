"""What the policies that go by arrival count: when a node came, and how urgent it is."""

from dataclasses import replace

import jax
import jax.numpy as jnp

from swa_jax.prefix_cache.tree import LEAST, ROOT, PrefixCache


def note_arrival(
    cache: PrefixCache,
    nodes: jax.Array,
    already: jax.Array,
    pages: jax.Array,
    priority: jax.Array,
) -> PrefixCache:
    """What "fifo" and "priority" count: never less for a node than for one below it.

    Args:
      cache: the tree.
      nodes: int32[N] a path from the root.
      already: int32[] pages of it that the tree held before.
      pages: int32[] pages of it.
      priority: int32[] as for `insert`.
    """
    if cache.config.policy not in ("fifo", "priority"):
        return cache
    place = jnp.arange(nodes.shape[0], dtype=jnp.int32)
    used = (place < pages) & (nodes > ROOT)
    if cache.config.policy == "fifo":
        used = used & (pages > already)  # what was all there has not arrived again
        value = cache.clock
    else:
        value = jnp.clip(priority, LEAST, -LEAST)
    used = jnp.where(used, nodes, cache.in_tree.shape[0])
    return replace(cache, rank=cache.rank.at[used].max(value, mode="drop"))
