"""Where the pages of a pool are drawn: a cell for each, or a tile for each run of many."""

from dataclasses import dataclass

import numpy as np
from matplotlib.axes import Axes

from swa_jax.viz.boxes import boxes

WIDTH = 32.0  # of every grid: as many units as there are cells in a row
_ROW_CELLS, _ROW_TILES = 32, 48
_LEAST_CELLS = 16  # in a row: fewer would be too large
_MOST_CELLS, _MOST_TILES = 512, 768


@dataclass(frozen=True)
class Grid:
    """Where the pages of a pool are drawn."""

    top: float  # y of its upper edge; y grows downwards
    ids: int  # page ids, the padding page included
    per_place: int  # pages of a tile; 1: cells
    per_row: int  # cells or tiles
    size: float  # edge of a cell or tile

    @property
    def places(self) -> int:
        """Cells or tiles."""
        return -(-self.ids // self.per_place)

    @property
    def rows(self) -> int:
        """Rows of cells or tiles."""
        return -(-self.places // self.per_row)

    @property
    def bottom(self) -> float:
        """The lower edge."""
        return self.top + self.rows * self.size

    @property
    def is_one_row(self) -> bool:
        """Every page has a cell and all stand side by side."""
        return self.per_place == 1 and self.rows == 1

    def corners(self, places: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Upper left corners."""
        return places % self.per_row * self.size, self.top + places // self.per_row * self.size

    def squares(self, places: np.ndarray) -> np.ndarray:
        """float[K, 4, 2] outlines."""
        return boxes(*self.corners(places), self.size, self.size)


def grid_of(pages: int, top: float, one_row: int = 0) -> Grid:
    """The grid of a pool.

    Args:
      pages: of the pool; the padding page comes before them.
      top: y of its upper edge.
      one_row: cells that fill the width, where pools are that small; 0: they are not.
    """
    ids = pages + 1
    if one_row:
        return Grid(top, ids, 1, one_row, WIDTH / one_row)
    if ids <= _MOST_CELLS:
        return Grid(top, ids, 1, _ROW_CELLS, WIDTH / _ROW_CELLS)
    return Grid(top, ids, -(-ids // _MOST_TILES), _ROW_TILES, WIDTH / _ROW_TILES)


def one_row_for(most_pages: int) -> int:
    """Cells of a row that has all pages of a small pool, 0 where there are too many."""
    ids = most_pages + 1
    return max(ids, _LEAST_CELLS) if ids <= _ROW_CELLS + 1 else 0


def draw_ids(axes: Axes, grid: Grid, *, below: bool) -> None:
    """Writes page ids: of all pages of one row, else of the first page of each row.

    Args:
      axes: in units of the grid, y downwards.
      grid: where the pages are.
      below: ids of one row stand below it, not above.
    """
    if grid.is_one_row:
        y, side = (grid.bottom + 0.1, "top") if below else (grid.top - 0.1, "bottom")
        for page in range(grid.ids):
            at = (page + 0.5) * grid.size
            axes.text(at, y, str(page), ha="center", va=side, fontsize=6.5, color="#444444")
        return
    every = -(-grid.rows // 16)
    for row in range(0, grid.rows, every):
        first = row * grid.per_row * grid.per_place
        at = grid.top + (row + 0.5) * grid.size
        axes.text(-0.25, at, f"{first:,}", ha="right", va="center", fontsize=6.5, color="#444444")
