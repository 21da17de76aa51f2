"""Runs many servers at once, by counts of pages: one compiled loop, a step of each in every turn.

It is the replay (`swa_jax.replay`) without page ids and without a prefix cache, and comes to the
same figures: pages leave their window, what is done leaves, the oldest that fit come in, the newest
go back where memory is short, then every request grows.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from swa_jax.planner.limits import Limits
from swa_jax.planner.loads import Load
from swa_jax.planner.sim_step import sim_step, unfinished
from swa_jax.planner.sim_world import SimShape, SimWorld, new_sim_world
from swa_jax.wide import wide_value

__all__ = ("Figures", "SimShape", "simulate")

SLICE_STEPS = 256  # between two looks of the host, so that it can be interrupted


@dataclass(frozen=True)
class Figures:
    """What the servers came to, int64[B] each; sums are over the steps of a server."""

    steps: np.ndarray  # in which something ran
    clock: np.ndarray  # steps to its end, with those in which nobody was there
    completed: np.ndarray  # requests
    retracted: np.ndarray  # retractions
    recomputed: np.ndarray  # tokens
    longest_wait: np.ndarray  # steps, from arrival
    peak_full: np.ndarray  # pages
    peak_swa: np.ndarray  # pages
    peak_running: np.ndarray  # requests
    peak_pair: np.ndarray  # int64[B, 2] pages, when their bytes together were most
    peak_cost: np.ndarray  # of one budget
    sum_running: np.ndarray
    sum_full_pages: np.ndarray
    sum_swa_pages: np.ndarray
    sum_full_tokens: np.ndarray
    sum_swa_tokens: np.ndarray
    sum_cost: np.ndarray

    def of(self, server: int) -> dict[str, int | list[int]]:
        """The figures of one server."""
        return {name: values[server].tolist() for name, values in vars(self).items()}

    def mean(self, name: str) -> np.ndarray:
        """float64[B] the mean of a sum over the steps."""
        return getattr(self, f"sum_{name}") / np.maximum(self.steps, 1)


def simulate(
    shape: SimShape,
    limits: Limits,
    load: Load,
    on_slice: Callable[[int, int], None] | None = None,
    enough: Callable[[np.ndarray, np.ndarray], bool] | None = None,
) -> Figures:
    """Serves every request of every server.

    A request that is longer than what its server can hold at all never ends: leave it out.

    Args:
      shape: static sizes and rules.
      limits: leaves [B, ...].
      load: leaves [B, ...].
      on_slice: called now and then with the requests that are completed and those that there are.
      enough: asked now and then with bool[B] whether each server is at its end, and int[B] its
        steps; where it says so, the rest is left unfinished.

    Returns:
      `Figures` of the B servers.
    """
    world = _start(shape, load.count.shape[0])
    total = int(np.asarray(load.count, np.int64).sum())
    while True:
        world, more = _run(shape, limits, load, world, SLICE_STEPS)
        if on_slice is not None:
            on_slice(int(np.asarray(world.tally.completed, np.int64).sum()), total)
        more = np.asarray(more)
        if not more.any() or (enough is not None and enough(~more, np.asarray(world.tally.steps))):
            return _figures(world)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _start(shape: SimShape, servers: int) -> SimWorld:
    def all_alike(leaf: jax.Array) -> jax.Array:
        return jnp.broadcast_to(leaf, (servers, *leaf.shape))

    return jax.tree.map(all_alike, new_sim_world(shape))


@functools.partial(jax.jit, static_argnums=(0, 4), donate_argnums=3)
def _run(
    shape: SimShape, limits: Limits, load: Load, world: SimWorld, most: int
) -> tuple[SimWorld, jax.Array]:
    """Up to `most` steps of every server, and bool[B] which are not at their end."""
    step = jax.vmap(functools.partial(sim_step, shape))
    more = jax.vmap(unfinished)

    def go_on(carry: tuple[jax.Array, SimWorld]) -> jax.Array:
        return (carry[0] < most) & jnp.any(more(load, carry[1]))

    def turn(carry: tuple[jax.Array, SimWorld]) -> tuple[jax.Array, SimWorld]:
        # A server at its end has nothing to do in a step, so none needs to be kept from it.
        return carry[0] + 1, step(limits, load, carry[1])

    _, world = jax.lax.while_loop(go_on, turn, (jnp.int32(0), world))
    return world, more(load, world)


def _figures(world: SimWorld) -> Figures:
    values = jax.device_get(vars(world.tally) | {"clock": world.clock})
    wide = {name for name in values if name.startswith("sum_") or name == "recomputed"}
    return Figures(
        **{
            name: wide_value(value) if name in wide else np.asarray(value, np.int64)
            for name, value in values.items()
        }
    )
