"""How many pages there are, are held, and can be granted."""

import jax
import jax.numpy as jnp

from swa_jax.state import AllocatorState


def present_pages(allocator: AllocatorState) -> tuple[jax.Array, jax.Array]:
    """int32[] full and SWA pages that are the pool's own: all but those absent from it."""
    config, layout = allocator.config, allocator.config.unified_layout
    if layout is None or allocator.block_is_full is None:
        return jnp.int32(config.full_pages), jnp.int32(config.swa_units)
    blocks = jnp.sum(allocator.block_is_full, dtype=jnp.int32)
    others = jnp.int32(layout.blocks) - blocks
    return blocks * jnp.int32(layout.full_pages), others * jnp.int32(layout.swa_pages)


def held_pages(allocator: AllocatorState) -> tuple[jax.Array, jax.Array]:
    """int32[] full and SWA pages that are neither free nor pending."""
    all_full, all_swa = present_pages(allocator)
    swa = all_swa - allocator.swa.num_free - allocator.swa.num_pending
    if allocator.config.pure_swa_pool:
        return swa, swa
    full = allocator.full
    return all_full - full.num_free - full.num_pending, swa


def free_pages(allocator: AllocatorState) -> tuple[jax.Array, jax.Array]:
    """int32[] full and SWA pages that can be granted."""
    swa = allocator.swa.num_free
    return (swa if allocator.config.pure_swa_pool else allocator.full.num_free), swa


def absent_pages(allocator: AllocatorState) -> tuple[jax.Array, jax.Array]:
    """bool[F+1] and bool[S+1] pages that lie in blocks of the other pool."""
    layout, is_full = allocator.config.unified_layout, allocator.block_is_full
    if layout is None or is_full is None:
        return jnp.zeros(allocator.full.holders.shape, bool), jnp.zeros(
            allocator.swa.holders.shape, bool
        )
    return (
        jnp.pad(jnp.repeat(~is_full, layout.full_pages), (1, 0)),
        jnp.pad(jnp.repeat(is_full, layout.swa_pages), (1, 0)),
    )
