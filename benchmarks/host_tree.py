"""A prefix cache in plain Python: the rules of `swa_jax.prefix_cache`, kept as a host engine would.

A radix tree of segments. A segment is a run of whole pages that were used at the same time, are all
live in SWA or all dead, and have the same locks; it is cut where that stops being so. Tokens come
as bytes, so a segment is compared in one call. Segments stand in one linked list, the least
recently used first and a child before its parent, so what may leave is found from its head.
"""

from collections.abc import Iterator
from typing import NamedTuple


class HostPools:
    """Free pages of both pools as lists, and the SWA page of each full page; page 0 is padding."""

    def __init__(self, full_pages: int, swa_pages: int) -> None:
        """All free."""
        self.full = list(range(full_pages, 0, -1))
        self.swa = list(range(swa_pages, 0, -1))
        self.swa_of = [0] * (full_pages + 1)

    def take(self, count: int) -> list[int]:
        """Full pages, each with an SWA side. There must be as many."""
        if not count:
            return []
        pages, sides = self.full[-count:], self.swa[-count:]
        del self.full[-count:], self.swa[-count:]
        for page, side in zip(pages, sides, strict=True):
            self.swa_of[page] = side
        return pages

    def give_swa(self, pages: list[int]) -> int:
        """Frees the SWA side of these pages where there is one. Returns how many."""
        swa_of = self.swa_of
        sides = [swa_of[page] for page in pages if swa_of[page]]
        for page in pages:
            swa_of[page] = 0
        self.swa.extend(sides)
        return len(sides)

    def give(self, pages: list[int]) -> int:
        """Frees these pages and their SWA sides. Returns how many of the latter."""
        sides = self.give_swa(pages)
        self.full.extend(pages)
        return sides


class Node:
    """A segment: pages whose tokens are `key`, up to `end` pages from the root."""

    __slots__ = (
        "after",
        "before",
        "children",
        "end",
        "full_locks",
        "key",
        "live",
        "pages",
        "parent",
        "stamp",
        "swa_locks",
    )

    def __init__(self, key: bytes, pages: list[int], end: int, *, live: bool) -> None:
        """Hangs nowhere yet."""
        self.key, self.pages, self.end, self.live = key, pages, end, live
        self.children: dict[bytes, Node] = {}
        self.full_locks = self.swa_locks = self.stamp = 0
        self.parent = self.before = self.after = self


class Lock(NamedTuple):
    """A path that must stay: all of it in full, what lies below `boundary` pages in SWA too."""

    node: Node
    boundary: int


class HostTree:
    """The tree beside its pools. Lengths are in pages; keys in bytes, four a token."""

    def __init__(self, pools: HostPools, page_size: int, window: int) -> None:
        """Empty. `window` counts past tokens, as in `PoolConfig`."""
        self.pools, self.size, self.window = pools, page_size, window
        self.page_bytes = 4 * page_size
        self.window_pages = -(-window // page_size)
        # Of these many pages one window is kept longer: they fill half the SWA pool at most.
        least = 2 * self.window_pages
        least = max(least, -(-least * len(pools.full) // len(pools.swa)))
        self.kept_every = 1 << (least - 1).bit_length()
        self.root = Node(b"", [], 0, live=True)
        self.list = Node(b"", [], 0, live=True)  # its `after` is the oldest segment
        self.clock = 0
        self.full_evictable = self.swa_evictable = 0

    def match(self, key: bytes, most: int) -> tuple[int, Node]:
        """Pages of the longest usable prefix within `most` pages, and the segment it ends with."""
        node, best, dead_until = self.root, self.root, 0
        for node in self._walk(key, most):
            if not node.live:
                dead_until = node.end
            elif dead_until <= self._window_start(node.end):
                best = node
        self._touch(best)
        return best.end, best

    def pages_to(self, node: Node, start: int) -> list[int]:
        """The pages from `start` on that lead to the end of this segment."""
        parts: list[list[int]] = []
        while node.end > start:
            begin = node.end - len(node.pages)
            parts.append(node.pages[max(start - begin, 0) :])
            node = node.parent
        return [page for part in reversed(parts) for page in part]

    def lock(self, node: Node) -> Lock:
        """Holds the path to this segment, and SWA for the window at its end."""
        boundary, above = self._window_start(node.end), node
        while above.live and above.end > boundary:
            if above.end - len(above.pages) < boundary:
                self._cut(above, boundary - (above.end - len(above.pages)))
            above = above.parent
        made = Lock(node, above.end)
        self._count(made, 1)
        return made

    def unlock(self, held: Lock) -> None:
        """Undoes a lock."""
        self._count(held, -1)
        self._drop_dead(held.node)

    def release_passed(self, held: Lock, passed: int) -> Lock:
        """Gives up the SWA part of a lock above `passed` pages."""
        node, boundary = held.node, max(held.boundary, min(passed, held.node.end))
        while node.end > held.boundary:
            begin = node.end - len(node.pages)
            if begin < boundary < node.end:
                node = self._cut(node, boundary - begin)
                continue
            if node.end <= boundary:
                self._count_swa(node, -1)
            node = node.parent
        return Lock(held.node, boundary)

    def insert(self, key: bytes, pages: list[int], own_from: int, live_from: int) -> Node:
        """Takes over a request's pages; those from `own_from` on are its own.

        Copies of what is cached go back to the pools; a tombstone keeps the copy's SWA page.

        Args:
          key: tokens of `pages`.
          pages: whole pages of the request from its beginning.
          own_from: pages before this one are the tree's already.
          live_from: own pages before this one have left the window.

        Returns:
          The last segment of the request's path.
        """
        count, node = len(pages), self.root
        for node in self._walk(key, count):
            begin = node.end - len(node.pages)
            if node.end <= own_from:
                continue
            mine = pages[max(begin, own_from) : node.end]
            if not node.live and live_from < node.end:
                if live_from > begin:
                    self._cut(node, live_from - begin)
                    begin = live_from
                self._revive(node, pages[begin : node.end])
            self.pools.give(mine)
        if node.end < count and live_from < count:
            if live_from > node.end:
                node = self._add(node, key, pages, live_from, live=False)
            node = self._add(node, key, pages, count, live=True)
        self._touch(node)
        return node

    def evict(self, full: int, swa: int) -> tuple[int, int]:
        """Frees up to so many pages of each kind, the oldest first. Returns how many went."""
        full_before, swa_before = len(self.pools.full), len(self.pools.swa)
        node = self.list.after
        while full > len(self.pools.full) - full_before and node is not self.list:
            following = node.after
            if node.pages and not node.children and not node.full_locks:
                left = full - (len(self.pools.full) - full_before)
                self._trim(node, left)
            node = following
        want = swa_before + swa
        if len(self.pools.swa) < want:
            self._evict_far(want)
        if len(self.pools.swa) < want:
            self._evict_near(want)
        return len(self.pools.full) - full_before, len(self.pools.swa) - swa_before

    def _evict_far(self, want: int) -> None:
        """SWA pages a window or more from the end of every branch; those of kept windows last."""
        for spare in (True, False):
            for path in self._by_use():
                for node in reversed(path):  # the shallow end first
                    if want <= len(self.pools.swa):
                        return
                    if node.live and not node.swa_locks:
                        self._bury_far(node, want, spare=spare)

    def _bury_far(self, node: Node, want: int, *, spare: bool) -> None:
        stop = node.end - max(self.window_pages - self._to_leaf(node), 0)
        at = node.end - len(node.pages)
        while at < stop and node.live and want > len(self.pools.swa):
            block = at // self.kept_every * self.kept_every + self.kept_every
            end = min(block - self.window_pages if spare else stop, stop)
            end = min(end, at + want - len(self.pools.swa))
            if at < end:
                begin = node.end - len(node.pages)
                if at > begin:
                    self._cut(node, at - begin)
                self._bury(node, end - at)
            at = max(end, block) if spare else end

    def _evict_near(self, want: int) -> None:
        """SWA pages of the last windows, from the leaf up: a branch gets shorter."""
        for path in self._by_use():
            for node in path:
                left = want - len(self.pools.swa)
                if left <= 0:
                    return
                if not node.live or node.swa_locks:
                    continue
                if node.children or node.full_locks:
                    keep = len(node.pages) - left
                    if keep > 0:
                        self._cut(node, keep)
                    self._bury(node, len(node.pages))
                else:
                    self._trim(node, left)

    def _by_use(self) -> Iterator[list[Node]]:
        """Segments by their last use, those of one use together, the deepest first."""
        node = self.list.after
        while node is not self.list:
            path = [node]
            while node.after is not self.list and node.after.stamp == path[0].stamp:
                node = node.after
                path.append(node)
            node = node.after
            yield path

    def _to_leaf(self, node: Node) -> int:
        """Pages from the end of this segment to the nearest leaf, or a window."""
        most = self.window_pages if node.children else 0
        for child in node.children.values():
            if len(child.pages) < most:
                most = min(most, len(child.pages) + self._to_leaf(child))
        return most

    def _window_start(self, end: int) -> int:
        return max(end * self.size - self.window, 0) // self.size

    def _walk(self, key: bytes, most: int) -> Iterator[Node]:
        """The segments of a prefix; the last is cut where the prefix leaves it."""
        step, end, at, node = self.page_bytes, most * self.page_bytes, 0, self.root
        while at < end:
            child = node.children.get(key[at : at + step])
            if child is None:
                return
            stop = at + len(child.key)
            if stop > end or key[at:stop] != child.key:
                shared = self._shared(child.key, key[at : min(stop, end)])
                yield self._cut(child, shared)
                return
            yield child
            at, node = stop, child

    def _shared(self, one: bytes, other: bytes) -> int:
        """Whole pages that both begin with, by halving; the first page is equal."""
        low, high = 1, min(len(one), len(other)) // self.page_bytes
        while low < high:
            middle = (low + high + 1) // 2
            at, end = low * self.page_bytes, middle * self.page_bytes
            low, high = (middle, high) if one[at:end] == other[at:end] else (low, middle - 1)
        return low

    def _cut(self, node: Node, count: int) -> Node:
        """Makes the first `count` pages a segment of their own, which is returned."""
        if count == len(node.pages):
            return node
        edge = count * self.page_bytes
        begin = node.end - len(node.pages)
        upper = Node(node.key[:edge], node.pages[:count], begin + count, live=node.live)
        upper.full_locks, upper.swa_locks, upper.stamp = node.full_locks, node.swa_locks, node.stamp
        upper.parent = node.parent
        node.parent.children[node.key[: self.page_bytes]] = upper
        node.key, node.pages, node.parent = node.key[edge:], node.pages[count:], upper
        upper.children[node.key[: self.page_bytes]] = node
        self._link(upper, node.after)
        return upper

    def _add(self, parent: Node, key: bytes, pages: list[int], end: int, *, live: bool) -> Node:
        begin = parent.end
        part = key[begin * self.page_bytes : end * self.page_bytes]
        node = Node(part, pages[begin:end], end, live=live)
        node.parent = parent
        parent.children[part[: self.page_bytes]] = node
        self._link(node, self.list)
        self.full_evictable += end - begin
        self.swa_evictable += (end - begin) * live
        return node

    def _revive(self, node: Node, copies: list[int]) -> None:
        """Gives a tombstone the SWA pages of these copies of its pages."""
        swa_of = self.pools.swa_of
        for page, copy in zip(node.pages, copies, strict=True):
            swa_of[page], swa_of[copy] = swa_of[copy], 0
        node.live = True
        if not node.swa_locks:
            self.swa_evictable += len(node.pages)

    def _bury(self, node: Node, count: int) -> None:
        """Makes the first `count` pages of a live segment tombstones."""
        if count <= 0:
            return
        upper = self._cut(node, count)
        upper.live = False
        self.swa_evictable -= self.pools.give_swa(upper.pages)

    def _trim(self, node: Node, count: int) -> None:
        """Takes up to `count` pages off the end of an unlocked leaf."""
        keep = max(len(node.pages) - count, 0)
        gone, node.pages = node.pages[keep:], node.pages[:keep]
        self.full_evictable -= len(gone)
        self.swa_evictable -= self.pools.give(gone)
        if keep:
            node.key = node.key[: keep * self.page_bytes]
            node.end -= len(gone)
            return
        # It keeps its place in the list for whoever stands on it, and is known by having no page.
        del node.parent.children[node.key[: self.page_bytes]]
        self._unlink(node)
        self._drop_dead(node.parent)

    def _drop_dead(self, node: Node) -> None:
        """Removes unlocked tombstones that nothing hangs from."""
        if node is not self.root and not (node.live or node.children or node.full_locks):
            self._trim(node, len(node.pages))

    def _count(self, held: Lock, change: int) -> None:
        node = held.node
        while node is not self.root:
            if node.end > held.boundary:
                self._count_swa(node, change)
            if node.full_locks == (change < 0):  # the first lock, or the last
                self.full_evictable -= change * len(node.pages)
            node.full_locks += change
            node = node.parent

    def _count_swa(self, node: Node, change: int) -> None:
        if node.live and node.swa_locks == (change < 0):
            self.swa_evictable -= change * len(node.pages)
        node.swa_locks += change

    def _touch(self, node: Node) -> None:
        """Makes a path the youngest, its root last."""
        self.clock += 1
        while node is not self.root:
            node.stamp = self.clock
            self._unlink(node)
            self._link(node, self.list)
            node = node.parent

    @staticmethod
    def _link(node: Node, after: Node) -> None:
        before = after.before
        node.before, node.after = before, after
        before.after = after.before = node

    @staticmethod
    def _unlink(node: Node) -> None:
        node.before.after, node.after.before = node.after, node.before
