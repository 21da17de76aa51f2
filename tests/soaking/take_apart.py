"""The end of a serving world: everything back, nothing counted."""

import jax
import numpy as np

import swa_jax as swa
from swa_jax import prefix_cache, serving
from swa_jax.counts import held_pages
from swa_jax.serving.world import World

from .part import Left


def take_apart(world: World) -> Left:
    """Checks a world in which nobody runs, empties its cache, and says what is left."""
    world = serving.lift_fence(world)
    cache, state = world.cache, world.allocator
    assert cache is not None
    swa.check(state)
    prefix_cache.check(cache, state)
    assert not np.asarray(world.queue.status).any(), "some request is still there"
    assert not np.asarray(cache.full_locks)[np.asarray(cache.in_tree)].any(), "a lock is left"
    assert not int(cache.num_receipts), "a receipt is left"
    pool = state.config
    cache, state, _ = prefix_cache.evict(
        cache, state, full_tokens=pool.full_tokens, swa_tokens=pool.swa_tokens
    )
    swa.check(state)
    prefix_cache.check(cache, state)
    assert not np.asarray(cache.in_tree).any(), "the cache cannot be emptied"
    full, of_swa = (int(pages) for pages in jax.device_get(held_pages(state)))
    return Left(sum(swa.faults(state).values()), full + of_swa)
