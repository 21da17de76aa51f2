"""What other threads want of the engine's, until it takes it."""

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from swa_jax.http.errors import EngineError, QueueFullError, StoppingError
from swa_jax.http.figures import Figures
from swa_jax.http.jobs import Job


@dataclass
class Orders:
    """What has come in since the last time."""

    arrived: list[Job] = field(default_factory=list)
    to_cancel: list[tuple[Job, int]] = field(default_factory=list)  # and the reason that counts
    calls: list[Callable[[], None]] = field(default_factory=list)
    stop: bool = False

    def __bool__(self) -> bool:
        return bool(self.arrived or self.to_cancel or self.calls or self.stop)


class Inbox:
    """Takes jobs from any thread while there are places for them.

    Args:
      places: jobs that may be open at once.
      figures: where refused jobs are counted.
    """

    def __init__(self, places: int, figures: Figures) -> None:
        """Empty."""
        self.places = places
        self.failed = False
        self.draining = False
        self._figures = figures
        self._changed = threading.Condition()
        self._open: set[Job] = set()
        self._orders = Orders()

    def submit(self, jobs: Sequence[Job]) -> None:
        """Takes all of the jobs, or none.

        Raises:
          EngineError: the engine has failed.
          QueueFullError: there are not as many places.
          StoppingError: nothing new is taken any more.
        """
        with self._changed:
            if self.failed:
                raise EngineError
            if self.draining:
                self._figures.refused["stopping"] += len(jobs)
                raise StoppingError("the server is stopping and takes no new requests")
            if len(jobs) > self.places - len(self._open):
                self._figures.refused["queue_full"] += len(jobs)
                raise QueueFullError(
                    f"the queue is full: {len(self._open)} of {self.places} sequences are running "
                    f"or waiting and {len(jobs)} more were asked for; try again later"
                )
            self._open.update(jobs)
            self._orders.arrived.extend(jobs)
            self._changed.notify()

    def cancel(self, jobs: Sequence[Job], counts_as: int) -> None:
        """Orders the end of jobs; those that are over already are left alone."""
        with self._changed:
            self._orders.to_cancel.extend((job, counts_as) for job in jobs)
            self._changed.notify()

    def call(self, function: Callable[[], None]) -> None:
        """Orders a call in the engine's thread.

        Raises:
          StoppingError: that thread takes no more orders.
        """
        with self._changed:
            if self.failed or self._orders.stop:
                raise StoppingError("the engine has ended")
            self._orders.calls.append(function)
            self._changed.notify()

    def stop(self) -> None:
        """Orders the end of the thread."""
        with self._changed:
            self.draining = True
            self._orders.stop = True
            self._changed.notify()

    def take(self, *, wait: bool) -> Orders:
        """The orders so far; with `wait` there is at least one."""
        with self._changed:
            while wait and not self._orders:
                self._changed.wait()
            orders, self._orders = self._orders, Orders(stop=self._orders.stop)
            return orders

    def fail(self) -> None:
        """Nothing is taken from here on, since nobody would serve it."""
        with self._changed:
            self.failed = True

    def forget(self, job: Job) -> None:
        """The job's place is empty again."""
        with self._changed:
            self._open.discard(job)

    @property
    def open_jobs(self) -> list[Job]:
        """Jobs that run, wait or give their pages back."""
        with self._changed:
            return list(self._open)
