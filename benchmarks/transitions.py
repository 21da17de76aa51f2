"""Times every transition, beside the host allocators of today's engines.

    python -m benchmarks.transitions [--json FILE] [--markdown FILE] [--smoke]

Per call: each allocator as a host loop calls it. Ours is jitted, its state donated, and waited for
after every call, so dispatch counts. In a loop: ours alone can be compiled into one `lax.scan`; the
time of a step is the loop's over its steps. All allocators get the same work in their own array
form, are checked against each other first, and must have every page free after each repetition.
"""

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import scans
from benchmarks.agree import check_agreement, shuffle_pools
from benchmarks.baseline import FreeListAllocator
from benchmarks.cases import CASES, Driver
from benchmarks.environment import CompileClock, environment, load_average
from benchmarks.ours import OwnCalls
from benchmarks.peers import Maker, Peer, find_peers
from benchmarks.report import Row, ratios, tables, verdicts
from benchmarks.workload import SMOKE, Workload


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    """Runs the benchmark and prints it.

    Returns:
      What `--json` writes.
    """
    options = _parser().parse_args(arguments)
    workload = SMOKE if options.smoke else Workload()
    peers = [] if options.no_peers else find_peers()
    start = time.perf_counter()
    where = environment()
    _print_head(where, peers)
    rows: list[Row] = []
    compile_seconds: dict[int, float] = {}
    compared, clock = 0, CompileClock()
    for tokens in workload.pools:
        print(f"timing pools of {tokens:,} tokens ...", file=sys.stderr, flush=True)
        before = clock.seconds
        pool_rows, checks = time_pool(workload, tokens, peers)
        rows += pool_rows
        compared += checks
        compile_seconds[tokens] = round(clock.seconds - before, 1)
    figures = ratios(rows, workload.pools)
    result = {
        "environment": {**where, "load_average_after": load_average()},
        "workload": vars(workload),
        "peers": {peer.name: {"timed": peer.make is not None, "note": peer.note} for peer in peers},
        "effects_compared": compared,
        "compile_seconds": compile_seconds,
        "results": rows,
        "ratios": figures,
        "seconds": round(time.perf_counter() - start, 1),
    }
    text = tables(rows, workload.pools) + "\n" + "\n".join(verdicts(figures))
    print(text)
    print(
        f"load average {result['environment']['load_average_after']}, {result['seconds']} s in all"
    )
    if options.json:
        options.json.write_text(json.dumps(result, indent=1) + "\n")
    if options.markdown:
        options.markdown.write_text(text + "\n")
    return result


def time_pool(workload: Workload, tokens: int, peers: list[Peer]) -> tuple[list[Row], int]:
    """All sides on pools of this size: the rows, and how many effects were compared before."""
    own = OwnCalls(tokens, workload.page_size)
    makers: list[Maker] = [peer.make for peer in peers if peer.make is not None]
    sides = [own, FreeListAllocator(tokens, workload.page_size)]
    sides += [make(tokens, workload.page_size) for make in makers]
    drivers = [Driver.of(side, workload, tokens) for side in sides]
    compared = check_agreement(drivers)
    for driver in drivers:
        shuffle_pools(driver)

    rows = [
        _row(scans.NAME, case, tokens, timing.summary())
        for case, timing in scans.time_scans(drivers[0], own).items()
    ]
    # Case by case, not side by side: what else the machine does then touches all sides alike.
    for case in CASES:
        for driver in drivers:
            if not case.needs & driver.side.lacks:
                timing = case.run(driver)
                rows.append(_row(driver.side.name, case.name, tokens, timing.summary()))
    if any(own.faults().values()):
        raise RuntimeError(f"the benchmark misused the allocator: {own.faults()}")
    return rows, compared


def _row(side: str, case: str, tokens: int, summary: dict[str, float | int]) -> Row:
    return {"side": side, "case": case, "pool_tokens": tokens, **summary}


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
