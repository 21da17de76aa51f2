"""One step of the replay, and a bounded run of steps: a single compiled `while_loop`.

evict -> finish -> admit -> retract if short -> grow -> count
"""

import functools
from dataclasses import replace

import jax
import jax.numpy as jnp

from swa_jax.counts import held_pages
from swa_jax.heavier import heavier
from swa_jax.leave_windows import leave_windows
from swa_jax.only_if import while_any
from swa_jax.paging import pages_for
from swa_jax.replay.admit import admit
from swa_jax.replay.grow import decode_demand, grow, plan_growth
from swa_jax.replay.release import finish, newest_row, retract
from swa_jax.replay.world import Load, LoopConfig, Rows, World, running


def evict(config: LoopConfig, world: World) -> World:
    """Gives back every SWA page that has left its row's window."""
    rows = world.rows
    allocator, evicted = leave_windows(
        world.allocator,
        rows.table,
        rows.length,
        rows.evicted,
        running(rows),
        step_pages=config.step_pages,
    )
    return replace(world, allocator=allocator, rows=replace(rows, evicted=evicted))


def more_than_one(rows: Rows) -> jax.Array:
    """bool[] the newest row is not the oldest, so one can be sent back."""
    return jnp.sum(running(rows), dtype=jnp.int32) > 1


def is_stuck(config: LoopConfig, world: World) -> jax.Array:
    """bool[] the decoding rows cannot all go on, or no row at all can."""
    demand = decode_demand(config, world)
    idle = jnp.sum(plan_growth(config, world, demand), dtype=jnp.int32) == 0
    return ~demand.fits | idle


def make_room(config: LoopConfig, world: World) -> tuple[World, jax.Array]:
    """Retracts the newest requests until this step can do something; int32[R] tokens to add."""

    def must_retract(world: World) -> jax.Array:
        return more_than_one(world.rows) & is_stuck(config, world)

    def back(world: World) -> World:
        return retract(config, world, newest_row(world.rows))

    world = while_any(must_retract, back, world)
    return world, plan_growth(config, world, decode_demand(config, world))


def count(config: LoopConfig, world: World, page_weight: jax.Array) -> World:
    """Brings the tally up to date, after the step's growth."""
    tally, rows = world.tally, world.rows
    full, swa = held_pages(world.allocator)
    all_full = jnp.sum(pages_for(rows.length, config.pool.page_size), dtype=jnp.int32)
    pair = jnp.stack([full, swa])
    more = heavier(pair, tally.peak_pair, page_weight)
    return replace(
        world,
        tally=replace(
            tally,
            steps=tally.steps + 1,
            peak_full=jnp.maximum(tally.peak_full, full),
            peak_swa=jnp.maximum(tally.peak_swa, swa),
            peak_all_full=jnp.maximum(tally.peak_all_full, all_full),
            peak_running=jnp.maximum(tally.peak_running, jnp.sum(running(rows), dtype=jnp.int32)),
            peak_pair=jnp.where(more, pair, tally.peak_pair),
        ),
    )


def step(config: LoopConfig, load: Load, page_weight: jax.Array, world: World) -> World:
    """One step of the engine: everything that a scheduler does between two model calls."""
    world = evict(config, world)
    world = finish(config, load, world)
    world = admit(config, world)
    world, tokens = make_room(config, world)
    world = grow(config, world, tokens)
    return count(config, world, page_weight)


def unfinished(world: World) -> jax.Array:
    """bool[] something waits or runs."""
    return jnp.any(world.waiting) | jnp.any(running(world.rows))


@functools.partial(jax.jit, static_argnums=(0, 4), donate_argnums=3)
def run_steps(
    config: LoopConfig, load: Load, page_weight: jax.Array, world: World, most: int
) -> World:
    """Runs up to `most` steps (static), or until nothing is left to do."""
    end = world.tally.steps + jnp.int32(most)

    def go_on(world: World) -> jax.Array:
        return unfinished(world) & (world.tally.steps < end)

    return jax.lax.while_loop(go_on, functools.partial(step, config, load, page_weight), world)
