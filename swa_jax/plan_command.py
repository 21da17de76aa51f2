"""`swa-jax plan`: which split of the KV memory serves a trace, found by simulation."""

import contextlib
import json
import os
import sys
import time
from types import TracebackType

import jax
import typer

from swa_jax import command_options as options
from swa_jax import plan_options as plan_opts
from swa_jax.command_output import bad_input, emit, show
from swa_jax.models import ModelConfig, get_model, parse_bytes
from swa_jax.plan_report import PlanRun, as_dict, as_table, notes, splits_table, verdict
from swa_jax.planner.confirm import compare_with_replay, slowest_rank
from swa_jax.planner.planning import PlanSettings, plan_split
from swa_jax.replay.interruptible import interruptible
from swa_jax.replay.outfile import OutFile
from swa_jax.replay.pool_options import DEFAULT_HBM
from swa_jax.replay.trace import Trace, load_trace

_STDOUT = "-"
_EXIT_CODES = (
    "Exit codes: 0 all went well (rejected requests are no error), 1 simulation and replay differ "
    "(--confirm), 2 bad input, 130 interrupted."
)
_EXAMPLES = """Examples:

swa-jax plan --model gpt-oss-20b --hbm 40GiB

swa-jax plan --model gemma-3-27b --hbm 80GiB --weights 54GB --chips 8 --dp 4 --confirm

swa-jax plan --model llama-4-scout --hbm 60GiB --chips 8 --trace trace.jsonl --step-ms 40

swa-jax plan --model gpt-oss-120b --hbm 30GiB --chips 4 --rate 2.5 --step-ms 30 --json plan.json

swa-jax plan --model gpt-oss-20b --hbm 40GiB --chips 4096 --dp 4096 --copies 4096 --limit 64"""


def register(app: typer.Typer) -> None:
    """Adds the command to an application."""
    app.command(epilog=f"{_EXAMPLES}\n\n{_EXIT_CODES}")(plan)


def plan(
    model: options.ModelName = "gpt-oss-20b",
    hbm: plan_opts.ChipHbm = DEFAULT_HBM,
    chips: plan_opts.Chips = 1,
    trace: plan_opts.TraceFile = "mooncake-conversation",
    dp: plan_opts.Dp = 1,
    weights: plan_opts.Weights = None,
    page_size: options.PageSize = 16,
    limit: options.Limit = None,
    copies: plan_opts.Copies = 1,
    deal: plan_opts.Deal = "round-robin",
    step_ms: plan_opts.StepMs = None,
    rate: plan_opts.Rate = None,
    max_running: plan_opts.MaxRunning = 256,
    chunk_tokens: plan_opts.ChunkTokens = 8192,
    max_context: options.MaxContext = None,
    candidates: plan_opts.Candidates = 32,
    confirm: plan_opts.Confirm = False,
    json_file: options.JsonFile = None,
    no_progress: options.NoProgress = False,
    quiet: options.Quiet = False,
) -> None:
    """Find the full/SWA split of KV memory that serves a trace with the least retraction.

    Many splits are simulated at once, by counts of pages and without a prefix cache. Of the splits
    that need about the fewest steps the one with the least retraction is chosen; what it leaves
    over in the mean is what a prefix cache would have.
    """
    with bad_input():
        settings = PlanSettings(
            hbm_bytes=_bytes("--hbm", hbm),
            chips=chips,
            dp=dp,
            weights_bytes=0 if weights is None else _bytes("--weights", weights),
            page_size=page_size,
            max_running=max_running,
            chunk_tokens=chunk_tokens,
            max_context=max_context,
            copies=copies,
            step_ms=step_ms,
            rate=rate,
            deal=deal,
            candidates=candidates,
        )
        if confirm and step_ms is not None:
            raise ValueError("--confirm replays as fast as memory allows: leave --step-ms out")
        known = get_model(model)
        to_file = None if json_file in (None, _STDOUT) else OutFile("--json", json_file)
        if to_file is not None and to_file.replaced and to_file.same_file(trace):
            raise ValueError(f"--json would overwrite the trace {trace}; name another file")
        requests = load_trace(trace, limit)
        wants_bar = sys.stderr.isatty() and not (quiet or no_progress)
        with _Progress() if wants_bar else contextlib.nullcontext() as bar:
            run = interruptible(lambda: _run(requests, known, settings, bar, confirm))
        text = json.dumps(as_dict(run), indent=2, allow_nan=False) + "\n"
        _print(run, text, json_file, quiet=quiet)
        if to_file is not None:
            to_file.write(text.encode())
    if run.differences:
        raise typer.Exit(1)


def _run(
    trace: Trace, model: ModelConfig, settings: PlanSettings, bar: "_Progress | None", confirm: bool
) -> PlanRun:
    _need_device()
    started = time.perf_counter()
    found = plan_split(trace, model, settings, bar)
    seconds = time.perf_counter() - started
    if not confirm:
        return PlanRun(found, seconds)
    rank = slowest_rank(found)
    if bar is not None:
        bar("replaying one rank", 0, 1)
    return PlanRun(found, seconds, rank, compare_with_replay(found, rank))


def _need_device() -> None:
    try:
        jax.devices()
    except (RuntimeError, AssertionError) as error:  # which one depends on what is installed
        wanted = os.environ.get("JAX_PLATFORMS", "")
        raise ValueError(f"JAX has no device for JAX_PLATFORMS={wanted!r}: {error}") from None


def _bytes(option: str, text: str) -> int:
    try:
        return parse_bytes(text)
    except ValueError as error:
        raise ValueError(f"{option} {text}: {error}") from None


def _print(run: PlanRun, text: str, json_file: str | None, *, quiet: bool) -> None:
    if not quiet:
        stream = sys.stderr if json_file == _STDOUT else sys.stdout
        tables = [as_table(run)] if run.plan.pure else [as_table(run), splits_table(run)]
        show(*tables, *notes(run), verdict(run), stream=stream)
    elif run.differences:
        emit(f"swa-jax: {verdict(run)}\n", sys.stderr)
    if json_file == _STDOUT:
        emit(text)


class _Progress:
    """A bar on stderr: what is being done, and completed requests; it goes when all is done."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            console=Console(stderr=True, highlight=False),
            transient=True,
        )
        self._task = self._bar.add_task("compiling", total=None)

    def __enter__(self) -> "_Progress":
        self._bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._bar.stop()

    def __call__(self, what: str, done: int, total: int) -> None:
        """Shows that `what` has come so far."""
        self._bar.update(self._task, description=what, completed=done, total=total)
