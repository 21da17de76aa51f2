"""Both pools page by page: who holds what, and which full page has which SWA page."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import LineCollection
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from swa_jax.config import PoolConfig
from swa_jax.state import AllocatorState
from swa_jax.state_text import facts, how_many, pool_text, title_of
from swa_jax.viz.boxes import EDGE
from swa_jax.viz.cells import draw_cells
from swa_jax.viz.grid import WIDTH, Grid, draw_ids, grid_of, one_row_for
from swa_jax.viz.looks import FIRST_OWNER, GREY, PADDING, PALE, WHITE, Look, looks_of
from swa_jax.viz.picture import Picture, new_picture, plain, set_title, shorten
from swa_jax.viz.pool_view import Owners, StateView, view_state
from swa_jax.viz.tiles import draw_tiles

_INCH = 0.32  # of one unit of a grid
_LEFT, _TOP, _BOTTOM = 0.75, 0.5, 0.1  # inches around the grids
_HEAD = 2.0  # units beside a grid, for its name and page ids
_GAP = 3.2  # units between two grids for the lines of the mapping, where there are any
_MARGIN = 0.1  # units, or the outermost edges would be cut
_LEGEND_LINE = 0.19  # inches
_LETTER = 0.063  # inches of a letter in the legend
_MOST_NAME = 26  # letters of an owner's name in the legend

Entry = tuple[Patch | Line2D, str]  # of a legend


@dataclass(frozen=True)
class MapLayout:
    """Where everything of a map is, by the configuration alone: frames of a film do not jump."""

    full: Grid | None
    swa: Grid
    height: float  # units
    has_lines: bool  # the mapping is drawn as lines
    has_tiles: bool

    def grids(self) -> list[Grid]:
        """In the order of `StateView.pools`."""
        return [self.swa] if self.full is None else [self.full, self.swa]


def page_map(
    state: AllocatorState,
    owners: Owners | None = None,
    *,
    rings: Owners | None = None,
    title: str | None = None,
) -> Picture:
    """Draws every page of both pools, coloured and lettered by who has it.

    Pools of up to 32 pages are one row each, with a line from every full page to its SWA page. In
    pools of up to 511 pages the number of the page on the other side stands in the cell. Of larger
    ones a tile stands for a run of pages: it is divided by what they are, has the letter of whoever
    holds most of it, and a black strip at its foot shows how many of its held pages are mapped.

    Args:
      state: one state, not a batch. Waits for the device.
      owners: int32 full slots that each name holds, of any shape; 0 and -1 in unused places. By
        default pages are told apart as held, pending, free and so on.
      rings: int32 rings that each name holds, where the SWA side is request rings.
      title: above it all; the sizes by default.

    Returns:
      A figure; `swa_jax.viz.as_png` makes a file of it.

    Raises:
      ValueError: a batch, a state without values (traced, donated), slots outside the pool.
    """
    return draw_view(view_state(state, owners, rings), title)


def draw_view(view: StateView, title: str | None = None) -> Picture:
    """The page map of a state that was looked at."""
    layout, looks = layout_of(view.config), looks_of(list(view.names))
    entries = legend_of([view], layout, looks, counts=True)
    picture, axes = blank_map(layout, entries)
    draw_map(axes, view, layout, looks)
    set_map_title(picture, title, view.config)
    return picture


def set_map_title(picture: Picture, title: str | None, config: PoolConfig) -> None:
    """A title above a map; the sizes where none is given."""
    set_title(picture, plain(title_of(config) if title is None else title), _LEFT)


def layout_of(config: PoolConfig) -> MapLayout:
    """Where the grids of such a state are."""
    full, top = None, _HEAD
    most = max(config.swa_units, 0 if config.pure_swa_pool else config.full_pages)
    one_row = one_row_for(most)
    has_lines = bool(one_row) and not config.pure_swa_pool and not config.has_rings
    if not config.pure_swa_pool:
        full = grid_of(config.full_pages, top, one_row)
        top = full.bottom + (_GAP if has_lines else _HEAD + 0.4)
    swa = grid_of(config.swa_units, top, one_row)
    grids = [swa] if full is None else [full, swa]
    has_tiles = any(grid.per_place > 1 for grid in grids)
    foot = swa.bottom + (1.7 if has_lines else 0)
    return MapLayout(full, swa, foot + 1.2, has_lines, has_tiles)


def blank_map(layout: MapLayout, entries: Sequence[Entry]) -> tuple[Picture, Axes]:
    """A figure of the right size with its legend, and axes in units of the grids, y downwards."""
    height = max(layout.height * _INCH, len(entries) * _LEGEND_LINE + 0.3)
    longest = max(len(label) for _, label in entries)
    width = _LEFT + WIDTH * _INCH + 0.9 + longest * _LETTER
    whole = height + _TOP + _BOTTOM
    picture = new_picture(width, whole)
    left = _LEFT - _MARGIN * _INCH
    breadth = (WIDTH + 2 * _MARGIN) * _INCH
    place = (left / width, _BOTTOM / whole, breadth / width, height / whole)
    axes = picture.add_axes(place)
    clear_map(axes, height / _INCH)
    _draw_legend(picture, entries)
    return picture, axes


def clear_map(axes: Axes, height: float) -> None:
    """Empties the axes, which show so many units."""
    axes.clear()
    axes.set_axis_off()
    _set_limits(axes, height)


def _set_limits(axes: Axes, height: float) -> None:
    axes.set_xlim(-_MARGIN, WIDTH + _MARGIN)
    axes.set_ylim(height, 0)


def draw_map(axes: Axes, view: StateView, layout: MapLayout, looks: Sequence[Look]) -> None:
    """Draws one state."""
    height = max(axes.get_ylim())
    pairs = zip(view.summary.pools, view.pools(), layout.grids(), strict=True)
    for counts, (name, pool), grid in pairs:
        is_full = name == "full"
        below = layout.has_lines and not is_full
        if grid.per_place == 1:
            draw_cells(axes, grid, pool, looks, partners=not layout.has_lines)
        else:
            draw_tiles(axes, grid, pool, looks, mapped=is_full)
        draw_ids(axes, grid, below=below)
        # Below it where lines come from above.
        y, side = (grid.bottom + 0.75, "top") if below else (grid.top - 0.75, "bottom")
        size = f"{name} pool, {how_many(int(counts.size), counts.unit)}"
        axes.text(0, y, size, va=side, weight="bold", fontsize=10)
        axes.text(WIDTH, y, pool_text(counts), va=side, ha="right", fontsize=8.5)
    if layout.has_lines:
        _draw_lines(axes, view, layout, looks)
    state_facts = [f"{label}: {text}" for label, text in facts(view.summary)]
    axes.text(0, layout.height - 0.8, "    ".join(state_facts), va="top", fontsize=8.5)
    _set_limits(axes, height)  # an image moves them


def _draw_lines(axes: Axes, view: StateView, layout: MapLayout, looks: Sequence[Look]) -> None:
    """A line from each mapped full page to its SWA page."""
    full, swa, pool = layout.full, layout.swa, view.full
    assert full is not None
    assert pool is not None
    pages = np.flatnonzero(pool.partner)
    ends = [
        [((page + 0.5) * full.size, full.bottom), ((other + 0.5) * swa.size, swa.top)]
        for page, other in zip(pages.tolist(), pool.partner[pages].tolist(), strict=True)
    ]
    seen = [looks[int(view.swa.kind[other])] for other in pool.partner[pages].tolist()]
    colours = [GREY if look.colour in (WHITE, PALE) else look.colour for look in seen]
    # A dark line with the owner's colour inside is seen on white, also where that is yellow.
    outer = LineCollection(ends, colors="#333333", linewidths=2.6, zorder=0.8)
    inner = LineCollection(ends, colors=colours, linewidths=1.3, zorder=0.9, label="mapping")
    axes.add_collection(outer, autolim=False)
    axes.add_collection(inner, autolim=False)


def legend_of(
    views: Sequence[StateView], layout: MapLayout, looks: Sequence[Look], *, counts: bool
) -> list[Entry]:
    """Handles and labels of whatever there is in one of the views; owners first."""
    found: dict[int, dict[str, int]] = {}
    for view in views:
        for name, pool in view.pools():
            for kind, count in enumerate(np.bincount(pool.kind).tolist()):
                if count:
                    found.setdefault(kind, {})[name] = count
    order = sorted(found, key=lambda kind: (kind < FIRST_OWNER, kind))
    entries: list[Entry] = []
    for kind in order:
        look = looks[kind]
        handle = Patch(facecolor=look.colour, edgecolor=EDGE, hatch=look.hatch or None)
        label = f"{look.letter or ' '}  {shorten(plain(look.label), _MOST_NAME)}"
        if counts and kind != PADDING:
            label += f": {' + '.join(f'{n:,} {name}' for name, n in found[kind].items())}"
        entries.append((handle, label))
    if layout.has_lines:
        entries.append((Line2D([], [], color="#333333", linewidth=2), "its SWA page"))
    elif layout.has_tiles:
        tiles = [grid.per_place for grid in layout.grids()]
        sizes = sorted({size for size in tiles if size > 1})
        text = " or ".join(f"{size:,}" for size in sizes)
        entries.append((Line2D([], [], linestyle=""), f"a tile is {text} pages"))
    if layout.has_tiles and layout.full is not None and layout.full.per_place > 1:
        entries.append(
            (Line2D([], [], color="#000000", linewidth=3), "share of held that is mapped")
        )
    return entries


def _draw_legend(picture: Picture, entries: Sequence[Entry]) -> None:
    """At the right, beside the grids."""
    width, height = picture.get_size_inches()
    at = (_LEFT + WIDTH * _INCH + 0.15) / width, 1 - _TOP / height
    picture.legend(
        [handle for handle, _ in entries],
        [label for _, label in entries],
        loc="upper left",
        bbox_to_anchor=at,
        frameon=False,
        fontsize=8,
        handlelength=2,
        handleheight=1.2,
        borderaxespad=0,
    )
