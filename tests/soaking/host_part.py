"""The part with a host tier: pages and whole requests go to host memory and come back.

The host is asked between slices of the loop, so this part is no single program. A slice is one, in
which every law is looked at after every step; so is what the host did before it, and each request
that leaves or comes back.
"""

from __future__ import annotations

import dataclasses
import functools
import random
from collections import Counter
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np

import swa_jax as swa
from swa_jax import serving
from swa_jax.host_cache import HostCache, HostConfig, HostedServing, MemoryStorage
from swa_jax.host_cache import hosted as between_slices
from swa_jax.host_cache.check import check_index
from swa_jax.serving import HostedRequest, ServingConfig
from swa_jax.serving.hosted import resume_from_host, retract_to_host
from swa_jax.serving.queue import EMPTY, HOSTED
from swa_jax.serving.world import NO_REQUEST
from swa_jax.serving.world_pools import world_pools

from .asking import KINDS, Shape
from .dice import seed_of
from .laws import world_laws
from .loops import (
    COUNTS,
    Load,
    Static,
    collect,
    disturb,
    law_names,
    new_load,
    refill,
    spoiled,
)
from .part import Left
from .planted import Plant, no_plant
from .serving_part import MODEL, NEW, PLACES, VOCAB, WINDOW
from .take_apart import take_apart
from .traces import Traces, load_traces
from .watch import is_intact, look, raise_if_broken
from .weather import Block, Weather

CONFIG = ServingConfig(
    swa.PoolConfig(96, 48, 4, WINDOW - 1),
    68,
    max_running=3,
    chunk_tokens=8,
    prefill_rows=2,
    max_new_tokens=NEW,
)
_HOST_TOKENS, _HOST_SWA, _STORED_PAGES = 480, 240, 400
_SLICE = 8  # steps
_PATIENCE = 500  # turns in which nobody ends
NEEDS = (
    *KINDS,
    "hosted",
    "resumed",
    "resume_refused",
    "cancelled_on_the_host",
    "restored_full_tokens",
    "restored_swa_tokens",
    "pages_on_the_host",
    "cache_hits",
    "session_hits",
    "cancelled_running",
    "slices_of_several_steps",
)


@functools.partial(jax.jit, static_argnums=0, donate_argnums=1)
def _between(static: Static, load: Load, traces: Traces, weather: Weather) -> Load:
    """Between two slices: who is done leaves, others come, some are cancelled."""
    seed = seed_of(load.seed, load.watch.steps)
    load = collect(static, load, seed)
    load = refill(static, load, traces, weather, seed)
    return disturb(load, weather, seed)


def _laws(static: Static, load: Load, goes_on: jax.Array) -> dict[str, jax.Array]:
    return world_laws(static.config, load.world) | load.texts | {"it_goes_on": goes_on}


@functools.partial(jax.jit, static_argnums=0, donate_argnums=1)
def _look(static: Static, load: Load, goes_on: jax.Array) -> Load:
    return load._replace(watch=look(load.watch, _laws(static, load, goes_on)))


@functools.partial(jax.jit, static_argnums=0, donate_argnums=1)
def _slice(static: Static, load: Load, steps: jax.Array, goes_on: jax.Array, plant: Plant) -> Load:
    """What `serving.run_steps` does, with a look at every law after each step."""

    def more(carry: tuple[Load, jax.Array]) -> jax.Array:
        load, left = carry
        return serving.unfinished(load.world) & (left > 0) & is_intact(load.watch)

    def one(carry: tuple[Load, jax.Array]) -> tuple[Load, jax.Array]:
        load, left = carry
        world = spoiled(static.config, load.world, plant, load.watch.steps)
        world = serving.step(static.model, static.config, None, None, world)
        load = load._replace(world=world)
        return load._replace(watch=look(load.watch, _laws(static, load, goes_on))), left - 1

    return jax.lax.while_loop(more, one, (load, steps))[0]


class HostPart:
    """The loop over a host tier, and requests that wait on the host with their KV."""

    group, needs = "host tier", NEEDS

    def __init__(
        self, policy: str, seed: int, *, stored: bool = False, plant: Plant | None = None
    ) -> None:
        """Nothing has come yet."""
        self.name = f"host tier, {policy}"
        self._static = Static(MODEL, CONFIG, Shape.of(CONFIG, VOCAB, 2))
        self._load: Load = new_load(self._static, PLACES, seed)
        self._traces = load_traces()
        self._plant = no_plant() if plant is None else plant
        self._names = law_names(self._static, self._load)
        world = self._load.world
        assert world.cache is not None
        tier = HostConfig.beside(CONFIG.pool, _HOST_TOKENS, _HOST_SWA)
        below = {"storage": MemoryStorage(_STORED_PAGES), "fingerprint": b"soak"} if stored else {}
        pools = world_pools(MODEL, CONFIG, world)
        self._host = HostCache(tier, world.cache, pools, policy, **below)
        self._serving = HostedServing(self._host, MODEL, CONFIG, slice_steps=_SLICE)
        self._away: list[HostedRequest] = []
        self._dice, self._found = random.Random(seed), Counter[str]()
        self._stall = 0

    def run(self, goal: int, quota: int, block: Block) -> Counter[str]:
        """See `Part.run`."""
        counts = dict.fromkeys(COUNTS, jnp.int32(0))
        watch = self._load.watch._replace(looks=jnp.int32(0))
        fresh = self._load._replace(counts=counts, quota=jnp.int32(quota), watch=watch)
        self._load = jax.tree.map(jnp.array, fresh)
        steps, self._found = self._steps(), Counter()
        restored = self._serving.restored_full, self._serving.restored_swa
        weather, ended = dataclasses.replace(block, cancel=8, fence=0).weather, 0
        while ended < goal:
            self._load = _between(self._static, self._load, self._traces, weather)
            left, now = int(self._load.quota), int(self._load.counts["ended"])
            self._stall, ended = 0 if now > ended else self._stall + 1, now
            empty = not np.asarray(self._load.world.queue.status != EMPTY).any()
            if empty and left == 0:
                break
            self._turn()
        found = self._found
        found.update({name: int(count) for name, count in self._load.counts.items()})
        found["steps"] = self._steps() - steps
        found["looks_between_steps"] = int(self._load.watch.steps - watch.steps) - found["steps"]
        found["looks"] = int(self._load.watch.looks)
        found["restored_full_tokens"] = self._serving.restored_full - restored[0]
        found["restored_swa_tokens"] = self._serving.restored_swa - restored[1]
        found["pages_on_the_host"] = self._host.index.full_pages
        check_index(self._host.index)
        return found

    def _turn(self) -> None:
        """A slice, and perhaps a request that leaves for the host or comes back."""
        # The tier's own loop over slices, with these in place of its own.
        with mock.patch.object(between_slices, "run_steps", self._run_steps):
            world = self._serving.run(None, self._load.world, _SLICE)
        self._see(world)
        rows = [int(place) for place in np.asarray(self._load.world.rows.request)]
        running = [place for place in rows if place != NO_REQUEST]
        if running and len(self._away) < 3 and self._dice.random() < 0.3:
            place = self._dice.choice(running)
            world, gone = retract_to_host(MODEL, CONFIG, self._load.world, place)
            self._see(world)
            if gone is not None:
                self._away.append(gone)
                self._found["hosted"] += 1
        if self._away and (self._dice.random() < 0.4 or not running):
            self._come_back(self._away.pop(self._dice.randrange(len(self._away))))

    def _come_back(self, gone: HostedRequest) -> None:
        queue = self._load.world.queue
        waits = int(queue.status[gone.place]) == HOSTED
        waits = waits and int(queue.ticket[gone.place]) == gone.ticket
        world, ok = resume_from_host(MODEL, CONFIG, self._load.world, gone)
        self._see(world)
        assert waits or not ok, f"{self.name}: a request that was cancelled came back"
        self._found["resumed"] += ok
        self._found["resume_refused"] += waits and not ok
        self._found["cancelled_on_the_host"] += not waits
        if waits and not ok:
            self._away.append(gone)

    def _run_steps(
        self,
        model: serving.ServingModel,
        params: None,
        config: ServingConfig,
        world: serving.World,
        steps: int,
        *,
        draft_params: None,
    ) -> serving.World:
        """In place of `serving.run_steps`."""
        self._see(world)
        before, goes_on = self._steps(), jnp.asarray(self._stall < _PATIENCE)
        self._load = _slice(self._static, self._load, jnp.int32(steps), goes_on, self._plant)
        self._raise_if_broken("in a slice")
        self._found["slices_of_several_steps"] += self._steps() - before > 1
        return self._load.world

    def _see(self, world: serving.World) -> None:
        load = self._load._replace(world=world)
        self._load = _look(self._static, load, jnp.asarray(self._stall < _PATIENCE))
        self._raise_if_broken("between slices")

    def _raise_if_broken(self, where: str) -> None:
        more = f"{where}, {self._steps()} steps of the loop so far"
        raise_if_broken(self.name, self._names, self._load.watch, more)

    def _steps(self) -> int:
        return int(self._load.world.stats.steps)

    def close(self) -> Left:
        """See `Part.close`."""
        self._host.wait()
        check_index(self._host.index)
        left = take_apart(self._load.world)
        self._host.close()
        return left
