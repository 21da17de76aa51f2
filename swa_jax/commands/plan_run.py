"""What `swa-jax plan` does with what it was asked for."""

import sys
import time
from dataclasses import dataclass

from swa_jax.commands.output import JsonOutput, emit, show
from swa_jax.commands.plan_report import PlanRun, as_dict, as_table, notes, splits_table, verdict
from swa_jax.commands.progress import Shown, show_progress
from swa_jax.models import ModelConfig, get_model, parse_bytes
from swa_jax.need_device import need_device
from swa_jax.planner.confirm import compare_with_replay, slowest_rank
from swa_jax.planner.planning import PlanSettings, plan_split
from swa_jax.replay.interruptible import interruptible
from swa_jax.replay.trace import Trace, load_trace

__all__ = ("Asked", "PlanSettings", "parse_size", "run")


@dataclass(frozen=True)
class Asked:
    """Which trace is planned for, and what serves it."""

    trace: str
    limit: int | None
    model: str
    settings: PlanSettings
    confirm: bool

    def __post_init__(self) -> None:
        if self.confirm and self.settings.step_ms is not None:
            raise ValueError("--confirm replays as fast as memory allows: leave --step-ms out")


def run(asked: Asked, out: JsonOutput, *, quiet: bool, progress: bool) -> PlanRun:
    """Plans, prints and writes.

    Args:
      asked: trace and settings.
      out: of `--json`.
      quiet: print only what is wrong.
      progress: show how far it is.

    Raises:
      ValueError: what was asked for cannot be done.
    """
    model = get_model(asked.model)
    trace = load_trace(asked.trace, asked.limit)
    with show_progress(wanted=progress) as shown:
        done = interruptible(lambda: _plan(trace, model, asked, shown))
    if not quiet:
        tables = [as_table(done)] if done.plan.pure else [as_table(done), splits_table(done)]
        show(*tables, *notes(done), verdict(done), stream=out.stream)
    elif done.differences:
        emit(f"swa-jax: {verdict(done)}\n", sys.stderr)
    out.write(as_dict(done))
    return done


def _plan(trace: Trace, model: ModelConfig, asked: Asked, shown: Shown) -> PlanRun:
    need_device()
    started = time.perf_counter()
    found = plan_split(trace, model, asked.settings, shown)
    seconds = time.perf_counter() - started
    if not asked.confirm:
        return PlanRun(found, seconds)
    rank = slowest_rank(found)
    shown("replaying one rank")
    return PlanRun(found, seconds, rank, compare_with_replay(found, rank))


def parse_size(option: str, text: str) -> int:
    """Bytes of an option; ValueError that names it where it is no size."""
    try:
        return parse_bytes(text)
    except ValueError as error:
        raise ValueError(f"{option} {text}: {error}") from None
