"""Prefill on one side, decode on the other, as one compiled program for each block."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from swa_jax.counts import held_pages
from swa_jax.serving.config import ServingConfig
from swa_jax.serving.world import World

from .laws import TEXT_LAWS, world_laws
from .pair_load import COUNTS, Pair, Sides, add
from .pair_turn import is_over, turn
from .traces import Traces
from .watch import is_intact, look
from .weather import Weather

_PATIENCE = 400  # turns in which nothing at all may happen


def _laws(sides: Sides, pair: Pair) -> dict[str, jax.Array]:
    """Of both sides."""

    def of(config: ServingConfig, world: World, name: str, inbox=None) -> dict[str, jax.Array]:
        return {f"{name}.{law}": ok for law, ok in world_laws(config, world, inbox).items()}

    laws = of(sides.prefill, pair.prefill, "prefill")
    laws |= of(sides.decode, pair.decode, "decode", pair.arrivals.inbox)
    return laws | {f"decode.{law}": pair.texts[law] for law in TEXT_LAWS}


def _moves(pair: Pair) -> jax.Array:
    """int32[] grows with everything that gets on."""
    stats = [
        getattr(world.stats, name)
        for world in (pair.prefill, pair.decode)
        for name in ("generated", "prefilled", "finished")
    ]
    jobs = pair.jobs
    return sum(stats, jnp.sum(jobs.full_from + jobs.swa_from + jobs.stage, dtype=jnp.int32))


def step(sides: Sides, pair: Pair, traces: Traces, weather: Weather) -> Pair:
    """One turn, and a look at the laws."""
    before = _moves(pair)
    pair = turn(sides, pair, traces, weather)
    idle = jnp.where((_moves(pair) != before) | is_over(pair), 0, pair.idle + 1)
    held, _ = held_pages(pair.decode.allocator)
    full = held * 1000 >= jnp.int32(sides.decode.pool.full_pages) * 999
    pair = add(pair._replace(idle=idle), **{"steps_at_99.9_percent": full})
    laws = _laws(sides, pair) | {"it_goes_on": idle < _PATIENCE}
    return pair._replace(watch=look(pair.watch, laws))


def law_names(sides: Sides, pair: Pair) -> list[str]:
    """Of what `step` looks at."""
    return [*jax.eval_shape(functools.partial(_laws, sides), pair), "it_goes_on"]


@functools.partial(jax.jit, static_argnums=0, donate_argnums=1)
def run_block(
    sides: Sides, pair: Pair, traces: Traces, weather: Weather, goal: jax.Array, quota: jax.Array
) -> Pair:
    """Turns until int32[] `goal` jobs have ended or nobody is left, or a law has broken.

    Args:
      sides: what is compiled.
      pair: taken over.
      traces: both.
      weather: of this block.
      goal: jobs.
      quota: jobs that may still come, in this block and later.
    """
    watch = pair.watch._replace(looks=jnp.int32(0))
    counts = dict.fromkeys(COUNTS, jnp.int32(0))
    pair = pair._replace(quota=quota, counts=counts, watch=watch)

    def go_on(pair: Pair) -> jax.Array:
        some = (pair.quota > 0) | ~is_over(pair)
        return is_intact(pair.watch) & (pair.counts["ended"] < goal) & some

    return jax.lax.while_loop(go_on, lambda pair: step(sides, pair, traces, weather), pair)
