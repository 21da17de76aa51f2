"""Repetitions of timed calls, each between its own untimed preparation and clean-up."""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Job:
    """One call to time.

    Attributes:
      prepare: makes the call's argument; not timed.
      timed: must not return before its result is there.
      finish: gets argument and result and undoes the call; not timed.
      units: steps in one call, by which the summary divides.
    """

    prepare: Callable[[], Any]
    timed: Callable[[Any], Any]
    finish: Callable[[Any, Any], None]
    units: int = 1


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


def measure(jobs: Sequence[Job], repeats: int) -> list[Timing]:
    """Times every job `repeats` times, in turns, after one call each to warm up.

    In turns, so that whatever else the machine does meanwhile touches all of them alike and
    their ratios stay fair.

    Args:
      jobs: what to compare with each other.
      repeats: timed repetitions of each.

    Returns:
      A timing for each job. The first call, which may compile, is not in it.
    """
    seconds: list[list[float]] = [[] for _ in jobs]
    for _ in range(repeats + 1):
        for job, spent in zip(jobs, seconds, strict=True):
            given = job.prepare()
            start = time.perf_counter()
            result = job.timed(given)
            spent.append(time.perf_counter() - start)
            job.finish(given, result)
    return [Timing(tuple(spent[1:]), job.units) for job, spent in zip(jobs, seconds, strict=True)]
