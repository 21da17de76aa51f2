"""The command line: outputs, exit codes, and one clear line where something is wrong."""

import dataclasses
import io
import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import jax
import pytest
from replays import RESULT
from typer.testing import CliRunner

import swa_jax
from swa_jax.check import InvariantError
from swa_jax.choices import EVENT_SLICE_STEPS
from swa_jax.cli import main
from swa_jax.commands.app import app, app_command
from swa_jax.commands.exit_codes import exit_codes
from swa_jax.models import MODELS
from swa_jax.replay import driver
from swa_jax.replay.trace import load_trace

BUNDLED = "mooncake-conversation"
ROOT = Path(__file__).parent.parent
AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03,5,5\n"
MOONCAKE = '{"timestamp": 0, "input_length": 5, "output_length": 5, "hash_ids": [0]}\n'
SMALL = ["replay", BUNDLED, "--limit", "4", "--full-tokens", "1600", "--swa-tokens", "1600"]


@pytest.fixture(autouse=True)
def _in_a_directory_of_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def calls(monkeypatch):
    """Replaces the driver; what it was called with lands in the list."""
    seen = []

    def run_replay(trace, model, pool, settings=None, on_progress=None, on_slice=None):
        seen.append((trace, model, pool, settings))
        for sample in RESULT.timeline:
            if on_progress is not None:
                on_progress(sample)
        return RESULT

    monkeypatch.setattr(driver, "run_replay", run_replay)
    return seen


def files():
    return sorted(path.name for path in Path().iterdir())


def fake_result(monkeypatch, outcome):
    def run_replay(*_):
        if isinstance(outcome, BaseException):
            raise outcome
        return outcome

    monkeypatch.setattr(driver, "run_replay", run_replay)


def refused(capsys, *arguments):
    """The one line that a refused command line gets."""
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    assert captured.err.startswith("swa-jax: ")
    return captured.err


def test_version(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"swa-jax {swa_jax.__version__}\n"


@pytest.mark.parametrize("arguments", [[], ["--help"], ["replay", "-h"], ["models", "--help"]])
def test_help_tells_the_exit_codes(arguments):
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0
    assert "Exit codes: 0 all went well" in result.stdout


COMMANDS = app_command().commands


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_examples_exit_codes_and_json(name):
    command = COMMANDS[name]
    examples, codes = command.epilog.rsplit("\n\n", 1)
    assert examples.startswith("Examples:\n\n")
    assert f"swa-jax {name}" in examples
    assert codes.startswith("Exit codes: 0 all went well, ")
    assert codes.endswith(exit_codes(None).partition("well, ")[2])
    for each in getattr(command, "commands", {name: command}).values():
        options = {option for parameter in each.params for option in parameter.opts}
        assert ("--json" in options) == (name != "serve-http")  # whose output is its answers


def test_the_commands_are_those_of_the_readme():
    wanted = {"replay", "plan", "bench", "check", "generate", "serve-http", "viz", "doctor"}
    assert set(COMMANDS) == wanted | {"models"}


def test_help_of_replay_has_examples_that_parse(calls, capsys):
    help_text = CliRunner().invoke(app, ["replay", "--help"], env={"COLUMNS": "200"}).stdout
    lines = [line.strip() for line in help_text.splitlines()]
    examples = [line.removeprefix("swa-jax ") for line in lines if line.startswith("swa-jax ")]
    assert len(examples) == 7
    Path("azure.csv").write_text(AZURE)
    Path("trace.jsonl").write_text(MOONCAKE)
    for example in examples:
        assert main(example.partition(" | ")[0].split()) == 0, example
    assert len(calls) == 7
    capsys.readouterr()


def test_models(capsys):
    assert main(["models"]) == 0
    shown = capsys.readouterr().out
    for model in MODELS.values():
        assert f" {model.name} " in shown
    assert main(["models", "llama-4-scout"]) == 0
    assert "chunks of 8,192 tokens" in capsys.readouterr().out


def test_models_as_json(capsys):
    assert main(["models", "--json", "-"]) == 0
    captured = capsys.readouterr()
    figures = json.loads(captured.out)["models"]
    assert [model["name"] for model in figures] == list(MODELS)
    assert "Known models" in captured.err
    assert main(["models", "gpt-oss-20b", "--json", "one.json"]) == 0
    (one,) = json.loads(Path("one.json").read_text())["models"]
    assert one == figures[list(MODELS).index("gpt-oss-20b")]
    assert (one["full_bytes_per_token"], one["past_window"]) == (24576, 127)
    capsys.readouterr()


def test_options_reach_the_driver(calls, capsys):
    options = "--limit 3 --hbm 1GiB --page-size 32 --max-running 9 --chunk-tokens 77"
    given = ["--max-context", "5000", "--model", "GEMMA-3-4B", "--quiet"]
    assert main(["replay", BUNDLED, *options.split(), *given]) == 0
    [(trace, model, pool, settings)] = calls
    assert len(trace) == 3
    assert model.name == "gemma-3-4b"
    assert (pool.page_size, pool.sliding_window) == (32, 1023)
    assert settings == driver.ReplaySettings(max_running=9, chunk_tokens=77, max_context=5000)
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("options", "changes"),
    [
        ([], {}),
        (["--no-prefix-cache"], {"prefix_cache": False}),
        (["--policy", "cost"], {"policy": "cost"}),
        (["--events", "e.jsonl"], {"slice_steps": EVENT_SLICE_STEPS}),
    ],
)
def test_cache_options_reach_the_driver(options, changes, calls):
    assert main([*SMALL, "-q", *options]) == 0
    assert calls[0][3] == driver.ReplaySettings(**changes)


def test_defaults(calls):
    assert main(["replay", BUNDLED, "-q"]) == 0
    [(trace, model, pool, settings)] = calls
    assert (len(trace), model.name, pool.page_size) == (1000, "gpt-oss-20b", 16)
    assert settings == driver.ReplaySettings(max_running=256, chunk_tokens=8192)


@pytest.mark.usefixtures("calls")
def test_table_and_verdict_on_stdout(capsys):
    assert main(SMALL) == 0
    captured = capsys.readouterr()
    assert "64 of 100 (64.0 %)" in captured.out
    assert captured.out.splitlines()[-1].startswith("3 of 4 requests completed, 1 rejected")
    assert captured.err == ""  # no progress bar where there is no terminal


@pytest.mark.usefixtures("calls")
def test_json_on_stdout_stands_alone(capsys):
    assert main([*SMALL, "--json", "-"]) == 0
    captured = capsys.readouterr()
    assert json.loads(captured.out)["completed"] == 3
    assert "3 of 4 requests completed" in captured.err


@pytest.mark.usefixtures("calls")
def test_json_and_plot_files(capsys):
    assert main([*SMALL, "--json", "a.json", "--plot", "a.png"]) == 0
    capsys.readouterr()
    assert files() == ["a.json", "a.png"]
    assert json.loads(Path("a.json").read_text())["trace"] == BUNDLED
    assert Path("a.png").read_bytes().startswith(b"\x89PNG")


def test_tables_are_as_wide_as_they_are_where_no_terminal_is(monkeypatch, capsys):
    from rich.table import Table

    from swa_jax.commands.output import show

    monkeypatch.setenv("COLUMNS", "40")
    table = Table()
    for column in range(9):
        table.add_column(f"column {column}", justify="right")
    table.add_row(*["123,456,789"] * 9)
    show(table)
    shown = capsys.readouterr().out
    assert shown.count("123,456,789") == 9
    assert "\u2026" not in shown


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.mark.usefixtures("calls")
@pytest.mark.parametrize(
    ("options", "bar"), [([], True), (["--no-progress"], False), (["-q"], False)]
)
def test_progress_on_a_terminal(options, bar, monkeypatch, capsys):
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "120")
    assert main([*SMALL, *options]) == 0
    assert ("4/4" in terminal.getvalue()) == bar
    assert ("peak full 60 %, SWA 20 %" in terminal.getvalue()) == bar
    capsys.readouterr()


@pytest.mark.parametrize("quiet", [False, True])
@pytest.mark.parametrize("figures", [{"leaked_swa_pages": 1}, {"faults": {"unmapped": 1}}])
def test_leaks_and_faults_exit_with_1(figures, quiet, monkeypatch, capsys):
    fake_result(monkeypatch, dataclasses.replace(RESULT, **figures))
    assert main([*SMALL, "--json", "a.json", *(["-q"] if quiet else [])]) == 1
    captured = capsys.readouterr()
    assert "FAILED: " in (captured.err if quiet else captured.out)
    assert json.loads(Path("a.json").read_text())["ok"] is False


def test_a_broken_law_exits_with_1(monkeypatch, capsys):
    fake_result(monkeypatch, InvariantError("law 3: page 7"))
    assert main(SMALL) == 1
    assert capsys.readouterr().err == "swa-jax: FAILED: the allocator broke a law: law 3: page 7\n"


def test_all_requests_rejected_is_no_error(monkeypatch, capsys):
    all_rejected = {"completed": 0, "rejected": 4, "rejected_reasons": {"too long": 4}}
    fake_result(monkeypatch, dataclasses.replace(RESULT, **all_rejected))
    assert main(SMALL) == 0
    assert "4 rejected (too long: 4)" in capsys.readouterr().out


@pytest.mark.parametrize("argument", ["--page-size", "--limit", "--max-running", "--chunk-tokens"])
@pytest.mark.parametrize("value", ["0", "-1", "x", "1.5", "9" * 5000])
def test_a_number_that_is_none(argument, value, calls, capsys):
    said = refused(capsys, "replay", BUNDLED, argument, value)
    assert f"'{argument}': must be " in said
    assert value[:5] in said
    assert not calls


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "Missing argument 'TRACE'"),
        (["no.jsonl"], "no.jsonl: no such file"),
        (["bad.jsonl"], "bad.jsonl, line 1: missing output_length"),
        ([BUNDLED, "--model", "gpt-oss-20"], "did you mean 'gpt-oss-20b'"),
        ([BUNDLED, "--hbm", "1GiB", "--full-tokens", "160"], "either --hbm or the tokens"),
        ([BUNDLED, "--hbm", "lots"], "--hbm lots: a memory size must be"),
        (
            [BUNDLED, "--full-tokens", "100", "--swa-tokens", "160"],
            "--page-size=16, got 100; try 96",
        ),
        ([BUNDLED, "--full-tokens", "160", "--swa-tokens", "16"], "need at least 144 tokens"),
        ([BUNDLED, "--json", "no/such.json"], "--json no/such.json: cannot be written"),
        ([BUNDLED, "--plot", "a.pdf"], "ends in .png, got a.pdf"),
        ([BUNDLED, "--plot", "no/such.png"], "--plot no/such.png: cannot be written"),
        ([BUNDLED, "--json", "a.png", "--plot", "./a.png"], "name two files"),
        (["bad.jsonl", "--json", "bad.jsonl"], "would overwrite the trace bad.jsonl"),
        ([BUNDLED, "--policy", "mru"], "'--policy': must be one of lru, lfu, fifo, priority, cost"),
        ([BUNDLED, "--events", "no/e.jsonl"], "--events no/e.jsonl: cannot be written"),
        ([BUNDLED, "--events", "-"], "--events writes to a file or a pipe that has a name, got -"),
        ([BUNDLED, "--json", "e", "--events", "./e"], "--json and --events both name ./e"),
        ([BUNDLED, "--events", "e", "--no-prefix-cache"], "there is none: turned off"),
        (
            [BUNDLED, "--events", "e", "--model", "mistral-7b-v0.1"],
            "there is none: the model has no full layers",
        ),
        ([BUNDLED, "--frob"], "No such option"),
        ([BUNDLED, "more"], "unexpected extra argument"),
    ],
)
def test_bad_input_is_told_in_one_line(arguments, said, calls, capsys):
    Path("bad.jsonl").write_text('{"timestamp": 0, "input_length": 1, "hash_ids": []}\n')
    assert said in refused(capsys, "replay", *arguments)
    assert not calls
    assert files() == ["bad.jsonl"]


def test_events_of_a_trace_without_ids(calls, capsys):
    Path("azure.csv").write_text(AZURE)
    said = refused(capsys, "replay", "azure.csv", "--events", "e.jsonl")
    assert "there is none: the trace does not say which prompts are equal" in said
    assert not calls


def test_bad_commands(capsys):
    assert "No such command 'repaly'" in refused(capsys, "repaly")
    assert "known models: " in refused(capsys, "models", "gpt")


def test_settings_that_the_driver_refuses(monkeypatch, capsys):
    fake_result(monkeypatch, ValueError("chunk_tokens must be less, got 8192"))
    assert refused(capsys, *SMALL) == "swa-jax: --chunk-tokens must be less, got 8192\n"


@pytest.mark.parametrize(
    "error", [MemoryError(), jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory")]
)
def test_too_little_memory(error, monkeypatch, capsys):
    fake_result(monkeypatch, error)
    assert "no memory for the state of 100 full and 100 SWA pages" in refused(capsys, *SMALL)


def test_a_bug_keeps_its_traceback(monkeypatch):
    fake_result(monkeypatch, jax.errors.JaxRuntimeError("INTERNAL: no"))
    with pytest.raises(jax.errors.JaxRuntimeError):
        main(SMALL)


def test_an_interrupt_is_heard_while_the_replay_is_busy(monkeypatch, capsys):
    busy = threading.Event()

    def run_replay(*_):
        # A signal, which also wakes a main thread that waits for a lock.
        os.kill(os.getpid(), signal.SIGINT)
        busy.wait(30)  # as native code does, it hears nothing

    monkeypatch.setattr(driver, "run_replay", run_replay)
    # A shell that starts tests in the background has told them not to hear it.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        assert main(SMALL) == 130
    finally:
        busy.set()
        signal.signal(signal.SIGINT, before)
    assert capsys.readouterr().err == "swa-jax: interrupted\n"


def test_a_full_disk(monkeypatch, capsys):
    fake_result(monkeypatch, RESULT)
    if not Path("/dev/full").exists():
        pytest.skip("no /dev/full here")
    assert "No space left" in refused(capsys, *SMALL, "-q", "--json", "/dev/full")
    with Path("/dev/full").open("w") as full:
        monkeypatch.setattr(sys, "stdout", full)
        assert main(["models"]) == 2
        monkeypatch.undo()
        os.dup2(os.open(os.devnull, os.O_WRONLY), full.fileno())
    assert "the output cannot be written: No space left" in capsys.readouterr().err


def test_nobody_reads_the_output():
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "swa_jax", "models"]
    done = subprocess.run(
        command, cwd=ROOT, stdout=writer, stderr=subprocess.PIPE, timeout=120, check=False
    )
    os.close(writer)
    assert (done.returncode, done.stderr) == (141, b"")


@pytest.mark.parametrize("module", ["typer", "rich"])
def test_without_the_extra(module, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, module, None)
    for user in ("swa_jax.commands.app", "swa_jax.commands.output"):
        monkeypatch.delitem(sys.modules, user)
    if module == "rich":
        monkeypatch.setitem(sys.modules, "rich.console", None)
    assert 'pip install "swa-jax[cli]"' in refused(capsys, "--version")


def test_without_matplotlib(monkeypatch, capsys, calls):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert 'pip install "swa-jax[plot]"' in refused(capsys, *SMALL, "--plot", "a.png")
    assert not calls


def test_a_real_replay(capsys):
    sizes = ["--full-tokens", "160000", "--swa-tokens", "8000", "--max-running", "16"]
    outputs = ["--json", "a.json", "--plot", "a.png", "--events", "a.jsonl"]
    assert main(["replay", BUNDLED, "--limit", "20", *sizes, *outputs]) == 0
    shown = capsys.readouterr().out
    assert "20 of 20 requests completed, nothing leaked, no faults" in shown
    assert "of the prompt tokens came from the prefix cache" in shown
    assert files() == ["a.json", "a.jsonl", "a.png"]
    figures = json.loads(Path("a.json").read_text())
    trace = load_trace(BUNDLED, limit=20)
    assert figures["completed"] == 20
    assert figures["prompt_tokens"] == trace.prompt_lens.sum()
    assert figures["output_tokens"] == trace.output_lens.sum()
    assert 0 < figures["peak_full_pages"] <= 10_000
    assert 0 < figures["peak_swa_pages"] <= 500
    assert 0 < figures["kv_bytes_peak"] < figures["kv_bytes_pool"]
    assert trace.hash_ids is not None
    assert figures["prompt_blocks"] == sum(map(len, trace.hash_ids))
    assert 0 < figures["hit_blocks"] < figures["prompt_blocks"]
    assert figures["hit_rate"] == figures["hit_tokens"] / figures["prompt_tokens"]
    assert blocks_left("a.jsonl") == figures["cached_full_pages"] > 0


def blocks_left(file):
    """Blocks that are stored after all events of a file."""
    left = set()
    for line in Path(file).read_text().splitlines():
        for event in json.loads(line)["events"]:
            names = set(event["block_hashes"])
            assert names.isdisjoint(left) == (event["type"] == "BlockStored")
            left ^= names
    return len(left)
