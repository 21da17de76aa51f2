"""The loop's state on the device, and the programs that change it. For one thread."""

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from swa_jax.http.device import View, enter, look, prompt_columns, strike, without_stats
from swa_jax.http.jobs import Job
from swa_jax.saved_state import restore_world, save_world
from swa_jax.serving import (
    Requests,
    ServingConfig,
    ServingModel,
    World,
    make_requests,
    new_world,
    run_steps,
)
from swa_jax.serving.trees import Tree


@dataclass(frozen=True)
class Served:
    """What is served, and how.

    Args:
      model: static.
      params: of the model.
      config: sizes and choices of the loop.
      draft_params: of `config.draft`, where it has any.
      steps: of the loop between two looks at what came out of it.
      max_waiting: requests known beyond those that can run at once.
      cache_dir: where the prefix cache is kept while the server does not run.
      weights: of the checkpoint, as for `save_world`.
    """

    model: ServingModel
    params: Tree
    config: ServingConfig
    draft_params: Tree = None
    steps: int = 4
    max_waiting: int = 256
    cache_dir: Path | None = None
    weights: str = ""

    @property
    def places(self) -> int:
        """N, requests that can be known at once."""
        return self.config.max_running + self.max_waiting


class WorldOwner:
    """Changes the state in place; every program is compiled when this has been made.

    Args:
      served: static.
    """

    def __init__(self, served: Served) -> None:
        """Compiles, which takes its time."""
        self._served = served
        self._columns = prompt_columns(served.config)
        self.world: World = self._first_world()
        self._warm_up()

    def _first_world(self) -> World:
        """With what an earlier server cached, where it kept it.

        Raises:
          ValueError: what was kept was made under another configuration, or is damaged.
        """
        served = self._served
        if served.cache_dir is not None:
            with contextlib.suppress(FileNotFoundError):
                return self._kept_world(served.cache_dir)
        return new_world(served.model, served.config, served.places)

    def _kept_world(self, cache_dir: Path) -> World:
        served = self._served
        try:
            return restore_world(
                cache_dir, served.model, served.config, served.places, weights=served.weights
            )
        except ValueError as error:
            raise ValueError(
                f"{error}; serve as it was saved, keep this cache elsewhere, or delete {cache_dir}"
            ) from None

    def keep(self) -> None:
        """Saves the prefix cache, if it is to be kept."""
        served = self._served
        if served.cache_dir is not None:
            save_world(
                served.cache_dir, served.model, served.config, self.world, weights=served.weights
            )

    def _warm_up(self) -> None:
        """Runs every program once, on requests that want no tokens."""
        for columns in self._columns:
            nothing = make_requests([[0]], max_new_tokens=0, prompt_columns=columns)
            self.world, place = enter(self._served.config, self.world, nothing)
            self.strike(released=[int(place[0])])
        self.run()
        self.look(np.zeros(self._served.places, np.int32))

    def enter(self, jobs: Sequence[Job]) -> list[int]:
        """The places that the jobs get in the loop's queue, -1 for none."""
        places = []
        for job in jobs:
            requests = self._requests(job)
            self.world, place = enter(self._served.config, self.world, requests)
            places.append(place)
        return [int(place[0]) for place in jax.device_get(places)]

    def _requests(self, job: Job) -> Requests:
        return make_requests(
            [job.prompt],
            max_new_tokens=job.max_new_tokens,
            temperature=job.temperature,
            top_k=job.top_k,
            top_p=job.top_p,
            seed=job.seed,
            ignore_eos=job.ignore_eos,
            prompt_columns=next(width for width in self._columns if width >= len(job.prompt)),
        )

    def run(self) -> None:
        """Some steps of the loop, or fewer where nothing is left to do."""
        served = self._served
        self.world = run_steps(
            served.model,
            served.params,
            served.config,
            self.world,
            served.steps,
            draft_params=served.draft_params,
        )

    def look(self, seen: np.ndarray) -> View:
        """On the host: what came after int32[N] tokens of each place. Waits for the device."""
        width = self._served.steps * (1 + self._served.config.num_drafts)
        return jax.device_get(look(width, self.world, jnp.array(seen)))

    def strike(self, cancelled: Sequence[int] = (), released: Sequence[int] = ()) -> None:
        """Ends the requests at some places, and empties others, whose requests are done."""
        both = np.full((2, self._served.places), -1, np.int32)
        both[0, : len(cancelled)] = cancelled
        both[1, : len(released)] = released
        self.world = strike(self.world, jnp.array(both[0]), jnp.array(both[1]))

    def forget_stats(self) -> None:
        """The loop counts from nothing again."""
        self.world = without_stats(self.world)
