"""Who holds which page, as two counters: what sharing means, without JAX.

It does not know in which order pages are granted. A grant is told to it with the pages that came
out, and it says whether they were anybody's.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from oracle import FAULT_KINDS, Sizes, ceil_div, frontier


class ShareOracle:
    """Holders of full and of SWA pages, the mapping, and what is free and pending."""

    def __init__(self, sizes: Sizes) -> None:
        self.sizes, self.page = sizes, sizes.page_size
        self.full: Counter[int] = Counter()
        self.swa: Counter[int] = Counter()
        self.map: dict[int, int] = {}
        self.pending = [0, 0]
        self.group_open = False
        self.faults: Counter[str] = Counter(dict.fromkeys(FAULT_KINDS, 0))

    # ---- what is left -------------------------------------------------------------------

    def left(self) -> tuple[int, int]:
        """Full and SWA pages that can be granted."""
        of_swa = self.sizes.swa_pages - len(self.swa) - self.pending[1]
        if self.sizes.pure:
            return of_swa, of_swa
        return self.sizes.full_pages - len(self.full) - self.pending[0], of_swa

    def short(self, full: int, of_swa: int) -> tuple[int, int]:
        left = self.left()
        return max(0, full - left[0]), max(0, of_swa - left[1])

    # ---- a page at a time ---------------------------------------------------------------

    def _named(self, slots: Iterable[int]) -> list[int]:
        """The pages of some slots, each once; padding is none."""
        pages: dict[int, None] = {}
        for slot in slots:
            if not 0 <= slot < self.sizes.full_tokens + self.page:
                self.faults["out_of_range"] += 1
            elif slot >= self.page:
                pages[slot // self.page] = None
        return list(pages)

    def _lower(self, side: int, page: int, left: int) -> None:
        pool = (self.full, self.swa)[side]
        if left:
            pool[page] = left
            return
        del pool[page]
        if self.group_open and (side == 1 or not self.sizes.pure):
            self.pending[side] += 1

    def _lower_swa(self, page: int, left: int) -> None:
        self._lower(1, self.map[page], left)
        if not left:
            del self.map[page]

    # ---- calls --------------------------------------------------------------------------

    def granted(self, full: Sequence[int], pairs: dict[int, int]) -> None:
        """Pages that a grant handed out, and the SWA pages that full pages got with it."""
        for page in full:
            assert self.sizes.pure or page not in self.full, f"full page {page} is held"
            self.full[page] = 1
            self.map.pop(page, None)
        for page, of_swa in pairs.items():
            assert of_swa not in self.swa, f"SWA page {of_swa} is held"
            assert page not in self.map, f"full page {page} has an SWA side"
            self.swa[of_swa] = 1
            self.map[page] = of_swa

    def share(self, slots: Sequence[int], live: Sequence[bool] | None = None) -> None:
        first = {s // self.page: live is None or live[i] for i, s in reversed([*enumerate(slots)])}
        for page in self._named(slots):
            if page not in self.full:
                self.faults["double_free"] += 1
                continue
            self.full[page] += 1
            if page in self.map and first[page]:
                self.swa[self.map[page]] += 1

    def free(self, slots: Iterable[int]) -> None:
        for page in self._named(slots):
            if page not in self.full:
                self.faults["double_free"] += 1
                continue
            left = self.full[page] - 1
            self._lower(0, page, left)
            if page in self.map:
                self._lower_swa(page, min(left, self.swa[self.map[page]]))

    def free_swa(self, slots: Iterable[int]) -> None:
        for page in self._named(slots):
            if page not in self.full:
                self.faults["double_free"] += 1
            elif page not in self.map:
                self.faults["unmapped"] += 1
            else:
                self.leave(page)

    def leave(self, page: int) -> None:
        """One holder's window passes a page that has an SWA side."""
        left = self.swa[self.map[page]] - 1
        if self.sizes.pure and left:  # there is one side only
            self.full[page] = left
        self._lower_swa(page, left)

    def free_full(self, slots: Iterable[int]) -> None:
        for page in self._named(slots):
            if page not in self.full:
                self.faults["double_free"] += 1
            elif page in self.map and self.swa[self.map[page]] >= self.full[page]:
                self.faults["still_mapped"] += 1
            else:
                self._lower(0, page, self.full[page] - 1)

    def group(self, *, begin: bool) -> None:
        if begin:
            self.faults["nested_group"] += self.group_open
        else:
            self.pending = [0, 0]
        self.group_open = begin

    def copies(self, rows: Sequence[tuple[int, int]]) -> list[bool]:
        """Which rows (length, last slot) copy their last page."""
        seen: Counter[int] = Counter()
        out = []
        for length, last in rows:
            page = last // self.page
            asks = length % self.page != 0
            out.append(asks and self.full[page] - seen[page] > 1)
            seen[page] += asks
        return out

    def moved(self, page: int) -> None:
        """A holder of `page` went over to a copy of its own."""
        left = self.full[page] - 1
        assert left > 0
        self.full[page] = left
        if page in self.map:
            self.swa[self.map[page]] = min(left, self.swa[self.map[page]])

    # ---- windows ------------------------------------------------------------------------

    def edge(self, length: int) -> int:
        """Tokens below which a holder's SWA pages are dead."""
        assert self.sizes.window is not None
        return frontier(length, self.page, self.sizes.window)

    def pages_for(self, tokens: int) -> int:
        return ceil_div(tokens, self.page)
