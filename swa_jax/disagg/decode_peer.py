"""A decode worker that has its prompts computed by a prefill side.

The way of a job: PREFILL (computed there) -> READY -> ASKED (room is reserved here, pieces are on
their way) -> ARRIVED (all KV is here, the prefill side may forget it) -> RUNNING -> an Outcome.
"""

import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from swa_jax.disagg.bundles import HostAsk, host_pieces
from swa_jax.disagg.decode_worker import DecodeWorker
from swa_jax.disagg.jobs import LOST, Job, Outcome
from swa_jax.disagg.links import Arriving, Channel, LinkError, Receiver
from swa_jax.serving.requests import CANCELLED, FINISH_REASONS, REJECTED

_GONE = (EOFError, OSError)
PREFILL, READY, ASKED, ARRIVED, RUNNING = "prefill", "ready", "asked", "arrived", "running"


@dataclass
class _Open:
    """A job that is not done."""

    job: Job
    stage: str = PREFILL
    ask: HostAsk | None = None  # from ASKED on
    pieces_left: int = 0
    deadline: float = float("inf")  # for all of its pieces


@dataclass
class _Way:
    """A bundle on its way."""

    arriving: Arriving
    names: list[int]
    deadline: float


@dataclass
class Traffic:
    """What was asked for so far, in tokens. Times `token_bytes` it is bytes."""

    requests: int = 0
    tokens: int = 0  # of all of them, each as if nothing were here
    full_tokens: int = 0  # in full layers
    swa_tokens: int = 0  # in SWA layers
    bundles: int = 0  # that came, each as large as `BundleSize` says
    refusals: int = 0  # times that there was no room for a request yet

    def add(self, ask: HostAsk) -> None:
        """Counts one request."""
        self.requests += 1
        self.tokens += ask.length
        self.full_tokens += ask.length - ask.full_start
        self.swa_tokens += ask.length - ask.swa_start


class DecodePeer:
    """Gives jobs to one prefill side, and runs them on once their KV is here.

    Args:
      worker: that decodes.
      channel: to the prefill side.
      receiver: by which KV comes from there.
      timeout: seconds that the KV of a job may take after it was asked for.
      on_stage: told (name, stage) whenever a job gets further; True from it cancels the job.

    Attributes:
      open: the prefill side is there. When it is gone, jobs whose KV has not arrived end as LOST.
      traffic: what was asked for so far.
    """

    def __init__(
        self,
        worker: DecodeWorker,
        channel: Channel,
        receiver: Receiver,
        *,
        timeout: float = 60.0,
        on_stage: Callable[[int, str], bool] | None = None,
    ) -> None:
        """Nothing to do yet."""
        self.worker, self.open, self.traffic = worker, True, Traffic()
        self._channel, self._receiver = channel, receiver
        self._timeout, self._on_stage = timeout, on_stage
        self._jobs: dict[int, _Open] = {}
        self._ready: deque[int] = deque()
        self._arrived: deque[int] = deque()
        self._ways: deque[_Way] = deque()
        self._outcomes: list[Outcome] = []
        self._may_fit = True

    @property
    def open_jobs(self) -> int:
        """Jobs without an outcome."""
        return len(self._jobs)

    def submit(self, jobs: Iterable[Job]) -> None:
        """Takes jobs. What they need more than the pools hold, they get as "rejected".

        Raises:
          ValueError: a name that is open already.
        """
        new = list(jobs)
        for job in new:
            if job.name in self._jobs:
                raise ValueError(f"a job named {job.name} is open already")
            self._jobs[job.name] = _Open(job)
        self._tell("submit", new)
        if not self.open:
            self._drop([job.name for job in new], LOST)

    def cancel(self, names: Sequence[int]) -> None:
        """Ends jobs, wherever they are on their way; unknown names: nothing."""
        known = [self._jobs[name] for name in names if name in self._jobs]
        runs = [entry.job.name for entry in known if entry.stage == RUNNING]
        self.worker.cancel(runs)
        self._drop(
            [entry.job.name for entry in known if entry.stage != RUNNING], FINISH_REASONS[CANCELLED]
        )

    def turn(self, steps: int = 4) -> list[Outcome]:
        """Hears what there is, takes in what has arrived, asks for more, decodes a few steps."""
        self._listen()
        self._unpack()
        self._seat()
        self._ask()
        self._time_out()
        done = self.worker.turn(steps)
        for outcome in done:
            del self._jobs[outcome.name]
        self._may_fit = self._may_fit or bool(done)
        outcomes, self._outcomes = self._outcomes + done, []
        return outcomes

    def wait(self, timeout: float) -> None:
        """Returns when the prefill side says something, or after so many seconds."""
        if not self.open:
            return
        try:
            self._channel.poll(timeout)
        except _GONE:
            self._lose()

    @property
    def is_waiting(self) -> bool:
        """Nothing can be done before the prefill side says something or a bundle arrives."""
        return not (self.worker.running or self._arrived or self._outcomes)

    def close(self) -> None:
        """Says goodbye; what is open is given up."""
        self._tell("bye")
        self._lose()

    # ---- what the prefill side says

    def _listen(self) -> None:
        try:
            while self.open and self._channel.poll():
                self._hear(self._channel.recv())
        except (*_GONE, LinkError):
            self._lose()

    def _hear(self, message: tuple) -> None:
        kind, *rest = message
        if kind == "ready":
            for name in rest[0]:
                if self._is_at(name, PREFILL):
                    self._ready.append(name)
                    self._reach(name, READY)
        elif kind == "ended":
            ended = dict(rest[0])
            known = [name for name in ended if self._is_at(name, PREFILL, READY, ASKED)]
            for name in known:
                rejected = ended[name] == FINISH_REASONS[REJECTED]
                self._drop([name], ended[name] if rejected else LOST)
        elif kind == "bundle":
            offered, names = rest
            arriving = self._receiver.fetch(offered, self.worker.bundle_shape)
            self._ways.append(_Way(arriving, names, time.monotonic() + self._timeout))
        elif kind == "gone":
            self._drop([name for name in rest[0] if self._is_at(name, READY, ASKED)], LOST)
        else:
            raise ValueError(f"unknown message from the prefill side: {kind!r}")

    def _is_at(self, name: int, *stages: str) -> bool:
        return name in self._jobs and self._jobs[name].stage in stages

    # ---- what arrives

    def _unpack(self) -> None:
        while self._ways and self._ways[0].arriving.is_ready():
            way = self._ways.popleft()
            try:
                bundle = way.arriving.take()
            except LinkError:
                self._lose()
                return
            accepted = self.worker.deliver(bundle)
            self.traffic.bundles += 1
            for name, good in zip(way.names, accepted, strict=False):
                # A piece for a job that was cancelled finds no reservation, and that is that.
                if self._is_at(name, ASKED):
                    self._count_piece(name, good)

    def _count_piece(self, name: int, good: bool) -> None:
        entry = self._jobs[name]
        if not good:
            self._drop([name], LOST)
            return
        entry.pieces_left -= 1
        if entry.pieces_left == 0:
            self._complete([name])
        else:
            self._reach(name, ASKED)

    def _complete(self, names: Sequence[int]) -> None:
        """All KV is here: the prefill side may forget it."""
        self._tell("arrived", list(names))
        for name in names:
            self._arrived.append(name)
            self._reach(name, ARRIVED)

    # ---- who comes in

    def _seat(self) -> None:
        while self._arrived:
            count = min(len(self._arrived), self.worker.size.pieces)
            entries = [self._jobs[self._arrived.popleft()] for _ in range(count)]
            seated = self.worker.seat([(e.job, e.ask) for e in entries if e.ask is not None])
            waits = [e.job.name for e, good in zip(entries, seated, strict=True) if not good]
            self._arrived.extendleft(reversed(waits))
            self._may_fit = self._may_fit or any(seated)
            for entry, good in zip(entries, seated, strict=True):
                if good:
                    self._reach(entry.job.name, RUNNING)
            if waits:
                return

    def _ask(self) -> None:
        idle = not (self.worker.running or self._asked())
        while self._ready and (self._may_fit or idle):
            count = min(len(self._ready), self.worker.size.pieces)
            names = [self._ready.popleft() for _ in range(count)]
            self._ask_for(names)
            idle = False

    def _asked(self) -> int:
        return sum(entry.ask is not None for entry in self._jobs.values())

    def _ask_for(self, names: Sequence[int]) -> None:
        asks, never = self.worker.reserve([self._jobs[name].job for name in names])
        self._may_fit = True
        wanted, waits = [], []
        deadline = time.monotonic() + self._timeout
        for name, ask, hopeless in zip(names, asks, never, strict=True):
            entry = self._jobs[name]
            if hopeless:
                self._drop([name], FINISH_REASONS[REJECTED])
            elif ask is None:
                waits.append(name)
            else:
                entry.ask, entry.deadline = ask, deadline
                entry.pieces_left = len(host_pieces(ask, self.worker.size))
                wanted.append((name, ask))
                self.traffic.add(ask)
        self._ready.extendleft(reversed(waits))
        if waits:
            self.traffic.refusals += len(waits)
            self._may_fit = False
        if wanted:
            self._tell("ask", wanted)
        for name, _ in wanted:
            if name in self._jobs:
                self._reach(name, ASKED)
        self._complete([name for name, _ in wanted if self._needs_nothing(name)])

    def _needs_nothing(self, name: int) -> bool:
        return self._is_at(name, ASKED) and self._jobs[name].pieces_left == 0

    # ---- who leaves

    def _reach(self, name: int, stage: str) -> None:
        self._jobs[name].stage = stage
        if self._on_stage is not None and self._on_stage(name, stage):
            self.cancel([name])

    def _time_out(self) -> None:
        now = time.monotonic()
        late = [e.job.name for e in self._jobs.values() if e.stage == ASKED and e.deadline < now]
        self._drop(late, LOST)
        while self._ways and self._ways[0].deadline < now:
            self._ways.popleft()

    def _drop(self, names: Sequence[int], reason: str) -> None:
        """Ends jobs that do not run: their reservations here, and what is left of them there."""
        entries = [self._jobs.pop(name) for name in names if name in self._jobs]
        if not entries:
            return
        gone = {entry.job.name for entry in entries}
        self.worker.give_up([entry.ask for entry in entries if entry.ask is not None])
        self._ready = deque(name for name in self._ready if name not in gone)
        self._arrived = deque(name for name in self._arrived if name not in gone)
        self._outcomes += [Outcome(entry.job.name, (), reason) for entry in entries]
        self._may_fit = True
        self._tell("cancel", sorted(gone))

    def _tell(self, *message: object) -> None:
        if not self.open:
            return
        try:
            self._channel.send(message)
        except _GONE:
            self._lose()

    def _lose(self) -> None:
        """The prefill side is gone: what has not arrived whole never will."""
        if not self.open:
            return
        self.open = False
        self._channel.close()
        self._ways.clear()
        self._drop(
            [e.job.name for e in self._jobs.values() if e.stage in (PREFILL, READY, ASKED)], LOST
        )
