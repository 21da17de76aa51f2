"""The benchmarks of the prefix cache and of the whole replay run, and time what agrees."""

import importlib.util
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from benchmarks import prefix_cache, vllm_classes, whole_replay
from benchmarks.host_replay import HostReplay, Totals
from benchmarks.own_cache import OwnLoop, OwnStore
from benchmarks.replay_peers import find_stores
from benchmarks.replay_store import PlainStore
from swa_jax.config import PoolConfig
from swa_jax.replay.driver import final_lengths

ROOT = Path(__file__).parent.parent
PLAIN = find_stores(engines=False)[0]


def test_smoke_replay_agrees_in_every_total(tmp_path):
    whole_replay.main(["--smoke", "--no-engines", "--results", str(tmp_path)])
    found = json.loads((tmp_path / "whole_replay.json").read_text())
    own, plain = found["results"]
    timed = {"requests_per_s", "us_per_step", "median_s", "min_s", "max_s", "side", "compile_s"}
    assert {name: own[name] for name in own if name not in timed} == {
        name: plain[name] for name in plain if name not in timed
    }
    assert own["completed"] == found["requests"] == 8
    # It is short of both kinds of page, and nothing of the policy is left out.
    assert own["hit_tokens"] > 0
    assert own["retracted"] > 0
    assert (own["peak_full"], own["peak_swa"]) == (16, 12)
    assert [row["fastest"] for row in found["goals"]] == [PlainStore.name]
    assert f"| {PlainStore.name} |" in (tmp_path / "whole_replay.md").read_text()
    assert (tmp_path / "whole_replay.png").read_bytes().startswith(b"\x89PNG")


def test_totals_that_differ_are_not_reported():
    same = Totals(steps=3, completed=2, seconds=0.5)
    whole_replay.check_equal(same, replace(same, seconds=0.1))
    with pytest.raises(RuntimeError, match=r"do not: \{'hit_tokens': \(0, 64\)\}"):
        whole_replay.check_equal(same, replace(same, hit_tokens=64))


def test_smoke_prefix_cache_finds_the_same_on_all_sides(tmp_path):
    prefix_cache.main(["--smoke", "--no-engines", "--results", str(tmp_path)])
    found = json.loads((tmp_path / "prefix_cache.json").read_text())
    hits = {row["side"]: row["hit_tokens"] for row in found["found"]}
    assert list(hits) == [OwnLoop.name, OwnStore.name, PlainStore.name]
    assert len(set(hits.values())) == 1
    assert hits[PlainStore.name] > 0
    calls = {(row["side"], row["call"]) for row in found["results"]}
    everywhere = {prefix_cache.WHOLE, prefix_cache.AGAIN, prefix_cache.LONG_MATCH}
    assert calls == {(side, call) for side in hits for call in everywhere} | {
        (side, call) for side in (OwnStore.name, PlainStore.name) for call in prefix_cache.CALLS
    }
    assert all(0 < row["min_us"] <= row["median_us"] <= row["max_us"] for row in found["results"])
    assert "below 1 ms" in (tmp_path / "prefix_cache.md").read_text()
    assert (tmp_path / "prefix_cache.png").read_bytes().startswith(b"\x89PNG")


def test_what_is_found_otherwise_is_not_reported():
    found = {OwnLoop.name: [64, 0], OwnStore.name: [64, 0], PlainStore.name: [64, 64]}
    with pytest.raises(RuntimeError, match="should find the same"):
        prefix_cache.check_found(found)


def tree_pages(store):
    """Pages of the tree, and those of them that are live; nothing may be locked."""
    pages, live, stack = [], 0, [store.tree.root]
    while stack:
        node = stack.pop()
        assert node.full_locks == node.swa_locks == 0
        assert all(bool(store.pools.swa_of[page]) == node.live for page in node.pages)
        pages += node.pages
        live += len(node.pages) * node.live
        stack += node.children.values()
    assert len(set(pages)) == len(pages)
    return len(pages), live


@pytest.mark.parametrize(
    "pool",
    [PoolConfig(64, 48, 4, 8), PoolConfig(128, 16, 4, 7), PoolConfig(48, 48, 4, 40)],
    ids=["short of both", "short of SWA", "a long window"],
)
def test_the_plain_loop_serves_all_and_loses_nothing(pool):
    rng = np.random.default_rng(0)
    retracted = 0
    for _ in range(20):
        work = whole_replay.tiny_work()
        lengths = rng.integers(1, 17, len(work.trace)).astype(np.int32)
        work = replace(work, trace=replace(work.trace, output_lens=lengths), pool=pool)
        store = PlainStore(pool, 4)
        loop = HostReplay(pool, whole_replay.host_load(work), store, max_running=4, chunk_tokens=16)
        totals = loop.run(most_steps=2000)
        assert totals.completed == len(work.trace)
        assert int(final_lengths(work.trace).max()) <= pool.full_tokens
        assert tree_pages(store) == store.held()
        assert store.held() == (store.tree.full_evictable, store.tree.swa_evictable)
        assert totals.peak_full <= pool.full_pages
        assert totals.peak_swa <= pool.swa_pages
        retracted += totals.retracted
    assert retracted > 0 or pool.full_pages > 2 * pool.swa_pages


def test_a_missing_vllm_is_said_to_be_missing(monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    assert vllm_classes.missing() == "not installed: torch"
    (tmp_path / "torch").mkdir()
    assert "source tree" in vllm_classes.missing()
    core = tmp_path / "vllm" / "v1" / "core"
    core.mkdir(parents=True)
    (core / "block_pool.py").touch()
    said = vllm_classes.missing()
    assert "has no vllm.v1.core.kv_cache_coordinator" in said
    assert "vllm.v1.core.block_pool" not in said
    assert said.endswith(f"need {vllm_classes.VERSION}")


@pytest.mark.peers
@pytest.mark.skipif(not vllm_classes._root(), reason="needs vllm, or its source tree")
def test_the_cache_manager_of_vllm_works_alone():
    # In a process of its own: nothing of another test's imports is in its way.
    program = """
from benchmarks.vllm_classes import load_vllm
made = load_vllm()
manager = made.new_manager(100, 4, 7, max_tokens=100)
first = made.new_request("first", list(range(30)), 4)
assert manager.allocate_slots(first, 30).get_block_ids()[0] == list(range(1, 9))
manager.free(first)
second = made.new_request("second", list(range(30)), 4)
assert manager.get_computed_blocks(second)[1] == 28
import sys
assert not [name for name in sys.modules if name.split(".")[0] == "vllm"]
"""
    subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=True, timeout=120)


@pytest.mark.long
@pytest.mark.peers
@pytest.mark.skipif(importlib.util.find_spec("sglang") is None, reason="needs sglang")
@pytest.mark.parametrize("name", ["whole_replay", "prefix_cache"])
def test_smoke_with_engines(tmp_path, name):
    cache = {"JAX_COMPILATION_CACHE_DIR": str(ROOT / ".pytest_cache" / "jax")}
    command = [sys.executable, "-m", f"benchmarks.{name}", "--smoke", "--results", str(tmp_path)]
    subprocess.run(command, cwd=ROOT, env=os.environ | cache, check=True, timeout=300)
    found = json.loads((tmp_path / f"{name}.json").read_text())
    assert "sglang" in {row["side"] for row in found["results"]}
