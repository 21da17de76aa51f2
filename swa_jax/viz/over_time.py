"""The course of a replay as a picture: pages in use, KV memory, requests."""

from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import to_rgba
from matplotlib.ticker import EngFormatter, StrMethodFormatter

from swa_jax.models import format_bytes
from swa_jax.replay.report import Run
from swa_jax.viz.looks import BLACK, BLUE, GREEN, ORANGE, PURPLE
from swa_jax.viz.picture import Picture, new_picture, plain

if TYPE_CHECKING:
    from swa_jax.replay.driver import Sample

# Lines differ in style and areas in hatch, too.
FULL, SWA, WITHOUT_SWA, RUNNING, WAITING = BLUE, ORANGE, BLACK, GREEN, PURPLE
_GIB = 2**30


def use_over_time(run: Run) -> Picture:
    """Draws what a replay used over its steps: pages of each pool, KV memory, requests.

    There is one sample for each slice of the loop. A peak can lie between two samples, so peaks are
    drawn as lines of their own.

    Args:
      run: a replay that was done, such as `swa_jax.replay.session.run_session` gives.

    Returns:
      A figure; `swa_jax.viz.as_png` makes a file of it.
    """
    hybrid = not run.pool.pure_swa_pool
    result, pool = run.result, run.pool
    panels = 3 + hybrid
    figure = new_picture(9, 2.2 * panels + 0.6, layout="constrained")
    axes: list[Axes] = list(figure.subplots(panels, 1, sharex=True))
    figure.suptitle(f"{plain(run.trace.name)} on {run.model.name}")
    samples = result.timeline
    steps = [sample.step for sample in samples]
    if hybrid:
        pages = [sample.full_pages for sample in samples]
        _pages(axes[0], "full", FULL, steps, pages, result.peak_full_pages, pool.full_pages)
    pages = [sample.swa_pages for sample in samples]
    _pages(axes[-3], "SWA", SWA, steps, pages, result.peak_swa_pages, pool.swa_pages)
    _memory(axes[-2], run, steps, samples)
    _line(axes[-1], steps, [sample.running for sample in samples], RUNNING, "running")
    waiting = [sample.waiting for sample in samples]
    _line(axes[-1], steps, waiting, WAITING, "waiting", style="-.")
    axes[-1].set_ylabel("requests")
    _finish(axes, max(steps, default=1))
    return figure


def _pages(
    panel: Axes,
    name: str,
    colour: str,
    steps: list[int],
    pages: list[int],
    peak: int,
    size: int,
) -> None:
    _line(panel, steps, pages, colour, "in use")
    panel.fill_between(steps, pages, color=colour, alpha=0.2, linewidth=0)
    panel.axhline(peak, color=colour, linestyle=":", label=f"peak, {peak:,}")
    panel.axhline(size, color=colour, linestyle="--", label=f"pool, {size:,}")
    panel.set_ylabel(f"{name} pages")
    panel.yaxis.set_major_formatter(EngFormatter(sep=""))


def _memory(panel: Axes, run: Run, steps: list[int], samples: "list[Sample]") -> None:
    """KV bytes in use, and what they would be if every layer kept everything."""
    model, result, size = run.model, run.result, run.pool.page_size
    full = np.array([sample.full_pages for sample in samples], np.float64) * size / _GIB
    swa = np.array([sample.swa_pages for sample in samples], np.float64) * size / _GIB
    below = full * model.full_bytes_per_token  # 0 for a model without full layers
    used = below + swa * model.swa_bytes_per_token
    if not run.pool.pure_swa_pool:
        panel.fill_between(steps, below, label="full layers", **_area(FULL, 0.5, "//"))
    panel.fill_between(steps, below, used, label="SWA layers", **_area(SWA, 0.7, ".."))
    label = f"without SWA,\npeak {format_bytes(result.kv_bytes_peak_full_only)}"
    if result.prefix_cache:  # that peak has no cached pages in it, the curve has
        label = "the same pages\nin all layers"
    if run.pool.pure_swa_pool:
        # The one pool forgets what left the window, so only the peak is known.
        peak = result.kv_bytes_peak_full_only / _GIB
        panel.axhline(peak, color=WITHOUT_SWA, linestyle="--", label=label)
    else:
        everything = full * model.full_only_bytes_per_token
        _line(panel, steps, everything, WITHOUT_SWA, label, style="--")
    panel.set_ylabel("KV in use, GiB")


def _area(colour: str, alpha: float, hatch: str) -> dict[str, Any]:
    face = to_rgba(colour, alpha)
    return {"facecolor": face, "edgecolor": to_rgba(BLACK, 0.35), "hatch": hatch, "linewidth": 0}


def _line(
    panel: Axes,
    steps: list[int],
    values: "list[int] | np.ndarray",
    colour: str,
    label: str,
    style: str = "-",
) -> None:
    marker = "o" if len(steps) < 2 else None  # one point makes no line
    panel.plot(steps, values, color=colour, linestyle=style, marker=marker, label=label)


def _finish(axes: list[Axes], last_step: int) -> None:
    axes[-1].set_xlabel("step")
    axes[-1].set_xlim(0, 1.02 * last_step)
    axes[-1].xaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
    for panel in axes:
        panel.set_ylim(bottom=0)
        panel.grid(alpha=0.3)
        panel.spines[["top", "right"]].set_visible(False)
        panel.legend(loc="center left", bbox_to_anchor=(1.01, 0.5), frameon=False, fontsize=9)
