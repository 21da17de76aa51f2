"""A prefix tree on the host: which page stands where, ready to be drawn or listed.

The tree lies on its side. A page stands in the column of its depth; the longest continuation of a
page goes on in its row, every other one begins a row of its own below it.
"""

from dataclasses import dataclass

import numpy as np

from swa_jax.prefix_cache import PrefixCache
from swa_jax.prefix_cache.arguments import check_pair
from swa_jax.prefix_cache.tree import ROOT
from swa_jax.state import AllocatorState
from swa_jax.state_summary import UnreadableError, on_host

# What a page is, and what locks hold it; indices into the looks of a tree.
LIVE, TOMBSTONE = 0, 1
UNLOCKED, FULL_LOCKED, SWA_LOCKED = 0, 1, 2


@dataclass(frozen=True, eq=False)
class TreeView:
    """The nodes of a tree, parents first. Arrays are int[K] by node."""

    page: np.ndarray
    parent: np.ndarray  # place of its parent among the nodes, -1 at the root
    depth: np.ndarray  # from 1
    row: np.ndarray
    kind: np.ndarray  # LIVE or TOMBSTONE
    lock: np.ndarray  # UNLOCKED, FULL_LOCKED (full KV alone) or SWA_LOCKED (both)
    full_locks: np.ndarray
    swa_page: np.ndarray  # 0 where it is a tombstone
    namespace: np.ndarray
    page_size: int

    @property
    def rows(self) -> int:
        """Rows of the whole tree: its ends."""
        return int(self.row.max(initial=-1)) + 1


def view_tree(cache: PrefixCache, state: AllocatorState) -> TreeView:
    """Looks at every node of a tree once. Waits for the device.

    Args:
      cache: one tree, not a batch.
      state: the allocator that it stands beside.

    Raises:
      ValueError: a batch, a tree without values, or another allocator's.
    """
    if not isinstance(cache, PrefixCache):
        raise ValueError(f"cache must be a PrefixCache, got {type(cache).__name__}")
    check_pair(cache, state)
    fields = (
        cache.in_tree,
        cache.parent,
        cache.depth,
        cache.full_locks,
        cache.swa_locks,
        cache.namespace,
        cache.born,
        state.full_to_swa,
    )
    try:
        arrays = map(np.asarray, on_host(fields))
    except UnreadableError as error:
        raise ValueError(f"the tree cannot be drawn: {error}") from None
    here, parent, depth, full, of_swa, space, born, mapping = arrays
    if here.ndim != 1:
        raise ValueError(
            f"one tree can be drawn, this is a batch of shape {here.shape[:-1]}: choose one, such "
            "as jax.tree.map(lambda leaf: leaf[0], (caches, states))"
        )
    pages = np.flatnonzero(here)
    # Parents before children, older ones first.
    pages = pages[np.lexsort((pages, born[pages], depth[pages]))]
    place = np.full(here.shape, -1)
    place[pages] = np.arange(pages.size)
    above = np.where(parent[pages] == ROOT, -1, place[parent[pages]])
    return TreeView(
        page=pages,
        parent=above,
        depth=depth[pages],
        row=_rows(above, depth[pages], space[pages]),
        kind=np.where(mapping[pages] == 0, TOMBSTONE, LIVE),
        lock=np.where(of_swa[pages] > 0, SWA_LOCKED, np.where(full[pages] > 0, FULL_LOCKED, 0)),
        full_locks=full[pages],
        swa_page=mapping[pages],
        namespace=space[pages],
        page_size=cache.config.pool.page_size,
    )


def _rows(parent: np.ndarray, depth: np.ndarray, space: np.ndarray) -> np.ndarray:
    """int[K] the row of each node; nodes come parents first."""
    count = parent.size
    children: list[list[int]] = [[] for _ in range(count)]
    tops: list[int] = []
    for node, above in enumerate(parent.tolist()):
        (tops if above < 0 else children[above]).append(node)
    deepest = depth.tolist()
    for node in range(count - 1, -1, -1):
        above = int(parent[node])
        if above >= 0:
            deepest[above] = max(deepest[above], deepest[node])
    tops.sort(key=lambda node: int(space[node]))  # stable: a namespace's rows lie together
    row, free = np.zeros(count, int), 0
    todo = [(node, True) for node in reversed(tops)]
    while todo:  # no recursion: a prefix has thousands of pages
        node, begins = todo.pop()
        row[node] = free if begins else row[parent[node]]
        free += begins
        below = children[node]
        if below:
            longest = max(below, key=lambda child: deepest[child])
            todo += [(child, True) for child in reversed(below) if child != longest]
            todo.append((longest, False))
    return row


@dataclass(frozen=True)
class Stretch:
    """Pages that follow each other in one row and look alike."""

    row: int
    first: int  # depth of the first page
    pages: int
    kind: int
    lock: int


def stretches(view: TreeView) -> list[Stretch]:
    """Every row from left to right, in as few pieces as its looks allow."""
    if not view.page.size:
        return []
    order = np.lexsort((view.depth, view.row))
    row, depth = view.row[order], view.depth[order]
    look = view.kind[order] * 3 + view.lock[order]
    new = (np.diff(row) != 0) | (np.diff(depth) != 1) | (np.diff(look) != 0)
    starts = np.flatnonzero(np.concatenate([[True], new]))
    lengths = np.diff(np.concatenate([starts, [row.size]]))
    return [
        Stretch(int(row[at]), int(depth[at]), int(length), int(look[at]) // 3, int(look[at]) % 3)
        for at, length in zip(starts, lengths, strict=True)
    ]
