"""One replay from a user's wishes to its outputs; what is wrong with the wishes is told first."""

import importlib.util
import json
import os
from collections.abc import Callable
from dataclasses import dataclass

import jax

from swa_jax.config import PoolConfig
from swa_jax.models import ModelConfig
from swa_jax.replay import driver
from swa_jax.replay.outfile import OutFile
from swa_jax.replay.report import Run, as_dict
from swa_jax.replay.trace import Trace

STDOUT = "-"


@dataclass(frozen=True)
class Outputs:
    """The files to write after the run."""

    json: OutFile | None
    plot: OutFile | None

    def write(self, run: Run) -> None:
        """Writes them; `ValueError` where that fails."""
        if self.json is not None:
            self.json.write(json_text(run).encode())
        if self.plot is not None:
            from swa_jax.replay.plot import timeline_png

            self.plot.write(timeline_png(run))


def json_text(run: Run) -> str:
    """All figures of `run`."""
    return json.dumps(as_dict(run), indent=2, allow_nan=False) + "\n"


def checked_outputs(
    trace: str | os.PathLike[str], json_file: str | None, plot_file: str | None
) -> Outputs:
    """The files, known to be writable before a long run begins.

    Raises:
      ValueError: a file that cannot be written or must not be, or matplotlib is missing.
    """
    json_out = None if json_file in (None, STDOUT) else OutFile("--json", json_file)
    plot_out = None
    if plot_file is not None:
        if importlib.util.find_spec("matplotlib") is None:
            raise ValueError('--plot needs matplotlib: pip install "swa-jax[plot]"')
        plot_out = OutFile("--plot", plot_file)
        if plot_out.replaced and plot_out.path.suffix.lower() != ".png":
            raise ValueError(f"--plot draws a PNG: name a file that ends in .png, got {plot_file}")
    for out in (json_out, plot_out):
        if out is not None and out.replaced and out.same_file(trace):
            raise ValueError(f"{out.option} would overwrite the trace {trace}; name another file")
    if json_out is not None and plot_out is not None and json_out.same_file(plot_out.path):
        raise ValueError(f"--json and --plot both name {plot_file}; name two files")
    return Outputs(json_out, plot_out)


def run_session(
    trace: Trace,
    model: ModelConfig,
    pool: PoolConfig,
    settings: driver.ReplaySettings,
    on_progress: Callable[[driver.Sample], None] | None,
) -> Run:
    """`run_replay`, with what the machine lacks told as a `ValueError`."""
    try:
        jax.devices()
    except (RuntimeError, AssertionError) as error:  # which one depends on what is installed
        wanted = os.environ.get("JAX_PLATFORMS", "")
        raise ValueError(f"JAX has no device for JAX_PLATFORMS={wanted!r}: {error}") from None
    try:
        result = driver.run_replay(trace, model, pool, settings, on_progress)
    except (MemoryError, jax.errors.JaxRuntimeError) as error:
        if not isinstance(error, MemoryError) and "RESOURCE_EXHAUSTED" not in str(error):
            raise
        raise ValueError(
            f"no memory for the state of {pool.full_pages:,} full and {pool.swa_pages:,} SWA "
            "pages; give smaller pools, larger pages or a lower --max-running"
        ) from None
    return Run(trace, model, pool, settings, result)
