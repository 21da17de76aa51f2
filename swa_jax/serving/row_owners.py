"""Whose pages the rows of the loop hold, where pages carry owner tags."""

import jax

from swa_jax.serving.queue import Queue
from swa_jax.serving.world import World, of_rows


def row_owners(world: World) -> jax.Array | None:
    """int32[R] owner of each row's pages: its request's ticket, counted from 1. None without tags.

    No two requests of a world have one ticket, so that whoever sits in a row next is another.
    """
    if world.allocator.owner_tags is None:
        return None
    return of_rows(world.rows, world.queue.ticket) + 1


def request_owner(queue: Queue, place: jax.Array) -> jax.Array:
    """int32[] owner of the pages of the request at a place."""
    return queue.ticket[place] + 1
