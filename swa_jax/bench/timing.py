"""Repetitions of timed calls, each between its own untimed preparation and clean-up."""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
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
class Effort:
    """How often a job is repeated.

    Attributes:
      least: repetitions that a job gets, unless they take four times `seconds`: then two do.
      most: repetitions after which it is left; at least 2, or there is no spread.
      seconds: after which it is left, preparation and clean-up included.
    """

    least: int
    most: int
    seconds: float

    def __post_init__(self) -> None:
        """Refuses repetitions without a spread."""
        if not 2 <= self.least <= self.most:
            raise ValueError(
                f"at least 2 repetitions, and no more than most; got {self.least=}, {self.most=}"
            )

    def enough(self, repeats: int, spent: float) -> bool:
        """Whether a job that was repeated so often, in so many seconds, is done."""
        if repeats >= self.most or (repeats >= self.least and spent >= self.seconds):
            return True
        return repeats >= 2 and spent >= 4 * self.seconds > 0


@dataclass(frozen=True)
class Timing:
    """Seconds of every repetition; `units` steps were done in each."""

    seconds: tuple[float, ...]
    units: int

    def summary(self) -> dict[str, float | int]:
        """Microseconds a step: the median, and how far the repetitions spread."""
        per_step = [1e6 * second / self.units for second in self.seconds]
        low, median, high = statistics.quantiles(per_step, n=4, method="inclusive")
        return {
            "median_us": median,
            "min_us": min(per_step),
            "q1_us": low,
            "q3_us": high,
            "max_us": max(per_step),
            "repeats": len(per_step),
            "steps": self.units,
        }


@dataclass
class _Spent:
    """What a job has taken so far."""

    whole: float = 0.0  # s, preparation and clean-up included
    timed: list[float] = field(default_factory=list)  # s of each repetition


def measure(jobs: Sequence[Job], effort: Effort) -> list[Timing]:
    """Times every job, in turns, after one call each to warm up.

    In turns, so that whatever else the machine does meanwhile touches all of them alike and
    their ratios stay fair.

    Args:
      jobs: what to compare with each other.
      effort: when a job has been repeated enough; the others go on.

    Returns:
      A timing for each job. The first call, which may compile, is not in it.
    """
    for job in jobs:
        _once(job)
    spent = [_Spent() for _ in jobs]
    while waiting := [
        (job, so_far)
        for job, so_far in zip(jobs, spent, strict=True)
        if not effort.enough(len(so_far.timed), so_far.whole)
    ]:
        for job, so_far in waiting:
            start = time.perf_counter()
            so_far.timed.append(_once(job))
            so_far.whole += time.perf_counter() - start
    return [Timing(tuple(one.timed), job.units) for job, one in zip(jobs, spent, strict=True)]


def _once(job: Job) -> float:
    given = job.prepare()
    start = time.perf_counter()
    result = job.timed(given)
    taken = time.perf_counter() - start
    job.finish(given, result)
    return taken
