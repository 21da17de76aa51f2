"""`swa-jax check`: programs and saved states, exit codes, one line where something is wrong."""

import dataclasses
import json
from pathlib import Path

import jax.numpy as jnp
import mutants
import pytest
from saving import POOL
from test_recorded import FOLDER
from typer.testing import CliRunner

import swa_jax as swa
from swa_jax import debug, prefix_cache
from swa_jax.cli import main
from swa_jax.commands.app import app
from swa_jax.saved_state import save_state

ONE = FOLDER / "one_token_frees_its_swa_page_once.json"
GROUP = FOLDER / "group_settles_its_frees_at_the_call.json"


@pytest.fixture(autouse=True)
def _in_a_directory_of_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def refused(capsys, *arguments):
    """The one line that a refused command line gets."""
    assert main(["check", *map(str, arguments)]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    lines = captured.err.splitlines()
    assert len(lines) == 1, captured.err
    return lines[0]


def test_good_programs(capsys):
    assert main(["check", str(ONE), str(GROUP), "--json", "out.json", "--no-progress"]) == 0
    out = capsys.readouterr().out
    assert "all laws hold in 2 files" in out
    assert "program of 4 calls" in out
    assert "1 unmapped" in out
    figures = json.loads(Path("out.json").read_text())
    assert figures["ok"] is True
    assert [file["calls"] for file in figures["files"]] == [4, 9]
    assert figures["files"][0]["faults"] == {"unmapped": 1}
    assert figures["files"][0]["failure"] is None
    assert figures["files"][0]["config"]["page_size"] == 4


def test_a_broken_law_is_told_with_the_call_the_pages_and_the_owners(capsys, monkeypatch):
    mutants.late_look_up_in_a_group(monkeypatch)
    assert main(["check", str(GROUP), "--json", "-", "--quiet"]) == 1
    captured = capsys.readouterr()
    (line, verdict) = captured.err.splitlines()
    assert "call 3, free_swa for request 1, broke settled_at_the_call" in line
    assert "SWA page 1 (held by request 1)" in line
    assert verdict == "FAILED: 1 of 1 file"
    (file,) = json.loads(captured.out)["files"]
    laws = file["failure"].pop("laws")
    assert set(laws) == {"settled_at_the_call", "as_asked"}
    assert file["failure"] == {
        "call": 3,
        "name": "free_swa",
        "owner": "request 1",
        "full_pages": {"1": ["request 1"]},
        "swa_pages": {"1": ["request 1"]},
    }
    assert not file["ok"]


def test_another_outcome_than_was_recorded_is_a_failure(capsys):
    program = debug.load(ONE)
    wrong = dataclasses.replace(program.calls[1], outcome=debug.Outcome((28, 31)))
    calls = (program.calls[0], wrong, *program.calls[2:])
    debug.save(dataclasses.replace(program, calls=calls), "wrong.json")
    assert main(["check", "wrong.json", "--no-progress"]) == 1
    assert "28/31 tokens were left, and 28/32 are" in capsys.readouterr().out


def test_misuse_is_a_failure_where_asked(capsys):
    program = debug.load(ONE)
    bare = [dataclasses.replace(call, outcome=None) for call in program.calls]
    debug.save(dataclasses.replace(program, calls=tuple(bare)), "bare.json")
    assert main(["check", "bare.json", "--quiet"]) == 0
    assert capsys.readouterr().out == ""
    assert main(["check", "bare.json", "--strict", "--quiet"]) == 1
    assert "misuse was counted: 1 unmapped" in capsys.readouterr().out
    assert main(["check", str(ONE), "--strict", "--quiet"]) == 0  # it was recorded so


def test_saved_states(capsys):
    pytest.importorskip("orbax.checkpoint")
    state, cache = swa.free(swa.init(POOL), [-1]), prefix_cache.init(POOL)
    save_state("saved", state, cache)
    assert main(["check", "saved", "--json", "out.json", "--no-progress"]) == 0
    assert "saved state of 16 full and 12 SWA pages, 0 of them cached" in capsys.readouterr().out
    (file,) = json.loads(Path("out.json").read_text())["files"]
    assert file["kind"] == "saved state"
    assert file["config"]["full_tokens"] == 64
    assert file["faults"] == {"out_of_range": 1}
    assert main(["check", "saved", "--quiet", "--strict"]) == 1
    assert "1 out_of_range" in capsys.readouterr().out
    stale = dataclasses.replace(state, full_to_swa=state.full_to_swa.at[16].set(2))
    save_state("saved", stale, dataclasses.replace(cache, num_receipts=jnp.int32(1)))
    assert main(["check", "saved", "--quiet"]) == 1
    assert "broken: no_stale_mapping" in capsys.readouterr().out
    save_state("saved", state, dataclasses.replace(cache, num_receipts=jnp.int32(1)))
    assert main(["check", "saved", "--quiet"]) == 1
    assert "broken: receipts" in capsys.readouterr().out
    Path("empty").mkdir()
    assert "no finished save" in refused(capsys, "empty")


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("none.json", None, "none.json cannot be read: No such file"),
        ("bad.json", "{", "bad.json is no program: Expecting"),
        (
            "pure.json",
            {"calls": [{"call": 1, "name": "rebalance", "full_pages": 1, "swa_pages": 1}]},
            "pure.json: call 1 (rebalance): only a unified budget",
        ),
    ],
)
def test_bad_input_is_one_line(name, content, words, capsys):
    if isinstance(content, dict):
        head = {"format": "swa_jax program", "version": 1}
        content = {**head, "config": {"full_tokens": 32, "swa_tokens": 32}, **content}
        content = json.dumps(content)
    if content is not None:
        Path(name).write_text(content)
    assert words in refused(capsys, "--quiet", name)


def test_what_is_checked_is_not_written_over(capsys):
    Path("p.json").write_bytes(ONE.read_bytes())
    assert "overwrite" in refused(capsys, "p.json", "--json", "p.json")
    assert Path("p.json").read_bytes() == ONE.read_bytes()


def test_help_has_examples():
    text = CliRunner().invoke(app, ["check", "--help"], env={"COLUMNS": "200"}).stdout
    assert "swa-jax check tests/recorded/*.json" in text
    assert "1 a law is broken" in text
