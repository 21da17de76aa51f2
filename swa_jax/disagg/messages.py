"""What the two sides of a pair say to each other, checked whole before any of it is acted on.

Each kind of message has parts, and for each part there is a function here that takes it as it came
and returns what it means. A name is taken once, however often a list of them has it.
"""

import operator
import pickle
from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any

from swa_jax.disagg.bundles import HostAsk
from swa_jax.disagg.jobs import Job, check_new
from swa_jax.disagg.links import Channel, LinkError
from swa_jax.inputs import whole_number
from swa_jax.replay.trace_lines import show

Kinds = Mapping[str, tuple[Callable[[Any], Any], ...]]

_MOST = 2**31 - 1  # of a number that goes to the device
_WRONG = (AttributeError, IndexError, KeyError, OverflowError, TypeError, ValueError)
_UNREADABLE = (*_WRONG, ImportError, pickle.UnpicklingError)


def received(channel: Channel) -> Any:  # noqa: ANN401
    """The next message, whatever it is.

    Raises:
      LinkError: bytes that are no message.
      EOFError: the other side is gone; OSError, too.
    """
    try:
        return channel.recv()
    except _UNREADABLE as error:
        raise LinkError(f"the other side sent what cannot be read: {_text(error)}") from error


def understood(message: object, kinds: Kinds) -> tuple[str, list[Any]]:
    """The kind of a message, and its parts.

    Args:
      message: as it came.
      kinds: by name, what takes each of its parts.

    Raises:
      LinkError: it is none of these, or a part is not what it should be.
    """
    try:
        kind, *parts = message  # type: ignore[misc]
        return kind, [take(part) for take, part in zip(kinds[kind], parts, strict=True)]
    except _WRONG as error:
        said = f"got {show(message)}: {_text(error)}"
        raise LinkError(f"expected a message of {', '.join(kinds)}, {said}") from error


def names(said: object) -> list[int]:
    """Each name once, in their order."""
    return list(dict.fromkeys(names_of_pieces(said)))


def names_of_pieces(said: object) -> list[int]:
    """A name for each piece: one that has several comes several times."""
    return [_name(name) for name in _listed(said)]


def endings(said: object) -> list[tuple[int, str]]:
    """(name, reason) of each name, the first where there are several."""
    return _first_of_each([(name, _word(reason)) for name, reason in _listed(said)])


def asks(said: object) -> list[tuple[int, HostAsk]]:
    """(name, ask) of each name, the first where there are several."""
    return _first_of_each([(name, HostAsk(*map(_number, ask))) for name, ask in _listed(said)])


def jobs(said: object) -> list[Job]:
    """Jobs, each of another name.

    Each is made anew: what comes as bytes has not passed the checks of a `Job`.
    """
    check_new(_listed(said), ())
    return [Job(*(getattr(job, field.name) for field in fields(Job))) for job in _listed(said)]


def anything(said: object) -> object:
    """What only the other end of a `Sender` understands."""
    return said


def _listed(said: object) -> list[Any]:
    if not isinstance(said, list | tuple):
        raise TypeError(f"a list is wanted, not {type(said).__name__}")
    return list(said)


def _first_of_each(pairs: list[tuple[Any, Any]]) -> list[tuple[int, Any]]:
    first: dict[int, Any] = {}
    for name, value in pairs:
        first.setdefault(_name(name), value)
    return list(first.items())


def _name(said: Any) -> int:  # noqa: ANN401
    return whole_number("name", operator.index(said), -(2**63), 2**63 - 1)


def _text(error: BaseException) -> str:
    """What an error says, where that can be said: an integer may have too many digits."""
    try:
        return str(error)
    except ValueError:
        return type(error).__name__


def _word(said: object) -> str:
    if not isinstance(said, str):
        raise TypeError(f"a word is wanted, not {type(said).__name__}")
    return said


def _number(said: Any) -> int:  # noqa: ANN401
    number = operator.index(said)
    if not 0 <= number <= _MOST:
        raise ValueError(f"numbers of an ask are from 0 to {_MOST}, got {number}")
    return number
