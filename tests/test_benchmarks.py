"""The benchmark runs, and times only what it has checked. Nothing here asserts a time."""

import importlib.util
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from benchmarks import levanter_side, peers, serving
from benchmarks.peers import find_peers
from benchmarks.report import CALL, LOOP, PLAIN
from benchmarks.transitions import main
from swa_jax.bench import scans
from swa_jax.bench.agree import check_agreement, shuffle_pool
from swa_jax.bench.baseline import FreeListAllocator
from swa_jax.bench.cases import CASES, Driver, expect_all_free, fits, plan
from swa_jax.bench.timing import Effort, Job, measure
from swa_jax.bench.workload import SMOKE, Point, Workload

ROOT = Path(__file__).parent.parent

POINT = SMOKE.main
EVERYTHING = {case.name for case in CASES}
# Fresh pools, decoding, an extend of each kind, two frees, two by side, a group.
COMPARED = 1 + 11 + 4 + 2 + 4 + 2


def plain(allocator=FreeListAllocator, point=POINT):
    return Driver.of(allocator.at(point), SMOKE, point)


def test_smoke_run_writes_every_figure(tmp_path):
    main(["--smoke", "--no-peers", "--results", str(tmp_path)])
    found = json.loads((tmp_path / "transitions.json").read_text())
    for key in ("jax", "python", "processor", "cores", "date", "device", "load_average"):
        assert found["environment"][key], key
    assert found["effects_compared"] == (COMPARED - 2) + 5
    cases = {(row["side"], row["case"]) for row in found["results"]}
    expected = {(CALL, case.name) for case in CASES} | {(LOOP, name) for name in scans.LOOPS}
    assert cases == expected | {(PLAIN, case.name) for case in CASES if not case.of_ours}
    for row in found["results"]:
        assert 0 < row["min_us"] <= row["q1_us"] <= row["median_us"], row
        assert row["median_us"] <= row["q3_us"] <= row["max_us"], row
        assert row["repeats"] == 2
    assert found["compile_seconds"]["programs"]["jit(decode_loop)"]["times"] == 1
    assert "| free_swa_segment |" in (tmp_path / "transitions.md").read_text()
    for name in ("ratios", "pools", "sizes"):
        assert (tmp_path / f"transitions_{name}.png").read_bytes().startswith(b"\x89PNG"), name


@pytest.mark.peers
@pytest.mark.skipif(
    not all(importlib.util.find_spec(name) for name in ("torch", "sglang")),
    reason="needs torch and sglang",
)
def test_smoke_run_with_peers(tmp_path):
    # In a process of its own: importing an engine warns, and leaves torch in inference mode.
    cache = {"JAX_COMPILATION_CACHE_DIR": str(ROOT / ".pytest_cache" / "jax")}
    command = [sys.executable, "-m", "benchmarks.transitions", "--smoke", "--results", tmp_path]
    subprocess.run(command, cwd=ROOT, env={**os.environ, **cache}, check=True, timeout=300)
    found = json.loads((tmp_path / "transitions.json").read_text())
    assert found["peers"]["sglang"]["timed"], found["peers"]["sglang"]["note"]
    assert all(row["engine_ratio"] > 0 for row in found["ratios"])


def test_a_peer_that_is_not_there_says_how_to_get_it(monkeypatch):
    def load():
        raise ImportError("no numbers")

    known = [
        replace(peers._KNOWN[0], package="no_such_engine"),
        replace(peers._KNOWN[1], package="json", load=load),
        replace(peers._KNOWN[2], package="json", load=lambda: FreeListAllocator.at),
    ]
    monkeypatch.setattr(peers, "_KNOWN", known)
    absent, broken, tree = find_peers()
    assert (absent.make, absent.note) == (None, "not installed; `make peers`")
    assert broken.make is None
    assert broken.note.startswith("found, but does not import: no numbers; see the docstring of")
    assert (tree.make, tree.note) == (FreeListAllocator.at, "a source tree")


def test_levanter_is_left_out_where_it_would_take_seconds():
    assert levanter_side.reaches(Point())
    assert levanter_side.reaches(Workload().at_long_row)
    assert not levanter_side.reaches(Point(pool_tokens=2**22))
    assert not levanter_side.reaches(Point(page_size=1))


class LeakySwa(FreeListAllocator):
    """Forgets the SWA pages of a segment."""

    name = "leaky"

    def free_swa_segment(self, slots):
        pass


class WrongOffset(FreeListAllocator):
    """Decodes into the place after the right one."""

    name = "crooked"

    def decode(self, seq_lens, last):
        return [slot + 1 for slot in super().decode(seq_lens, last)]


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (LeakySwa, "leaky differs after free_swa_segment"),
        (WrongOffset, "crooked: all decoded granted a slot twice"),
    ],
)
def test_an_allocator_that_does_otherwise_is_not_timed(wrong, message):
    with pytest.raises(RuntimeError, match=message):
        check_agreement([plain(), plain(allocator=wrong)], EVERYTHING)


def test_agreement_counts_what_it_compared():
    assert check_agreement([plain(), plain()], EVERYTHING) == COMPARED
    assert check_agreement([plain(), plain()], {"decode"}) == 12


class NoSegments(FreeListAllocator):
    """Has only what an engine without segments has."""

    lacks = frozenset({"free_segment", "free_swa_segment", "extend_tail"})


def test_what_a_side_lacks_is_not_compared():
    assert check_agreement([plain(), plain(allocator=NoSegments)], EVERYTHING) == COMPARED - 5


def test_shuffled_pools_are_full_and_out_of_order():
    driver = plain()
    shuffle_pool(driver)
    expect_all_free(driver)
    pages = np.array(driver.extend())[:: POINT.page_size] // POINT.page_size
    assert np.any(np.diff(pages) != 1)
    with pytest.raises(RuntimeError, match="should have all 1024 tokens free again"):
        expect_all_free(driver)


def test_baseline_guards_its_lists():
    pools = FreeListAllocator(16, 4)
    slots = pools.extend(([0], [8], [-1]), 8)
    pools.free_swa(slots)
    assert pools.available() == (8, 16)
    pools.free(slots)
    pools.free(slots)
    assert pools.available() == (16, 16)
    with pytest.raises(RuntimeError, match="no 5 free pages"):
        pools.extend(([0, 0], [16, 4], [-1, -1]), 20)
    assert pools.available() == (16, 16)


def test_baseline_fills_the_last_page_first():
    pools = FreeListAllocator(16, 4)
    first = pools.extend(([0], [3], [-1]), 3)
    more = pools.extend(([3], [9], [first[-1]]), 6)
    assert [slot % 4 for slot in first + more] == [0, 1, 2, 3, 0, 1, 2, 3, 0]
    assert pools.decode([10], more[-1:]) == [more[-1] + 1]


def test_baseline_maps_only_the_tail():
    pools = FreeListAllocator(32, 4)
    slots = pools.extend_tail(([0, 0], [12, 8], [-1, -1]), [4, 0], 20)
    assert pools.available() == (12, 28)
    pools.free_swa(slots[:8])
    assert pools.available() == (12, 28)
    pools.free_swa(slots[8:12])
    assert pools.available() == (12, 32)
    pools.free(slots)
    assert pools.available() == (32, 32)


def test_jobs_are_timed_in_turns_without_the_first_call():
    calls = []

    def job(name):
        return Job(
            lambda: calls.append(f"prepare {name}") or name,
            lambda given: calls.append(f"run {given}") or given.upper(),
            lambda given, result: calls.append(f"finish {given} {result}"),
            units=4,
        )

    timings = measure([job("a"), job("b")], Effort(2, 2, 0.0))
    turn = ["prepare a", "run a", "finish a A", "prepare b", "run b", "finish b B"]
    assert calls == turn * 3
    assert [len(timing.seconds) for timing in timings] == [2, 2]
    summary = replace(timings[0], seconds=(4e-6, 8e-6, 12e-6)).summary()
    assert summary == {
        "median_us": 2,
        "min_us": 1,
        "q1_us": 1.5,
        "q3_us": 2.5,
        "max_us": 3,
        "repeats": 3,
        "steps": 4,
    }


@pytest.mark.parametrize(
    ("repeats", "spent", "enough"),
    [
        (9, 0.0, True),
        (8, 0.9, False),
        (5, 1.0, True),
        (4, 3.9, False),
        (2, 4.0, True),
        (1, 9, False),
    ],
)
def test_a_job_is_left_when_it_was_repeated_enough(repeats, spent, enough):
    assert Effort(least=5, most=9, seconds=1.0).enough(repeats, spent) is enough


def test_repetitions_without_a_spread_are_refused():
    with pytest.raises(ValueError, match=r"at least 2 repetitions.* got self.least=1"):
        Effort(1, 9, 1.0)


def test_each_point_of_the_plan_is_timed_once_and_fits():
    workload = Workload()
    for case, points in plan(workload):
        assert len(set(points)) == len(points)
        assert set(points) <= set(workload.points())
        assert all(fits(case, point, workload) for point in points), case
    sizes = {(case.name, len(points)) for case, points in plan(workload)}
    assert {("decode", 11), ("extend", 12), ("tail extend", 1), ("free", 11)} <= sizes
    assert not fits(CASES[0], Point(pool_tokens=2**16, batch=1024), workload)


def test_a_loop_frees_as_many_batches_as_the_pool_holds():
    workload = Workload()
    sets = [workload.sets(point) for point in (*workload.at_pools, *workload.at_slots)]
    assert sets == [1, 4, 16, 16, 16, 64, 64, 16, 4]


@pytest.mark.parametrize("sizes", [{"pool_tokens": 1000}, {"row_tokens": 250}])
def test_a_batch_that_is_no_segment_is_refused(sizes):
    (name, tokens), *_ = sizes.items()
    with pytest.raises(ValueError, match=rf"{name} must be a positive multiple .*got {tokens}"):
        Point(**sizes)


@pytest.mark.long
def test_smoke_run_of_the_serving_loops(tmp_path):
    file = tmp_path / "serving.json"
    serving.main(["--smoke", "--json", str(file)])
    figures = json.loads(file.read_text())
    assert [row["side"] for row in figures["rows"]] == ["compiled", "python loop", "host allocator"]
    assert len({row["steps"] for row in figures["rows"]}) == 1
    assert all(0 < row["share"] < 1 for row in figures["share"])
