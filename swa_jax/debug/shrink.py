"""Makes a failing program small, by Hypothesis: fewer calls, then smaller arguments.

Hypothesis looks for the simplest example of a strategy that fails. Here a strategy draws a number
for each call: 0 leaves the call out. All numbers but one in 65,536 keep it, so that the first
example that it tries is as a rule the whole program, and each step from there leaves something out.
The same is done with each value of the arguments, which keep their lengths: an array of another
length would be compiled anew.
"""

import functools
import importlib
import itertools
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from types import ModuleType
from typing import Any

from swa_jax.debug.calls import AS_OF, CAN_BE_GIVEN, LISTS, Kind
from swa_jax.debug.files import as_text
from swa_jax.debug.program import Call, Program, check_program, without_outcomes
from swa_jax.debug.values import Given, Value, compress

Fails = Callable[[Program], bool]
_MOST = 2**16 - 1
_LARGE = 2**14  # numbers above it are lowered to less, or stay
_AT_ONCE = 150  # decisions of one search: Hypothesis takes some 500 steps in each
_TRIES = 2000


def shrink(program: Program, fails: Fails) -> Program:
    """The smallest program that still fails, as far as leaving out and making smaller goes.

    Slots that a call left out had handed out become padding; what calls came to when they were
    recorded is forgotten, since fewer calls come to something else. The pools stay as they are.

    Args:
      program: that fails.
      fails: says so of a program, and says the same each time. To find the calls that break a law:
        `lambda program: run(program).failure is not None`.

    Returns:
      A program that fails. It can be run and saved.

    Raises:
      ImportError: Hypothesis is not installed.
      ValueError: the program does not fail.
    """
    hypothesis = _require_hypothesis()
    check_program(program)
    asked = _Asked(fails)
    whole = without_outcomes(program)
    if not asked(whole):
        raise ValueError(
            "fails(program) is False for the program itself, so there is nothing to shrink. It is "
            "given the program without the outcomes that were recorded"
        )
    smallest = _shortest_start(whole, asked)
    while True:
        before = smallest
        smallest = _leave_out(hypothesis, smallest, asked)
        smallest = _make_smaller(hypothesis, smallest, asked)
        smallest = _one_by_one(smallest, asked)
        if smallest == before:
            return _trimmed(smallest, asked)


def _require_hypothesis() -> ModuleType:
    try:
        return importlib.import_module("hypothesis")
    except ImportError as error:
        raise ImportError(
            'shrinking a program needs Hypothesis: pip install "swa-jax[debug]"'
        ) from error


class _Asked:
    """`fails`, asked once for each program."""

    def __init__(self, fails: Fails) -> None:
        self._fails, self._known = fails, dict[str, bool]()

    def __call__(self, program: Program) -> bool:
        text = as_text(program)
        if text not in self._known:
            self._known[text] = bool(self._fails(program))
        return self._known[text]


def _shortest_start(program: Program, fails: Fails) -> Program:
    """The shortest beginning that fails, if longer ones fail as well."""
    low, high = 0, len(program)  # the first `high` calls fail
    while low < high:
        middle = (low + high) // 2
        if fails(replace(program, calls=program.calls[:middle])):
            high = middle
        else:
            low = middle + 1
    return replace(program, calls=program.calls[:high])


def _search(
    hypothesis: ModuleType, most: Sequence[int], build: Callable[[list[int]], Program], fails: Fails
) -> Program | None:
    """The program of the smallest numbers that fails; None where none was found."""
    strategies = importlib.import_module("hypothesis.strategies")
    numbers = strategies.tuples(*(strategies.integers(0, top) for top in most))
    settings = hypothesis.settings(
        max_examples=_TRIES,
        database=None,
        deadline=None,
        derandomize=False,
        phases=(hypothesis.Phase.generate, hypothesis.Phase.shrink),
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    try:
        found = hypothesis.find(
            numbers,
            lambda drawn: fails(build(list(drawn))),
            settings=settings,
            random=random.Random(0),
        )
    except hypothesis.errors.NoSuchExample:
        return None
    return build(list(found))


def _leave_out(hypothesis: ModuleType, program: Program, fails: Fails) -> Program:
    """Fewer calls. The last ones first: the earlier ones are what they stand on."""
    end = len(program)
    while end > 0:
        start = max(end - _AT_ONCE, 0)

        rest = functools.partial(_without_drawn, program, start)
        program = _search(hypothesis, [_MOST] * (end - start), rest, fails) or program
        end = start
    return program


def _one_by_one(program: Program, fails: Fails) -> Program:
    """No single call can be left out of what this gives; a smaller argument may have freed one."""
    place = len(program) - 1
    while place >= 0:
        shorter = without_calls(program, {place})
        if fails(shorter):
            program, place = shorter, len(shorter)
        place -= 1
    return program


def _without_drawn(program: Program, start: int, drawn: list[int]) -> Program:
    return without_calls(program, {start + i for i, number in enumerate(drawn) if number == 0})


def without_calls(program: Program, gone: set[int]) -> Program:
    """The program without some of its calls.

    Args:
      program: any.
      gone: their places, from 0. Values that they handed out become 0, which is padding.
    """
    number, count = {}, 0
    states = [0]
    for place in range(len(program)):
        count += place not in gone
        number[place + 1] = 0 if place in gone else count
        states.append(count)

    def kept(value: Value) -> Value:
        if not isinstance(value, Given):
            return value
        return value._replace(call=number[value.call]) if number[value.call] else 0

    calls = []
    for place, call in enumerate(program.calls):
        if place not in gone:
            changed = _with_values(call, kept)
            if AS_OF in changed.arguments:
                earlier = {AS_OF: states[changed.arguments[AS_OF]]}
                changed = replace(changed, arguments={**changed.arguments, **earlier})
            calls.append(changed)
    return replace(program, calls=tuple(calls))


def _with_values(call: Call, change: Callable[[Value], Value]) -> Call:
    """The call with every value of its lists changed."""
    arguments: dict[str, Any] = dict(call.arguments)
    for name, kind in call.kind.arguments.items():
        if name not in arguments:
            continue
        if kind is Kind.TABLE:
            arguments[name] = [compress([change(v) for v in row]) for row in call.rows(name)]
        elif kind in CAN_BE_GIVEN or kind in LISTS:
            arguments[name] = compress([change(value) for value in call.values(name)])
        elif kind is Kind.NUMBER:
            arguments[name] = change(arguments[name])
    return replace(call, arguments=arguments)


def _make_smaller(hypothesis: ModuleType, program: Program, fails: Fails) -> Program:
    """Arguments that need not be given are left out, numbers lowered, slots made padding."""
    program = _without_options(program, fails)
    start = 0
    while start < len(tops := list(_tops(program))):
        # Values keep their places: the next search takes up where this one ends.
        part = tops[start : start + _AT_ONCE]
        lowered = functools.partial(_lowered, program, start)
        program = _search(hypothesis, part, lowered, fails) or program
        start += _AT_ONCE
    return program


def _without_options(program: Program, fails: Fails) -> Program:
    for place, call in enumerate(program.calls):
        for name in call.kind.optional:
            if name in call.arguments:
                rest = {key: value for key, value in call.arguments.items() if key != name}
                calls = list(program.calls)
                calls[place] = replace(calls[place], arguments=rest)
                smaller = replace(program, calls=tuple(calls))
                try:
                    program = smaller if fails(smaller) else program
                except ValueError:
                    continue
                call = program.calls[place]
    return program


def _tops(program: Program) -> Iterator[int]:
    """How large a number is drawn for each value of each call."""
    for value in _values(program):
        plain = 1 if isinstance(value, Given) else min(abs(value), _LARGE)
        yield 256 * plain


def _values(program: Program) -> Iterator[Value]:
    found: list[Value] = []

    def note(value: Value) -> Value:
        found.append(value)
        return value

    for call in program.calls:
        _with_values(call, note)
    yield from found


def _lowered(program: Program, start: int, drawn: list[int]) -> Program:
    """Values from place `start` on no larger than what was drawn for them; others as they are."""
    limits = itertools.chain(itertools.repeat(None, start), drawn, itertools.repeat(None))

    def lower(value: Value) -> Value:
        most = next(limits)
        if most is None or (isinstance(value, Given) and most):
            return value
        if isinstance(value, Given):
            return 0
        near = min(abs(value), most) if most <= _LARGE else abs(value)
        return near if value > 0 else -near

    return replace(program, calls=tuple(_with_values(call, lower) for call in program.calls))


def _trimmed(program: Program, fails: Fails) -> Program:
    """Without padding at the end of lists of slots, if it fails then too."""
    calls = []
    for call in program.calls:
        arguments = dict(call.arguments)
        if (
            "slots" in arguments
            and set(arguments) <= {"slots", "by"}
            and not isinstance(arguments.get("by"), list)
        ):
            values = call.values("slots")
            while len(values) > 1 and values[-1] == 0:
                values.pop()
            arguments["slots"] = compress(values)
        calls.append(replace(call, arguments=arguments))
    smaller = replace(program, calls=tuple(calls))
    return smaller if fails(smaller) else program
