"""Times every transition, beside the host allocators of today's engines.

    python -m benchmarks.transitions [--json FILE] [--markdown FILE] [--smoke] [--no-peers]

"call": as a host loop calls it. Ours is jitted, its state donated, and waited for after every call,
so dispatch counts. "scan": steps of one compiled `lax.scan`, which ours alone can be; a step's time
is the loop's over its steps. All allocators get the same work in their own array form, are checked
against each other first, and must have every page free after each repetition. The pools' sizes are
timed in turns, so that their ratio does not depend on what else the machine did meanwhile.
"""

import argparse
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks import scans
from benchmarks.agree import check_agreement, shuffle_pools
from benchmarks.baseline import FreeListAllocator
from benchmarks.cases import CASES, Case, Driver
from benchmarks.environment import CompileClock, environment, load_average
from benchmarks.ours import OwnCalls
from benchmarks.peers import Peer, find_peers
from benchmarks.report import Row, ratios, tables, verdicts
from benchmarks.side import Maker
from benchmarks.timing import measure
from benchmarks.workload import SMOKE, Workload


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    """Runs the benchmark and prints it.

    Returns:
      What `--json` writes.
    """
    options = _parser().parse_args(arguments)
    workload = SMOKE if options.smoke else Workload()
    peers = [] if options.no_peers else find_peers()
    start, clock = time.perf_counter(), CompileClock()
    where = environment()
    _print_head(where, peers)
    makers = [OwnCalls, FreeListAllocator, *(peer.make for peer in peers if peer.make is not None)]
    drivers, compared = prepare(workload, makers)
    rows = time_all(workload, drivers)
    figures = ratios(rows, workload.pools)
    result = {
        "environment": {**where, "load_average_after": load_average()},
        "workload": asdict(workload),
        "peers": {peer.name: {"timed": peer.make is not None, "note": peer.note} for peer in peers},
        "effects_compared": compared,
        "compile_seconds": round(clock.seconds, 1),
        "results": rows,
        "ratios": figures,
        "seconds": round(time.perf_counter() - start, 1),
    }
    judged = ["tiny sizes: goals not judged"] if options.smoke else verdicts(figures)
    text = tables(rows, workload.pools) + "\n" + "\n".join(judged)
    print(text)
    print(
        f"{compared} effects agreed before timing; {result['seconds']} s in all, "
        f"{result['compile_seconds']} s of them compiling; load average {load_average()}"
    )
    if options.json:
        options.json.write_text(json.dumps(result, indent=1) + "\n")
    if options.markdown:
        options.markdown.write_text(text + "\n")
    return result


def prepare(workload: Workload, makers: Sequence[Maker]) -> tuple[list[list[Driver]], int]:
    """Makes every allocator in every size, checks them against the first, shuffles their pools.

    Returns:
      A list of drivers, one a pool size, for each maker; how many effects were compared.
    """
    by_pool: list[list[Driver]] = []
    compared = 0
    for tokens in workload.pools:
        _progress(f"checking pools of {tokens:,} tokens")
        sides = [make(tokens, workload.page_size) for make in makers]
        drivers = [Driver.of(side, workload, tokens) for side in sides]
        compared += check_agreement(drivers)
        for driver in drivers:
            shuffle_pools(driver)
        by_pool.append(drivers)
    return [list(column) for column in zip(*by_pool, strict=True)], compared


def time_all(workload: Workload, drivers: list[list[Driver]]) -> list[Row]:
    """Times every case on every side that has it; ours comes first in `drivers`."""
    own = drivers[0]
    rows = _rows(scans.NAME, scans.DECODE, own, workload.scan_repeats)
    for case in scans.TURNOVERS:
        rows += _rows(scans.NAME, case, own, workload.repeats)
    for case in CASES:
        for column in drivers:
            side = column[0].side
            if not case.needs & side.lacks:
                rows += _rows(side.name, case, column, workload.repeats)
    for driver in own:
        if isinstance(driver.side, OwnCalls) and any(driver.side.faults().values()):
            raise RuntimeError(f"the benchmark misused the allocator: {driver.side.faults()}")
    return rows


def _rows(side: str, case: Case, drivers: list[Driver], repeats: int) -> list[Row]:
    _progress(f"{side}: {case.name}")
    timings = measure([case.job(driver) for driver in drivers], repeats)
    return [
        {"side": side, "case": case.name, "pool_tokens": driver.tokens, **timing.summary()}
        for driver, timing in zip(drivers, timings, strict=True)
    ]


def _progress(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _print_head(where: dict[str, object], peers: list[Peer]) -> None:
    print(", ".join(f"{name} {value}" for name, value in where.items() if value is not None))
    for peer in peers:
        timed = "timed" if peer.make is not None else "not timed"
        print(f"{peer.name}: {timed} ({peer.note})")
    print()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.transitions", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--smoke", action="store_true", help="tiny sizes: does it run at all")
    parser.add_argument("--no-peers", action="store_true", help="leave other engines out")
    parser.add_argument("--json", type=Path, help="write every figure to this file")
    parser.add_argument("--markdown", type=Path, help="write the tables to this file")
    return parser


if __name__ == "__main__":
    main()
