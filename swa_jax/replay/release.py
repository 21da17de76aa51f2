"""Rows that end: finished ones, and the newest one when memory runs out."""

from dataclasses import replace

import jax
import jax.numpy as jnp

from swa_jax.free import free
from swa_jax.only_if import while_any
from swa_jax.replay.world import NO_REQUEST, Load, LoopConfig, Rows, World, running
from swa_jax.state import PAD_SLOT


def held_slots(
    config: LoopConfig, rows: Rows, row: jax.Array, owned_from: jax.Array | int = 0
) -> jax.Array:
    """int32[C] first slots of the pages that the row holds by itself, padded.

    Pages below `owned_from` tokens are a prefix cache's.

    In a pure SWA pool a page that has left the window is gone and may be somebody else's by now,
    so the row must not name it again.
    """
    size = config.pool.page_size
    start = jnp.arange(config.table_pages, dtype=jnp.int32) * jnp.int32(size)
    held = (start < rows.length[row]) & (start >= owned_from)
    if config.pool.pure_swa_pool:
        held = held & (start >= rows.evicted[row])
    return jnp.where(held, rows.table[row], PAD_SLOT)


def vacate(
    config: LoopConfig, world: World, row: jax.Array, owned_from: jax.Array | int = 0
) -> World:
    """Gives back every page that a row holds by itself and makes it idle."""
    rows = world.rows
    allocator = free(world.allocator, held_slots(config, rows, row, owned_from))

    def put(values: jax.Array, value: int) -> jax.Array:
        return values.at[row].set(value, mode="drop")

    idle = replace(
        rows,
        request=put(rows.request, NO_REQUEST),
        length=put(rows.length, 0),
        prefill=put(rows.prefill, 0),
        evicted=put(rows.evicted, 0),
        last_loc=put(rows.last_loc, -1),
    )
    return replace(world, allocator=allocator, rows=idle)


def is_done(load: Load, rows: Rows) -> jax.Array:
    """bool[R] rows that hold all the KV their request will ever need."""
    request = jnp.maximum(rows.request, 0)
    final = load.final_lens.at[request].get(mode="fill", fill_value=0)
    return running(rows) & (rows.length >= final)


def finish(config: LoopConfig, load: Load, world: World) -> World:
    """Frees every row whose request is complete, one after the other."""

    def one(world: World) -> World:
        row = jnp.argmax(is_done(load, world.rows)).astype(jnp.int32)
        tally = replace(world.tally, completed=world.tally.completed + 1)
        return replace(vacate(config, world, row), tally=tally)

    return while_any(lambda world: jnp.any(is_done(load, world.rows)), one, world)


def newest_row(rows: Rows) -> jax.Array:
    """int32[] the row whose request came last: requests are served in their order."""
    return jnp.argmax(rows.request).astype(jnp.int32)


def retract(
    config: LoopConfig, world: World, row: jax.Array, owned_from: jax.Array | int = 0
) -> World:
    """Sends a row's request back to the queue, the pages it holds by itself to the pools.

    It keeps what it has generated: when it is admitted again it prefills up to there. The oldest
    request is never the newest unless it runs alone, so it always makes progress.
    """
    rows, tally = world.rows, world.tally
    request = rows.request[row]
    length = rows.length[row]
    reached = jnp.maximum(world.progress[request], length)
    return replace(
        vacate(config, world, row, owned_from),
        waiting=world.waiting.at[request].set(True, mode="drop"),
        progress=world.progress.at[request].set(reached, mode="drop"),
        tally=replace(tally, retracted=tally.retracted + 1, recomputed=tally.recomputed + length),
    )
