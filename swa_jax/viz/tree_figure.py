"""The prefix tree page by page: what is live, what is a tombstone, what is locked."""

import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import LineCollection
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from swa_jax.prefix_cache import PrefixCache
from swa_jax.state import AllocatorState
from swa_jax.viz.boxes import EDGE, boxes, fill
from swa_jax.viz.looks import BLACK, ORANGE, SKY, WHITE, Look
from swa_jax.viz.picture import Picture, new_picture, plain, set_title
from swa_jax.viz.tree_view import (
    FULL_LOCKED,
    LIVE,
    SWA_LOCKED,
    TOMBSTONE,
    TreeView,
    stretches,
    view_tree,
)

LOOKS = {
    LIVE: Look("live: has its SWA side", "", SKY),
    TOMBSTONE: Look("tombstone: has full KV alone", "T", WHITE, "////"),
}
_LOCK_COLOURS = {FULL_LOCKED: BLACK, SWA_LOCKED: ORANGE}
_LOCK_LABELS = {
    FULL_LOCKED: "line below: full KV locked (L: locks)",
    SWA_LOCKED: "two lines: SWA side locked too",
}
_MOST_ROWS, _MOST_ROWS_OF_CELLS = 40, 20
_MOST_CELLS = 26  # pages of the longest prefix that have a cell each
_CELL = 0.4  # inches
_BAR_ROW = 0.22  # inches
_LEFT, _RIGHT, _TOP, _BOTTOM = 0.9, 3.1, 0.6, 0.55  # inches
_WIDTH = 10.4  # inches, where pages are not drawn one by one


def prefix_tree(cache: PrefixCache, state: AllocatorState, *, title: str | None = None) -> Picture:
    """Draws a prefix tree, its root at the left.

    A row is a prefix from where it parts from the row above it. Where no prefix is longer than 26
    pages each page has a cell with its id, its SWA page (or T for a tombstone) and how many locks
    hold it. Longer ones are drawn as bars, to scale. Of many rows those with the most pages are
    drawn, and the rest is counted.

    Args:
      cache: one tree, not a batch. Waits for the device.
      state: the allocator that it stands beside.
      title: before the counts above it.

    Returns:
      A figure; `swa_jax.viz.as_png` makes a file of it.

    Raises:
      ValueError: a batch, a tree without values (traced, donated), or another allocator's.
    """
    return draw_tree_view(view_tree(cache, state), title)


def draw_tree_view(view: TreeView, title: str | None = None) -> Picture:
    """The picture of a tree that was looked at."""
    has_cells = int(view.depth.max(initial=0)) <= _MOST_CELLS
    kept = _largest_rows(view, _MOST_ROWS_OF_CELLS if has_cells else _MOST_ROWS)
    shown = _only(view, kept)
    picture, axes = _blank(shown, has_cells=has_cells)
    if has_cells:
        _draw_cells(axes, shown)
    else:
        _draw_bars(axes, shown)
    _draw_branches(axes, shown)
    _draw_names(axes, shown)
    _draw_words(picture, axes, view, kept, "prefix tree" if title is None else plain(title))
    return picture


def _largest_rows(view: TreeView, most: int) -> np.ndarray:
    """The rows to draw, in order: of a row that is kept, so are those that it hangs from."""
    if view.rows <= most:
        return np.arange(view.rows)
    pages = np.bincount(view.row, minlength=view.rows)
    hangs_from = np.full(view.rows, -1)
    begins = (view.parent >= 0) & (view.row != view.row[np.maximum(view.parent, 0)])
    hangs_from[view.row[begins]] = view.row[view.parent[begins]]
    kept: set[int] = set()
    for row in np.argsort(-pages, kind="stable").tolist():
        path = [row]
        while hangs_from[path[-1]] >= 0:
            path.append(int(hangs_from[path[-1]]))
        if len(kept.union(path)) <= most:
            kept.update(path)
    return np.array(sorted(kept))


def _only(view: TreeView, rows: np.ndarray) -> TreeView:
    """The nodes of some rows, which are numbered anew."""
    if rows.size == view.rows:
        return view
    stays = np.isin(view.row, rows)
    place = np.cumsum(stays) - 1
    parent = view.parent[stays]
    return TreeView(
        page=view.page[stays],
        parent=np.where(parent < 0, -1, place[np.maximum(parent, 0)]),
        depth=view.depth[stays],
        row=np.searchsorted(rows, view.row[stays]),
        kind=view.kind[stays],
        lock=view.lock[stays],
        full_locks=view.full_locks[stays],
        swa_page=view.swa_page[stays],
        namespace=view.namespace[stays],
        page_size=view.page_size,
    )


def _blank(view: TreeView, *, has_cells: bool) -> tuple[Picture, Axes]:
    columns = max(int(view.depth.max(initial=0)), 1)
    inner = max(columns * _CELL, 3.0) if has_cells else _WIDTH
    height = max(max(view.rows, 1) * (_CELL * 1.25 if has_cells else _BAR_ROW), 1.2)
    width, whole = _LEFT + inner + _RIGHT, _TOP + height + _BOTTOM
    picture = new_picture(width, whole)
    axes = picture.add_axes((_LEFT / width, _BOTTOM / whole, inner / width, height / whole))
    axes.set_xlim(0, (inner / _CELL if has_cells else columns) * 1.01)
    axes.set_ylim(max(view.rows, 1), 0)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.set_yticks([])
    unit = "token" if view.page_size == 1 else "tokens"
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlabel(f"pages of {view.page_size:,} {unit} from the start of a prompt", fontsize=8)
    axes.tick_params(labelsize=7)
    return picture, axes


_TOP_OF_CELL, _HEIGHT = 0.1, 0.68  # of a row


def _draw_cells(axes: Axes, view: TreeView) -> None:
    for kind, look in LOOKS.items():
        at = view.kind == kind
        cells = boxes(view.depth[at] - 1, view.row[at] + _TOP_OF_CELL, 1, _HEIGHT)
        fill(axes, cells, look, edge=0.5)
    _draw_locks(axes, view.depth - 1, np.ones(view.depth.size), view.row, view.lock)
    nodes = zip(
        view.depth.tolist(),
        view.row.tolist(),
        view.page.tolist(),
        view.swa_page.tolist(),
        view.full_locks.tolist(),
        strict=True,
    )
    for depth, row, page, swa_page, locks in nodes:
        lock = f" L{locks}" if locks else ""
        text = f"{page}\n{f'→{swa_page}' if swa_page else 'T'}{lock}"
        y = row + _TOP_OF_CELL + _HEIGHT / 2
        background = {"facecolor": WHITE, "linewidth": 0, "pad": 0.6} if not swa_page else None
        axes.text(depth - 0.5, y, text, ha="center", va="center", fontsize=5.5, bbox=background)


def _draw_bars(axes: Axes, view: TreeView) -> None:
    pieces = stretches(view)
    left = np.array([piece.first - 1 for piece in pieces], float)
    width = np.array([piece.pages for piece in pieces], float)
    row, kind = np.array([p.row for p in pieces]), np.array([p.kind for p in pieces])
    for one, look in LOOKS.items():
        at = kind == one
        bars = boxes(left[at], row[at] + _TOP_OF_CELL, width[at], _HEIGHT)
        fill(axes, bars, look, edge=0.5)
    _draw_locks(axes, left, width, row, np.array([piece.lock for piece in pieces]))


def _draw_locks(
    axes: Axes, left: np.ndarray, width: np.ndarray, row: np.ndarray, lock: np.ndarray
) -> None:
    """A black line below what is locked, and a second one in colour where the SWA side is too."""
    for kind, offset in ((FULL_LOCKED, 0.83), (SWA_LOCKED, 0.92)):
        at = lock >= kind
        ends = [
            [(x, y), (x + length, y)]
            for x, length, y in zip(left[at], width[at], row[at] + offset, strict=True)
        ]
        if ends:
            lines = LineCollection(
                ends, colors=_LOCK_COLOURS[kind], linewidths=2, label=_LOCK_LABELS[kind]
            )
            axes.add_collection(lines, autolim=False)


def _draw_branches(axes: Axes, view: TreeView) -> None:
    """Where a row begins inside another: a line down from the page that it goes on from."""
    begins = view.parent >= 0
    begins &= view.row != view.row[np.maximum(view.parent, 0)]
    ends = [
        [(depth - 1, view.row[above] + _TOP_OF_CELL + _HEIGHT), (depth - 1, row + _TOP_OF_CELL)]
        for depth, row, above in zip(
            view.depth[begins], view.row[begins], view.parent[begins], strict=True
        )
    ]
    lines = LineCollection(ends, colors="#777777", linewidths=1, zorder=0.5)
    axes.add_collection(lines, autolim=False)


def _draw_names(axes: Axes, view: TreeView) -> None:
    """Namespaces other than 0, at the rows that begin at the root."""
    tops = np.flatnonzero(view.parent < 0)
    if not view.namespace.any():
        return
    for node in tops.tolist():
        text = f"namespace\n{int(view.namespace[node])}"
        at = view.row[node] + _TOP_OF_CELL + _HEIGHT / 2
        axes.annotate(
            text,
            (0, at),
            xytext=(-6, 0),
            textcoords="offset points",
            ha="right",
            va="center",
            fontsize=6,
        )


def _draw_words(picture: Picture, axes: Axes, view: TreeView, kept: np.ndarray, name: str) -> None:
    width, height = picture.get_size_inches()
    tombstones = int((view.kind == TOMBSTONE).sum())
    title = f"{name}: {view.page.size:,} pages, {tombstones:,} of them tombstones"
    set_title(picture, title, _LEFT)
    if kept.size < view.rows:
        hidden = int((~np.isin(view.row, kept)).sum())
        text = f"not drawn: {hidden:,} pages in the {view.rows - kept.size:,} shortest branches"
        picture.text(_LEFT / width, 0.06 / height, text, fontsize=8)
    entries: list[Patch | Line2D] = [
        Patch(
            facecolor=look.colour,
            edgecolor=EDGE,
            hatch=look.hatch or None,
            label=f"{look.letter or '→'}  {look.label}: {int((view.kind == kind).sum()):,}",
        )
        for kind, look in LOOKS.items()
    ]
    locked = {kind: int((view.lock >= kind).sum()) for kind in _LOCK_LABELS}
    for kind, label in _LOCK_LABELS.items():
        if locked[kind]:
            colour = _LOCK_COLOURS[kind]
            text = f"{label}: {locked[kind]:,}"
            entries.append(Line2D([], [], color=colour, linewidth=2, label=text))
    picture.legend(
        handles=entries,
        loc="upper left",
        bbox_to_anchor=(axes.get_position().x1 + 0.12 / width, 1 - _TOP / height),
        frameon=False,
        fontsize=8,
        borderaxespad=0,
    )
