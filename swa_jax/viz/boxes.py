"""Rectangles, many at a time."""

import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import PolyCollection

from swa_jax.viz.looks import Look

EDGE = "#444444"


def boxes(
    left: np.ndarray, top: np.ndarray, width: np.ndarray | float, height: np.ndarray | float
) -> np.ndarray:
    """float[K, 4, 2] outlines from corners and sizes, float[K] or the same for all."""
    corners = [(0, 0), (1, 0), (1, 1), (0, 1)]
    outline = [np.stack([left + x * width, top + y * height], axis=-1) for x, y in corners]
    return np.stack(outline, axis=1)


def fill(axes: Axes, outlines: np.ndarray, look: Look, edge: float = 0.6) -> None:
    """Draws rectangles that look alike.

    Args:
      axes: to draw into.
      outlines: float[K, 4, 2] as from `boxes`.
      look: colour and hatch; its label names them.
      edge: width of the outline, points.
    """
    if not len(outlines):
        return
    collection = PolyCollection(
        list(outlines),
        facecolors=look.colour,
        edgecolors=EDGE,
        linewidths=edge,
        hatch=look.hatch or None,
        label=look.label,
    )
    axes.add_collection(collection, autolim=False)
