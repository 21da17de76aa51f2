"""`swa-jax bench`: figures, JSON, and a failure where the allocators differ."""

import json
from pathlib import Path

import pytest

from swa_jax.bench import here
from swa_jax.bench.baseline import FreeListAllocator
from swa_jax.bench.cases import CASES
from swa_jax.bench.workload import Point
from swa_jax.cli import main
from swa_jax.commands import bench as bench_command

TINY = [
    "bench",
    "--pool-tokens",
    "1024",
    "--page-size",
    "4",
    "--batch",
    "8",
    "--rows",
    "8",
    "--row-tokens",
    "16",
    "--seconds",
    "0.001",
]


@pytest.fixture(autouse=True)
def _in_a_directory_of_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def test_cases_are_those_that_there_are():
    assert tuple(case.name for case in CASES) == bench_command._CASES


def test_figures_of_two_cases(capsys):
    chosen = ["--case", "decode", "--case", "free_segment"]
    assert main([*TINY, *chosen, "--json", "a.json"]) == 0
    captured = capsys.readouterr()
    figures = json.loads(Path("a.json").read_text())
    assert figures["ok"]
    assert {row["case"] for row in figures["results"]} == {"decode", "free_segment"}
    assert {row["side"] for row in figures["results"]} == {
        "swa_jax, loop",
        "swa_jax, call",
        "plain Python",
    }
    assert all(0 < row["min_us"] <= row["median_us"] for row in figures["results"])
    assert "free_segment" in captured.out
    assert "faster" in captured.out
    assert "effects of ours and of plain Python were compared first" in captured.out


def test_allocators_that_differ_are_not_timed(monkeypatch, capsys):
    def forget(self, slots):
        pass

    monkeypatch.setattr(FreeListAllocator, "free_swa_segment", forget)
    assert main([*TINY, "--case", "free_swa_segment", "--quiet"]) == 1
    said = capsys.readouterr().err
    assert said.startswith("swa-jax: FAILED: plain Python differs after free_swa_segment")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--pool-tokens", "1024"], "a batch takes 65,536 tokens and a pool has 1,024: give"),
        (["--page-size", "3"], "must be a positive multiple of the page"),
        (["--case", "fre"], "must be one of decode, extend"),
        (["--seconds", "0"], "must be a number above 0, got '0'"),
    ],
)
def test_refusals_say_what_is_wrong(arguments, said, capsys):
    assert main(["bench", *arguments]) == 2
    captured = capsys.readouterr()
    assert said in captured.err
    assert captured.err.count("\n") == 1


def test_a_small_pool_has_fewer_decode_steps():
    assert here.workload_at(Point(), 0.1).loop_steps == 240
    small = here.workload_at(Point(256, 4, 8, 8, 16), 0.1)
    assert small.loop_steps == 15
    assert small.main.decode_tokens(small.loop_steps) <= 256
