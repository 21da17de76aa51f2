"""A small pool: a cell for each page, with the letter of who has it."""

from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.patheffects import withStroke

from swa_jax.viz.boxes import fill
from swa_jax.viz.grid import Grid
from swa_jax.viz.looks import SHARED, Look
from swa_jax.viz.pool_view import PoolView


def draw_cells(
    axes: Axes, grid: Grid, view: PoolView, looks: Sequence[Look], *, partners: bool
) -> None:
    """Draws one pool.

    Args:
      axes: in units of the grid, y downwards.
      grid: where.
      view: the pages.
      looks: by kind.
      partners: write into cells which page of the other pool goes with them.
    """
    for kind in np.unique(view.kind).tolist():
        look, places = looks[kind], np.flatnonzero(view.kind == kind)
        fill(axes, grid.squares(places), look)
    x, y = grid.corners(np.arange(grid.ids))
    for page, (left, upper) in enumerate(zip(x.tolist(), y.tolist(), strict=True)):
        look, holders = looks[int(view.kind[page])], int(view.holders[page])
        letter = look.letter
        if view.kind[page] == SHARED and holders > 1:
            letter += str(holders) if holders < 100 else "99+"
        other = int(view.partner[page]) if partners else 0
        middle = left + grid.size / 2
        if letter:
            at = upper + grid.size * (0.34 if other else 0.5)
            size = 7.5 if len(letter) < 3 else 5.5
            _write(axes, middle, at, letter, look, size, weight="bold")
        if other:
            size = 5.5 if other < 10**5 else 4
            _write(axes, middle, upper + grid.size * 0.76, f"→{other}", look, size)


def _write(
    axes: Axes, x: float, y: float, text: str, look: Look, size: float, weight: str = "normal"
) -> None:
    """Text on a page; on a hatch it has a rim, or it would not be legible."""
    rim = [withStroke(linewidth=3, foreground=look.colour)] if look.hatch else None
    axes.text(
        x,
        y,
        text,
        ha="center",
        va="center",
        fontsize=size,
        weight=weight,
        color=look.ink,
        path_effects=rim,
    )
