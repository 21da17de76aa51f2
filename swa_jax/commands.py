"""The commands of `swa-jax`. Needs typer and rich; `swa_jax.cli.main` runs them."""

import contextlib
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Annotated, Any

import typer

import swa_jax
from swa_jax import command_options as options
from swa_jax.check import InvariantError
from swa_jax.command_output import bad_input, emit, show
from swa_jax.config import PoolConfig
from swa_jax.model_table import model_table, models_table
from swa_jax.models import ModelConfig, get_model
from swa_jax.plan_command import register as register_plan
from swa_jax.replay.driver import ReplaySettings
from swa_jax.replay.event_log import EventLog
from swa_jax.replay.interruptible import interruptible
from swa_jax.replay.pool_options import pool_from_options
from swa_jax.replay.progress import ReplayProgress
from swa_jax.replay.ranks import RankSettings
from swa_jax.replay.ranks_report import (
    RanksRun,
    rank_table,
    ranks_problems,
    ranks_sections,
    ranks_verdict,
)
from swa_jax.replay.ranks_session import rank_settings, ranks_json, run_ranks_session
from swa_jax.replay.report import Run, as_table, notes, problems, table_of, verdict
from swa_jax.replay.session import (
    EVENT_SLICE_STEPS,
    STDOUT,
    check_events,
    checked_outputs,
    json_text,
    run_session,
)
from swa_jax.replay.trace import Trace, load_trace
from swa_jax.serving_commands import register

_EXIT_CODES = (
    "Exit codes: 0 all went well (rejected requests are no error), 1 the replay found leaks or "
    "faults, 2 bad input, 130 interrupted."
)
_EXAMPLES = """Examples:

swa-jax replay mooncake-conversation

swa-jax replay mooncake-conversation --model gemma-3-27b --plot run.png

swa-jax replay trace.jsonl --full-tokens 1048576 --swa-tokens 131072

swa-jax replay azure.csv --model mistral-7b-v0.1 --hbm 80GiB --limit 1000

swa-jax replay trace.jsonl --policy cost --events blocks.jsonl

swa-jax replay mooncake-conversation --hbm 20GiB --host-gib 8

swa-jax replay trace.jsonl --quiet --json - | jq .kv_bytes_peak"""

app = typer.Typer(
    add_completion=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_enable=False,
)


def app_command() -> Any:  # noqa: ANN401 - click's Command or typer's own, as the version has it
    """The command, with `main(argv, prog_name=, standalone_mode=)`."""
    return typer.main.get_command(app)


def _show_version(wanted: bool) -> None:
    if wanted:
        emit(f"swa-jax {swa_jax.__version__}\n")
        raise typer.Exit


@app.callback(invoke_without_command=True, epilog=_EXIT_CODES)
def swa_jax_command(
    context: typer.Context,
    version: Annotated[
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version."),
    ] = False,
) -> None:
    """KV-slot allocation for models with full and sliding-window attention."""
    if context.invoked_subcommand is None:
        emit(context.get_help() + "\n")


@app.command(epilog=_EXIT_CODES)
def models(
    name: Annotated[str | None, typer.Argument(help="Show all about this one.")] = None,
) -> None:
    """List the known models: layers, window, KV bytes of a token, source."""
    with bad_input():
        table = models_table() if name is None else model_table(get_model(name))
    show(table)


@app.command(epilog=f"{_EXAMPLES}\n\n{_EXIT_CODES}")
def replay(
    trace: options.TraceFile,
    model: options.ModelName = "gpt-oss-20b",
    hbm: options.Hbm = None,
    full_tokens: options.FullTokens = None,
    swa_tokens: options.SwaTokens = None,
    page_size: options.PageSize = 16,
    limit: options.Limit = None,
    max_running: options.MaxRunning = 256,
    chunk_tokens: options.ChunkTokens = 8192,
    max_context: options.MaxContext = None,
    no_prefix_cache: options.NoPrefixCache = False,
    policy: options.Policy = "lru",
    host_gib: options.HostGib = None,
    dp: options.Dp = None,
    placement: options.Placement = None,
    no_compare: options.NoCompare = False,
    events_file: options.EventsFile = None,
    json_file: options.JsonFile = None,
    plot_file: options.PlotFile = None,
    no_progress: options.NoProgress = False,
    quiet: options.Quiet = False,
) -> None:
    """Serve a request trace in one compiled loop and say what KV memory it took."""
    with bad_input():
        settings = ReplaySettings(
            max_running,
            chunk_tokens,
            max_context,
            prefix_cache=not no_prefix_cache,
            policy=policy,
            host_bytes=None if host_gib is None else int(host_gib * 2**30),
        )
        refused = {"--host-gib": host_gib, "--events": events_file, "--plot": plot_file}
        spread = rank_settings(dp, placement, compare=not no_compare, refused=refused)
        known = get_model(model)
        outputs = checked_outputs(trace, json_file, plot_file, events_file)
        requests = load_trace(trace, limit)
        pool = pool_from_options(
            known,
            hbm=hbm,
            full_tokens=full_tokens,
            swa_tokens=swa_tokens,
            page_size=page_size,
            max_running=max_running,
            chunk_tokens=chunk_tokens,
            prefix_cache=settings.prefix_cache and requests.hash_ids is not None,
        )
        if events_file is not None:
            check_events(requests, pool, settings)
            settings = replace(settings, slice_steps=EVENT_SLICE_STEPS)
        with _broken_law(), _bar(len(requests), pool, wanted=not (quiet or no_progress)) as bar:
            run = interruptible(
                lambda: _run(requests, known, pool, settings, spread, bar, outputs.events)
            )
        report = _report(run)
        _print_report(report, json_file, quiet=quiet)
        outputs.write(report.json, run if isinstance(run, Run) else None)
    if report.problems:
        raise typer.Exit(1)


register_plan(app)
register(app)


def _bar(
    requests: int, pool: PoolConfig, *, wanted: bool
) -> contextlib.AbstractContextManager[ReplayProgress | None]:
    if wanted and sys.stderr.isatty():
        return ReplayProgress(requests, pool)
    return contextlib.nullcontext()


def _run(
    trace: Trace,
    model: ModelConfig,
    pool: PoolConfig,
    settings: ReplaySettings,
    spread: RankSettings | None,
    on_progress: ReplayProgress | None,
    events: EventLog | None,
) -> Run | RanksRun:
    if spread is None:
        return run_session(trace, model, pool, settings, on_progress, events)
    return run_ranks_session(trace, model, pool, settings, spread, on_progress)


@contextlib.contextmanager
def _broken_law() -> Iterator[None]:
    try:
        yield
    except InvariantError as error:
        emit(f"swa-jax: FAILED: the allocator broke a law: {error}\n", sys.stderr)
        raise typer.Exit(1) from None


@dataclass(frozen=True)
class _Report:
    """What is told of a replay, of either kind."""

    parts: list[Any]  # tables and lines
    verdict: str
    problems: list[str]
    json: str


def _report(run: Run | RanksRun) -> _Report:
    if isinstance(run, Run):
        return _Report([as_table(run), *notes(run)], verdict(run), problems(run), json_text(run))
    parts = [table_of(ranks_sections(run)), rank_table(run), *notes(run.run)]
    return _Report(parts, ranks_verdict(run), ranks_problems(run), ranks_json(run))


def _print_report(report: _Report, json_file: str | None, *, quiet: bool) -> None:
    if not quiet:
        stream = sys.stderr if json_file == STDOUT else sys.stdout
        show(*report.parts, report.verdict, stream=stream)
    elif report.problems:
        emit(f"swa-jax: {report.verdict}\n", sys.stderr)
    if json_file == STDOUT:
        emit(report.json)
