"""The same random programs on swa_jax and on sglang's own allocator, compared after every call.

    python -m tests.peers.differential --calls 100000 --page 4 --json out.json

After each call: equal counts in both pools, a grant on both sides or on none, equal places in the
pages, and for every token of every held page the same SWA slot or none, up to the names of pages.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.sglang_classes import load_sglang
from tests.peers.calls import SHAPES, Call, Shape
from tests.peers.drawing import Drawn, Writer
from tests.peers.our_side import CHUNK, OurSide, Seen
from tests.peers.renaming import DifferenceError, Renaming
from tests.peers.sglang_side import SglangSide

PROGRAM = 16 * CHUNK  # calls on one pair of allocators


class Comparison:
    """One program on both sides."""

    def __init__(self, shape: Shape, seed: int) -> None:
        self.writer = Writer(shape, seed)
        self.ours = OurSide(shape)
        self.theirs = SglangSide(shape, need_sort=seed % 2 == 1)
        self.names = Renaming(shape)
        self.counts: Counter[str] = Counter()
        self.made: list[Call] = []

    def run(self, count: int) -> None:
        """Makes `count` calls more, `CHUNK` at most.

        Raises:
          DifferenceError: at the first difference, with the calls before it.
        """
        drawn = self.writer.draw(count)
        seen = self.ours.run([each.call for each in drawn])
        for i, each in enumerate(drawn):
            self.made.append(each.call)
            try:
                self._compare(each, seen, i)
            except AssertionError as error:  # of this project, or sglang's own
                last = "\n".join(map(repr, self.made[-5:]))
                made = f"after {len(self.made)} calls, the last of them\n{last}"
                raise DifferenceError(f"{error or 'assertion'}\n{made}") from error
        if not self.writer.oracle.group_open:
            self.theirs.check_lists(self.names)

    def _compare(self, drawn: Drawn, seen: Seen, i: int) -> None:
        call = drawn.call
        left = self.theirs.available()
        granted = self.theirs.run(call, self.names)
        self.counts[call.name] += 1
        ok = bool(seen.ok[i])
        if ok != (drawn.slots is not None) or ok != (granted is not None):
            raise DifferenceError(f"granted: ours {ok}, theirs {granted is not None}")
        if granted is not None:
            slots = seen.slots[i, : granted.size].astype(np.int64)
            if slots.tolist() != drawn.slots:
                raise DifferenceError(f"ours granted {slots.tolist()}, the oracle {drawn.slots}")
            self.names.learn_grant(slots, granted)
        elif call.grants:
            self._count_refusal(call, left)
        self.names.forget(seen.full_free[i], seen.swa_free[i])
        available = tuple(seen.available[i].tolist())
        if available != self.theirs.available():
            raise DifferenceError(f"available: ours {available}, theirs {self.theirs.available()}")
        self.names.compare_mapping(seen.mapping[i], self.theirs.mapping())

    def _count_refusal(self, call: Call, left: tuple[int, int]) -> None:
        page = self.names.page
        full = sum(-(-row.seq // page) - -(-row.prefix // page) for row in call.rows)
        tail = [-(-row.tail // page) for row in call.rows]
        of_swa = sum(tail) if call.name == "alloc_extend_swa_tail" else full
        short = [n > tokens // page for n, tokens in zip((full, of_swa), left, strict=True)]
        kind = {(True, False): "full alone", (False, True): "SWA alone"}
        self.counts[f"refused, {kind.get((short[0], short[1]), 'both short')}"] += 1


def compare(page: int, calls: int, seed: int = 0) -> dict[str, Any]:
    """Runs `calls` calls in programs of `PROGRAM`, each on fresh pools.

    Args:
      page: tokens in a page, a key of `SHAPES`.
      calls: how many.
      seed: of the first program; the others count on. Odd seeds have sglang's `need_sort`.

    Returns:
      What was done, for the report.

    Raises:
      DifferenceError: at the first difference.
    """
    counts: Counter[str] = Counter()
    half_done, start = 0, time.perf_counter()
    lengths = [min(PROGRAM, calls - done) for done in range(0, calls, PROGRAM)]
    for number, length in enumerate(lengths):
        comparison = Comparison(SHAPES[page], seed + number)
        try:
            for done in range(0, length, CHUNK):
                comparison.run(min(CHUNK, length - done))
        except DifferenceError as error:
            raise DifferenceError(f"page {page}, seed {seed + number}: {error}") from None
        counts += comparison.counts
        half_done += comparison.theirs.half_done
    return {
        "page": page,
        "sglang": load_sglang().version,
        "calls": calls,
        "programs": len(lengths),
        "by_call": {k: n for k, n in sorted(counts.items()) if not k.startswith("refused")},
        "refused": {k[9:]: n for k, n in sorted(counts.items()) if k.startswith("refused")},
        "half_done_decodes_of_theirs": half_done,
        "differences": 0,
        "seconds": round(time.perf_counter() - start, 1),
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--calls", type=int, default=10_000, help="for each page size")
    parser.add_argument("--page", type=int, action="append", choices=SHAPES, help="default: all")
    parser.add_argument("--seed", type=int, default=0, help="of the first program")
    parser.add_argument("--json", type=Path, help="where to write the figures")
    given = parser.parse_args(arguments)
    results = []
    for page in given.page or SHAPES:
        results.append(compare(page, given.calls, given.seed))
        print(json.dumps(results[-1]), flush=True)
    if given.json:
        given.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
