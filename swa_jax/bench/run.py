"""Checks allocators against each other, then times them in turns."""

import gc
from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict, dataclass
from typing import Any, TypeAlias

from swa_jax.bench.agree import check_agreement, shuffle_pool
from swa_jax.bench.baseline import FreeListAllocator
from swa_jax.bench.cases import Case, Driver, fits, plan
from swa_jax.bench.ours import OwnCalls
from swa_jax.bench.scans import LOOPS, NAME
from swa_jax.bench.side import Peer, Side
from swa_jax.bench.timing import Effort, Job, measure
from swa_jax.bench.workload import Point, Workload

# The case, the side, the sizes that matter to it, and the timing's summary.
Row: TypeAlias = dict[str, Any]
Told: TypeAlias = Callable[[str, int, int], None]  # what is done, of which, of how many


@dataclass(frozen=True)
class _Sides:
    """Makes each allocator once for a pool, or once for a point where it has to."""

    peers: Sequence[Peer]
    made: dict[tuple[str, Point | tuple[int, int]], Side]

    def at(self, point: Point) -> list[tuple[Side, bool]]:
        """Every allocator for a point, ours first, and whether it is new."""
        found = []
        for peer in self.peers:
            if peer.make is None or not peer.reaches(point):
                continue
            key = (peer.name, point if peer.per_point else (point.pool_tokens, point.page_size))
            is_new = key not in self.made
            if is_new:
                self.made[key] = peer.make(point)
            found.append((self.made[key], is_new))
        return found


def planned(
    workload: Workload, names: Collection[str] | None = None
) -> list[tuple[Case, list[Point]]]:
    """At which points each case is timed; only the cases of these names, where any are given."""
    return [(case, where) for case, where in plan(workload) if not names or case.name in names]


def prepare(
    workload: Workload,
    peers: Sequence[Peer],
    told: Told,
    names: Collection[str] | None = None,
) -> tuple[dict[Point, list[Driver]], int]:
    """Makes every allocator, checks it against ours at every point, shuffles its pool.

    Args:
      workload: the points.
      peers: allocators beside ours and the plain-Python free list.
      told: called before each point.
      names: of the cases; all by default.

    Returns:
      The drivers of each point, ours first; how many effects were compared.

    Raises:
      RuntimeError: two allocators did different things.
    """
    always = [Peer(side.name, side.at, "here") for side in (OwnCalls, FreeListAllocator)]
    sides, drivers, compared = _Sides([*always, *peers], {}), {}, 0
    cases = planned(workload, names)
    used = {point for _, where in cases for point in where}
    points = [point for point in dict.fromkeys(workload.points()) if point in used]
    for place, point in enumerate(points):
        sizes = f"pools of {point.pool_tokens:,}, page {point.page_size}, {point.rows} rows"
        told(f"comparing, {sizes}", place, len(points))
        at_point = [(Driver.of(side, workload, point), is_new) for side, is_new in sides.at(point)]
        drivers[point] = [driver for driver, _ in at_point]
        timed = {case.name for case, where in cases if point in where}
        compared += check_agreement(drivers[point], timed)
        for driver, is_new in at_point:
            if is_new:
                shuffle_pool(driver)
    return drivers, compared


def time_all(
    workload: Workload,
    drivers: dict[Point, list[Driver]],
    told: Told,
    names: Collection[str] | None = None,
) -> list[Row]:
    """Times every case at its points, on every side that has it.

    Args:
      workload: the cases' points, and how often each is repeated.
      drivers: of `prepare`; ours comes first.
      told: called before each case.
      names: of the cases; all by default.

    Raises:
      RuntimeError: an allocator leaks, or ours was misused.
    """
    effort = Effort(workload.least_repeats, workload.most_repeats, workload.seconds)
    rows: list[Row] = []
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        cases = planned(workload, names)
        for place, (case, points) in enumerate(cases):
            told(f"timing {case.name}", place, len(cases))
            fitting = [point for point in points if fits(case, point, workload)]
            rows += _time(case, [driver for point in fitting for driver in drivers[point]], effort)
            gc.collect()
    finally:
        gc.enable()
        gc.unfreeze()
    for driver in (each for at_point in drivers.values() for each in at_point):
        if isinstance(driver.side, OwnCalls) and any(driver.side.faults().values()):
            raise RuntimeError(f"the benchmark misused the allocator: {driver.side.faults()}")
    return rows


def _time(case: Case, drivers: Sequence[Driver], effort: Effort) -> list[Row]:
    """A row for each side at each point, timed in turns."""
    named: list[tuple[str, Driver, Job]] = []
    for driver in drivers:
        is_ours = isinstance(driver.side, OwnCalls)
        if is_ours and case.name in LOOPS:
            named.append((NAME, driver, LOOPS[case.name].job(driver)))
        if not case.needs & driver.side.lacks and (is_ours or not case.of_ours):
            named.append((driver.side.name, driver, case.job(driver)))
    timings = measure([job for _, _, job in named], effort)
    return [
        {"case": case.name, "side": side, **_where(case, driver.point), **timing.summary()}
        for (side, driver, _), timing in zip(named, timings, strict=True)
    ]


def _where(case: Case, point: Point) -> dict[str, int]:
    sizes = asdict(point)
    for name in ("rows", "row_tokens") if case.decodes else ("batch",):
        del sizes[name]
    return sizes
