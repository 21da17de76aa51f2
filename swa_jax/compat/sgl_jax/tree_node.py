"""Nodes as an engine's radix cache has them: runs of the core's nodes, which are single pages.

A run is as long as its pages have one child each and the same state: a mapping or none, and the
same locks. It ends also at every node that somebody holds, so whoever walks down from the root
comes by all nodes that a match has handed out. A node is named by its last page and stays what it
is however much is inserted around it; how far up it reaches may change.
"""

from collections.abc import Callable, Hashable
from typing import Protocol

import numpy as np

from swa_jax.compat.sgl_jax import tree_calls as columns
from swa_jax.compat.sgl_jax.keys import RadixKey
from swa_jax.prefix_cache.tree import ROOT


class Snapshot:
    """A tree and its allocator as the host has read them.

    Args:
      rows: int32[F+1, 9 + K] of `tree_calls.read`.
      page_size: tokens in a page of the pool.
    """

    def __init__(self, rows: np.ndarray, page_size: int) -> None:
        """Sorts the pages by what they hang from."""
        self.rows, self.page_size = rows, page_size
        self.children: dict[int, list[int]] = {}
        for page in np.flatnonzero(rows[:, columns.IN_TREE]).tolist():
            self.children.setdefault(int(rows[page, columns.PARENT]), []).append(page)

    def has(self, page: int, born: int) -> bool:
        """This very node is in the tree."""
        return bool(self.rows[page, columns.IN_TREE]) and self.born(page) == born

    def born(self, page: int) -> int:
        """When the page came in."""
        return int(self.rows[page, columns.BORN])

    def depth(self, page: int) -> int:
        """Pages from the root."""
        return self.column(page, columns.DEPTH)

    def column(self, page: int, column: int) -> int:
        """One of the columns of `tree_calls.read`."""
        return int(self.rows[page, column])

    def path_below(self, above: int, page: int) -> list[int]:
        """The pages after `above` down to `page`."""
        path = []
        while page != above:
            path.append(page)
            page = self.column(page, columns.PARENT)
        return path[::-1]

    def goes_on(self, page: int, held: Callable[[int], bool]) -> int | None:
        """The page that the run of `page` goes on with, None where it ends."""
        below = self.children.get(page, [])
        if len(below) != 1 or held(page):
            return None
        state = slice(columns.TOMBSTONE, columns.SWA_LOCKS + 1)
        same = np.array_equal(self.rows[page, state], self.rows[below[0], state])
        return below[0] if same else None

    def end_of(self, page: int, held: Callable[[int], bool]) -> int:
        """The last page of the run that `page` is in."""
        while (below := self.goes_on(page, held)) is not None:
            page = below
        return page

    def above(self, page: int, held: Callable[[int], bool]) -> int:
        """The last page of the run above that of `page`, ROOT where there is none."""
        above = self.column(page, columns.PARENT)
        while above != ROOT and self.goes_on(above, held) is not None:
            above = self.column(above, columns.PARENT)
        return above

    def slots(self, pages: list[int]) -> np.ndarray:
        """int32[T] full slots of these pages."""
        first = np.asarray(pages, np.int32)[:, None] * np.int32(self.page_size)
        return (first + np.arange(self.page_size, dtype=np.int32)).reshape(-1)

    def tokens(self, pages: list[int]) -> np.ndarray:
        """int32[T] tokens of these pages, as the core has them."""
        return self.rows[pages, columns.LAST_USE + 1 :].reshape(-1)


class Tree(Protocol):
    """What a node asks its cache."""

    def snapshot_of(self, node: "TreeNode") -> Snapshot | None:
        """The present tree of the node's rank; None if the node is not in it any more."""
        ...

    def is_held(self, rank: int, page: int) -> bool:
        """Somebody holds the node that ends with this page."""
        ...

    def node_at(self, rank: int, page: int) -> "TreeNode":
        """The node that ends with this page; the root for ROOT."""
        ...

    def children_of_root(self) -> dict[Hashable, "TreeNode"]:
        """The first nodes of all prefixes of all ranks."""
        ...

    def known(self, node: "TreeNode") -> "TreeNode":
        """The object that stands for a node equal to `node`; `node` itself where there is none."""
        ...

    def key_of(self, rank: int, namespace: int, coded: np.ndarray) -> RadixKey:
        """The key behind the core's tokens and namespace."""
        ...

    def by_child_key(self, nodes: "list[TreeNode]") -> "dict[Hashable, TreeNode]":
        """These nodes as their parent files them."""
        ...


class TreeNode:
    """A live view of a node: what it shows is as of now, and reading it waits for the device.

    Args:
      tree: the cache.
      rank: whose pools.
      page: the last full page.
      born: tells the page from an earlier or later one of the same id.
      depth: pages from the root.
      epoch: how many resets came before it.
    """

    host_value = None  # there is no host tier

    def __init__(
        self, tree: Tree, rank: int, page: int, born: int, depth: int, epoch: int = 0
    ) -> None:
        """Reads nothing yet."""
        self.tree = tree
        self.rank, self.page, self.born, self.depth, self.epoch = rank, page, born, depth, epoch

    @property
    def _identity(self) -> tuple[int, ...]:
        return id(self.tree), self.rank, self.page, self.born, self.epoch

    def __eq__(self, other: object) -> bool:
        return isinstance(other, TreeNode) and self._identity == other._identity

    def __hash__(self) -> int:
        return hash(self._identity)

    def __reduce__(self) -> tuple[Callable[..., "TreeNode"], tuple[object, ...]]:
        """For `copy.deepcopy` and `pickle`: a node of the cache that is copied with it."""
        where = (self.rank, self.page, self.born, self.depth, self.epoch)
        return _node_of, (self.tree, *where)

    def __lt__(self, other: "TreeNode") -> bool:
        return self.last_access_time < other.last_access_time

    def __repr__(self) -> str:
        return f"TreeNode(id={self.id}, page={self.page}, {self.depth} pages from the root)"

    @property
    def is_root(self) -> bool:
        """Stands above all namespaces and holds nothing."""
        return self.page == ROOT

    @property
    def id(self) -> int:
        """A number that no other node of this cache has at the same time; 0 for the root."""
        return 0 if self.is_root else (self.born << 32) + (self.page << 8) + self.rank + 1

    @property
    def parent(self) -> "TreeNode | None":
        """The node above; None for the root and for a node that has left the tree."""
        tree = self._snapshot()
        if tree is None:
            return None
        return self.tree.node_at(self.rank, tree.above(self.page, self._is_held))

    @property
    def children(self) -> "dict[Hashable, TreeNode]":
        """The nodes below, by `get_child_key_fn` of their keys."""
        if self.is_root:
            return self.tree.children_of_root()
        tree = self._snapshot()
        pages = [] if tree is None else tree.children.get(self.page, [])
        ends = [] if tree is None else [tree.end_of(page, self._is_held) for page in pages]
        return self.tree.by_child_key([self.tree.node_at(self.rank, page) for page in ends])

    @property
    def key(self) -> RadixKey | None:
        """The tokens of this node alone; None once it has left the tree."""
        if self.is_root:
            return RadixKey([])
        tree = self._snapshot()
        if tree is None:
            return None
        namespace = tree.column(self.page, columns.NAMESPACE)
        return self.tree.key_of(self.rank, namespace, tree.tokens(self._pages(tree)))

    @property
    def value(self) -> np.ndarray | list | None:
        """int32[T] the full slots of this node alone; None once it has left the tree."""
        if self.is_root:
            return []
        tree = self._snapshot()
        return None if tree is None else tree.slots(self._pages(tree))

    @property
    def evicted(self) -> bool:
        """The node has left the tree."""
        return not self.is_root and self._snapshot() is None

    @property
    def backuped(self) -> bool:
        """The host has a copy: never."""
        return False

    @property
    def swa_tombstone(self) -> bool:
        """Full KV without an SWA side."""
        return bool(self._column(columns.TOMBSTONE, 0))

    @property
    def full_lock_ref(self) -> int:
        """Locks on the full KV; the root counts as locked once."""
        return self._column(columns.FULL_LOCKS, 1)

    @property
    def swa_lock_ref(self) -> int:
        """Locks on the SWA side; the root counts as locked once."""
        return self._column(columns.SWA_LOCKS, 1)

    @property
    def last_access_time(self) -> int:
        """Counts matches and inserts, not seconds."""
        return self._column(columns.LAST_USE, 0)

    def _column(self, column: int, of_root: int) -> int:
        if self.is_root:
            return of_root
        tree = self._snapshot()
        return 0 if tree is None else tree.column(self.page, column)

    def _pages(self, tree: Snapshot) -> list[int]:
        return tree.path_below(tree.above(self.page, self._is_held), self.page)

    def _snapshot(self) -> Snapshot | None:
        return None if self.is_root else self.tree.snapshot_of(self)

    def _is_held(self, page: int) -> bool:
        return self.tree.is_held(self.rank, page)


def _node_of(tree: Tree, rank: int, page: int, born: int, depth: int, epoch: int) -> TreeNode:
    node = TreeNode(tree, rank, page, born, depth, epoch)
    # A cache that is itself being copied has no nodes yet.
    return tree.known(node) if hasattr(tree, "_nodes") else node
