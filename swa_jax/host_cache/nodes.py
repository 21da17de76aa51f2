"""The nodes of the host's tree: one page of one prefix."""

from __future__ import annotations

from collections.abc import Hashable

NO_ROW = -1


class HostNode:
    """A page of a prefix, with where host memory has it.

    Attributes:
      key: what the page is compared by.
      parent: the page before it; a namespace's root for the first.
      children: the pages that follow it, by key.
      full: row of the full layers, NO_ROW where host memory has none.
      swa: row of the SWA layers, likewise.
      pins: how many pins and copies hold it.
      hits: matches that passed here.
      to_end: pages to the nearest end of a branch below, 0 for an end; counted up to `kept_pages`.
    """

    __slots__ = ("children", "full", "hits", "key", "parent", "pins", "swa", "to_end")

    def __init__(self, key: Hashable, parent: HostNode | None) -> None:
        """Has no row; its parent has to name it."""
        self.key = key
        self.parent = parent
        self.children: dict[Hashable, HostNode] = {}
        self.full = NO_ROW
        self.swa = NO_ROW
        self.pins = 0
        self.hits = 0
        self.to_end = 0

    @property
    def is_bare(self) -> bool:
        """Host memory has nothing of this page and nothing hangs from it."""
        return self.full == NO_ROW and self.swa == NO_ROW and not self.children
