"""Repetitions of one timed call, each between its own untimed preparation and clean-up."""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

Given = TypeVar("Given")
Result = TypeVar("Result")


@dataclass(frozen=True)
class Timing:
    """Seconds of every repetition; `units` steps were done in each."""

    seconds: tuple[float, ...]
    units: int

    def summary(self) -> dict[str, float | int]:
        """Microseconds a step."""
        per_step = [1e6 * second / self.units for second in self.seconds]
        return {
            "median_us": statistics.median(per_step),
            "min_us": min(per_step),
            "max_us": max(per_step),
            "repeats": len(per_step),
            "steps": self.units,
        }


def measure(
    prepare: Callable[[], Given],
    timed: Callable[[Given], Result],
    finish: Callable[[Given, Result], None],
    *,
    repeats: int,
    units: int,
) -> Timing:
    """Times `timed` alone, `repeats` times after one call to warm up.

    Args:
      prepare: makes the call's argument; not timed.
      timed: must not return before its result is there.
      finish: gets argument and result and undoes the call; not timed.
      repeats: timed repetitions.
      units: steps in one call, by which the summary divides.

    Returns:
      The seconds of every repetition. The first call, which may compile, is not among them.
    """
    seconds = []
    for _ in range(repeats + 1):
        given = prepare()
        start = time.perf_counter()
        result = timed(given)
        seconds.append(time.perf_counter() - start)
        finish(given, result)
    return Timing(tuple(seconds[1:]), units)
