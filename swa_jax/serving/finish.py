"""What goes to the cache: prompts as they are prefilled, and all of a request that is over."""

from dataclasses import replace

import jax
import jax.numpy as jnp

from swa_jax.group import free_group_begin, free_group_end
from swa_jax.only_if import only_if, while_any
from swa_jax.serving.config import ServingConfig
from swa_jax.serving.queue import DONE
from swa_jax.serving.row_pages import give_row, vacate
from swa_jax.serving.world import World, add_stats, ended


def finish(config: ServingConfig, world: World) -> World:
    """Gives the cache what was prefilled, and ends every row whose request has a finish reason.

    Args:
      config: what is static.
      world: before the call.

    Returns:
      The world: later requests find the prompts of those that run, requests that ended are DONE
      and their rows idle. What was computed for a request that was cancelled is cached too: it is
      as good as any.
    """

    def due(world: World) -> jax.Array:
        return world.rows.fresh | ended(world)

    def one(world: World) -> World:
        row = jnp.argmax(due(world)).astype(jnp.int32)
        world = give_row(config, world, row)
        rows = replace(world.rows, fresh=world.rows.fresh.at[row].set(False, mode="drop"))
        return only_if(ended(world)[row], lambda w: _end(config, w, row), replace(world, rows=rows))

    return while_any(lambda world: jnp.any(due(world)), one, world)


def _end(config: ServingConfig, world: World, row: jax.Array) -> World:
    place = world.rows.request[row]
    world = vacate(config, world, row)
    queue = world.queue
    queue = replace(queue, status=queue.status.at[place].set(DONE, mode="drop"))
    return add_stats(replace(world, queue=queue), finished=jnp.int32(1))


def raise_fence(world: World) -> World:
    """Pages freed from here on are queued and granted to nobody until `lift_fence`.

    For a loop on the host that dispatches a step before it has read the one before: a request
    that is finished meanwhile still writes in the step under way (public report B21).
    """
    return replace(world, allocator=free_group_begin(world.allocator))


def lift_fence(world: World) -> World:
    """The step under way has ended: what was queued can be granted."""
    return replace(world, allocator=free_group_end(world.allocator))
