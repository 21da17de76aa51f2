"""The command line: which parts, how many requests, where the figures go."""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import jax

from tests.arguments import from_one

from .host_part import HostPart
from .pair_part import PairPart
from .part import Part, Result, all_wrong, soak
from .report import as_json, as_text
from .rows_part import RowsPart
from .serving_part import ServingPart


class Share(NamedTuple):
    """A part, and how much of the load it gets."""

    make: Callable[[int], Part]  # by seed
    requests: float  # of all
    block: int  # requests in a block


SHARES = {
    "allocator:pages": Share(lambda seed: RowsPart("pages", seed), 0.26, 10_000),
    "allocator:full": Share(lambda seed: RowsPart("full", seed), 0.09, 5000),
    "loops:tight": Share(lambda seed: ServingPart("tight", seed), 0.10, 2500),
    "loops:tokens": Share(lambda seed: ServingPart("tokens", seed), 0.12, 2500),
    "loops:roomy": Share(lambda seed: ServingPart("roomy", seed), 0.30, 5000),
    "loops:unified": Share(lambda seed: ServingPart("unified", seed), 0.06, 2500),
    "loops:sampled": Share(lambda seed: ServingPart("sampled", seed), 0.02, 1000),
    "disaggregated": Share(PairPart, 0.045, 500),
    "host:write_back": Share(lambda seed: HostPart("write_back", seed), 0.0025, 100),
    "host:stored": Share(lambda seed: HostPart("write_through", seed, stored=True), 0.0025, 100),
}
# One of each kind, and a part of a block: what compiles and runs in about two minutes.
SHORT = ("loops:unified", "allocator:pages", "disaggregated", "host:stored")
_SHORT_MINUTES = 5


def _is_short(minutes: float | None) -> bool:
    return minutes is not None and minutes <= _SHORT_MINUTES


def choose(names: Sequence[str], minutes: float | None) -> list[str]:
    """Parts by name, or by the beginning of it; all of them, or few where time is short."""
    if not names:
        return list(SHORT if _is_short(minutes) else SHARES)
    unknown = [name for name in names if not any(part.startswith(name) for part in SHARES)]
    if unknown:
        raise SystemExit(f"unknown parts {unknown}; there are {', '.join(SHARES)}")
    return [part for part in SHARES if any(part.startswith(name) for name in names)]


def run(
    parts: Sequence[str],
    requests: int,
    minutes: float | None,
    seed: int,
    tell: Callable[[str], None],
) -> tuple[list[Result], list[str]]:
    """Runs parts one after another; also what is wrong."""
    whole = sum(SHARES[name].requests for name in parts)
    start = time.monotonic()
    results, needs, gone = [], {}, 0.0
    for name in parts:
        share = SHARES[name]
        gone += 1 / len(parts)
        deadline = float("inf") if minutes is None else start + minutes * 60 * gone
        made: list[Part] = []

        def make(share: Share = share, made: list[Part] = made) -> Part:
            made.append(share.make(seed))
            return made[0]

        count = max(1, round(requests * share.requests / whole))
        size = share.block // (4 if _is_short(minutes) else 1)
        result = soak(make, count, deadline, tell, block_size=size)
        needs.setdefault(made[0].group, set()).update(made[0].needs)
        results.append(result)
    return results, all_wrong(results, needs)


def parts_run(parts: Sequence[str]) -> str:
    """How many parts of all there were."""
    short = ", the short set" if tuple(parts) == SHORT else ""
    return f"{len(parts)} of {len(SHARES)} parts{short}"


def _minutes(text: str) -> float:
    number = float(text)
    if not 0 < number < math.inf:  # nor NaN
        raise argparse.ArgumentTypeError(f"must be a finite number above 0, got {text}")
    return number


def _seed(text: str) -> int:
    number = int(text)
    if not 0 <= number < 2**32:
        raise argparse.ArgumentTypeError(f"must be from 0 to {2**32 - 1}, got {text}")
    return number


def main(argv: Sequence[str] | None = None) -> None:
    """Soaks, prints what was found; the exit status says whether all was right."""
    parser = argparse.ArgumentParser(prog="python -m tests.soaking", description=__doc__)
    parser.add_argument(
        "--requests", type=from_one, default=1_000_000, help="in all; by default 1,000,000"
    )
    parser.add_argument(
        "--minutes",
        type=_minutes,
        help="stop after about so many; up to 5, and without --parts, only the short set runs: "
        f"{len(SHORT)} of {len(SHARES)} parts",
    )
    parser.add_argument("--seed", type=_seed, default=0, help="0 or more")
    parser.add_argument("--parts", nargs="*", default=[], help=", ".join(SHARES))
    parser.add_argument("--json", type=Path, help="where the figures go")
    args = parser.parse_args(argv)
    jax.config.update("jax_platforms", os.environ.get("JAX_PLATFORMS", "cpu"))

    def tell(line: str) -> None:
        print(line, file=sys.stderr, flush=True)

    parts = choose(args.parts, args.minutes)
    results, wrong = run(parts, args.requests, args.minutes, args.seed, tell)
    print(as_text(results))
    if args.json is not None:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(as_json(results, wrong, args.seed), indent=1) + "\n")
    for line in wrong:
        print(f"WRONG: {line}")
    total = sum(result.requests for result in results)
    print(f"{total:,} requests: {'all was right' if not wrong else f'{len(wrong)} things wrong'}")
    print(parts_run(parts))
    sys.exit(1 if wrong else 0)
