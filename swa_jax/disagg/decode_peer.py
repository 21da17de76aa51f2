"""A decode worker that has its prompts computed by a prefill side.

The way of a job: PREFILL (computed there) -> READY -> ASKED (room is reserved here, pieces are on
their way) -> ARRIVED (all KV is here, the prefill side may forget it) -> RUNNING -> an Outcome.

Each way to there is a *life* with a number that no other way has, of this job or another one. The
two sides speak of lives, so what comes late for an earlier life finds nobody.

Who has ARRIVED and waits for a row holds pages, and those who run may need them. When a turn got
nobody further, the newest who has ARRIVED gives its reservation up and begins a new life. A new
reservation leaves each row its next page (`reserve`), so one that runs gets at least a page further
each time, and in the end is done.
"""

import itertools
import secrets
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from swa_jax.disagg import messages
from swa_jax.disagg.bundles import HostAsk, host_pieces, is_for
from swa_jax.disagg.decode_worker import DecodeWorker
from swa_jax.disagg.jobs import LOST, Job, Outcome, check_new
from swa_jax.disagg.links import Arriving, Channel, LinkError, Receiver
from swa_jax.serving.requests import CANCELLED, FINISH_REASONS, LENGTH, REJECTED

_GONE = (EOFError, OSError)
_FINAL = (FINISH_REASONS[REJECTED], FINISH_REASONS[LENGTH])  # the prefill side can say these
_KINDS: messages.Kinds = {
    "ready": (messages.names,),
    "ended": (messages.endings,),
    "bundle": (messages.anything, messages.names_of_pieces),
    "gone": (messages.names,),
}
PREFILL, READY, ASKED, ARRIVED, RUNNING = "prefill", "ready", "asked", "arrived", "running"


@dataclass
class _Open:
    """A job that is not done."""

    job: Job
    number: int  # counts jobs as they are submitted
    stage: str = PREFILL
    ask: HostAsk | None = None  # from ASKED on
    pieces_left: int = 0
    deadline: float = float("inf")  # for all of its pieces


@dataclass
class _Way:
    """A bundle on its way."""

    arriving: Arriving
    lives: list[int]
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
      on_stage: told (name, stage) whenever a job gets further; True from it cancels the job. It may
        cancel and submit others.

    Attributes:
      open: the prefill side is there. When it is gone, or says what means nothing, jobs whose KV
        has not arrived end as LOST in the next turn.
      wrong: what it said that means nothing, or what became of a bundle; None otherwise.
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
        self.wrong: str | None = None
        self._channel, self._receiver = channel, receiver
        self._timeout, self._on_stage = timeout, on_stage
        self._jobs: dict[int, _Open] = {}  # by life
        self._lives: dict[int, int] = {}  # by name, of the jobs that are open
        # Begun at random: the prefill side may still have to do with another peer's.
        self._new_lives, self._submitted = itertools.count(secrets.randbits(48)), 0
        self._ready: deque[int] = deque()  # lives, as all that follow
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
          ValueError: something else than a Job, or a name that is open already or comes twice;
            none is taken then.
        """
        new = list(jobs)
        check_new(new, self._lives)
        entries = [_Open(job, self._submitted + index) for index, job in enumerate(new)]
        self._submitted += len(new)
        self._begin(entries)

    def cancel(self, names: Sequence[int]) -> None:
        """Ends jobs, wherever they are on their way; unknown names: nothing."""
        lives = [self._lives[name] for name in names if name in self._lives]
        runs = [life for life in lives if self._is_at(life, RUNNING)]
        self.worker.cancel([self._jobs[life].job.name for life in runs])
        self._drop([life for life in lives if life not in runs], FINISH_REASONS[CANCELLED])

    def turn(self, steps: int = 4) -> list[Outcome]:
        """Hears what there is, takes in what has arrived, asks for more, decodes a few steps.

        A prefill side that says what means nothing is lost, as one that is gone: nothing of such a
        message is acted on, nothing is raised, and `wrong` says what it was.

        Returns:
          What has ended, jobs included that were given to the worker itself.
        """
        self._listen()
        self._unpack()
        self._leave_if_gone()
        self._seat()
        self._ask()
        self._time_out()
        self._decode(steps)
        self._leave_if_gone()
        outcomes, self._outcomes = self._outcomes, []
        return outcomes

    def wait(self, timeout: float) -> None:
        """Returns when the prefill side says something, or after so many seconds."""
        if not self.open:
            return
        try:
            self._channel.poll(timeout)
        except _GONE:
            self.open = False

    @property
    def is_waiting(self) -> bool:
        """Nothing can be done before the prefill side says something or a bundle arrives."""
        return self.open and not (self.worker.running or self._arrived or self._outcomes)

    def close(self) -> None:
        """Says goodbye; what is open is given up."""
        self._tell("bye")
        self.open = False
        self._leave_if_gone()

    # ---- what the prefill side says

    def _listen(self) -> None:
        try:
            while self.open and self._channel.poll():
                self._hear(messages.received(self._channel))
        except _GONE:
            self.open = False
        except LinkError as error:
            self.open, self.wrong = False, str(error)

    def _hear(self, message: object) -> None:
        kind, rest = messages.understood(message, _KINDS)
        if kind == "ready":
            lives = [life for life in rest[0] if self._is_at(life, PREFILL)]
            self._ready.extend(lives)
            self._reach(lives, READY)
        elif kind == "ended":
            for life, reason in rest[0]:
                if self._is_at(life, PREFILL, READY, ASKED):
                    self._drop([life], reason if reason in _FINAL else LOST)
        elif kind == "bundle":
            offered, lives = rest
            arriving = self._receiver.fetch(offered, self.worker.bundle_shape)
            self._ways.append(_Way(arriving, lives, time.monotonic() + self._timeout))
        else:  # "gone"
            self._drop([life for life in rest[0] if self._is_at(life, READY, ASKED)], LOST)

    def _is_at(self, life: int, *stages: str) -> bool:
        return life in self._jobs and self._jobs[life].stage in stages

    # ---- what arrives

    def _unpack(self) -> None:
        while self._ways and self._ways[0].arriving.is_ready():
            way = self._ways.popleft()
            try:
                bundle = way.arriving.take()
            except LinkError as error:
                self.open, self.wrong = False, str(error)
                return
            entries = [self._jobs.get(life) for life in way.lives]
            if not is_for(bundle, [None if entry is None else entry.ask for entry in entries]):
                self.open, self.wrong = False, "a bundle names others than those that it is for"
                return
            accepted = self.worker.deliver(bundle)
            self.traffic.bundles += 1
            for life, good in zip(way.lives, accepted, strict=False):
                # A piece for a life that is over finds no reservation, and that is that.
                if self._is_at(life, ASKED):
                    self._count_piece(life, good)

    def _count_piece(self, life: int, good: bool) -> None:
        entry = self._jobs[life]
        if not good:
            self._drop([life], LOST)
            return
        entry.pieces_left -= 1
        if entry.pieces_left == 0:
            self._complete([life])
        else:
            self._reach([life], ASKED)

    def _complete(self, lives: Sequence[int]) -> None:
        """All KV is here: the prefill side may forget it."""
        if lives:
            self._tell("arrived", list(lives))
        self._arrived.extend(lives)
        self._reach(lives, ARRIVED)

    # ---- who comes in

    def _seat(self) -> None:
        while self._arrived:
            count = min(len(self._arrived), self.worker.size.pieces)
            lives = [self._arrived.popleft() for _ in range(count)]
            entries = [self._jobs[life] for life in lives]
            seated = self.worker.seat([(e.job, e.ask) for e in entries if e.ask is not None])
            waits = [life for life, good in zip(lives, seated, strict=True) if not good]
            self._arrived.extendleft(reversed(waits))
            self._may_fit = self._may_fit or any(seated)
            self._reach([life for life in lives if life not in waits], RUNNING)
            if waits:
                return

    def _ask(self) -> None:
        idle = not (self.worker.running or self._asked())
        while self._ready and (self._may_fit or idle):
            count = min(len(self._ready), self.worker.size.pieces)
            lives = [self._ready.popleft() for _ in range(count)]
            self._ask_for(lives)
            idle = False

    def _asked(self) -> int:
        return sum(entry.ask is not None for entry in self._jobs.values())

    def _ask_for(self, lives: Sequence[int]) -> None:
        asks, never = self.worker.reserve([self._jobs[life].job for life in lives])
        self._may_fit = True
        wanted, waits, hopeless = [], [], []
        deadline = time.monotonic() + self._timeout
        for life, ask, can_never in zip(lives, asks, never, strict=True):
            entry = self._jobs[life]
            if can_never:
                hopeless.append(life)
            elif ask is None:
                waits.append(life)
            else:
                entry.ask, entry.deadline = ask, deadline
                entry.pieces_left = len(host_pieces(ask, self.worker.size))
                wanted.append((life, ask))
                self.traffic.add(ask)
        self._ready.extendleft(reversed(waits))
        self._drop(hopeless, FINISH_REASONS[REJECTED])
        if waits:
            self.traffic.refusals += len(waits)
            self._may_fit = False
        if wanted:
            self._tell("ask", wanted)
        asked = [life for life, _ in wanted]
        self._reach(asked, ASKED)
        self._complete([life for life in asked if self._needs_nothing(life)])

    def _needs_nothing(self, life: int) -> bool:
        return self._is_at(life, ASKED) and self._jobs[life].pieces_left == 0

    # ---- who runs

    def _decode(self, steps: int) -> None:
        done = self.worker.turn(steps)
        for outcome in done:
            life = self._lives.get(outcome.name)
            # Another one of this name may have been given to the worker itself.
            if life is not None and self._is_at(life, RUNNING):
                del self._jobs[life], self._lives[outcome.name]
        self._outcomes += done
        self._may_fit = self._may_fit or bool(done)
        if self.worker.stands and self._arrived:
            newest = max(self._arrived, key=lambda life: self._jobs[life].number)
            self._begin([self._end(newest)])

    def _begin(self, entries: Sequence[_Open]) -> None:
        """Jobs begin a life, their first or another one."""
        jobs = []
        for entry in entries:
            life = next(self._new_lives)
            self._jobs[life] = _Open(entry.job, entry.number)
            self._lives[entry.job.name] = life
            jobs.append(replace(entry.job, name=life))
        if jobs:
            self._tell("submit", jobs)

    # ---- who leaves

    def _reach(self, lives: Sequence[int], stage: str) -> None:
        """All are there before anybody is told: who is told may cancel others."""
        for life in lives:
            self._jobs[life].stage = stage
        for life in lives:
            if self._on_stage is None or not self._is_at(life, stage):
                continue
            name = self._jobs[life].job.name
            if self._on_stage(name, stage) and self._lives.get(name) == life:
                self.cancel([name])

    def _time_out(self) -> None:
        now = time.monotonic()
        late = [life for life, e in self._jobs.items() if e.stage == ASKED and e.deadline < now]
        self._drop(late, LOST)
        while self._ways and self._ways[0].deadline < now:
            self._ways.popleft()

    def _drop(self, lives: Sequence[int], reason: str) -> None:
        """Ends jobs that do not run: their reservations here, and what is left of them there."""
        gone = [life for life in dict.fromkeys(lives) if life in self._jobs]
        for life in gone:
            name = self._end(life).job.name
            self._outcomes.append(Outcome(name, (), reason))
        if gone:
            self._tell("cancel", gone)

    def _end(self, life: int) -> _Open:
        """Ends a life that does not run, and the reservation for it."""
        entry = self._jobs.pop(life)
        del self._lives[entry.job.name]
        if entry.ask is not None:
            self.worker.give_up([entry.ask])
        for queue in (self._ready, self._arrived):
            if life in queue:
                queue.remove(life)
        self._may_fit = True
        return entry

    def _tell(self, *message: object) -> None:
        """Says something, or notices that nobody hears: `_leave_if_gone` does the rest."""
        if not self.open:
            return
        try:
            self._channel.send(message)
        except _GONE:
            self.open = False

    def _leave_if_gone(self) -> None:
        """What has not arrived whole never will, once the prefill side is gone.

        Only where nothing is in anybody's hands: a message can fail anywhere inside a turn.
        """
        if self.open:
            return
        self._channel.close()
        self._ways.clear()
        self._drop([life for life in self._jobs if self._is_at(life, PREFILL, READY, ASKED)], LOST)
