"""One replay from a user's wishes to its outputs; what is wrong with the wishes is told first."""

import contextlib
import importlib.util
import itertools
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from swa_jax.config import PoolConfig
from swa_jax.json_output import STDOUT, JsonOutput
from swa_jax.models import ModelConfig
from swa_jax.need_device import need_device
from swa_jax.out_of_memory import device_memory, is_out_of_memory
from swa_jax.replay import driver
from swa_jax.replay.event_log import EventLog
from swa_jax.replay.outfile import OutFile
from swa_jax.replay.report import Run, no_cache_reason
from swa_jax.replay.trace import Trace


@dataclass(frozen=True)
class Outputs:
    """Where the results go."""

    json: JsonOutput
    plot: OutFile | None
    events: EventLog | None = None  # written during the run

    def write(self, figures: dict[str, object], run: Run | None) -> None:
        """Writes them, the figures as JSON and what `run` shows; `ValueError` where that fails."""
        self.json.write(figures)
        if self.plot is not None and run is not None:
            from swa_jax.viz import as_png, use_over_time

            self.plot.write(as_png(use_over_time(run)))


def checked_outputs(
    trace: str | os.PathLike[str],
    json_file: str | None,
    plot_file: str | None,
    events_file: str | None = None,
) -> Outputs:
    """The files, known to be writable before a long run begins.

    Raises:
      ValueError: a file that cannot be written or must not be, or matplotlib is missing.
    """
    json_out = JsonOutput(json_file)
    plot_out = None
    if plot_file is not None:
        if importlib.util.find_spec("matplotlib") is None:
            raise ValueError('--plot needs matplotlib: pip install "swa-jax[plot]"')
        plot_out = OutFile("--plot", plot_file)
        if plot_out.replaced and plot_out.path.suffix.lower() != ".png":
            raise ValueError(f"--plot draws a PNG: name a file that ends in .png, got {plot_file}")
    if events_file == STDOUT:
        raise ValueError("--events writes to a file or a pipe that has a name, got -")
    events_out = None if events_file is None else EventLog("--events", events_file)
    outs = [out for out in (json_out.file, plot_out, events_out) if out is not None]
    for out in outs:
        if out.replaced and out.same_file(trace):
            raise ValueError(f"{out.option} would overwrite the trace {trace}; name another file")
    for one, other in itertools.combinations(outs, 2):
        if one.same_file(other.path):
            options = f"{one.option} and {other.option}"
            raise ValueError(f"{options} both name {other.name}; name two files")
    return Outputs(json_out, plot_out, events_out)


def check_events(trace: Trace, pool: PoolConfig, settings: driver.ReplaySettings) -> None:
    """There are no events without a cache.

    Raises:
      ValueError: says why there is none.
    """
    reason = no_cache_reason(trace, pool, settings)
    if reason is not None:
        raise ValueError(f"--events tells what the prefix cache holds, and there is none: {reason}")


def run_session(
    trace: Trace,
    model: ModelConfig,
    pool: PoolConfig,
    settings: driver.ReplaySettings,
    on_progress: Callable[[driver.Sample], None] | None,
    events: EventLog | None = None,
) -> Run:
    """`run_replay`, with what the machine lacks told as a `ValueError`.

    With `events` the tree is looked at after each slice, so short slices miss less.
    """
    with lacks_told(pool), contextlib.nullcontext() if events is None else events.writing():
        look = None if events is None else events.look
        result = driver.run_replay(trace, model, pool, settings, on_progress, look)
    return Run(trace, model, pool, settings, result)


@contextlib.contextmanager
def lacks_told(pool: PoolConfig, ranks: int = 1) -> Iterator[None]:
    """What the machine lacks for a replay in here, a device or memory, becomes a `ValueError`."""
    need_device()
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        each = "" if ranks == 1 else f" on each of {ranks} ranks"
        raise ValueError(
            f"no memory for the state of {pool.full_pages:,} full and {pool.swa_pages:,} SWA "
            f"pages{each}; give smaller pools, larger pages or a lower --max-running"
            f"{device_memory()}"
        ) from None
