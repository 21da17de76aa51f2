"""States worth saving."""

import jax.numpy as jnp
import numpy as np

import swa_jax as swa
from swa_jax import prefix_cache
from swa_jax.models.decoder import KVPool

PAGE = 4
POOL = swa.PoolConfig(64, 48, PAGE, 6)


def layers(seed, pool=POOL):
    """KV of several dtypes, by chance."""
    rng = np.random.default_rng(seed)

    def layer(pages, dtype, *shape):
        values = rng.normal(size=(pages + 1, pool.page_size, *shape)) * 9
        return jnp.asarray(values.astype(jnp.dtype(dtype)))

    full = (layer(pool.full_pages, "bfloat16", 2, 3), layer(pool.full_pages, "int32"))
    return KVPool(full, (layer(pool.swa_pages, "float8_e4m3fn", 5),))


def prompt(seed):
    return np.random.default_rng(seed).integers(0, 99, 20)


def filled(seed, pool=POOL, **options):
    """An allocator and its cache with two prompts, one locked, and a request of 7 tokens."""
    state, cache = swa.init(pool), prefix_cache.init(pool, **options)
    inserted = None
    for at in range(2):
        tokens = prompt(2 * seed + at)
        state, grant = swa.alloc_extend(state, [0], [20], [-1], capacity=20)
        cache, state, inserted = prefix_cache.insert(cache, state, tokens, 20, grant.slots)
        if at == 0:
            cache, state, _ = prefix_cache.evict(cache, state, full_tokens=0, swa_tokens=8)
    assert inserted is not None
    cache, receipt = prefix_cache.lock(cache, state, inserted.node)
    state, grant = swa.alloc_extend(state, [0], [7], [-1], capacity=20)
    assert grant.ok
    return state, cache, receipt
