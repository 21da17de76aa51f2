"""A prefill worker on the host: it computes prompts and reads out their KV."""

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np

from swa_jax.disagg.bundles import BundleSize, HostAsk, HostPiece, bundle_shape, pack_bundle
from swa_jax.disagg.jobs import Job, check_new, places_in_parts, requests_of
from swa_jax.disagg.prefill_side import Parcel
from swa_jax.models.decoder import DecoderConfig
from swa_jax.serving import cancel, end_sent, new_world, ready, release, run_steps, submit
from swa_jax.serving.config import ServingConfig
from swa_jax.serving.model import ServingModel, as_model
from swa_jax.serving.queue import DONE
from swa_jax.serving.requests import FINISH_REASONS
from swa_jax.serving.trees import Tree
from swa_jax.serving.world import World

_submit = jax.jit(submit, static_argnums=0, donate_argnums=1)
_cancel = jax.jit(cancel, donate_argnums=0)
_release = jax.jit(release, donate_argnums=0)
_end_sent = jax.jit(end_sent, static_argnums=0, donate_argnums=1)
_ready = jax.jit(ready, static_argnums=0)


class PrefillWorker:
    """Owns a world and drives it. Not for several threads.

    Args:
      model: static.
      config: with role="prefill"; its window is that of `prefill_window`.
      params: of the model.
      draft_params: of the source of drafts.
      places: requests known at once; others wait on the host.
      size: of a bundle, the same on both sides.
      world: to start from, placed on devices as the caller likes; by default a new one.

    Attributes:
      world: the state between two calls.
      bundle_shape: shapes and dtypes of what `pack` gives.

    Raises:
      ValueError: a configuration of another role.
    """

    def __init__(
        self,
        model: ServingModel | DecoderConfig,
        config: ServingConfig,
        params: Tree,
        *,
        draft_params: Tree = None,
        places: int = 64,
        size: BundleSize | None = None,
        world: World | None = None,
    ) -> None:
        """Nothing runs yet."""
        if not config.only_prefills:
            raise ValueError(
                f'a prefill worker needs ServingConfig(role="prefill"), got role={config.role!r}'
            )
        self.model, self.config, self.size = as_model(model), config, size or BundleSize()
        self.world = new_world(self.model, config, places) if world is None else world
        self._params, self._draft_params = params, draft_params
        self._waiting: deque[Job] = deque()
        self._places: dict[int, int] = {}  # by name
        self._free = places
        self._ready: set[int] = set()
        self._stands = False  # the last turn came to no step, and nothing has come in since
        self._told = False  # something has ended here, and its pages go back in the next turn
        self.bundle_shape = bundle_shape(self.model, config, self.size, self.world)

    @property
    def open_jobs(self) -> int:
        """Jobs that wait, run, or are ready."""
        return len(self._waiting) + len(self._places)

    @property
    def is_busy(self) -> bool:
        """There is something to compute, and room to compute it in.

        False too while what is ready holds all that the rest waits for: until some of it has been
        fetched or is cancelled, another turn would do nothing.
        """
        some = bool(self._waiting) or len(self._places) > len(self._ready)
        return self._told or (some and not self._stands)

    def submit(self, jobs: Iterable[Job]) -> None:
        """Takes jobs, to be computed in this order.

        Raises:
          ValueError: a name that is open here already, or twice among these; none is taken then.
        """
        new = list(jobs)
        check_new(new, {*self._places, *(job.name for job in self._waiting)})
        self._waiting.extend(new)
        self._stands = False

    def is_ready(self, name: int) -> bool:
        """The KV of a job can be sent."""
        return name in self._ready

    def end(self, names: Sequence[int]) -> None:
        """The KV of these has arrived: their pages go to the cache in the next turn."""
        self._note(names)
        for at in places_in_parts(self._places, names, self.size.pieces):
            self.world = _end_sent(self.config, self.world, at)

    def cancel(self, names: Sequence[int]) -> None:
        """Ends jobs; what was computed of them goes to the cache. Unknown names: nothing."""
        self._note(names)
        gone = set(names)
        self._waiting = deque(job for job in self._waiting if job.name not in gone)
        for at in places_in_parts(self._places, names, self.size.pieces):
            self.world = _cancel(self.world, at)

    def cancel_all(self) -> None:
        """Nobody wants any of it."""
        self._waiting.clear()
        self.cancel(list(self._places))

    def turn(self, steps: int = 4) -> tuple[list[int], list[tuple[int, str]]]:
        """Runs up to so many steps.

        Returns:
          Names that have become ready, and (name, reason) of those that have ended since.
        """
        self._seat()
        if not self._places:
            self._told = False
            return [], []
        before = int(self.world.stats.steps)
        self.world = run_steps(
            self.model,
            self._params,
            self.config,
            self.world,
            steps,
            draft_params=self._draft_params,
        )
        queue = self.world.queue
        can, status, reason, taken = jax.device_get(
            (_ready(self.config, self.world), queue.status, queue.reason, self.world.stats.steps)
        )
        places = list(self._places.items())
        new = [name for name, place in places if can[place] and name not in self._ready]
        self._ready.update(new)
        done = [
            (name, FINISH_REASONS[reason[place]]) for name, place in places if status[place] == DONE
        ]
        self._forget([name for name, _ in done])
        self._told = self._told and steps == 0
        self._stands = steps > 0 and int(taken) == before and not done
        if new and len(self._places) > len(self._ready):
            # Their prompts are in the cache now, so that others may need less than they did.
            self.world = replace(self.world, refused_at=jnp.full((), -1, jnp.int32))
        return new, done

    def _note(self, names: Sequence[int]) -> None:
        self._stands = False
        self._told = self._told or any(name in self._places for name in names)

    def pack(self, wanted: Sequence[tuple[int, HostAsk, int, int]]) -> Parcel:
        """Parcel [B] of at most B (name, ask, full_from, swa_from).

        Piece i is refused where job i is not here any more.
        """
        pieces = [
            HostPiece(self._places.get(name, -1), ask, full_from, swa_from)
            for name, ask, full_from, swa_from in wanted
        ]
        return pack_bundle(self.model, self.config, self.size, self.world, pieces)

    def _seat(self) -> None:
        while self._waiting and self._free:
            count = min(len(self._waiting), self._free, self.size.pieces)
            jobs = [self._waiting.popleft() for _ in range(count)]
            requests = requests_of(
                [_prompt_alone(job) for job in jobs], self.size.pieces, self.config.max_context
            )
            self.world, places = _submit(self.config, self.world, requests)
            for job, place in zip(jobs, np.asarray(places).tolist(), strict=False):
                self._places[job.name] = place
            self._free -= count

    def _forget(self, names: Sequence[int]) -> None:
        for at in places_in_parts(self._places, names, self.size.pieces):
            self.world = _release(self.world, at)
        for name in names:
            del self._places[name]
            self._ready.discard(name)
        self._free += len(names)


def _prompt_alone(job: Job) -> Job:
    """What a prefill worker needs of a job: whether it wants a token, and no more."""
    return Job(job.name, job.prompt, min(1, job.max_new_tokens), namespace=job.namespace)
