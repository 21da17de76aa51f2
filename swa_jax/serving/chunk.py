"""Which rows prefill in a step, and how far."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from swa_jax.serving.config import ServingConfig
from swa_jax.serving.world import World, of_rows, to_compute
from swa_jax.share_pages import share_pages

_LAST = 2**31 - 1


@dataclass(frozen=True)
class Chunk:
    """What a step prefills: S rows of R, the oldest first."""

    rows: jax.Array  # int32[S] rows
    counts: jax.Array  # int32[S] tokens, 0 for none


def plan_chunk(config: ServingConfig, world: World, pages: jax.Array) -> Chunk:
    """The oldest rows in prefill, and how far their chunks and int32[] new pages reach."""
    left = jnp.maximum(to_compute(world) - 1, 0)
    ticket = of_rows(world.rows, world.queue.ticket)
    order = jnp.argsort(jnp.where(left > 0, ticket, _LAST)).astype(jnp.int32)
    rows = order[: config.prefill_rows]
    want = jnp.minimum(left[rows], jnp.int32(config.chunk_tokens))
    return Chunk(rows, share_pages(world.rows.length[rows], want, pages, config.pool.page_size))
