"""A plain prefix tree to compare against: a dict from prefixes to nodes, one page at a time.

It knows counts and prefixes, not page ids: a page of a request is `True` while it is live in SWA
and `False` after that. A prefix is named by its namespace and the keys of its pages, so two
prefixes are the same entry exactly if their tokens are the same.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Sequence
from typing import Any

import swa_jax as swa

Name = tuple[int, tuple[tuple[int, ...], ...]]


@dataclasses.dataclass
class Node:
    live: bool
    full_locks: int = 0
    swa_locks: int = 0
    last_use: int = 0
    rank: int = 0


@dataclasses.dataclass(frozen=True)
class OracleReceipt:
    """The names whose full lock and whose SWA lock this lock counted."""

    full: tuple[Name, ...]
    swa: tuple[Name, ...]


class PrefixOracle:
    """Both pools as counts of free pages, and the tree."""

    def __init__(
        self,
        config: swa.PoolConfig,
        *,
        is_bigram: bool = False,
        policy: str = "lru",
        max_prefix_tokens: int | None = None,
    ) -> None:
        self.config = config
        self.page, self.window = config.page_size, config.sliding_window
        self.free_full, self.free_swa = config.full_pages, config.swa_pages
        self.is_bigram, self.policy = is_bigram, policy
        self.most = max_prefix_tokens
        self.nodes: dict[Name, Node] = {}
        self.clock = 0

    def copy(self) -> PrefixOracle:
        return copy.deepcopy(self)

    # ---- pages of requests outside the tree ---------------------------------------------

    def grant(self, pages: int) -> bool:
        """Takes pages from both pools, or from neither."""
        if pages > min(self.free_full, self.free_swa):
            return False
        self.free_full -= pages
        self.free_swa -= pages
        return True

    def free(self, pages: Sequence[bool]) -> None:
        self.free_full += len(pages)
        self.free_swa += sum(pages)

    # ---- names --------------------------------------------------------------------------

    def path(self, tokens: Sequence[int], length: int, ns: int) -> list[Name]:
        """The names of all page-aligned prefixes, shortest first."""
        extra = 1 if self.is_bigram else 0
        usable = max(0, min(length, len(tokens)) - extra)
        if self.most is not None:
            usable = min(usable, self.most)
        size = self.page
        keys = [tuple(tokens[i * size : (i + 1) * size + extra]) for i in range(usable // size)]
        return [(ns, tuple(keys[: i + 1])) for i in range(len(keys))]

    def above(self, name: Name) -> list[Name]:
        """A prefix and all that it hangs from, shortest first."""
        ns, keys = name
        return [(ns, keys[: i + 1]) for i in range(len(keys))]

    def below(self, name: Name) -> list[Name]:
        """All cached prefixes that continue this one."""
        ns, keys = name
        at = len(keys)
        return [n for n in self.nodes if n[0] == ns and len(n[1]) > at and n[1][:at] == keys]

    def window_start(self, pages: int) -> int:
        """The first page that must be live for a prefix of so many pages."""
        if self.window is None:
            return 0
        return max(0, pages * self.page - self.window) // self.page

    # ---- match and insert ---------------------------------------------------------------

    def cached(self, path: Sequence[Name]) -> int:
        """Pages that are there, live or not."""
        count = 0
        while count < len(path) and path[count] in self.nodes:
            count += 1
        return count

    def match(self, tokens: Sequence[int], length: int, ns: int = 0) -> list[Name]:
        """The names of the matched pages."""
        path = self.path(tokens, length, ns)
        best = 0
        for pages in range(1, self.cached(path) + 1):
            if all(self.nodes[name].live for name in path[self.window_start(pages) : pages]):
                best = pages
        self._use(path[:best])
        if self.policy == "lfu":
            for name in path[:best]:
                self.nodes[name].rank += 1
        return path[:best]

    def _use(self, path: Sequence[Name]) -> None:
        self.clock += 1
        for name in path:
            self.nodes[name].last_use = self.clock

    def insert(
        self,
        tokens: Sequence[int],
        length: int,
        own: Sequence[bool | None],
        ns: int = 0,
        priority: int = 0,
    ) -> tuple[int, list[Name]]:
        """Pages that were cached before, and the names of what is cached now.

        Args:
          own: page by page of the request: is the caller's own page live? None where the page is
            not the caller's to give (it is the tree's already).
        """
        path = self.path(tokens, length, ns)
        before = self.cached(path)
        for name, live in zip(path[:before], own, strict=False):
            if live is None:
                continue
            self.free_full += 1
            if live and not self.nodes[name].live:
                self.nodes[name].live = True  # the SWA page of the copy becomes the node's
            elif live:
                self.free_swa += 1
        end = before
        for place in range(before, len(path)):
            if own[place] is None:
                break
            if own[place]:
                end = place + 1  # a leaf must be live
        for place in range(before, end):
            rank = priority if self.policy == "priority" else 0
            self.nodes[path[place]] = Node(live=bool(own[place]), rank=rank)
        self._use(path[:end])
        for name in path[:end]:
            node = self.nodes[name]
            if self.policy == "fifo" and end > before:
                node.rank = self.clock  # what holds up an arrival counts as arrived with it
            elif self.policy == "priority":
                node.rank = max(node.rank, priority)
        return before, path[:end]

    # ---- locks --------------------------------------------------------------------------

    def lock(self, path: Sequence[Name]) -> OracleReceipt:
        start = len(path)  # of the live pages at the end, a window of them at most
        while start > self.window_start(len(path)) and self.nodes[path[start - 1]].live:
            start -= 1
        receipt = OracleReceipt(tuple(path), tuple(path[start:]))
        for name in receipt.full:
            self.nodes[name].full_locks += 1
        for name in receipt.swa:
            self.nodes[name].swa_locks += 1
        return receipt

    def unlock(self, receipt: OracleReceipt) -> None:
        self.release_swa_lock(receipt)
        for name in receipt.full:
            self.nodes[name].full_locks -= 1

    def release_swa_lock(self, receipt: OracleReceipt, tokens: int | None = None) -> OracleReceipt:
        """Gives up SWA locks, all or those of pages that end at or before `tokens`."""
        kept = []
        for name in receipt.swa:
            if tokens is not None and len(name[1]) * self.page > tokens:
                kept.append(name)
            else:
                self.nodes[name].swa_locks -= 1
        return OracleReceipt(receipt.full, tuple(kept))

    # ---- evict --------------------------------------------------------------------------

    def _leaves(self) -> list[Name]:
        inner = {(ns, keys[:-1]) for ns, keys in self.nodes}
        return [name for name in self.nodes if name not in inner]

    def _order(self, name: Name) -> tuple[int, int]:
        node = self.nodes[name]
        return (node.last_use if self.policy == "lru" else node.rank, node.last_use)

    def _swa_order(self, name: Name, in_tail: bool) -> tuple[Any, ...]:
        """Where few are missed the start of a branch goes first, in its last window the end."""
        depth = len(name[1])
        worth = 2 if in_tail else int(self._in_kept_window(depth))
        return (worth, self._order(name), -depth if in_tail else depth)

    def _in_kept_window(self, depth: int) -> bool:
        """Kept windows end at multiples of `every` pages: they fill half the SWA pool at most."""
        if self.window is None:
            return False
        window, every = -(-self.window // self.page), 1
        most = self.config.swa_tokens // self.page // 2
        while every < 2 * window or window * self.config.full_tokens // self.page > most * every:
            every *= 2
        return any((depth + ahead) % every == 0 for ahead in range(window))

    def _remove(self, name: Name) -> bool:
        node = self.nodes.pop(name)
        assert node.full_locks == node.swa_locks == 0
        self.free_full += 1
        self.free_swa += node.live
        return node.live

    def near_leaf(self) -> set[Name]:
        """Prefixes that some branch needs for its match: less than a window above its end."""
        window = self.config.full_tokens if self.window is None else self.window
        reach = -(-window // self.page)
        return {name for leaf in self._leaves() for name in self.above(leaf)[-reach:]}

    def evict(self, *, full: int = 0, swa_tokens: int = 0) -> tuple[int, int]:
        """Tokens freed in each pool."""
        full_before, swa_before = self.free_full, self.free_swa
        self._drop_dangling()
        so_far = self.free_full - full_before
        for _ in range(-(-max(full, 0) // self.page) - so_far):
            open_leaves = [name for name in self._leaves() if not self.nodes[name].full_locks]
            if not open_leaves:
                break
            self._remove(min(open_leaves, key=self._order))
        wanted = -(-max(swa_tokens, 0) // self.page) - (self.free_swa - swa_before)
        tail = self.near_leaf()
        open_swa = [n for n, node in self.nodes.items() if node.live and not node.swa_locks]
        open_swa.sort(key=lambda name: self._swa_order(name, name in tail))
        for name in open_swa[: max(0, wanted)]:
            self.nodes[name].live = False
            self.free_swa += 1
        self._drop_dangling()
        return (
            (self.free_full - full_before) * self.page,
            (self.free_swa - swa_before) * self.page,
        )

    def _drop_dangling(self) -> None:
        """Tombstones that nothing hangs from and nobody locks have no use."""
        while True:
            useless = [
                name
                for name in self._leaves()
                if not self.nodes[name].live and not self.nodes[name].full_locks
            ]
            if not useless:
                return
            for name in useless:
                self._remove(name)

    # ---- sizes --------------------------------------------------------------------------

    def sizes(self) -> tuple[int, int, int, int]:
        """Evictable full and SWA, protected full and SWA, in tokens."""
        nodes = list(self.nodes.values())
        counts = (
            sum(not node.full_locks for node in nodes),
            sum(node.live and not node.swa_locks for node in nodes),
            sum(node.full_locks > 0 for node in nodes),
            sum(node.live and node.swa_locks > 0 for node in nodes),
        )
        a, b, c, d = (count * self.page for count in counts)
        return a, b, c, d

    def left(self) -> tuple[int, int]:
        return self.free_full * self.page, self.free_swa * self.page

    def tombstones(self) -> set[Name]:
        return {name for name, node in self.nodes.items() if not node.live}

    def check(self, held: int, held_live: int) -> None:
        """Rule R11, and the rules about leaves and locks, on the oracle itself."""
        full, of_swa = held, held_live
        for node in self.nodes.values():
            full, of_swa = full + 1, of_swa + node.live
            assert node.full_locks >= node.swa_locks >= 0
            assert node.live or not node.swa_locks
        assert full + self.free_full == self.config.full_pages
        assert of_swa + self.free_swa == self.config.swa_pages
        for name in self.nodes:
            assert len(name[1]) == 1 or (name[0], name[1][:-1]) in self.nodes
