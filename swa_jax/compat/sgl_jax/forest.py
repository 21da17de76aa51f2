"""The trees of all ranks, and the nodes that callers see of them."""

from collections.abc import Callable, Hashable
from typing import Any, TypeVar
from weakref import WeakValueDictionary

import numpy as np

from swa_jax.compat.common.host_arrays import host_int
from swa_jax.compat.common.host_pools import HostPools
from swa_jax.compat.sgl_jax.keys import KeyLike, RadixKey
from swa_jax.compat.sgl_jax.rank_tree import Place, RankTree, Seen
from swa_jax.compat.sgl_jax.tree_node import Snapshot, TreeNode
from swa_jax.prefix_cache.tree import ROOT

T = TypeVar("T")


class Forest:
    """One tree a rank. A node is one object for as long as somebody holds it."""

    get_child_key_fn: Callable[[KeyLike], Hashable]

    def __init__(self, pools: HostPools, trees: list[RankTree]) -> None:
        """Trees beside `pools`, none where nothing is kept."""
        self._pools = pools
        self._trees = trees
        self._nodes: WeakValueDictionary[tuple[int, ...], TreeNode] = WeakValueDictionary()
        self._seen: dict[tuple[str, int], tuple[Seen, Any]] = {}
        self.root_node = TreeNode(self, 0, ROOT, 0, 0)

    def __getstate__(self) -> dict[str, Any]:
        """For `copy.deepcopy` and `pickle`: what was read is read again."""
        return {**vars(self), "_nodes": None, "_seen": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._nodes, self._seen = WeakValueDictionary(), {}

    def known(self, node: TreeNode) -> TreeNode:
        """The object that stands for a node equal to `node`; `node` itself where there is none."""
        if node.is_root:
            return vars(self).get("root_node", node)
        name = (node.rank, node.page, node.born, node.epoch)
        return self._nodes.setdefault(name, node)

    def snapshot_of(self, node: TreeNode) -> Snapshot | None:
        """The present tree of the node's rank; None if the node is not in it any more."""
        if node.epoch != self._trees[node.rank].epoch:
            return None
        tree = self._snapshot(node.rank)
        return tree if tree.has(node.page, node.born) else None

    def is_held(self, rank: int, page: int) -> bool:
        """Somebody holds the node that ends with this page."""
        return self._name(rank, page) in self._nodes

    def node_at(self, rank: int, page: int) -> TreeNode:
        """The node that ends with this page; the root for ROOT."""
        tree = self._snapshot(rank)
        tokens = tree.depth(page) * self._pools.config.page_size
        return self._node(rank, Place(page, tree.born(page), tokens))

    def children_of_root(self) -> dict[Hashable, TreeNode]:
        """The first nodes of all prefixes of all ranks."""
        nodes = [node for rank in range(len(self._trees)) for node in self._first_nodes(rank)]
        return self.by_child_key(nodes)

    def by_child_key(self, nodes: list[TreeNode]) -> dict[Hashable, TreeNode]:
        """These nodes as their parent files them."""
        return {self.get_child_key_fn(key): node for node in nodes if (key := node.key) is not None}

    def key_of(self, rank: int, namespace: int, coded: np.ndarray) -> RadixKey:
        """The key behind the core's tokens and namespace."""
        tree = self._trees[rank]
        return RadixKey(tree.coding.tokens(coded), *tree.spaces.thing(namespace))

    def _first_nodes(self, rank: int) -> list[TreeNode]:
        tree = self._snapshot(rank)
        pages = tree.children.get(ROOT, [])
        return [
            self.node_at(rank, tree.end_of(page, lambda one: self.is_held(rank, one)))
            for page in pages
        ]

    def _snapshot(self, rank: int) -> Snapshot:
        return self._read("tree", rank, lambda tree: tree.snapshot())

    def _name(self, rank: int, page: int) -> tuple[int, ...]:
        return rank, page, self._snapshot(rank).born(page), self._trees[rank].epoch

    def _node(self, rank: int, place: Place) -> TreeNode:
        if place.page == ROOT:
            return self.root_node
        depth = place.tokens // self._pools.config.page_size
        epoch = self._trees[rank].epoch
        return self.known(TreeNode(self, rank, place.page, place.born, depth, epoch))

    def _rank(self, dp_rank: int | None) -> int:
        """Whose pools: rank 0 for None, the last for one past the end."""
        rank = 0 if dp_rank is None else host_int("dp_rank", dp_rank)
        return min(max(rank, 0), self._pools.ranks - 1)

    def _read(self, what: str, rank: int, read: Callable[[RankTree], T]) -> T:
        """Reads the device once for each state of a tree and its allocator."""
        tree, seen = self._trees[rank], self._seen.get((what, rank))
        if seen is None or not tree.is_as(seen[0]):
            seen = tree.now(), read(tree)
            self._seen[what, rank] = seen
        return seen[1]
