"""Evicting what a step lacks, and a little more so as to do it less often."""

import jax
import jax.numpy as jnp

from swa_jax.prefix_cache.evict import Evicted, evict
from swa_jax.prefix_cache.tree import PrefixCache
from swa_jax.state import AllocatorState

# The part of a pool that is evicted beyond what is lacking. The rarer evictions are, the less they
# cost; but the extra is what is lost against an exact LRU.
_EXTRA = 64


def evict_lacking(
    cache: PrefixCache, state: AllocatorState, full: jax.Array, swa: jax.Array
) -> tuple[PrefixCache, AllocatorState, Evicted]:
    """Evicts for int32[] full and SWA pages that are lacking; 0 or less: none of that kind."""
    pool = cache.config.pool

    def tokens(lacking: jax.Array, pages: int) -> jax.Array:
        wanted = jnp.where(lacking > 0, lacking + jnp.int32(pages // _EXTRA), 0)
        return wanted * jnp.int32(pool.page_size)

    return evict(
        cache,
        state,
        full_tokens=tokens(full, pool.full_pages),
        swa_tokens=tokens(swa, pool.swa_pages),
    )
