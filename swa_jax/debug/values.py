"""Numbers of a recorded call, and what stands for slots that an earlier call handed out.

A program names the slots that it was given by the call that gave them, not by number: it can then
lose a call, or run where pages are granted in another order, and still free what it was granted.

In a list of a call's arguments an item is one of

    5           the number itself
    "0*12"      the same number so many times
    "3[7]"      what call 3 handed out at place 7 (places from 0, calls from 1)
    "3[0:8]"    its places 0 to 7
    "swa 3[7]"  the SWA slot that this slot had right after call 3
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple, TypeAlias

from swa_jax.debug.limits import MOST_VALUES, shown

Item: TypeAlias = int | str
LEAST_INT, MOST_INT = -(2**31), 2**31 - 1
_RUN = 4  # fewer equal numbers are written one by one
# Digits are bounded, so that no number takes long to read.
_REPEATED = re.compile(r"(-?[0-9]{1,10})\*([0-9]{1,9})", re.ASCII)
_GIVEN = re.compile(r"(swa )?([0-9]{1,9})\[([0-9]{1,9})(?::([0-9]{1,9}))?\]", re.ASCII)
_FORMS = '5, "0*12", "3[7]", "3[0:8]" or "swa 3[7]"'


class Given(NamedTuple):
    """A slot or ring that an earlier call handed out."""

    call: int  # its number, from 1
    place: int  # in its answer, from 0
    swa: bool = False  # the SWA slot that it had right after that call


Value: TypeAlias = int | Given


def expand(name: str, items: object, room: int = MOST_VALUES) -> list[Value]:
    """The values of a list of items.

    Args:
      name: of the list, for an error's text.
      items: a list of numbers and texts.
      room: how many values there may be; no more than these are ever made.

    Raises:
      ValueError: no such list, an item of no known form, or too many values.
    """
    if not isinstance(items, list | tuple):
        raise ValueError(f"{name} must be a list, got {shown(items)}")
    values: list[Value] = []
    for item in items:
        count, made = _read(name, item)
        if count > room - len(values):
            raise ValueError(f"{name} has more values than the {room} that there is room for")
        values += made
    return values


def _read(name: str, item: object) -> tuple[int, Iterable[Value]]:
    """How many values an item stands for, and these, not made yet."""
    if isinstance(item, int) and is_int32(item):
        return 1, [item]
    if isinstance(item, str):
        if match := _REPEATED.fullmatch(item):
            number, count = int(match[1]), int(match[2])
            if LEAST_INT <= number <= MOST_INT:
                return count, (number for _ in range(count))
        if match := _GIVEN.fullmatch(item):
            call, first = int(match[2]), int(match[3])
            end = first + 1 if match[4] is None else int(match[4])
            if call and first < end:
                swa = match[1] is not None
                return end - first, (Given(call, place, swa) for place in range(first, end))
    raise ValueError(f"{name} must hold int32 numbers or texts such as {_FORMS}, got {shown(item)}")


def is_int32(value: object) -> bool:
    """Whether it is a Python int that int32 can hold; a bool is none."""
    return isinstance(value, int) and not isinstance(value, bool) and LEAST_INT <= value <= MOST_INT


def compress(values: Sequence[Value]) -> list[Item]:
    """The shortest list of items that stands for these values. `expand` undoes it."""
    return [item for run in _runs(values) for item in _items(run)]


def _runs(values: Sequence[Value]) -> Iterator[Sequence[Value]]:
    """Neighbours that one item can stand for."""
    start = 0
    for place in range(1, len(values) + 1):
        if place == len(values) or not _goes_on(values[place - 1], values[place]):
            yield values[start:place]
            start = place


def _goes_on(one: Value, following: Value) -> bool:
    if isinstance(one, Given) and isinstance(following, Given):
        return following == one._replace(place=one.place + 1)
    return not isinstance(one, Given) and not isinstance(following, Given) and one == following


def _items(run: Sequence[Value]) -> list[Item]:
    first = run[0]
    if isinstance(first, Given):
        places = f"{first.place}" if len(run) == 1 else f"{first.place}:{first.place + len(run)}"
        return [f"{'swa ' if first.swa else ''}{first.call}[{places}]"]
    return [f"{first}*{len(run)}"] if len(run) >= _RUN else [first] * len(run)
