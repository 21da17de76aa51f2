"""An allocator alone: rows that grow, fork, leave their windows, are rolled back and given up."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

import swa_jax as swa
from swa_jax.counts import held_pages

from .dice import roll, seed_of
from .planted import Plant
from .rows_calls import TO_EMPTY_ROWS, TO_LIVE_ROWS, give_up, wrong_now
from .rows_load import COUNTS, Rows, add, row_laws
from .watch import is_intact, look


def step(rows: Rows, weights: jax.Array, plant: Plant) -> Rows:
    """One call, on a row by lot, and a look at the laws.

    Args:
      rows: before the step.
      weights: int32[calls] how often each is chosen, first those to empty rows.
      plant: a mistake to be made.
    """
    seed = seed_of(rows.seed, rows.watch.steps)
    row = roll(seed, 1, 0, rows.table.shape[0])
    is_empty = rows.reserved[row] == 0
    first = len(TO_EMPTY_ROWS)
    place = jnp.arange(weights.shape[0], dtype=jnp.int32)
    chances = jnp.cumsum(jnp.where((place < first) == is_empty, weights, 0), dtype=jnp.int32)
    branch = jnp.sum(chances <= roll(seed, 2, 0, chances[-1]), dtype=jnp.int32)
    wrong, ended = wrong_now(plant, rows.watch.steps), rows.counts["ended"]
    calls = TO_EMPTY_ROWS + TO_LIVE_ROWS
    inside = seed_of(seed, jnp.int32(3))
    rows = jax.lax.switch(branch, calls, rows, row, inside, wrong)
    held, _ = held_pages(rows.state)
    full = held * 1000 >= jnp.int32(rows.config.full_pages) * 999
    rows = add(rows, **{"steps_at_99.9_percent": full})
    mapped = rows.state.full_to_swa
    idle = jnp.where(rows.counts["ended"] > ended, 0, rows.idle + 1)
    return rows._replace(
        memory=jnp.where(mapped > 0, mapped, rows.memory),
        idle=idle,
        watch=look(rows.watch, row_laws(rows)),
    )


def law_names(rows: Rows) -> list[str]:
    """Of what `step` looks at."""
    return list(jax.eval_shape(row_laws, rows))


@functools.partial(jax.jit, donate_argnums=0)
def run_block(rows: Rows, weights: jax.Array, goal: jax.Array, plant: Plant) -> Rows:
    """Steps until int32[] `goal` requests have ended, or a law has broken."""
    watch = rows.watch._replace(looks=jnp.int32(0))
    rows = rows._replace(counts=dict.fromkeys(COUNTS, jnp.int32(0)), watch=watch)

    def go_on(rows: Rows) -> jax.Array:
        return is_intact(rows.watch) & (rows.counts["ended"] < goal)

    return jax.lax.while_loop(go_on, lambda rows: step(rows, weights, plant), rows)


@functools.partial(jax.jit, donate_argnums=0)
def give_all_up(rows: Rows) -> Rows:
    """Every row goes, and the group ends."""
    count = rows.table.shape[0]
    rows = jax.lax.fori_loop(0, count, lambda row, rows: give_up(rows, row, jnp.int32(0)), rows)
    return rows._replace(state=swa.free_group_end(rows.state))
