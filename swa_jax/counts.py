"""How many pages are held and how many can be granted."""

import jax
import jax.numpy as jnp

from swa_jax.state import AllocatorState


def held_pages(allocator: AllocatorState) -> tuple[jax.Array, jax.Array]:
    """int32[] full and SWA pages that are neither free nor pending."""
    config = allocator.config
    swa = jnp.int32(config.swa_pages) - allocator.swa.num_free - allocator.swa.num_pending
    if config.pure_swa_pool:
        return swa, swa
    full = allocator.full
    return jnp.int32(config.full_pages) - full.num_free - full.num_pending, swa


def free_pages(allocator: AllocatorState) -> tuple[jax.Array, jax.Array]:
    """int32[] full and SWA pages that can be granted."""
    swa = allocator.swa.num_free
    return (swa if allocator.config.pure_swa_pool else allocator.full.num_free), swa
