"""The loops of all ranks as one compiled program, and what the host asks of them in between.

Leading axis R: ranks. Each has a `World`, or a `SharedWorld`, of its own; the load and the content
are the same for all. A rank whose queue has run dry while requests wait for a rank stops there, so
that it never serves on with less than it would have had.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from swa_jax.counts import held_pages
from swa_jax.data_parallel import each_rank, new_ranks
from swa_jax.replay.content import Content
from swa_jax.replay.engine import Carry
from swa_jax.replay.shared_step import shared_step
from swa_jax.replay.shared_world import SharedWorld, new_shared_world
from swa_jax.replay.step import step, unfinished
from swa_jax.replay.world import Load, LoopConfig, World, new_world, running

AXIS = "data"


@dataclass(frozen=True)
class Looks:
    """Each rank between two slices. int32[R] each."""

    steps: np.ndarray
    completed: np.ndarray
    running: np.ndarray
    waiting: np.ndarray
    full_pages: np.ndarray
    swa_pages: np.ndarray
    refused: np.ndarray


def world_of(carry: Carry) -> World:
    """The world in what a loop carries."""
    return carry.world if isinstance(carry, SharedWorld) else carry


def with_waiting(carry: Carry, waiting: jax.Array) -> Carry:
    """The same carry with another queue, bool[..., N]."""
    if isinstance(carry, SharedWorld):
        return replace(carry, world=replace(carry.world, waiting=waiting))
    return replace(carry, waiting=waiting)


def run_rank(
    config: LoopConfig,
    most: int,
    load: Load,
    content: Content | None,
    weight: jax.Array,
    more: jax.Array,
    carry: Carry,
) -> Carry:
    """Up to `most` steps (static) of one rank; bool[] `more` requests wait for a rank yet."""
    end = world_of(carry).tally.steps + jnp.int32(most)

    def go_on(carry: Carry) -> jax.Array:
        world = world_of(carry)
        fed = jnp.any(world.waiting) | ~more
        return unfinished(world) & fed & (world.tally.steps < end)

    def one(carry: Carry) -> Carry:
        if content is None:
            return step(config, load, weight, carry)
        return shared_step(config, load, content, weight, carry)

    return jax.lax.while_loop(go_on, one, carry)


def _look(carry: Carry) -> tuple[jax.Array, ...]:
    world = world_of(carry)
    tally = world.tally
    count = functools.partial(jnp.sum, dtype=jnp.int32)
    busy, waiting = count(running(world.rows)), count(world.waiting)
    return tally.steps, tally.completed, busy, waiting, *held_pages(world.allocator), tally.refused


class RankLoop:
    """The compiled loops of R ranks, over as many devices as divide them.

    Args:
      config: static sizes of a rank's loop.
      load: all requests.
      content: what their prompts are; None for ranks without a prefix cache.
      weight: int32[2] of a full and an SWA page.
      policy: of the prefix caches.
      ranks: R.
      slice_steps: most steps between two looks.
      devices: to use at most; all there are by default.
    """

    def __init__(
        self,
        config: LoopConfig,
        load: Load,
        content: Content | None,
        weight: jax.Array,
        policy: str,
        ranks: int,
        slice_steps: int,
        devices: int | None = None,
    ) -> None:
        """Compiles the loop."""
        self.config, self.ranks, self._policy = config, ranks, policy
        self._mesh = _mesh(ranks, devices)
        self.devices = 1 if self._mesh is None else self._mesh.size
        # A GPU has room for all of a device's ranks at once, and each launch serves them all.
        self._in_turn = jax.default_backend() == "cpu"
        self.load, self.content, self._weight = self.same((load, content, weight))
        self._make = jax.jit(self._fresh)
        call = functools.partial(run_rank, config, slice_steps)
        program = jax.jit(self.each(call, same=4), donate_argnums=4)
        start = jax.eval_shape(self._make)
        if self._mesh is not None:
            start = jax.tree.map(lambda x: _like(x, self._spread()), start)
        given = self.load, self.content, self._weight, self.same(jnp.zeros((), bool))
        self.program = program.lower(*given, start).compile()
        self._look = jax.jit(self.each(_look)).lower(start).compile()

    def each(self, call: Callable[..., Any], same: int = 0) -> Callable[..., Any]:
        """`each_rank` on these devices."""
        return each_rank(call, mesh=self._mesh, axis=AXIS, same=same, one_by_one=self._in_turn)

    def same(self, values: Any) -> Any:  # noqa: ANN401 - any pytree
        """Arrays where every device has them."""
        if self._mesh is None:
            return jax.tree.map(jnp.asarray, values)
        return jax.device_put(values, NamedSharding(self._mesh, PartitionSpec()))

    def spread(self, values: np.ndarray) -> jax.Array:
        """An array [R, ...] with each rank's part on its device."""
        return jnp.asarray(values) if self._mesh is None else jax.device_put(values, self._spread())

    def start(self, waiting: np.ndarray) -> Carry:
        """Nothing runs yet; bool[R, N] says who waits where."""
        return with_waiting(self._make(), self.spread(waiting))

    def advance(self, carry: Carry, *, more: bool) -> Carry:
        """A slice of steps of every rank; takes its argument's buffers."""
        flag = self.same(jnp.full((), more, bool))
        return self.program(self.load, self.content, self._weight, flag, carry)

    def look(self, carry: Carry) -> Looks:
        """Waits for the slice."""
        return Looks(*(np.asarray(part) for part in jax.device_get(self._look(carry))))

    def _fresh(self) -> Carry:
        nobody = jnp.zeros(self.load.prompt_lens.shape, bool)

        def make() -> Carry:
            if self.content is None:
                return new_world(self.config, self.load, nobody)
            return new_shared_world(self.config, self.load, nobody, self._policy)

        return new_ranks(make, self.ranks, mesh=self._mesh, axis=AXIS)

    def _spread(self) -> NamedSharding:
        assert self._mesh is not None
        return NamedSharding(self._mesh, PartitionSpec(AXIS))


def _like(leaf: jax.ShapeDtypeStruct, place: NamedSharding) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place)


def _mesh(ranks: int, devices: int | None) -> Mesh | None:
    """Of the most devices that share the ranks evenly; None for one."""
    there = jax.local_devices()[:devices]
    count = max(n for n in range(1, len(there) + 1) if ranks % n == 0)
    return None if count == 1 else Mesh(np.array(there[:count]), (AXIS,))
