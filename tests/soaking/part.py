"""A part of a soak: blocks of requests, what is measured after each, what is left at its end."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from .memory import Held, growth, held_now, is_constant
from .watch import BrokenLawError
from .weather import BLOCKS, Block


@dataclass
class Left:
    """At the end of a part: nobody runs, and the cache was emptied."""

    faults: int
    leaked: int  # pages, of both pools


class Part(Protocol):
    """One kind of load on one configuration."""

    @property
    def name(self) -> str:
        """Of the part."""
        ...

    @property
    def group(self) -> str:
        """Parts of one group see to each other's kinds of load."""
        ...

    @property
    def needs(self) -> tuple[str, ...]:
        """Counts of the group that must not be 0."""
        ...

    def run(self, goal: int, quota: int, block: Block) -> Counter[str]:
        """Until `goal` requests have ended: "ended", "steps", "looks" and what else happened.

        At most `quota` requests come in, in this block and later; raises `BrokenLawError`.
        """
        ...

    def close(self) -> Left:
        """Takes the part apart; laws hold on the host too, or this raises."""
        ...


@dataclass
class Result:
    """What a part did."""

    name: str
    group: str
    requests: int = 0
    steps: int = 0
    looks: int = 0
    counts: Counter[str] = field(default_factory=Counter)
    faults: int = 0
    leaked: int = 0
    seconds: float = 0.0
    cpu_seconds: float = 0.0
    seen: list[Held] = field(default_factory=list)  # after each block
    wrong: list[str] = field(default_factory=list)
    broken: bool = False  # a law ended it: the first of `wrong`


def soak(
    make: Callable[[], Part],
    requests: int,
    deadline: float,
    tell: Callable[[str], None],
    *,
    block_size: int,
) -> Result:
    """Runs a part, at least once through every weather.

    Args:
      make: the part.
      requests: that it is to serve.
      deadline: of `time.monotonic`, when to stop.
      tell: is told how far it is.
      block_size: requests in a block.
    """
    start, cpu = time.monotonic(), time.process_time()
    part = make()
    result = Result(part.name, part.group)
    try:
        _run_blocks(part, requests, deadline, tell, block_size, result)
        left = part.close()
        result.faults, result.leaked = left.faults, left.leaked
    except (AssertionError, BrokenLawError) as error:
        result.wrong.append(str(error) or repr(error))
        result.broken = True
    result.wrong += _wrong(result)
    result.seconds = time.monotonic() - start
    result.cpu_seconds = time.process_time() - cpu
    return result


def _run_blocks(
    part: Part,
    requests: int,
    deadline: float,
    tell: Callable[[str], None],
    block_size: int,
    result: Result,
) -> None:
    of_all = f" of {requests:,}" if math.isinf(deadline) else ""  # by the clock, no total is meant
    number, size = 0, max(1, min(block_size, requests // len(BLOCKS)))
    while result.requests < requests:
        if number >= len(BLOCKS) and time.monotonic() > deadline:
            break
        block, left = BLOCKS[number % len(BLOCKS)], requests - result.requests
        goal = max(1, min(left, round(size * block.share)))
        _add(result, part.run(goal, left, block))
        result.seen.append(held_now())
        number += 1
        tell(f"{part.name}: {result.requests:,}{of_all} requests, {block.name}")
    _add(result, part.run(2**30, 0, BLOCKS[0]))  # whoever is still there


def _add(result: Result, counts: Counter[str]) -> None:
    result.requests += counts["ended"]
    result.steps += counts["steps"]
    result.looks += counts["looks"]
    result.counts += counts


def _wrong(result: Result) -> list[str]:
    wrong = []
    if result.faults:
        wrong.append(f"{result.faults} faults were counted")
    if result.leaked:
        wrong.append(f"{result.leaked} pages are held by nobody")
    if len(result.seen) >= 4 and not is_constant(result.seen):
        grown = growth(result.seen)
        wrong.append(f"memory grew by {grown.rss:,} bytes and {grown.arrays} arrays")
    return wrong


def all_wrong(results: list[Result], needs: dict[str, set[str]]) -> list[str]:
    """What is wrong in all parts, broken laws first.

    Where a law ended a part, what would have happened after it is not asked for.
    """
    laws = [f"{result.name}: {result.wrong[0]}" for result in results if result.broken]
    others = [
        f"{result.name}: {each}" for result in results for each in result.wrong[result.broken :]
    ]
    return laws + others + ([] if laws else missing(results, needs))


def missing(results: list[Result], needs: dict[str, set[str]]) -> list[str]:
    """What was to happen and did not: a soak that did not soak."""
    return [
        f"{group}: {name} never happened"
        for group, names in needs.items()
        for name in sorted(names)
        if not sum(result.counts[name] for result in results if result.group == group)
    ]
