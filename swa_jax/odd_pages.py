"""Pages that look wrong in a state that breaks a law: on the device, from the state alone."""

import jax
import jax.numpy as jnp

from swa_jax.counts import absent_pages
from swa_jax.paging import look_up
from swa_jax.state import NOBODY, PAD_PAGE, UNMAPPED, AllocatorState, PagePool


def odd_pages(state: AllocatorState) -> tuple[jax.Array, jax.Array]:
    """Pages of which ring, holders and mapping say what cannot be.

    Args:
      state: any, also one that breaks every law.

    Returns:
      bool[F+1] full pages and bool[S+1] SWA pages (or rings). None where all laws hold; none where
      a law is broken that is about counters alone.
    """
    full_gone, swa_gone = absent_pages(state)
    wrong_map = _wrongly_mapped(state)
    full = (state.full.holders < 0) | wrong_map | (state.scratch != jnp.int32(NOBODY))
    if not state.config.pure_swa_pool:
        full = full | _wrongly_queued(state.full, full_gone)
    of_swa = (state.swa.holders < 0) | _wrongly_queued(state.swa, swa_gone)
    to = jnp.where(wrong_map & (state.full_to_swa > PAD_PAGE), state.full_to_swa, of_swa.shape[0])
    return full, of_swa.at[to].set(True, mode="drop")


def _wrongly_queued(pool: PagePool, absent: jax.Array) -> jax.Array:
    """bool[N+1] not in the ring once where released, or in it where held, absent or padding."""
    size = jnp.int32(pool.ring.shape[0])
    place = jnp.arange(pool.ring.shape[0], dtype=jnp.int32)
    offset = jnp.where(place < pool.head, place + (size - pool.head), place - pool.head)
    used = offset < pool.num_free + pool.num_pending
    page = jnp.where(used & (pool.ring >= 0), pool.ring, pool.holders.shape[0])
    queued = jnp.zeros(pool.holders.shape, jnp.int32).at[page].add(1, mode="drop")
    return queued != (pool.free & ~absent).astype(jnp.int32)


def _wrongly_mapped(state: AllocatorState) -> jax.Array:
    """bool[F+1] mapped though released, to what is released or no page, or to another's page."""
    mapping, swa_holders = state.full_to_swa, state.swa.holders
    has = mapping != UNMAPPED
    if state.config.has_rings:
        return has
    inside = (mapping >= 0) & (mapping < jnp.int32(swa_holders.shape[0]))
    to = jnp.where(has & inside, mapping, swa_holders.shape[0])
    count = jnp.zeros(swa_holders.shape, jnp.int32).at[to].add(1, mode="drop")
    held = look_up(swa_holders, to, 0)
    wrong = has & (~inside | state.full.free | (held <= 0) | (look_up(count, to, 0) > 1))
    wrong = wrong | (has & (held > state.full.holders))
    own = jnp.arange(mapping.shape[0], dtype=jnp.int32)
    if state.config.pure_swa_pool:
        live = ~state.swa.free & (own != PAD_PAGE)
        wrong = wrong | jnp.where(live, mapping != own, has)
    return wrong | (has & (own == PAD_PAGE))
