"""A program of calls as plain data: what was called with what, and what came out."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

from swa_jax.config import PoolConfig
from swa_jax.debug.calls import CALLS, CAN_BE_GIVEN, LISTS, CallKind, Kind
from swa_jax.debug.limits import (
    MOST_ABOUT,
    MOST_CALLS,
    MOST_HANDED_OUT,
    MOST_NAME,
    MOST_SHAPES,
    MOST_STATE_BYTES,
    MOST_VALUES,
    MOST_WORK_BYTES,
    shown,
)
from swa_jax.debug.values import MOST_INT, Given, Value, expand, is_int32
from swa_jax.faults import FAULT_KINDS, FOREIGN
from swa_jax.state import state_bytes

Arguments: TypeAlias = Mapping[str, Any]  # ints, bools, and lists of these and of items


@dataclass(frozen=True)
class Outcome:
    """What a call came to when it was recorded, whatever the order in which pages are granted."""

    left: tuple[int, int]  # full and SWA tokens that could be granted after it
    ok: bool | None = None  # of its answer; None where it has none
    faults: Mapping[str, int] = field(default_factory=dict)  # that it added, by kind


@dataclass(frozen=True)
class Call:
    """One call of a transition.

    Args:
      name: as in `swa_jax`; one of `swa_jax.debug.CALLS`.
      arguments: by name, the state left out: numbers, and lists of items (`swa_jax.debug.values`
        says which). What `swa.free_swa` calls `owner` is "as_of" here, the number of a state.
      owner: who is to hold the pages that it hands out, or whose they are that it takes back.
      outcome: what running it must come to; None: only the laws must hold.
    """

    name: str
    arguments: Arguments = field(default_factory=dict)
    owner: str | None = None
    outcome: Outcome | None = None

    @property
    def kind(self) -> CallKind:
        """What this transition takes and gives."""
        return CALLS[self.name]

    def values(self, name: str) -> list[Value]:
        """The values of an argument that is one list."""
        return expand(name, self.arguments[name])

    def rows(self, name: str) -> list[list[Value]]:
        """The values of an argument that is a table."""
        return [expand(name, row) for row in self.arguments[name]]


@dataclass(frozen=True, repr=False)
class Program:
    """Calls on a new state, the first of which is call 1.

    Args:
      config: of the pools.
      calls: in order.
      about: what it shows, for whoever reads the file.
    """

    config: PoolConfig
    calls: tuple[Call, ...] = ()
    about: str = ""

    def __len__(self) -> int:
        """How many calls."""
        return len(self.calls)

    def __str__(self) -> str:
        """One line for each call."""
        lines = [as_line(number, call) for number, call in enumerate(self.calls, start=1)]
        return "\n".join([f"program on {self.config}", *lines])

    def __repr__(self) -> str:
        """As for people: notebooks show it."""
        return str(self)


def as_line(number: int, call: Call) -> str:
    """A call for people to read."""
    inside = ", ".join(f"{name}={_short(value)}" for name, value in call.arguments.items())
    owner = "" if call.owner is None else f"  # {call.owner}"
    return f"{number:>3} {call.name}({inside}){owner}"


def _short(value: object) -> str:
    text = str(value).replace("'", "")
    return text if len(text) <= 60 else text[:57] + "..."


def without_outcomes(program: Program) -> Program:
    """The same calls, of which only the laws are asked."""
    return replace(program, calls=tuple(replace(call, outcome=None) for call in program.calls))


def check_program(program: Program) -> None:
    """Raises for a program that cannot be run, or that would take too much to run.

    Args:
      program: any.

    Raises:
      ValueError: the first thing that is wrong, with its call.
    """
    if not isinstance(program, Program):
        raise ValueError(
            "program must be a Program, such as Recorder.program or load(path) gives, got "
            f"{shown(program)}"
        )
    if not isinstance(program.config, PoolConfig):
        raise ValueError(f"config must be a PoolConfig, got {shown(program.config)}")
    most = state_bytes(program.config)
    if most > MOST_STATE_BYTES:
        raise ValueError(
            f"config: a state of {program.config.full_pages} full and {program.config.swa_units} "
            f"SWA pages takes {most} bytes, more than the {MOST_STATE_BYTES} allowed here: give "
            "smaller pools"
        )
    _check_text("about", program.about, MOST_ABOUT, lines=True)
    if len(program.calls) > MOST_CALLS:
        raise ValueError(
            f"a program has at most {MOST_CALLS} calls, got {len(program.calls)}: keep a part"
        )
    if len(program.calls) * most > MOST_WORK_BYTES:
        raise ValueError(
            f"{len(program.calls)} calls on states of {most} bytes would be looked at for too long "
            f"({MOST_WORK_BYTES} bytes at most): give smaller pools or fewer calls"
        )
    checker = _Checker(program)
    for number, call in enumerate(program.calls, start=1):
        try:
            checker.check(number, call)
        except ValueError as error:
            name = f" ({call.name})" if isinstance(call, Call) and call.name in CALLS else ""
            raise ValueError(f"call {number}{name}: {error}") from None


class _Checker:
    """What the calls so far handed out and took up."""

    def __init__(self, program: Program) -> None:
        self.config = program.config
        self.places: dict[int, tuple[str, int]] = {}  # by call: what it gives, and how many
        self.room, self.handed_out = MOST_VALUES, 0
        self.shapes: set[tuple] = set()

    def check(self, number: int, call: Call) -> None:
        if not isinstance(call, Call) or not isinstance(call.name, str) or call.name not in CALLS:
            name = call.name if isinstance(call, Call) else call
            raise ValueError(f"no such call: {shown(name)}; known are {', '.join(CALLS)}")
        _check_names(call)
        check_owner(call.owner)
        if call.outcome is not None:
            _check_outcome(call.outcome)
        sizes = {
            name: self._size(number, name, call.kind.arguments[name], call.arguments[name])
            for name in call.kind.arguments
            if name in call.arguments
        }
        self.shapes.add((call.name, *sizes.items()))
        if len(self.shapes) > MOST_SHAPES:
            raise ValueError(
                f"more than {MOST_SHAPES} calls that differ in shape; each is compiled on its own, "
                "so give arrays of a few lengths, with 0 in unused places"
            )
        if call.kind.hands_out:
            count = self._answers(call, sizes)
            self.handed_out += count
            if self.handed_out > MOST_HANDED_OUT:
                raise ValueError(
                    f"the answers of all calls so far have more than {MOST_HANDED_OUT} places; "
                    "give smaller capacities or fewer calls"
                )
            self.places[number] = (call.kind.gives or "", count)

    def _answers(self, call: Call, sizes: Mapping[str, Any]) -> int:
        """Places of the answer."""
        if "capacity" in sizes:
            return int(call.arguments["capacity"])
        rows = sizes.get("rings", sizes.get("seq_lens"))
        return rows * self.config.page_size if call.kind.gives == "copies" else rows

    def _size(self, number: int, name: str, kind: Kind, value: Any) -> Any:  # noqa: ANN401
        """The length of a list, (rows, columns) of a table, the value of what is static."""
        if kind is Kind.NUMBER:
            _check_int(name, value)
            return None
        if kind is Kind.STATIC:
            _check_int(name, value, 1, MOST_HANDED_OUT)
            return value
        if kind is Kind.STATE:
            _check_int(name, value, 0, number - 1)
            return None
        if kind is Kind.MARKS:
            if not isinstance(value, list | tuple) or not all(isinstance(v, bool) for v in value):
                raise ValueError(f"{name} must be {kind.value}, got {shown(value)}")
            return self._counted(len(value), name)
        if kind is Kind.TABLE:
            return self._table_size(number, name, value)
        if kind is Kind.OWNERS and is_int32(value):
            return None
        assert kind in LISTS or kind is Kind.OWNERS
        return len(self._values(number, name, kind, value))

    def _table_size(self, number: int, name: str, value: object) -> tuple[int, int]:
        if not isinstance(value, list | tuple) or not value:
            raise ValueError(f"{name} must be {Kind.TABLE.value}, got {shown(value)}")
        widths = {len(self._values(number, name, Kind.TABLE, row)) for row in value}
        if len(widths) > 1:
            raise ValueError(f"{name} must have rows of one length, got {sorted(widths)[:4]}")
        return len(value), widths.pop()

    def _values(self, number: int, name: str, kind: Kind, items: object) -> list[Value]:
        values = expand(name, items, self.room)
        self._counted(len(values), name)
        for value in values:
            if isinstance(value, Given):
                self._check_given(number, name, kind, value)
        return values

    def _counted(self, count: int, name: str) -> int:
        self.room -= count
        if self.room < 0:
            raise ValueError(f"{name}: all calls together may have {MOST_VALUES} values")
        return count

    def _check_given(self, number: int, name: str, kind: Kind, value: Given) -> None:
        what = f"{'swa ' if value.swa else ''}{value.call}[{value.place}]"
        if kind not in CAN_BE_GIVEN or value.swa != (kind is Kind.SWA_SLOTS):
            wanted = "with swa before it" if kind is Kind.SWA_SLOTS else "as it is"
            wanted = f"a call's answer {wanted}" if kind in CAN_BE_GIVEN else "numbers alone"
            raise ValueError(f"{name} takes {wanted}, got {what!r}")
        if value.call >= number or value.call not in self.places:
            raise ValueError(f"{name} has {what!r}, and no call before this one handed that out")
        gives, count = self.places[value.call]
        if (gives == "rings") != (kind is Kind.RINGS):
            raise ValueError(
                f"{name} is {kind.value}, and {what!r} is none: call {value.call} gave {gives}"
            )
        if value.place >= count:
            raise ValueError(f"{name} has {what!r}, and call {value.call} has {count} places")


def _check_names(call: Call) -> None:
    """All arguments that there must be, and no others."""
    if not isinstance(call.arguments, Mapping):
        raise ValueError(f"arguments must be given by name, got {shown(call.arguments)}")
    known = call.kind.arguments
    missing = [n for n in known if n not in call.arguments and n not in call.kind.optional]
    unknown = [name for name in call.arguments if name not in known]
    if missing:
        raise ValueError(f"{', '.join(missing)} must be given")
    if unknown:
        takes = ", ".join(known) or "nothing"
        raise ValueError(f"it takes {takes}; got {', '.join(map(shown, unknown[:4]))}")


def _check_int(name: str, value: object, least: int | None = None, most: int = MOST_INT) -> None:
    if not is_int32(value) or (least is not None and not least <= value <= most):  # type: ignore[operator]
        wanted = "an int32 number" if least is None else f"an integer from {least} to {most}"
        raise ValueError(f"{name} must be {wanted}, got {shown(value)}")


def _check_text(name: str, value: object, most: int, *, lines: bool = False) -> None:
    """What is printed later must not steer a terminal."""
    text = value.replace("\n", " ") if lines and isinstance(value, str) else value
    if not isinstance(text, str) or not text.isprintable() or len(text) > most:
        raise ValueError(
            f"{name} must be printable text of at most {most} letters, got {shown(value)}"
        )


def check_owner(name: object) -> None:
    """Raises ValueError for what is no name of who holds a page, and not None."""
    if name is not None:
        _check_text("owner", name, MOST_NAME)


def _check_outcome(outcome: Outcome) -> None:
    left = outcome.left
    if not isinstance(left, tuple) or len(left) != 2:
        raise ValueError(f"left must be full and SWA tokens, such as [12, 8], got {shown(left)}")
    for value in left:
        _check_int("left", value, 0)
    if outcome.ok is not None and not isinstance(outcome.ok, bool):
        raise ValueError(f"ok must be true or false, got {shown(outcome.ok)}")
    known = (*FAULT_KINDS, FOREIGN)
    if not isinstance(outcome.faults, Mapping) or set(outcome.faults) - set(known):
        raise ValueError(
            f"faults must be counts by kind ({', '.join(known)}), got {shown(outcome.faults)}"
        )
    for kind, count in outcome.faults.items():
        _check_int(f"faults: {kind}", count, 0)
