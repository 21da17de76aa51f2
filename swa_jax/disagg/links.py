"""How two workers hear of each other, and how KV gets from one to the other, in one process.

Between processes the standard library's connections and `swa_jax.disagg.transfer` take this place.
"""

from collections import deque
from typing import Any, Protocol

import jax

from swa_jax.disagg.prefill_side import Parcel
from swa_jax.replay.trace_lines import show


class LinkError(Exception):
    """What was on its way will not arrive: the other side is gone, or says what means nothing."""


class Channel(Protocol):
    """Small messages in order, both ways: `multiprocessing.connection.Connection` is one."""

    def send(self, obj: Any, /) -> None:  # noqa: ANN401
        """Sends something that can be pickled."""
        ...

    def recv(self) -> Any:  # noqa: ANN401
        """The next message; EOFError where the other side is gone."""
        ...

    def poll(self, timeout: float | None = 0.0, /) -> bool:
        """There is a message, or the other side is gone."""
        ...

    def close(self) -> None:
        """The other side is told."""
        ...


class Arriving(Protocol):
    """A bundle on its way."""

    def is_ready(self) -> bool:
        """`take` will not wait."""
        ...

    def take(self) -> Parcel:
        """The bundle, on this side's devices; LinkError where it will not arrive."""
        ...


class Sender(Protocol):
    """The prefill side's end."""

    def send(self, bundle: Parcel) -> Any:  # noqa: ANN401
        """Offers a bundle; what the other end needs in order to fetch it, for a message."""
        ...


class Receiver(Protocol):
    """The decode side's end."""

    def fetch(self, offered: Any, shape: Parcel) -> Arriving:  # noqa: ANN401
        """Begins to fetch what `send` offered; `shape` says what it looks like.

        Raises:
          LinkError: nothing was offered under that.
        """
        ...


class LocalChannel:
    """One end of a pair in one process; see `local_channels`."""

    def __init__(self, incoming: deque, outgoing: deque) -> None:
        """Not closed."""
        self._incoming, self._outgoing = incoming, outgoing

    def send(self, obj: Any, /) -> None:  # noqa: ANN401
        """Puts a message where the other end finds it."""
        self._outgoing.append(obj)

    def recv(self) -> Any:  # noqa: ANN401
        """The next message; EOFError after the last one of an end that was closed."""
        message = self._incoming.popleft()
        if message is LocalChannel:
            self._incoming.append(message)
            raise EOFError
        return message

    def poll(self, timeout: float | None = 0.0, /) -> bool:
        """There is something to receive; it does not wait, since nobody could send meanwhile."""
        return bool(self._incoming)

    def close(self) -> None:
        """The other end finds EOFError."""
        self._outgoing.append(LocalChannel)


def local_channels() -> tuple[LocalChannel, LocalChannel]:
    """Both ends of a channel for two workers that take turns in one thread."""
    one, other = deque(), deque()
    return LocalChannel(one, other), LocalChannel(other, one)


class DeviceLink:
    """Moves bundles between devices of one process by `jax.device_put`; both ends in one.

    Args:
      sharding: of the decode side: a device, a Sharding, or a Parcel of these.
    """

    def __init__(self, sharding: Any) -> None:  # noqa: ANN401
        """Nothing is on its way."""
        self._sharding = sharding
        self._offered: dict[int, Parcel] = {}
        self._count = 0

    def send(self, bundle: Parcel) -> int:
        """Keeps the bundle until it is fetched."""
        self._count += 1
        self._offered[self._count] = bundle
        return self._count

    def fetch(self, offered: int, shape: Parcel) -> "Landed":
        """Copies it to the decode side's devices."""
        if not isinstance(offered, int) or offered not in self._offered:
            raise LinkError(f"no bundle {show(offered)} was offered, or it was fetched already")
        return Landed(jax.device_put(self._offered.pop(offered), self._sharding))


class Landed:
    """A bundle that has been dispatched to where it is wanted."""

    def __init__(self, bundle: Parcel) -> None:
        """It is on its way."""
        self._bundle = bundle

    def is_ready(self) -> bool:
        """JAX waits by itself where it must."""
        return True

    def take(self) -> Parcel:
        """The bundle."""
        return self._bundle
