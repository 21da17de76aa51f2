"""A decode worker on the host: reservations, arrivals, and the requests that run."""

from collections.abc import Sequence

import jax
import numpy as np

from swa_jax.disagg.bundles import (
    NO_ASK,
    NOT_YET,
    BundleSize,
    HostAsk,
    bundle_shape,
    deliver_all,
    give_up_all,
    reserve_all,
    seat_all,
    tickets_of,
)
from swa_jax.disagg.decode_side import new_arrivals
from swa_jax.disagg.jobs import (
    Job,
    Outcome,
    check_new,
    in_parts,
    padded,
    places_in_parts,
    requests_of,
)
from swa_jax.disagg.prefill_side import Parcel
from swa_jax.models.decoder import DecoderConfig
from swa_jax.serving import cancel, new_world, outputs, release, run_steps, submit
from swa_jax.serving.config import ServingConfig
from swa_jax.serving.model import ServingModel, as_model
from swa_jax.serving.queue import DONE
from swa_jax.serving.requests import FINISH_REASONS
from swa_jax.serving.trees import Tree
from swa_jax.serving.world import World

_submit = jax.jit(submit, static_argnums=0, donate_argnums=1)
_cancel = jax.jit(cancel, donate_argnums=0)
_release = jax.jit(release, donate_argnums=0)
_outputs = jax.jit(outputs, static_argnums=0)


class DecodeWorker:
    """Owns a world and what arrives for it, and drives both. Not for several threads.

    Args:
      model: static.
      config: with role="both".
      params: of the model.
      draft_params: of the source of drafts.
      places: requests that can run or wait here.
      reservations: at once.
      size: of a bundle, the same on both sides.
      world: to start from, placed on devices as the caller likes; by default a new one.
      first_serial: as for `new_inbox`; choose it at random where a worker that starts again could
        still be sent what its former life asked for.

    Attributes:
      world: the state between two calls.
      arrivals: beside it.
      bundle_shape: shapes and dtypes of what `deliver` takes.
      stands: jobs run or wait here, and the last turn got none of them further: what they need is
        held by reservations.

    Raises:
      ValueError: the configuration of a prefill worker.
    """

    def __init__(
        self,
        model: ServingModel | DecoderConfig,
        config: ServingConfig,
        params: Tree,
        *,
        draft_params: Tree = None,
        places: int = 64,
        reservations: int = 16,
        size: BundleSize | None = None,
        world: World | None = None,
        first_serial: int = 1,
    ) -> None:
        """Nothing runs yet."""
        if config.only_prefills:
            raise ValueError(
                f'a decode worker needs ServingConfig(role="both"), got role={config.role!r}'
            )
        self.model, self.config, self.size = as_model(model), config, size or BundleSize()
        self.world = new_world(self.model, config, places) if world is None else world
        self.arrivals = new_arrivals(config, self.world, reservations, first_serial=first_serial)
        self._params, self._draft_params = params, draft_params
        self._places: dict[int, int] = {}  # by name, of those that run
        self.stands, self._seen = False, ()
        self.bundle_shape = bundle_shape(self.model, config, self.size, self.world)

    @property
    def running(self) -> int:
        """Jobs that decode, or wait to go on after a retraction."""
        return len(self._places)

    def reserve(self, jobs: Sequence[Job]) -> tuple[list[HostAsk | None], list[bool]]:
        """Room for what will arrive of at most B jobs, in their order.

        Returns:
          What is lacking of each, None where there is no room now; and whether there never will be.
        """
        count, columns = self.size.pieces, self.config.max_context
        requests = requests_of(jobs, count, columns)
        self.world, self.arrivals, reserved = reserve_all(
            self.config,
            self.world,
            self.arrivals,
            requests.tokens,
            requests.prompt_lens - 1,
            requests.namespace,
        )
        got = jax.device_get(reserved)
        numbers = np.stack(
            [got.ticket.place, got.ticket.serial, got.full_start, got.swa_start, got.length], axis=1
        )
        asks = [
            HostAsk(*numbers[index].tolist()) if got.ok[index] else None
            for index in range(len(jobs))
        ]
        return asks, got.never[: len(jobs)].tolist()

    def deliver(self, bundle: Parcel) -> list[bool]:
        """Takes B pieces in; which were accepted."""
        self.world, self.arrivals, accepted = deliver_all(
            self.model, self.config, self.world, self.arrivals, bundle
        )
        return np.asarray(accepted).tolist()

    def seat(self, jobs: Sequence[tuple[Job, HostAsk]]) -> list[bool]:
        """Gives rows to at most B jobs whose KV is here; False for one that has to wait.

        One with the name of a job that runs here waits until that is done.
        """
        count = self.size.pieces
        requests = requests_of([job for job, _ in jobs], count, self.config.max_context)
        asks = [NO_ASK if job.name in self._places else ask for job, ask in jobs]
        tickets = tickets_of(asks, count)
        self.world, self.arrivals, places = seat_all(
            self.config, self.world, self.arrivals, tickets, requests
        )
        seated = np.asarray(places).tolist()[: len(jobs)]
        for (job, _), place in zip(jobs, seated, strict=True):
            if place != NOT_YET:
                self._places[job.name] = place
        return [place != NOT_YET for place in seated]

    def submit(self, jobs: Sequence[Job]) -> list[bool]:
        """Takes at most B jobs that are computed here from the start; False: no place for it.

        Raises:
          ValueError: more jobs, a name that runs here already or comes twice; none is taken then.
        """
        check_new(jobs, self._places)
        requests = requests_of(jobs, self.size.pieces, self.config.max_context)
        self.world, places = _submit(self.config, self.world, requests)
        taken = np.asarray(places).tolist()[: len(jobs)]
        for job, place in zip(jobs, taken, strict=True):
            if place >= 0:
                self._places[job.name] = place
        return [place >= 0 for place in taken]

    def give_up(self, asks: Sequence[HostAsk]) -> None:
        """Ends reservations; their pages go back."""
        count = self.size.pieces
        for part in in_parts(asks, count):
            tickets = tickets_of(part, count)
            self.world, self.arrivals = give_up_all(self.world, self.arrivals, tickets)

    def cancel(self, names: Sequence[int]) -> None:
        """Ends jobs that run; their pages go back in the next turn."""
        for at in places_in_parts(self._places, names, self.size.pieces):
            self.world = _cancel(self.world, at)

    def turn(self, steps: int = 4) -> list[Outcome]:
        """Runs up to so many steps; what has ended."""
        self.stands = False
        if not self._places:
            return []
        self.world = run_steps(
            self.model,
            self._params,
            self.config,
            self.world,
            steps,
            draft_params=self._draft_params,
        )
        rows = self.world.rows
        status, *seen = jax.device_get((self.world.queue.status, rows.request, rows.length))
        done = [(name, place) for name, place in self._places.items() if status[place] == DONE]
        # A place belongs to one job until it is done, so the same again is the same job.
        before, self._seen = self._seen, tuple(map(tuple, seen))
        self.stands = steps > 0 and not done and before == self._seen
        return [
            outcome for part in in_parts(done, self.size.pieces) for outcome in self._collect(part)
        ]

    def _collect(self, done: Sequence[tuple[int, int]]) -> list[Outcome]:
        """At most B outcomes; their places are free then."""
        at = padded([place for _, place in done], self.size.pieces, -1)
        queue = self.world.queue
        made, reason, cached = jax.device_get(
            (_outputs(self.config, self.world, at), queue.reason, queue.cached)
        )
        self.world = _release(self.world, at)
        outcomes = []
        for (name, place), row, length in zip(done, *made, strict=False):
            del self._places[name]
            words = FINISH_REASONS[reason[place]]
            had = max(0, int(cached[place]))
            outcomes.append(Outcome(name, tuple(row[:length].tolist()), words, had))
        return outcomes
