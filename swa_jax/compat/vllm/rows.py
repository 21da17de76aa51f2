"""A request's blocks: which of them the tree has too, and which it holds a share of.

A block that the tree has is kept by the request's lock. As long as the request's window reads it,
the request also holds a share: then its SWA side stays, whatever is evicted. What the tree has not
is the request's own, also where it has the same text on another page.
"""

from collections.abc import Hashable
from dataclasses import dataclass, field

import numpy as np

from swa_jax.compat.vllm.store import page_row, room_for
from swa_jax.prefix_cache import Receipt, no_receipt


@dataclass
class Row:
    """The blocks of one request, in token order."""

    pages: list[int] = field(default_factory=list)  # full pages
    swa: list[int] = field(default_factory=list)  # their SWA sides; 0 once a window has left
    in_tree: list[bool] = field(default_factory=list)
    shares: list[bool] = field(default_factory=list)
    receipt: Receipt = field(default_factory=no_receipt)
    behind: int = 0  # blocks that the window has left
    space: Hashable = ()  # the namespace of its text
    # int32[n] whole blocks that were computed, in the tree or not: what they hold, whatever becomes
    # of the request's own record.
    text: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int32))

    @property
    def cached(self) -> int:
        """Tokens of `text`."""
        return len(self.text)

    def extend(self, pages: list[int], swa: list[int], *, in_tree: bool, shared_from: int) -> None:
        """Adds blocks; those from place `shared_from` of the row on hold a share."""
        start = len(self.pages)
        self.pages += pages
        self.swa += swa
        self.in_tree += [in_tree] * len(pages)
        self.shares += [place >= shared_from for place in range(start, len(self.pages))]

    def pick(self, *, in_tree: bool, begin: int = 0, end: int | None = None) -> np.ndarray:
        """int32[N] at each place its page, where the tree has it or has it not; 0 elsewhere.

        Of those in the tree only what the row holds a share of.
        """
        end = len(self.pages) if end is None else end
        kept = [
            page
            if begin <= place < end and self.in_tree[place] == in_tree and self.shares[place]
            else 0
            for place, page in enumerate(self.pages)
        ]
        return page_row(kept, room_for(len(self.pages)))

    def leave(self, edge: int) -> None:
        """Blocks below place `edge` are behind the window."""
        for place in range(self.behind, edge):
            self.swa[place] = 0
            if self.in_tree[place]:
                self.shares[place] = False
        self.behind = max(self.behind, edge)
