"""A large pool: a tile for each run of pages, divided in proportion to what they are."""

from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb

from swa_jax.viz.boxes import boxes, fill
from swa_jax.viz.grid import WIDTH, Grid
from swa_jax.viz.looks import ABSENT, BLACK, FREE, PADDING, WHITE, Look
from swa_jax.viz.pool_view import PoolView

_PARTS = 16  # columns of pixels in a tile
_STRIP = 0.16  # height of the mark of mapped pages, of a tile
_ON_ITS_OWN = 0.75  # of a tile, above which a letter stands on its own colour
_FRAME, _MAPPED = Look("_frames", "", "none"), Look("mapped", "", BLACK)


def draw_tiles(
    axes: Axes, grid: Grid, view: PoolView, looks: Sequence[Look], *, mapped: bool
) -> None:
    """Draws one pool.

    Args:
      axes: in units of the grid, y downwards.
      grid: where.
      view: the pages.
      looks: by kind.
      mapped: mark how many of the held pages of a tile have an SWA side.
    """
    counts = count_kinds(view.kind, grid.per_place, len(looks))
    axes.imshow(
        _tile_image(grid, counts, looks),
        extent=(0, WIDTH, grid.bottom, grid.top),
        interpolation="nearest",
        aspect="auto",
        zorder=0,
    )
    tiles = np.arange(grid.places)
    fill(axes, grid.squares(tiles), _FRAME, edge=0.3)
    share = counts / counts.sum(axis=1, keepdims=True)
    for kind in np.flatnonzero((share == 1).any(axis=0)).tolist():
        look = looks[kind]
        if look.hatch:  # a tile of one kind looks like a cell
            places = np.flatnonzero(share[:, kind] == 1)
            fill(axes, grid.squares(places), look, edge=0.3)
    if mapped:
        _draw_strips(axes, grid, view)
    _draw_letters(axes, grid, share, looks)


def _draw_letters(axes: Axes, grid: Grid, share: np.ndarray, looks: Sequence[Look]) -> None:
    """The letter of what there is most of in a tile, free pages aside."""
    shown = share.copy()
    shown[:, [FREE, PADDING]] = 0
    most, part = shown.argmax(axis=1), shown.max(axis=1)
    x, y = grid.corners(np.arange(grid.places))
    for tile in np.flatnonzero(part).tolist():
        look = looks[int(most[tile])]
        if look.letter:
            at = x[tile] + grid.size / 2, y[tile] + grid.size * 0.45
            plate = {"facecolor": WHITE, "linewidth": 0, "pad": 0.7}
            # Where it does not stand on its own colour it gets a ground to be legible on.
            ground = None if part[tile] > _ON_ITS_OWN and not look.hatch else plate
            axes.text(
                *at,
                look.letter,
                ha="center",
                va="center",
                fontsize=6.5,
                color=BLACK if ground else look.ink,
                bbox=ground,
            )


def count_kinds(kind: np.ndarray, run: int, kinds: int) -> np.ndarray:
    """int[tiles, kinds] pages of each kind in each run of `run` pages; `kind` is int8[N]."""
    rows = np.full((-(-kind.size // run), run), -1, np.int8)  # the last run may be short
    rows.reshape(-1)[: kind.size] = kind
    return np.stack([np.count_nonzero(rows == one, axis=1) for one in range(kinds)], axis=1)


def _tile_image(grid: Grid, counts: np.ndarray, looks: Sequence[Look]) -> np.ndarray:
    """float[rows, columns, 3] colours: each tile is `_PARTS` columns, shared out by kind.

    A kind that is there at all gets more than a column, or a single page would be lost in a large
    pool.
    """
    # Held pages first and free ones last, so that tiles fill from the left.
    ends = (PADDING, FREE, ABSENT)
    order = [PADDING, *(kind for kind in range(len(looks)) if kind not in ends), ABSENT, FREE]
    share = counts[:, order] / np.maximum(counts.sum(axis=1, keepdims=True), 1) * _PARTS
    share = np.where(counts[:, order] > 0, np.maximum(share, 1.5), 0)
    edges = np.cumsum(share, axis=1)
    edges = edges / np.maximum(edges[:, -1:], 1e-9) * _PARTS
    middles = np.arange(_PARTS) + 0.5
    place = (edges[:, None, :] <= middles[None, :, None]).sum(axis=2)
    kind = np.asarray(order)[np.minimum(place, len(order) - 1)]
    palette = np.array([to_rgb(look.part) for look in looks])
    image = np.ones((grid.rows * grid.per_row, _PARTS, 3))
    image[: kind.shape[0]] = palette[kind]
    return image.reshape(grid.rows, grid.per_row * _PARTS, 3)


def _draw_strips(axes: Axes, grid: Grid, view: PoolView) -> None:
    """A black strip at a tile's foot: as long as the part of its held pages that is mapped."""
    has = view.partner > 0
    held = (view.holders > 0) & (view.kind != PADDING)
    mapped = count_kinds(has.astype(np.int8), grid.per_place, 2)[:, 1]
    of_held = count_kinds(held.astype(np.int8), grid.per_place, 2)[:, 1]
    tiles = np.flatnonzero(mapped)
    share = np.minimum(mapped[tiles] / np.maximum(of_held[tiles], 1), 1) * grid.size
    x, y = grid.corners(tiles)
    outlines = boxes(x, y + grid.size * (1 - _STRIP), share, grid.size * _STRIP)
    fill(axes, outlines, _MAPPED, edge=0)
