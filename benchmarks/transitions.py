"""Times every transition, beside the host allocators of today's engines.

    python -m benchmarks.transitions [--results FOLDER] [--smoke] [--no-peers]

"call": as a host loop calls it. Ours is jitted, its state donated, and waited for after every call,
so dispatch counts; on a CPU the calling thread computes (`jax_cpu_enable_async_dispatch` is off),
which saves some 40 us a call where nothing else is to run meanwhile. "loop": steps of one compiled
`lax.scan`, which ours alone can be; a step's time is the loop's over its steps.
`swa_jax/bench/workload.py` has the sizes: a main point, from which one thing at a time is varied.
All allocators get the same work in their own array form, are checked against each other first, and
must have every page free after each repetition. Points and allocators are timed in turns, so that a
ratio does not depend on what else the machine did meanwhile; Python's garbage collector waits.
"""

import argparse
import json
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import jax

from benchmarks.peers import find_peers
from benchmarks.plots import draw
from benchmarks.report import flat_goals, page, ratios, speed_goals
from benchmarks.writing import draws, progress
from swa_jax.bench.environment import (
    CompileClock,
    environment,
    load_average,
    stay_on_one_core,
)
from swa_jax.bench.run import prepare, time_all
from swa_jax.bench.side import Peer
from swa_jax.bench.workload import SMOKE, Workload


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    """Runs the benchmark and prints its Markdown page.

    Returns:
      What `--results` writes as JSON.
    """
    options = _parser().parse_args(arguments)
    if not options.smoke:
        stay_on_one_core()
    jax.config.update("jax_cpu_enable_async_dispatch", False)
    peers = [] if options.no_peers else find_peers()
    result = run(SMOKE if options.smoke else Workload(), peers, smoke=options.smoke)
    print(page(result, pictures=draws(options.results)))
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
    drivers, compared = prepare(workload, peers, _told)
    rows = time_all(workload, drivers, _told)
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


def _told(what: str, done: int, total: int) -> None:
    progress(f"{what} ({done + 1} of {total})")


def _about(peer: Peer) -> dict[str, str | bool]:
    return {"timed": peer.make is not None, "note": peer.note, "differs": peer.differs}


def write(result: dict[str, Any], folder: Path) -> None:
    """Writes `transitions.json`, `transitions.md` and, where matplotlib is, the pictures."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "transitions.json").write_text(as_json(result))
    (folder / "transitions.md").write_text(page(result, pictures=draws(folder)))
    if draws(folder):
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
