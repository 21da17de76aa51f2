"""A prefill worker that does what a decode side asks it to.

Messages in: ("submit", jobs), ("ask", [(name, HostAsk)]), ("arrived", names), ("cancel", names),
("bye",). Out: ("ready", names), ("ended", [(name, reason)]), ("bundle", offered, names),
("gone", names). Names on the way are lives (`DecodePeer`): none is ever used twice.
"""

from collections import deque

from swa_jax.disagg import messages
from swa_jax.disagg.bundles import BundleSize, HostAsk, host_pieces
from swa_jax.disagg.jobs import Job
from swa_jax.disagg.links import Channel, LinkError, Sender
from swa_jax.disagg.prefill_worker import PrefillWorker

_GONE = (EOFError, OSError)
_KINDS: messages.Kinds = {
    "submit": (messages.jobs,),
    "ask": (messages.asks,),
    "arrived": (messages.names,),
    "cancel": (messages.names,),
    "bye": (),
}


class PrefillPeer:
    """Answers one decode side.

    Args:
      worker: that computes.
      channel: to the decode side.
      sender: by which KV goes there.

    Attributes:
      open: the decode side is there, has not said goodbye, and says what can be understood.
      wrong: what it said that means nothing; None otherwise.
    """

    def __init__(self, worker: PrefillWorker, channel: Channel, sender: Sender) -> None:
        """Nothing is asked yet."""
        self.worker, self.open = worker, True
        self.wrong: str | None = None
        self._channel, self._sender = channel, sender
        self._wanted: deque[tuple[int, HostAsk, int, int]] = deque()

    def run(self) -> None:
        """Serves until the decode side leaves or is gone; no page is held by a request then."""
        while self.open or self.worker.open_jobs:
            self.turn()
            if self.open and not self.worker.is_busy and not self._wanted:
                self._wait()

    def turn(self, steps: int = 4) -> None:
        """Hears what there is, computes up to so many steps, sends what is wanted.

        A decode side that says what means nothing is lost, as one that is gone: nothing of such a
        message is acted on, nothing is raised, and `wrong` says what it was.
        """
        try:
            while self.open and self._channel.poll():
                self._hear(messages.received(self._channel))
        except _GONE:
            self._lose()
        except LinkError as error:
            self.wrong = str(error)
            self._channel.close()  # it is not to wait for an answer
            self._lose()
        ready, ended = self.worker.turn(steps)
        if ready:
            self._tell("ready", ready)
        if ended:
            self._tell("ended", ended)
        self._answer()

    def _wait(self) -> None:
        try:
            self._channel.poll(0.02)
        except _GONE:
            self._lose()

    def _hear(self, message: object) -> None:
        kind, rest = messages.understood(message, _KINDS)
        if kind == "submit":
            self._submit(rest[0])
        elif kind == "ask":
            self._want(rest[0])
        elif kind == "arrived":
            self.worker.end(rest[0])
        elif kind == "cancel":
            gone = set(rest[0])
            self._wanted = deque(piece for piece in self._wanted if piece[0] not in gone)
            self.worker.cancel(rest[0])
        else:  # "bye"
            self._lose()

    def _want(self, asks: list[tuple[int, HostAsk]]) -> None:
        most = self.worker.config.max_context
        if any(ask.length > most for _, ask in asks):
            raise LinkError(f"the decode side asks for more tokens than a prompt can have ({most})")
        gone = []
        for name, ask in asks:
            if self.worker.is_ready(name):
                self._wanted.extend((name, ask, *starts) for starts in host_pieces(ask, self.size))
            else:
                gone.append(name)
        if gone:
            self._tell("gone", gone)

    def _submit(self, jobs: list[Job]) -> None:
        try:
            self.worker.submit(jobs)
        except ValueError as error:
            raise LinkError(f"the decode side submits what cannot be taken: {error}") from error

    @property
    def size(self) -> BundleSize:
        """Of a bundle."""
        return self.worker.size

    def _answer(self) -> None:
        while self._wanted and self.open:
            count = min(len(self._wanted), self.size.pieces)
            pieces = [self._wanted.popleft() for _ in range(count)]
            gone = [piece[0] for piece in pieces if not self.worker.is_ready(piece[0])]
            if gone:
                self._tell("gone", gone)
                if not self.open:
                    return
            offered = self._sender.send(self.worker.pack(pieces))
            self._tell("bundle", offered, [piece[0] for piece in pieces])

    def _tell(self, *message: object) -> None:
        if not self.open:
            return
        try:
            self._channel.send(message)
        except _GONE:
            self._lose()

    def _lose(self) -> None:
        """Nobody will fetch anything any more."""
        self.open = False
        self._wanted.clear()
        self.worker.cancel_all()
