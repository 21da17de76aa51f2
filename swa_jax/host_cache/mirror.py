"""What the host knows of the device's tree: nodes by page, as they were at the last look.

A look compares three stamps a node (when it came in, the hash of its prefix, and the node above it)
and reads the tokens of new nodes only, so it costs by what changed but for a few small arrays.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from swa_jax.inputs import Ints
from swa_jax.prefix_cache.arguments import host_tokens
from swa_jax.prefix_cache.read_nodes import ABSENT, read_nodes
from swa_jax.prefix_cache.tree import ROOT, CacheConfig, PrefixCache
from swa_jax.state import AllocatorState


def token_keys(tokens: Ints, page_size: int, *, is_bigram: bool = False) -> list[bytes]:
    """What the whole pages of a text are compared by, one key a page.

    Args:
      tokens: int32[T] the text, as much of it as counts.
      page_size: tokens in a page.
      is_bigram: a token's key is the pair with its successor, so the last page needs one more.
    """
    row, extra = host_tokens(tokens), int(is_bigram)
    ends = range(page_size + extra, row.size + 1, page_size)
    return [row[end - page_size - extra : end].tobytes() for end in ends]


@dataclass(frozen=True)
class TreePath:
    """A path of the device's tree."""

    namespace: int
    nodes: list[int]  # pages from the root down
    keys: list[bytes]  # theirs


@dataclass(frozen=True, eq=False)
class Stamps:
    """The device's tree at one moment: enough to tell what came and went since the last look."""

    born: np.ndarray  # int32[F+1] -1 where there is no node
    mark: np.ndarray  # int32[F+1]
    parent: np.ndarray  # int32[F+1] 0 where there is no node
    swa: np.ndarray  # int32[F+1] SWA page of each node, 0 for none
    clock: int  # of the tree
    changed: np.ndarray  # bool[F+1] another node than at the last look, or none any more


class TreeMirror:
    """The device's tree as it was at the last `look`.

    Args:
      config: of the tree.
    """

    def __init__(self, config: CacheConfig) -> None:
        """Knows nothing yet."""
        nodes = config.pool.full_pages + 1
        self.config = config
        self.clock = 0
        self.born = np.full(nodes, ABSENT, np.int32)
        self.mark = np.zeros(nodes, np.int32)
        self.parent = np.zeros(nodes, np.int32)
        self.depth = np.zeros(nodes, np.int32)
        self.space = np.zeros(nodes, np.int32)
        self.swa = np.zeros(nodes, np.int32)  # SWA page of each node, 0 for none
        self.saved_full = np.zeros(nodes, bool)  # the node's full KV has been copied once
        self.saved_swa = np.zeros(nodes, bool)
        self.uses = np.zeros(nodes, np.int32)  # that it was computed, and every match
        self.keys: list[bytes] = [b""] * nodes
        self._child: dict[tuple[int, int, bytes], int] = {}  # (parent, namespace, key)

    @property
    def in_tree(self) -> np.ndarray:
        """bool[F+1]."""
        return self.born != ABSENT

    def look(self, cache: PrefixCache, state: AllocatorState) -> None:
        """Learns what came and went. Waits for the device."""
        self.learn(cache, self.stamps(cache, state))

    def stamps(self, cache: PrefixCache, state: AllocatorState) -> Stamps:
        """What the tree is like now, beside what is known of it. Waits for the device."""
        born, mark, parent, swa, clock = jax.device_get(_stamps(cache, state))
        changed = (born != self.born) | (mark != self.mark) | (parent != self.parent)
        if int(clock) < self.clock:  # another tree, whose nodes may have the same stamps
            changed |= self.in_tree
        return Stamps(born, mark, parent, swa, int(clock), changed)

    def learn(self, cache: PrefixCache, stamps: Stamps) -> None:
        """Takes over what `stamps` has just read, with the tokens of new nodes."""
        born, changed = stamps.born, stamps.changed
        for page in np.flatnonzero(changed & self.in_tree).tolist():
            self._child.pop((int(self.parent[page]), int(self.space[page]), self.keys[page]), None)
        self.born, self.mark, self.swa = born, stamps.mark, stamps.swa
        self.parent, self.clock = stamps.parent, stamps.clock
        new = np.flatnonzero(changed & (born != ABSENT))
        if not new.size:
            return
        self.saved_full[new] = self.saved_swa[new] = False
        self.uses[new] = 1
        _, self.depth[new], self.space[new], tokens = read_nodes(cache, new)
        for at, page in enumerate(new.tolist()):
            self.keys[page] = key = tokens[at].tobytes()
            self._child[int(self.parent[page]), int(self.space[page]), key] = page

    def path(self, page: int) -> TreePath:
        """The path that ends in a node."""
        nodes = []
        at = page
        while at != ROOT:
            nodes.append(at)
            at = int(self.parent[at])
        nodes.reverse()
        return TreePath(int(self.space[page]), nodes, [self.keys[node] for node in nodes])

    def paths(self, marked: np.ndarray) -> Iterator[TreePath]:
        """Paths that have every node of bool[F+1] `marked` on one of them, the deepest first."""
        left = marked.copy()
        pages = np.flatnonzero(left)
        for page in pages[np.argsort(-self.depth[pages], kind="stable")].tolist():
            if left[page]:
                path = self.path(page)
                left[path.nodes] = False
                yield path

    def find(self, keys: Iterable[bytes], namespace: int) -> list[int]:
        """The nodes of a prompt's pages, as far as there are any."""
        found: list[int] = []
        at = ROOT
        for key in keys:
            node = self._child.get((at, namespace, key))
            if node is None:
                break
            found.append(node)
            at = node
        return found

    def near_end(self, window_pages: int) -> np.ndarray:
        """bool[F+1]: an end of a branch is less than a window below, so its match needs the node.

        Args:
          window_pages: pages of a window.
        """
        here = self.in_tree
        above = np.zeros_like(here)
        above[self.parent[here]] = True
        at = np.flatnonzero(here & ~above)
        near = np.zeros_like(here)
        for _ in range(window_pages):
            if not at.size:
                break
            near[at] = True
            at = np.unique(self.parent[at])
            at = at[at != ROOT]
        return near


@jax.jit
def _stamps(cache: PrefixCache, state: AllocatorState) -> tuple[jax.Array, ...]:
    here = cache.in_tree
    born = jnp.where(here, cache.born, ABSENT)
    others = (cache.hash, cache.parent, state.full_to_swa)
    return born, *(jnp.where(here, values, 0) for values in others), cache.clock
