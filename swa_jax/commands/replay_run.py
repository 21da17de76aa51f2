"""What `swa-jax replay` does with what it was asked for."""

import contextlib
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import typer

from swa_jax.check import InvariantError
from swa_jax.choices import EVENT_SLICE_STEPS
from swa_jax.commands.exit_codes import FOUND
from swa_jax.commands.output import emit, show
from swa_jax.commands.progress import Shown, show_progress
from swa_jax.config import PoolConfig
from swa_jax.models import ModelConfig, get_model
from swa_jax.replay.driver import ReplaySettings
from swa_jax.replay.event_log import EventLog
from swa_jax.replay.interruptible import interruptible
from swa_jax.replay.pool_options import pool_from_options
from swa_jax.replay.progress import ReplayProgress
from swa_jax.replay.ranks import RankSettings
from swa_jax.replay.ranks_report import (
    RanksRun,
    rank_table,
    ranks_dict,
    ranks_problems,
    ranks_sections,
    ranks_verdict,
)
from swa_jax.replay.ranks_session import rank_settings, run_ranks_session
from swa_jax.replay.report import Run, as_dict, as_table, notes, problems, table_of, verdict
from swa_jax.replay.session import Outputs, check_events, checked_outputs, run_session
from swa_jax.replay.trace import Trace, load_trace

__all__ = ("Asked", "ReplaySettings", "Sizes", "checked_outputs", "rank_settings", "run")


@dataclass(frozen=True)
class Sizes:
    """What was said about memory; None where nothing was."""

    hbm: str | None
    full_tokens: int | None
    swa_tokens: int | None
    page_size: int

    def pool(self, model: ModelConfig, settings: ReplaySettings, trace: Trace) -> PoolConfig:
        """The pools; ValueError for sizes that cannot work."""
        return pool_from_options(
            model,
            hbm=self.hbm,
            full_tokens=self.full_tokens,
            swa_tokens=self.swa_tokens,
            page_size=self.page_size,
            max_running=settings.max_running,
            chunk_tokens=settings.chunk_tokens,
            prefix_cache=settings.prefix_cache and trace.hash_ids is not None,
        )


@dataclass(frozen=True)
class Asked:
    """Which trace is served, and how."""

    trace: str
    limit: int | None
    model: str
    settings: ReplaySettings
    ranks: RankSettings | None  # None: no --dp


def run(asked: Asked, sizes: Sizes, outputs: Outputs, *, quiet: bool, progress: bool) -> list[str]:
    """Replays, prints and writes.

    Args:
      asked: trace and settings.
      sizes: of the pools.
      outputs: where the results go.
      quiet: print only what is wrong.
      progress: show how far it is.

    Returns:
      What is wrong; empty if nothing is.

    Raises:
      ValueError: what was asked for cannot be done.
    """
    model, settings = get_model(asked.model), asked.settings
    trace = load_trace(asked.trace, asked.limit)
    pool = sizes.pool(model, settings, trace)
    if outputs.events is not None:
        check_events(trace, pool, settings)
        settings = replace(settings, slice_steps=EVENT_SLICE_STEPS)
    with _broken_law(), show_progress(wanted=progress) as shown:
        done = interruptible(
            lambda: _replay(trace, model, pool, settings, asked.ranks, shown, outputs.events)
        )
    report = _report(done)
    if not quiet:
        show(*report.parts, report.verdict, stream=outputs.json.stream)
    elif report.problems:
        emit(f"swa-jax: {report.verdict}\n", sys.stderr)
    outputs.write(report.figures, done if isinstance(done, Run) else None)
    return report.problems


def _replay(
    trace: Trace,
    model: ModelConfig,
    pool: PoolConfig,
    settings: ReplaySettings,
    ranks: RankSettings | None,
    shown: Shown,
    events: EventLog | None,
) -> Run | RanksRun:
    progress = ReplayProgress(len(trace), pool, shown)
    if ranks is None:
        return run_session(trace, model, pool, settings, progress, events)
    return run_ranks_session(trace, model, pool, settings, ranks, progress)


@contextlib.contextmanager
def _broken_law() -> Iterator[None]:
    try:
        yield
    except InvariantError as error:
        emit(f"swa-jax: FAILED: the allocator broke a law: {error}\n", sys.stderr)
        raise typer.Exit(FOUND) from None


@dataclass(frozen=True)
class _Report:
    """What is told of a replay, of either kind."""

    parts: list[Any]  # tables and lines
    verdict: str
    problems: list[str]
    figures: dict[str, object]


def _report(run: Run | RanksRun) -> _Report:
    if isinstance(run, Run):
        return _Report([as_table(run), *notes(run)], verdict(run), problems(run), as_dict(run))
    parts = [table_of(ranks_sections(run)), rank_table(run), *notes(run.run)]
    return _Report(parts, ranks_verdict(run), ranks_problems(run), ranks_dict(run))
