"""The thread that owns the loop's state: it takes jobs, runs a few steps, and tells the news."""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from time import monotonic
from typing import TypeVar

import numpy as np

from swa_jax.http.device import View
from swa_jax.http.errors import EngineError, StoppingError
from swa_jax.http.figures import Figures, LoopCounts
from swa_jax.http.inbox import Inbox
from swa_jax.http.jobs import Job, Update
from swa_jax.http.world_owner import Served, WorldOwner
from swa_jax.serving import FINISH_REASONS, World
from swa_jax.serving.queue import DONE
from swa_jax.serving.requests import CANCELLED, UNFINISHED

_CUT = "the server is stopping; this request was cut off"

Result = TypeVar("Result")


class Engine:
    """Serves jobs together, as the loop has room for them.

    Its methods may be called from any thread; only its own thread touches the state.

    Args:
      served: what is served, and how.

    Attributes:
      error: what made it fail, None while it has not.
      figures: what it has counted.
      on_failure: called by the engine's thread when it cannot go on.
    """

    def __init__(self, served: Served) -> None:
        """Not started yet."""
        self.served = served
        self.on_failure: Callable[[], None] = lambda: None
        self.figures = Figures(places=served.places)
        self.error: BaseException | None = None
        self._inbox = Inbox(served.places, self.figures)
        self._ready: Future[WorldOwner] = Future()
        self._thread = threading.Thread(target=self._main, daemon=True, name="swa-jax-engine")
        # Of the engine's thread alone.
        self._seated: dict[int, Job] = {}  # by place in the loop's queue
        self._counts = LoopCounts(self.figures)

    def start(self) -> None:
        """Returns when everything is compiled, so that the first job is served at once."""
        self._thread.start()
        self._ready.result()

    def submit(self, jobs: Sequence[Job]) -> None:
        """Takes all of the jobs, or none and raises as `Inbox.submit` does."""
        self._inbox.submit(jobs)

    def cancel(self, jobs: Sequence[Job], counts_as: int = CANCELLED) -> None:
        """Ends jobs; soon nothing is heard of them any more, and their pages come back."""
        self._inbox.cancel(jobs, counts_as)

    def drain(self) -> None:
        """Takes nothing new from here on."""
        self._inbox.draining = True

    def cut(self) -> None:
        """Ends every job that is open, with an error."""
        self.call(lambda _: self._cut())

    def call(self, function: Callable[[World], Result]) -> Future[Result]:
        """What a function gives for the state, in the engine's thread between two rounds."""
        outcome: Future[Result] = Future()

        def run() -> None:
            try:
                outcome.set_result(function(self._ready.result().world))
            except Exception as error:
                outcome.set_exception(error)

        self._inbox.call(run)
        return outcome

    def stop(self) -> None:
        """Ends the thread, and with an error every job that is open."""
        self._inbox.stop()
        if self._thread.ident is not None:
            self._thread.join()

    @property
    def is_taking_jobs(self) -> bool:
        """It has neither failed nor been told to take no more."""
        return not (self._inbox.failed or self._inbox.draining)

    @property
    def open_jobs(self) -> int:
        """Jobs that run, wait or give their pages back."""
        return len(self._inbox.open_jobs)

    # What follows runs in the engine's thread.

    def _main(self) -> None:
        try:
            owner = WorldOwner(self.served)
            self._counts.add(owner.look(self._seen()))
            self._ready.set_result(owner)
            while self._round(owner):
                pass
            self._cut()
            owner.keep()
        except BaseException as error:
            self._fail(error)

    def _round(self, owner: WorldOwner) -> bool:
        """Carries out orders and runs a few steps; False when it was told to stop."""
        orders = self._inbox.take(wait=not self._seated)
        self._cancel(owner, orders.to_cancel)
        self._seat(owner, orders.arrived)
        if self._seated:
            owner.run()
            self._report(owner, owner.look(self._seen()))
        for call in orders.calls:
            call()
        return not orders.stop

    def _cancel(self, owner: WorldOwner, jobs: Sequence[tuple[Job, int]]) -> None:
        places = []
        for job, counts_as in jobs:
            if not job.forgotten:
                job.ended, job.counts_as = True, counts_as
                if job.place >= 0:
                    places.append(job.place)
        if places:
            owner.strike(cancelled=places)

    def _seat(self, owner: WorldOwner, jobs: Sequence[Job]) -> None:
        wanted = [job for job in jobs if not job.ended]
        for job in jobs:
            if job.ended:  # cancelled before it came here
                self._forget(job, CANCELLED)
        for job, place in zip(wanted, owner.enter(wanted), strict=True):
            assert place >= 0, "as many jobs are taken as there are places"
            job.place, job.seen = place, len(job.prompt)
            self._seated[place] = job
            self.figures.prompt_tokens += len(job.prompt)

    def _seen(self) -> np.ndarray:
        seen = np.zeros(self.served.places, np.int32)
        for place, job in self._seated.items():
            seen[place] = job.seen
        return seen

    def _report(self, owner: WorldOwner, view: View) -> None:
        """Tells every job its news, and empties the places of those that are over."""
        if self._counts.add(view):
            owner.forget_stats()
        done = []
        for place, job in self._seated.items():
            self._tell_news(job, view)
            if view.status[place] == DONE:
                done.append(place)
        if done:
            owner.strike(released=done)
        for place in done:
            self._forget(self._seated.pop(place), int(view.reason[place]))

    def _tell_news(self, job: Job, view: View) -> None:
        known, reason = int(view.known[job.place]), int(view.reason[job.place])
        tokens = tuple(view.tokens[job.place, : known - job.seen].tolist())
        if tokens and job.seen == len(job.prompt):
            self.figures.first_token.add(monotonic() - job.came)
        job.seen = known
        if tokens or reason != UNFINISHED:
            self._tell(job, Update(tokens, reason, max(0, int(view.cached[job.place]))))

    def _tell(self, job: Job, update: Update) -> None:
        if not job.ended:
            job.ended = update.reason != UNFINISHED or update.error is not None
            job.deliver(update)

    def _forget(self, job: Job, reason: int) -> None:
        counted = reason if job.counts_as is None else job.counts_as
        self.figures.finished[FINISH_REASONS[counted]] += 1
        self.figures.request.add(monotonic() - job.came)
        job.forgotten = True
        self._inbox.forget(job)

    def _cut(self) -> None:
        jobs = [job for job in self._inbox.open_jobs if not job.ended]
        for job in jobs:
            self._tell(job, Update(error=StoppingError(_CUT)))
        self.cancel(jobs)

    def _fail(self, error: BaseException) -> None:
        self.error = error
        self._inbox.fail()
        for job in self._inbox.open_jobs:
            self._tell(job, Update(error=EngineError()))
        for call in self._inbox.take(wait=False).calls:
            call()
        if self._ready.done():
            self.on_failure()
        else:
            self._ready.set_exception(error)
