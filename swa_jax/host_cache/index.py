"""Which pages of which prefixes host memory has. Plain Python, no arrays: bytes lie elsewhere.

A tree like the device's: a node is a page and hangs from the page before it. Rows of the full and
of the SWA layers are given out apart, and a page may have either, both or none: what is missing may
be on the device.

Order of leaving: a path that is used moves to the young end with its root last, so the oldest full
row is always at the end of what its branch has. Among SWA rows those go first that no end of a
branch needs, that is further than a window and a page above every end.
"""

from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from swa_jax.host_cache.config import HostConfig
from swa_jax.host_cache.nodes import NO_ROW, HostNode


@dataclass(frozen=True)
class Usable:
    """What of a prompt can be used, with what device and host have together."""

    pages: int  # of the longest usable prefix
    device_pages: int  # of it those that are usable with what the device has alone
    full: tuple[int, ...]  # pages whose full rows must come from the host, ascending
    swa: tuple[int, ...]  # likewise the SWA rows


@dataclass(frozen=True)
class Placed:
    """Rows that were given out and are to be written now; page numbers count from the root."""

    full: tuple[tuple[int, int], ...]  # (page, row)
    swa: tuple[tuple[int, int], ...]  # (page, row)


@dataclass
class Pin:
    """Holds a path until `unpin`, once."""

    nodes: list[HostNode]


class HostIndex:
    """The tree and its rows.

    Args:
      config: capacities, page and window.

    Keys are anything hashable, one a page: two pages are the same if their keys and all before them
    are. With pairs of tokens (EAGLE) a key has the first token of the next page too.
    """

    def __init__(self, config: HostConfig) -> None:
        """Every row is free."""
        self.config = config
        self._roots: dict[Hashable, HostNode] = {}
        self._spare_full = list(range(config.full_pages - 1, -1, -1))
        self._spare_swa = list(range(config.swa_pages - 1, -1, -1))
        # Nodes that have such a row and that nothing pins, oldest first.
        self._full_order: OrderedDict[HostNode, None] = OrderedDict()
        self._near_order: OrderedDict[HostNode, None] = OrderedDict()
        self._far_order: OrderedDict[HostNode, None] = OrderedDict()
        self.dropped_full = 0  # rows that made room for others
        self.dropped_swa = 0

    # ---- looking --------------------------------------------------------------------------

    @property
    def full_pages(self) -> int:
        """Full rows in use."""
        return self.config.full_pages - len(self._spare_full)

    @property
    def swa_pages(self) -> int:
        """SWA rows in use."""
        return self.config.swa_pages - len(self._spare_swa)

    def find(self, keys: Iterable[Hashable], namespace: Hashable = 0) -> list[HostNode]:
        """The nodes of a prompt's pages, as far as there are any; some may have no row.

        Args:
          keys: one a page.
          namespace: prefixes of others are not seen.
        """
        node = self._roots.get(namespace)
        found: list[HostNode] = []
        if node is None:
            return found
        for key in keys:
            node = node.children.get(key)
            if node is None:
                break
            found.append(node)
        return found

    def usable(
        self,
        keys: Sequence[Hashable],
        namespace: Hashable = 0,
        *,
        device_pages: int = 0,
        device_live: Sequence[bool] = (),
    ) -> Usable:
        """The longest prefix that can be continued with what device and host have together.

        Every page's full KV is on either, and so is SWA for the window at its end.

        Args:
          keys: one a page of the prompt; the match is no longer than they are.
          namespace: of the prompt.
          device_pages: pages whose full KV the device has, from the first on.
          device_live: for each of them whether it has its SWA side; fewer: not live.

        Returns:
          `Usable`; nothing comes from the host where it makes the match no longer.
        """
        found = self.find(keys, namespace)
        pages, alone = 0, 0
        dead, dead_alone = -1, -1  # the last page without SWA, so far
        start_of = self.config.window_start
        for page in range(len(keys)):
            node = found[page] if page < len(found) else None
            live = page < device_pages and page < len(device_live) and device_live[page]
            if page >= device_pages and (node is None or node.full == NO_ROW):
                break
            if not live:
                dead_alone = page
                if node is None or node.swa == NO_ROW:
                    dead = page
            start = start_of(page + 1)
            if dead < start:
                pages = page + 1
            if page < device_pages and dead_alone < start:
                alone = page + 1
        if pages == alone:
            return Usable(pages, alone, (), ())
        window = range(start_of(pages), pages)
        live_now = {page for page, is_live in enumerate(device_live[:device_pages]) if is_live}
        return Usable(
            pages=pages,
            device_pages=alone,
            full=tuple(range(min(device_pages, pages), pages)),
            swa=tuple(page for page in window if page not in live_now),
        )

    # ---- writing --------------------------------------------------------------------------

    def store(self, keys: Sequence[Hashable], namespace: Hashable = 0) -> Placed:
        """Takes in a whole prefix: every full row, SWA rows for a window and a page at its end.

        Args:
          keys: one a page.
          namespace: of the prefix.
        """
        first = max(self.config.window_start(len(keys)) - 1, 0)
        return self.put(keys, namespace, full=range(len(keys)), swa=range(first, len(keys)))

    def put(
        self,
        keys: Sequence[Hashable],
        namespace: Hashable = 0,
        *,
        full: Iterable[int] = (),
        swa: Iterable[int] = (),
    ) -> Placed:
        """Gives rows to pages of a prefix, in place of the oldest rows where none is left.

        Args:
          keys: one a page, from the first page of the prefix.
          namespace: of the prefix.
          full: pages that are to have a full row, ascending; those that have one keep it.
          swa: likewise for SWA rows.

        Returns:
          `Placed`, the rows that are new. Pages go without where all rows are pinned or belong to
          this prefix, the deepest first. The path is the youngest afterwards.

        Raises:
          ValueError: pages that the prefix has not, or that are not ascending.
        """
        wanted_full, wanted_swa = list(full), list(swa)
        _check_pages("full", wanted_full, len(keys))
        _check_pages("swa", wanted_swa, len(keys))
        last = max([*wanted_full[-1:], *wanted_swa[-1:]], default=-1)
        path = self._grow(keys[: last + 1], namespace)
        new_full, missed = self._give(path, wanted_full, "full", self._take_full)
        # Without its full row the SWA row of a page is of no use, nor are those below it.
        # From the end: a branch is of use by its last window.
        served = [page for page in reversed(wanted_swa) if page < missed]
        wanted = set(served)
        others = [node for page, node in enumerate(path) if page not in wanted]
        new_swa, _ = self._give(path, served, "swa", lambda: self._take_swa(others))
        self._let_go(path)
        return Placed(tuple(new_full), tuple(reversed(new_swa)))

    def _give(
        self, path: list[HostNode], pages: Iterable[int], kind: str, take: Callable[[], int]
    ) -> tuple[list[tuple[int, int]], int]:
        """Rows for those of a path's pages that have none; also the first that got none."""
        given: list[tuple[int, int]] = []
        for page in pages:
            if getattr(path[page], kind) == NO_ROW:
                row = take()
                if row == NO_ROW:
                    return given, page
                setattr(path[page], kind, row)
                given.append((page, row))
        return given, len(path)

    def take_back(self, keys: Iterable[Hashable], namespace: Hashable, placed: Placed) -> None:
        """Takes rows again that `put` gave for pages that could not be written.

        Args:
          keys: as for `put`.
          namespace: likewise.
          placed: of `put`.
        """
        path = self.find(keys, namespace)
        self._hold(path)
        for kind, rows, spare in (
            ("full", placed.full, self._spare_full),
            ("swa", placed.swa, self._spare_swa),
        ):
            for page, row in rows:
                if page < len(path) and getattr(path[page], kind) == row:
                    setattr(path[page], kind, NO_ROW)
                    spare.append(row)
        self._let_go(path)

    def touch(self, keys: Iterable[Hashable], namespace: Hashable = 0, *, hit: bool = True) -> int:
        """Makes a path the youngest, and counts a hit; the pages that were found."""
        path = self.find(keys, namespace)
        self._hold(path)
        for node in path:
            node.hits += hit
        self._let_go(path)
        return len(path)

    def forget(self, keys: Sequence[Hashable], namespace: Hashable = 0) -> bool:
        """Drops the last page of a path; False if it is not there or pinned or not an end."""
        path = self.find(keys, namespace)
        if len(path) < len(keys) or not path or path[-1].pins or path[-1].children:
            return False
        self._drop_rows(path[-1])
        self._prune(path[-1])
        return True

    # ---- pins -----------------------------------------------------------------------------

    def pin(self, keys: Iterable[Hashable], namespace: Hashable = 0) -> Pin:
        """Holds what there is of a path until `unpin`: no row of it leaves or is given out again.

        Args:
          keys: one a page.
          namespace: of the path.
        """
        path = self.find(keys, namespace)
        self._hold(path)
        return Pin(path)

    def unpin(self, pin: Pin) -> None:
        """Ends a pin; doing so again changes nothing."""
        path, pin.nodes = pin.nodes, []
        self._let_go(path)

    # ---- inside ---------------------------------------------------------------------------

    def _grow(self, keys: Sequence[Hashable], namespace: Hashable) -> list[HostNode]:
        """The nodes of a whole path, made where they are missing, and held."""
        path = self.find(keys, namespace)
        self._hold(path)
        if len(path) == len(keys):
            return path
        start = path[-1] if path else self._roots.setdefault(namespace, HostNode(namespace, None))
        new: list[HostNode] = []
        for key in keys[len(path) :]:
            above = new[-1] if new else start
            above.children[key] = node = HostNode(key, above)
            node.pins = 1
            new.append(node)
        for distance, node in enumerate(reversed(new)):
            node.to_end = min(distance, self.config.kept_pages)
        self._recount(start)
        return path + new

    def _hold(self, path: list[HostNode]) -> None:
        for node in path:
            if not node.pins:
                self._full_order.pop(node, None)
                self._near_order.pop(node, None)
                self._far_order.pop(node, None)
            node.pins += 1

    def _let_go(self, path: list[HostNode]) -> None:
        """Ends a hold: the path is young then, its root last."""
        for node in reversed(path):
            node.pins -= 1
            if node.pins:
                continue
            if node.full != NO_ROW:
                self._full_order[node] = None
            if node.swa != NO_ROW:
                self._swa_order(node)[node] = None
            if node.is_bare:
                self._prune(node)

    def _swa_order(self, node: HostNode) -> OrderedDict[HostNode, None]:
        near = node.to_end < self.config.kept_pages
        return self._near_order if near else self._far_order

    def _take_full(self) -> int:
        if not self._spare_full and self._full_order:
            node = next(iter(self._full_order))  # nothing below it has a full row
            self.dropped_full += 1
            self._drop_rows(node)
            self._prune(node)
        return self._spare_full.pop() if self._spare_full else NO_ROW

    def _take_swa(self, others: list[HostNode]) -> int:
        """A spare row; else one that no end needs, of `others` too; else the oldest."""
        if not self._spare_swa:
            node = self._far_swa(others)
            if node is None and self._near_order:
                node, _ = self._near_order.popitem(last=False)
            if node is not None:
                self.dropped_swa += 1
                self._spare_swa.append(node.swa)
                node.swa = NO_ROW
                self._prune(node)
        return self._spare_swa.pop() if self._spare_swa else NO_ROW

    def _far_swa(self, others: list[HostNode]) -> HostNode | None:
        if self._far_order:
            return self._far_order.popitem(last=False)[0]
        for node in others:  # held by nobody but the call under way
            if node.swa != NO_ROW and node.to_end >= self.config.kept_pages and node.pins == 1:
                return node
        return None

    def _drop_rows(self, node: HostNode) -> None:
        if node.full != NO_ROW:
            self._full_order.pop(node, None)
            self._spare_full.append(node.full)
            node.full = NO_ROW
        if node.swa != NO_ROW:
            self._swa_order(node).pop(node, None)
            self._spare_swa.append(node.swa)
            node.swa = NO_ROW
            self.dropped_swa += 1

    def _prune(self, node: HostNode) -> None:
        """Takes bare nodes out, from this one up."""
        while node.is_bare and not node.pins:
            above = node.parent
            if above is None:
                del self._roots[node.key]
                return
            del above.children[node.key]
            node = above
        self._recount(node)

    def _recount(self, node: HostNode) -> None:
        """Sets `to_end` of a node whose children changed, and of those above as far as it moves."""
        most = self.config.kept_pages
        while node.parent is not None:
            below = min((child.to_end for child in node.children.values()), default=-1)
            before, node.to_end = node.to_end, min(below + 1, most)
            if node.to_end == before:
                return
            if (before < most) != (node.to_end < most):
                self._move_swa(node, was_near=before < most)
            node = node.parent

    def _move_swa(self, node: HostNode, was_near: bool) -> None:
        """The node's SWA row is wanted by an end now, or by none any more."""
        old, new = self._near_order, self._far_order
        if not was_near:
            old, new = new, old
        if node in old:
            del old[node]
            new[node] = None


def _check_pages(name: str, pages: list[int], count: int) -> None:
    bounds = [-1, *pages, count]
    if any(page <= before for before, page in pairwise(bounds)):
        raise ValueError(f"{name} must be ascending pages from 0 to {count - 1}, got {pages}")
