"""Requests of a prefill worker that are computed and wait to be sent.

Such a worker never decodes. A row whose known tokens but the last are computed is ready: it keeps
its pages, is not retracted, and leaves when its KV was sent or its request is cancelled.
"""

from dataclasses import replace

import jax
import jax.numpy as jnp

from swa_jax.inputs import Ints, as_int32
from swa_jax.serving.config import ServingConfig
from swa_jax.serving.queue import RUNNING, WAITING, open_requests
from swa_jax.serving.requests import SENT, UNFINISHED
from swa_jax.serving.world import World, ended, running, to_compute


def ready_rows(config: ServingConfig, world: World) -> jax.Array:
    """bool[R] rows whose KV can be sent; none on a worker that decodes."""
    if not config.only_prefills:
        return jnp.zeros(world.rows.request.shape, bool)
    return running(world.rows) & ~ended(world) & (to_compute(world) == 1)


def ready(config: ServingConfig, world: World) -> jax.Array:
    """bool[N] the same by place in the queue."""
    places = world.queue.status.shape[0]
    at = jnp.where(ready_rows(config, world), world.rows.request, places)
    return jnp.zeros(places, bool).at[at].set(True, mode="drop")


def end_sent(config: ServingConfig, world: World, places: Ints) -> World:
    """Ends int32[M] requests whose KV has arrived elsewhere, in the next step.

    Args:
      config: static, of a prefill worker.
      world: before the call.
      places: of the queue; -1, and requests that are not ready, are left as they are.
    """
    queue, at = world.queue, as_int32("places", places, 1)
    count = queue.status.shape[0]
    inside = (at >= 0) & (at < count)
    known = jnp.where(inside, at, 0)
    is_open = (queue.status[known] == RUNNING) & (queue.reason[known] == UNFINISHED)
    at = jnp.where(inside & is_open & ready(config, world)[known], at, count)
    queue = replace(queue, reason=queue.reason.at[at].set(SENT, mode="drop"))
    return replace(world, queue=queue)


def can_go_on(config: ServingConfig, world: World) -> jax.Array:
    """bool[] a step can change something.

    Some request waits or runs. On a prefill worker those that are ready do not count, nor do those
    that wait for the memory or the rows of these.
    """
    if not config.only_prefills:
        return open_requests(world.queue)
    rows = running(world.rows)
    refused = (world.refused_at == world.stats.finished) & jnp.any(rows)
    comes_in = jnp.any(world.queue.status == WAITING) & jnp.any(~rows) & ~refused
    return jnp.any(rows & ~ready_rows(config, world)) | comes_in
