"""Times every transition, beside the host allocators of today's engines.

    python -m benchmarks.transitions [--results FOLDER] [--smoke] [--no-peers]

"call": as a host loop calls it. Ours is jitted, its state donated, and waited for after every call,
so dispatch counts; on a CPU the calling thread computes (`jax_cpu_enable_async_dispatch` is off),
which saves some 40 us a call where nothing else is to run meanwhile. "loop": steps of one compiled
`lax.scan`, which ours alone can be; a step's time is the loop's over its steps.
`benchmarks/workload.py` has the sizes: a main point, from which one thing at a time is varied. All
allocators get the same work in their own array form, are checked against each other first, and must
have every page free after each repetition. Points and allocators are timed in turns, so that a
ratio does not depend on what else the machine did meanwhile; Python's garbage collector waits.
"""

import argparse
import gc
import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import jax

from benchmarks.agree import check_agreement, shuffle_pool
from benchmarks.baseline import FreeListAllocator
from benchmarks.cases import Case, Driver, fits, plan
from benchmarks.environment import CompileClock, environment, load_average
from benchmarks.ours import OwnCalls
from benchmarks.peers import Peer, find_peers
from benchmarks.plots import draw
from benchmarks.report import Row, flat_goals, page, ratios, speed_goals
from benchmarks.scans import LOOPS, NAME
from benchmarks.side import Side
from benchmarks.timing import Effort, Job, measure
from benchmarks.workload import SMOKE, Point, Workload
from benchmarks.writing import progress


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    """Runs the benchmark and prints its Markdown page.

    Returns:
      What `--results` writes as JSON.
    """
    options = _parser().parse_args(arguments)
    jax.config.update("jax_cpu_enable_async_dispatch", False)
    peers = [] if options.no_peers else find_peers()
    result = run(SMOKE if options.smoke else Workload(), peers, smoke=options.smoke)
    print(page(result))
    print(
        f"{result['effects_compared']} effects agreed before timing; {result['seconds']} s in all, "
        f"{result['compile_seconds']['all']} s of them compiling"
    )
    for peer in peers:
        if peer.make is None:
            print(f"not timed: {peer.name} ({peer.note})")
    if options.results:
        write(result, options.results)
    return result


def run(workload: Workload, peers: Sequence[Peer], *, smoke: bool = False) -> dict[str, Any]:
    """Checks and times everything.

    Returns:
      All figures as JSON values.
    """
    start, clock = time.perf_counter(), CompileClock()
    where = environment()
    drivers, compared = prepare(workload, peers)
    rows = time_all(workload, drivers)
    main = asdict(workload.main)
    found = ratios(rows, main)
    return {
        "smoke": smoke,
        "environment": {**where, "load_average_after": load_average()},
        "workload": asdict(workload),
        "peers": {peer.name: _about(peer) for peer in peers},
        "effects_compared": compared,
        "compile_seconds": {"all": round(clock.seconds, 1), "programs": clock.programs()},
        "seconds": round(time.perf_counter() - start, 1),
        "goals": {"speed": speed_goals(found), "flat": flat_goals(rows, main)},
        "ratios": found,
        "results": rows,
    }


def _about(peer: Peer) -> dict[str, str | bool]:
    return {"timed": peer.make is not None, "note": peer.note, "differs": peer.differs}


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


def prepare(workload: Workload, peers: Sequence[Peer]) -> tuple[dict[Point, list[Driver]], int]:
    """Makes every allocator, checks it against ours at every point, shuffles its pool.

    Returns:
      The drivers of each point, ours first; how many effects were compared.
    """
    always = [Peer(side.name, side.at, "here") for side in (OwnCalls, FreeListAllocator)]
    sides, drivers, compared = _Sides([*always, *peers], {}), {}, 0
    for point in dict.fromkeys(workload.points()):
        progress(f"checking {point}")
        at_point = [(Driver.of(side, workload, point), is_new) for side, is_new in sides.at(point)]
        drivers[point] = [driver for driver, _ in at_point]
        timed = {case.name for case, points in plan(workload) if point in points}
        compared += check_agreement(drivers[point], timed)
        for driver, is_new in at_point:
            if is_new:
                shuffle_pool(driver)
    return drivers, compared


def time_all(workload: Workload, drivers: dict[Point, list[Driver]]) -> list[Row]:
    """Times every case at its points, on every side that has it; ours comes first in `drivers`."""
    effort = Effort(workload.least_repeats, workload.most_repeats, workload.seconds)
    rows: list[Row] = []
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        for case, points in plan(workload):
            progress(f"timing {case.name}")
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


def write(result: dict[str, Any], folder: Path) -> None:
    """Writes `transitions.json`, `transitions.md` and the pictures."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "transitions.json").write_text(as_json(result))
    (folder / "transitions.md").write_text(page(result))
    draw(result, folder)


def as_json(result: dict[str, Any]) -> str:
    """JSON with a line for each entry of a list, so that two runs can be compared by eye."""
    parts = []
    for name, value in result.items():
        if isinstance(value, list):
            lines = ",\n".join(f"  {json.dumps(_rounded(row))}" for row in value)
            parts.append(f'"{name}": [\n{lines}\n]')
        else:
            parts.append(f'"{name}": {json.dumps(_rounded(value), indent=1)}')
    return "{\n" + ",\n".join(parts) + "\n}\n"


def _rounded(value: Any) -> Any:  # noqa: ANN401
    """Five digits are more than a timing has."""
    if isinstance(value, float):
        return float(f"{value:.5g}")
    if isinstance(value, dict):
        return {name: _rounded(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_rounded(each) for each in value]
    return value


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.transitions", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--smoke", action="store_true", help="tiny sizes: does it run at all")
    parser.add_argument("--no-peers", action="store_true", help="leave other engines out")
    parser.add_argument("--results", type=Path, help="write JSON, Markdown and plots there")
    return parser


if __name__ == "__main__":
    main()
