"""Random programs on swa_jax and on sglang's own allocator (`python -m tests.peers.differential`).

`make peers` installs what they need; `.ci/run` runs them. Longer runs are for the command line.
"""

from __future__ import annotations

import json

import pytest

from benchmarks.sglang_classes import missing
from tests.peers import differential
from tests.peers.calls import SHAPES, Call, Row
from tests.peers.drawing import Drawn
from tests.peers.renaming import DifferenceError
from tests.peers.sglang_side import SglangSide

pytestmark = [
    pytest.mark.peers,
    pytest.mark.skipif(bool(missing()), reason=missing() or "sglang is there"),
]


@pytest.mark.parametrize("page", SHAPES)
def test_equal_after_each_of_ten_thousand_calls(page, tmp_path):
    file = tmp_path / "figures.json"
    differential.main(["--page", str(page), "--calls", "10000", "--json", str(file)])
    (figures,) = json.loads(file.read_text())
    assert figures["differences"] == 0
    assert sum(figures["by_call"].values()) == 10_000
    # A program that never ran short, or never made a call, would show less than it seems to.
    assert min(figures["refused"].values()) >= 20
    assert len(figures["refused"]) == 3
    assert len(figures["by_call"]) == (14 if page == 1 else 16)
    assert min(figures["by_call"].values()) >= 5
    assert (figures["half_done_decodes_of_theirs"] > 0) == (page > 1)


class OneCallIsLost(SglangSide):
    """The hundredth free is forgotten."""

    frees = 0

    def run(self, call, names):
        if call.name == "free":
            self.frees += 1
            if self.frees == 100:
                return None
        return super().run(call, names)


class OneTokenIsOff(SglangSide):
    """A token's SWA slot is its neighbour's."""

    def mapping(self):
        found = super().mapping().copy()
        found[found == 9] = 10
        return found


@pytest.mark.parametrize(
    ("wrong", "message"),
    [(OneCallIsLost, "available: ours"), (OneTokenIsOff, "maps to their SWA slot")],
)
def test_a_side_that_does_otherwise_is_noticed(wrong, message, monkeypatch):
    monkeypatch.setattr(differential, "SglangSide", wrong)
    with pytest.raises(DifferenceError, match=message):
        differential.compare(4, 2000, seed=1)


def test_a_difference_that_programs_leave_out_is_noticed():
    comparison = differential.Comparison(SHAPES[4], seed=0)
    extend = Call("alloc_extend", (Row(0, 2),))
    calls = [
        Drawn(extend, comparison.writer.oracle.alloc_extend([0], [2], [-1], capacity=2).slots),
        Drawn(Call("free_swa", slots=(4,))),
        Drawn(Call("alloc_decode", (Row(2, 3, 5),)), [6]),
    ]
    comparison.writer.drawn = calls
    with pytest.raises(DifferenceError, match=r"ours \(156, 124\), theirs \(156, 128\)"):
        comparison.run(len(calls))
