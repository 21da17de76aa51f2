"""Compares a new run of the benchmark with the recorded one, and says what has become slower.

    python -m benchmarks.check NEW.json [OLD.json] [--most 1.2]

What is compared are ratios, ours over a peer's in the same run, so that the machine's speed
cancels. Of several peers the median change counts: one that was disturbed, or that has changed,
does not decide. Exits with 1 where something of ours became slower by more than `--most` allows.
"""

import argparse
import json
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.report import OURS, SIZES, Where, together

RECORDED = Path(__file__).parent / "results" / "transitions.json"
MOST = 1.2


@dataclass(frozen=True)
class Change:
    """How a case of ours went against the peers that both runs have."""

    case: str
    side: str
    sizes: Where
    factor: float  # ours over a peer's, new over old, the median of the peers: above 1 is slower
    peers: int

    def __str__(self) -> str:
        """One line."""
        sizes = ", ".join(
            f"{name.replace('_', ' ')} {size:,}"
            for name, size in zip(SIZES, self.sizes, strict=True)
            if size is not None
        )
        return f"{self.factor:5.2f}  {self.side}: {self.case} ({sizes}; {self.peers} peers)"


def changes(new: dict[str, Any], old: dict[str, Any]) -> list[Change]:
    """What both runs have, the worst first.

    Args:
      new: a run, as `transitions` wrote it.
      old: the run to compare with.
    """
    found, before = together(new["results"]), together(old["results"])
    compared = [
        _change(key, side, found[key], before[key])
        for key in found.keys() & before.keys()
        for side in OURS
        if side in found[key] and side in before[key]
    ]
    return sorted((each for each in compared if each), key=lambda each: -each.factor)


def _change(
    key: tuple[str, Where], side: str, new: dict[str, Any], old: dict[str, Any]
) -> Change | None:
    """None where the runs have no peer in common."""
    factors = [
        (new[side]["median_us"] / new[peer]["median_us"])
        / (old[side]["median_us"] / old[peer]["median_us"])
        for peer in new.keys() & old.keys() - set(OURS)
    ]
    if not factors:
        return None
    return Change(key[0], side, key[1], statistics.median(factors), len(factors))


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints what became slower.

    Returns:
      1 where something became slower by more than allowed, 2 where nothing could be compared.
    """
    options = _parser().parse_args(arguments)
    for path, maker in ((options.new, "make bench-check"), (options.old, "make bench")):
        if not path.exists():
            print(f"there is no {path}: `{maker}` writes one")
            return 2
    new, old = (json.loads(path.read_text()) for path in (options.new, options.old))
    compared = changes(new, old)
    if not compared:
        print("the two runs have nothing in common: no case, or no peer")
        return 2
    slower = [change for change in compared if change.factor > options.most]
    middle = statistics.median(change.factor for change in compared)
    print(
        f"{len(compared)} cases beside the same peers: {middle:.2f} of the time before in the "
        f"median, {len(slower)} slower by more than {options.most:.2f}"
    )
    for change in slower:
        print(change)
    return int(bool(slower))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.check", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("new", type=Path, help="transitions.json of a new run")
    parser.add_argument("old", type=Path, nargs="?", default=RECORDED, help="the recorded one")
    parser.add_argument("--most", type=float, default=MOST, help="times slower that is let pass")
    return parser


if __name__ == "__main__":
    sys.exit(main())
