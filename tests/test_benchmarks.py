"""The benchmark runs, and times only what it has checked. Nothing here asserts a time."""

import importlib.util
import json
import os
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
from conftest import ROOT

from benchmarks import scans, serving
from benchmarks.agree import check_agreement, shuffle_pools
from benchmarks.baseline import FreeListAllocator
from benchmarks.cases import CASES, Driver, expect_all_free
from benchmarks.report import ratios, tables, verdicts
from benchmarks.timing import Job, measure
from benchmarks.transitions import main
from benchmarks.workload import SMOKE, Workload

TOKENS = SMOKE.pools[0]
OWN, PLAIN = "swa_jax, call", "plain Python"


def plain(tokens=TOKENS, allocator=FreeListAllocator):
    return Driver.of(allocator(tokens, SMOKE.page_size), SMOKE, tokens)


def test_smoke_run_writes_every_figure(tmp_path):
    file, page = tmp_path / "figures.json", tmp_path / "tables.md"
    main(["--smoke", "--no-peers", "--json", str(file), "--markdown", str(page)])
    found = json.loads(file.read_text())
    assert set(found) == {
        "environment",
        "workload",
        "peers",
        "effects_compared",
        "compile_seconds",
        "results",
        "ratios",
        "seconds",
    }
    for key in ("jax", "python", "processor", "cores", "date", "device", "load_average"):
        assert found["environment"][key], key
    assert found["effects_compared"] == 19
    cases = {(row["side"], row["case"]) for row in found["results"]}
    looped = {case.name for case in (scans.DECODE, *scans.TURNOVERS)}
    expected = {(side, case.name) for side in (OWN, PLAIN) for case in CASES}
    assert cases == expected | {(scans.NAME, name) for name in looped}
    for row in found["results"]:
        assert 0 < row["min_us"] <= row["median_us"] <= row["max_us"], row
        assert row["repeats"] == 2
    assert found["ratios"]["sglang_decode_over_ours"] is None
    assert "| free_swa_segment |" in page.read_text()


@pytest.mark.peers
@pytest.mark.skipif(
    not all(importlib.util.find_spec(name) for name in ("torch", "sglang")),
    reason="needs torch and sglang",
)
def test_smoke_run_with_peers(tmp_path):
    # In a process of its own: importing an engine warns, and leaves torch in inference mode.
    file = tmp_path / "figures.json"
    cache = {"JAX_COMPILATION_CACHE_DIR": str(ROOT / ".pytest_cache" / "jax")}
    command = [sys.executable, "-m", "benchmarks.transitions", "--smoke", "--json", str(file)]
    subprocess.run(command, cwd=ROOT, env={**os.environ, **cache}, check=True, timeout=300)
    found = json.loads(file.read_text())
    assert found["peers"]["sglang"]["timed"], found["peers"]["sglang"]["note"]
    assert found["ratios"]["sglang_decode_over_ours"]["min"] > 0


class LeakySwa(FreeListAllocator):
    """Forgets the SWA pages of a segment."""

    name = "leaky"

    def free_swa_segment(self, slots):
        pass


class WrongOffset(FreeListAllocator):
    """Decodes into the place after the right one."""

    name = "crooked"

    def decode(self, seq_lens, last_loc):
        return [slot + 1 for slot in super().decode(seq_lens, last_loc)]


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (LeakySwa, "leaky differs after free_swa_segment"),
        (WrongOffset, "crooked: all decoded granted a slot twice"),
    ],
)
def test_an_allocator_that_does_otherwise_is_not_timed(wrong, message):
    with pytest.raises(RuntimeError, match=message):
        check_agreement([plain(), plain(allocator=wrong)])


def test_agreement_counts_what_it_compared():
    assert check_agreement([plain(), plain()]) == 19


def test_shuffled_pools_are_full_and_out_of_order():
    driver = plain()
    shuffle_pools(driver)
    expect_all_free(driver)
    pages = np.array(driver.extend())[:: SMOKE.page_size] // SMOKE.page_size
    assert np.any(np.diff(pages) != 1)
    with pytest.raises(RuntimeError, match="should have all 1024 tokens free again"):
        expect_all_free(driver)


def test_baseline_guards_its_lists():
    pools = FreeListAllocator(16, 4)
    slots = pools.extend([0], [8], [-1], 8)
    pools.free_swa(slots)
    assert pools.available() == (8, 16)
    pools.free(slots)
    pools.free(slots)
    assert pools.available() == (16, 16)
    with pytest.raises(RuntimeError, match="no 5 free pages"):
        pools.extend([0, 0], [16, 4], [-1, -1], 20)
    assert pools.available() == (16, 16)


def test_baseline_fills_the_last_page_first():
    pools = FreeListAllocator(16, 4)
    first = pools.extend([0], [3], [-1], 3)
    more = pools.extend([3], [9], [first[-1]], 6)
    assert [slot % 4 for slot in first + more] == [0, 1, 2, 3, 0, 1, 2, 3, 0]
    assert pools.decode([10], more[-1:]) == [more[-1] + 1]


def test_jobs_are_timed_in_turns_without_the_first_call():
    calls = []

    def job(name):
        return Job(
            lambda: calls.append(f"prepare {name}") or name,
            lambda given: calls.append(f"run {given}") or given.upper(),
            lambda given, result: calls.append(f"finish {given} {result}"),
            units=4,
        )

    timings = measure([job("a"), job("b")], repeats=2)
    turn = ["prepare a", "run a", "finish a A", "prepare b", "run b", "finish b B"]
    assert calls == turn * 3
    assert [len(timing.seconds) for timing in timings] == [2, 2]
    summary = replace(timings[0], seconds=(4e-6, 8e-6)).summary()
    assert summary == {"median_us": 1.5, "min_us": 1, "max_us": 2, "repeats": 2, "steps": 4}


def rows(largest, sglang):
    figures = [(scans.NAME, 100, 4.0), (scans.NAME, 400, largest)]
    if sglang is not None:
        figures += [("sglang", 100, sglang), ("sglang", 400, 80.0)]
    return [
        {
            "side": side,
            "case": "decode",
            "pool_tokens": pool,
            "median_us": us,
            "min_us": us,
            "max_us": us,
        }
        for side, pool, us in figures
    ]


@pytest.mark.parametrize(
    ("largest", "sglang", "words"),
    [
        (6.0, 40.0, ["1.50 by minima; goal <= 1.5: met", "10.0 by minima; goal >= 10: met"]),
        (6.1, 39.0, ["1.52 by minima; goal <= 1.5: missed", "9.8 by minima; goal >= 10: missed"]),
        (4.0, None, ["1.00 by minima; goal <= 1.5: met", "sglang not timed; goal >= 10"]),
    ],
)
def test_verdicts_name_goal_and_outcome(largest, sglang, words):
    lines = verdicts(ratios(rows(largest, sglang), (100, 400)))
    for line, end in zip(lines, words, strict=True):
        assert line.endswith(end)


def test_table_leaves_out_what_a_side_lacks():
    table = tables([*rows(6.0, 40.0), {**rows(6.0, None)[0], "case": "extend"}], (100,))
    assert "| decode | 4.0 (4.0 to 4.0) | 40.0 (40.0 to 40.0) |" in table
    assert "| extend | 4.0 (4.0 to 4.0) |  |" in table


@pytest.mark.parametrize("pool", [1000, 2**16])
def test_a_pool_that_would_run_out_is_refused(pool):
    with pytest.raises(ValueError, match=rf"a pool must be a multiple of 16 tokens .* got {pool}"):
        Workload(pools=(pool,))


def test_a_batch_that_is_no_segment_is_refused():
    with pytest.raises(ValueError, match=r"extend_tokens must be a multiple of the page.* got 250"):
        Workload(extend_tokens=250)


@pytest.mark.long
def test_smoke_run_of_the_serving_loops(tmp_path):
    file = tmp_path / "serving.json"
    serving.main(["--smoke", "--json", str(file)])
    figures = json.loads(file.read_text())
    assert [row["side"] for row in figures["rows"]] == ["compiled", "python loop", "host allocator"]
    assert len({row["steps"] for row in figures["rows"]}) == 1
    assert all(0 < row["share"] < 1 for row in figures["share"])
