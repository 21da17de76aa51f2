"""`swa-jax plan`: tables, JSON, exit codes, and one clear line where something is wrong."""

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
from replays import made_up_trace
from typer.testing import CliRunner

from swa_jax.cli import main
from swa_jax.commands import plan_run
from swa_jax.commands.app import app
from swa_jax.commands.plan_report import PlanRun, as_dict, notes, sections, splits_table, verdict
from swa_jax.models import get_model
from swa_jax.planner import Figures
from swa_jax.planner.limits import PLENTY
from swa_jax.planner.planning import Plan, chip_part
from swa_jax.planner.splits import Outcome, PageBytes, Split

AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03,5,5\n"
SPLITS = [Split(900, 20), Split(800, 120), Split(500, 400), Split(460, 460)]


def made_up_plan(settings, trace=None, model="gpt-oss-20b", **changed):
    """A plan that nobody simulated."""
    known = get_model(model)
    part = chip_part(known, settings.tp)
    outcomes = [Outcome(s, i > 0, 50 - i, 3 - i, 70, 2.5, 4, 0.9) for i, s in enumerate(SPLITS)]
    figures = {name: np.full(settings.dp, 6) for name in Figures.__dataclass_fields__}
    figures |= {"peak_pair": np.full((settings.dp, 2), 6), "steps": np.full(settings.dp, 4)}
    values = {
        "trace": trace or made_up_trace(),
        "model": known,
        "chip_model": part,
        "settings": settings,
        "page": PageBytes.of(part, settings.page_size),
        "split": SPLITS[1],
        "rule": SPLITS[2],
        "outcomes": outcomes,
        "best": outcomes[1],
        "rule_outcome": outcomes[2],
        "sampled": settings.dp,
        "requests": 4,
        "rejected": {"longer than any full pool": 1},
        "ranks": Figures(**figures),
        "rank_of": np.zeros(4, np.int32),
        "accepted": np.arange(4),
    }
    if part.pure_swa:
        pool = Split(PLENTY, 300)
        values |= {"split": pool, "rule": pool, "outcomes": [Outcome(pool, True, 9, 0, 0, 1, 1, 1)]}
    return Plan(**(values | changed))


@pytest.fixture
def calls(monkeypatch, tmp_path):
    """Replaces the simulation; what it was called with lands in the list."""
    monkeypatch.chdir(tmp_path)
    Path("azure.csv").write_text(AZURE)
    Path("trace.jsonl").write_text('{"timestamp": 0, "input_length": 5, "output_length": 5}\n')
    seen = []

    def plan_split(trace, model, settings, on_progress=None):
        seen.append((trace, model, settings))
        return made_up_plan(settings, trace, model.name)

    monkeypatch.setattr(plan_run, "plan_split", plan_split)
    monkeypatch.setattr(plan_run, "compare_with_replay", lambda *_: {"steps": (4, 4)})
    return seen


def refused(capsys, *arguments):
    """The one line that a refused command line gets."""
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    return captured.err


def test_help_has_examples_that_parse(calls, capsys):
    help_text = CliRunner().invoke(app, ["plan", "--help"], env={"COLUMNS": "200"}).stdout
    lines = [line.strip() for line in help_text.splitlines()]
    examples = [line.removeprefix("swa-jax ") for line in lines if line.startswith("swa-jax ")]
    Path("trace.jsonl").write_text(
        '{"timestamp": 0, "input_length": 5, "output_length": 5, "hash_ids": [0]}\n'
    )
    for example in examples:
        assert main(example.split()) == 0, example
    assert len(calls) == len(examples) == 5
    assert "Exit codes: 0 all went well" in help_text
    capsys.readouterr()


def test_options_reach_the_simulation(calls, capsys):
    options = "--hbm 10GiB --chips 8 --dp 4 --weights 6GiB --page-size 32 --max-running 9"
    more = "--chunk-tokens 77 --max-context 5000 --copies 3 --deal least-loaded --candidates 5"
    timed = "--step-ms 40 --rate 2.5 --quiet --model GEMMA-3-4B --trace azure.csv"
    assert main(["plan", *options.split(), *more.split(), *timed.split()]) == 0
    [(trace, model, settings)] = calls
    assert (len(trace), model.name) == (1, "gemma-3-4b")
    assert (settings.tp, settings.chip_bytes) == (2, 7 * 2**30)
    assert (settings.page_size, settings.max_running, settings.chunk_tokens) == (32, 9, 77)
    assert (settings.max_context, settings.copies, settings.candidates) == (5000, 3, 5)
    assert (settings.deal, settings.step_ms, settings.rate) == ("least-loaded", 40.0, 2.5)
    assert capsys.readouterr() == ("", "")


def test_json_goes_to_a_file_or_to_stdout(calls, capsys):
    assert main(["plan", "--trace", "azure.csv", "--json", "out.json"]) == 0
    shown = capsys.readouterr()
    assert "Splits" in shown.out
    assert "best" in shown.out
    figures = json.loads(Path("out.json").read_text())
    assert main(["plan", "--trace", "azure.csv", "--json", "-"]) == 0
    shown = capsys.readouterr()
    again = json.loads(shown.out)
    assert "Splits" in shown.err
    assert {**again, "seconds": 0} == {**figures, "seconds": 0}
    assert figures["ok"]
    assert figures["split"]["full_tokens"] == 800 * 16
    assert [split["finished"] for split in figures["splits"]] == [False, True, True, True]
    assert figures["rejected_reasons"] == {"longer than any full pool": 1}


def test_the_trace_is_an_argument_or_an_option(calls, capsys):
    assert main(["plan", "azure.csv", "-q"]) == 0
    assert main(["plan", "--trace", "azure.csv", "-q"]) == 0
    assert main(["plan", "--limit", "2", "-q"]) == 0
    assert [trace.name for trace, _, _ in calls] == ["azure"] * 2 + ["mooncake-conversation"]
    said = refused(capsys, "plan", "azure.csv", "--trace", "trace.jsonl")
    assert said == "swa-jax: give one trace, not both azure.csv and --trace trace.jsonl\n"


def test_a_difference_from_the_replay_is_a_failure(calls, capsys, monkeypatch):
    assert main(["plan", "--trace", "azure.csv", "--confirm"]) == 0
    assert "the replay comes to the same figures" in capsys.readouterr().out.replace("\n", " ")
    monkeypatch.setattr(plan_run, "compare_with_replay", lambda *_: {"steps": (4, 5)})
    assert main(["plan", "--trace", "azure.csv", "--confirm", "--quiet"]) == 1
    said = capsys.readouterr().err
    assert said == "swa-jax: FAILED: simulation and replay differ in steps: 4 and 5\n"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--hbm", "40 bananas"], "--hbm 40 bananas: "),
        (["--weights", "0"], "--weights 0: a memory size must be a positive amount"),
        (["--chips", "3", "--dp", "2"], "--chips must be a multiple of --dp"),
        (["--chips", "0"], "must be a positive integer, got '0'"),
        (["--weights", "80GiB"], "--weights leave nothing for KV: 80 GiB on each of 1 chips"),
        (["--rate", "2"], "--rate 2 needs --step-ms"),
        (["--rate", "-2", "--step-ms", "1"], "must be a number above 0, got '-2'"),
        (["--step-ms", "nan"], "must be a number above 0, got 'nan'"),
        (["--step-ms", "40", "--confirm"], "leave --step-ms out"),
        (["--candidates", "2"], "must be an integer from 3 to 256, got '2'"),
        (["--deal", "best"], "must be one of round-robin, least-loaded, got 'best'"),
        (["--model", "gpt-oss"], "unknown model 'gpt-oss'; did you mean"),
        (["--trace", "nowhere.csv"], "no such file"),
        (["--trace", "azure.csv", "--json", "azure.csv"], "--json would overwrite the trace"),
        (["--json", "no/such/directory"], "--json"),
    ],
)
def test_refusals_say_what_is_wrong(calls, capsys, arguments, said):
    assert said in refused(capsys, "plan", *arguments)
    assert not calls


def settings_of(**options):
    from swa_jax.planner import PlanSettings

    return PlanSettings(2**30, **options)


def test_notes_say_what_the_reader_should_know():
    plain = PlanRun(made_up_plan(settings_of()), 1.0)
    assert notes(plain) == []
    wide = made_up_plan(settings_of(chips=32, dp=2), sampled=1, rule_outcome=None)
    said = notes(PlanRun(wide, 1.0))
    assert "--dp 4" in said[0]
    assert "1 of 2 ranks" in said[1]
    assert "does not fit" in said[2]


def test_one_pool_has_no_split():
    run = PlanRun(made_up_plan(settings_of(), model="mistral-7b-v0.1"), 1.0)
    labels = {label for _, rows in sections(run) for label, _ in rows}
    assert "SWA pool" in labels
    assert "full pool" not in labels
    assert verdict(run).startswith("one pool of 4,800 tokens")
    figures = as_dict(run)
    assert figures["peak_full_pages"] is None
    assert figures["split"] == {
        "full_tokens": None,
        "swa_tokens": 4800,
        "swa_share": 1.0,
        "kv_bytes": 301 * run.plan.page.swa,
    }


def test_time_is_told_where_a_step_has_one():
    rows = dict(dict(sections(PlanRun(made_up_plan(settings_of(step_ms=500.0)), 1.0)))["time"])
    assert rows["until the last is done"] == "3.0 s"
    assert rows["longest wait"] == "3.0 s"
    offline = dict(dict(sections(PlanRun(made_up_plan(settings_of()), 1.0)))["time"])
    assert "longest wait" not in offline


def test_the_table_shows_the_best_and_that_of_plan_pools():
    many = [Outcome(Split(900 - i, i + 1), True, 9, 0, 0, 1.0, 1, 0.5) for i in range(100)]
    plan = made_up_plan(settings_of(), outcomes=many, split=many[3].split, rule=many[7].split)
    table = splits_table(PlanRun(plan, 1.0))
    assert 9 <= table.row_count <= 11
    marks = [cell for cell in table.columns[-1].cells if cell]
    assert marks == ["best", "by plan_pools"]


def test_a_split_that_was_given_up_shows_no_result():
    table = splits_table(PlanRun(made_up_plan(settings_of()), 1.0))
    columns = {str(column.header): list(column.cells) for column in table.columns}
    assert columns["steps"][:2] == ["over 50", "49"]
    assert columns["retracted"][:2] == ["", "2"]
    assert columns["at once"][0] == ""
    assert columns[""][0] == "given up"


def test_amounts_of_a_plan_have_one_unit():
    rows = dict(dict(sections(PlanRun(made_up_plan(settings_of()), 1.0)))["one chip"])
    assert rows["memory for KV"] == "1 GiB"
    assert rows["full pool"].endswith(", 0.29 GiB")
    assert rows["SWA pool"].endswith("0.04 GiB")


def test_plans_are_values():
    plan = made_up_plan(settings_of())
    assert dataclasses.replace(plan, sampled=7).sampled == 7
