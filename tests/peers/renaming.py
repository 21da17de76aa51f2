"""Which of their pages is which of ours, kept up from what both sides hand out."""

from __future__ import annotations

import numpy as np

from tests.peers.calls import Shape


class DifferenceError(AssertionError):
    """The two sides do not agree."""


class Renaming:
    """A one-to-one map of held full pages and of held SWA pages; 0 where a page is not held."""

    def __init__(self, shape: Shape) -> None:
        self.page = shape.page
        self.full = np.zeros(shape.full_pages + 1, np.int64)
        self.swa = np.zeros(shape.swa_pages + 1, np.int64)
        self.filled = np.zeros(shape.full_pages + 1, np.int64)  # tokens of a page that were granted

    def full_slots(self, slots: tuple[int, ...] | list[int]) -> np.ndarray:
        """int64[N]: our full slots as theirs. Padding stays padding, -1 stays -1."""
        return self._rename(self.full, slots)

    def swa_slots(self, slots: tuple[int, ...] | list[int]) -> np.ndarray:
        """int64[N]: our SWA slots as theirs."""
        return self._rename(self.swa, slots)

    def _rename(self, pages: np.ndarray, slots: tuple[int, ...] | list[int]) -> np.ndarray:
        ours = np.asarray(slots, np.int64)
        theirs = pages[ours // self.page] * self.page + ours % self.page
        return np.where(ours < 0, ours, theirs)

    def learn_grant(self, ours: np.ndarray, theirs: np.ndarray) -> None:
        """Joins the pages of a grant, token by token."""
        if ours.shape != theirs.shape:
            raise DifferenceError(f"granted {ours.size} and {theirs.size} slots")
        offsets = ours % self.page
        if not np.array_equal(offsets, theirs % self.page):
            raise DifferenceError(f"granted other places in the pages: {ours} and {theirs}")
        pairs = dict.fromkeys(
            zip((ours // self.page).tolist(), (theirs // self.page).tolist(), strict=True)
        )
        for mine, other in pairs:
            self._join(self.full, mine, other, "full")
        np.maximum.at(self.filled, ours // self.page, offsets + 1)

    def _join(self, pages: np.ndarray, mine: int, other: int, kind: str) -> None:
        if pages[mine] == other and other:
            return
        if pages[mine] or not 1 <= other < pages.size or other in pages:
            holder = np.flatnonzero(pages == other).tolist()
            raise DifferenceError(
                f"our {kind} page {mine} is their {pages[mine]} (0: new), yet got {other}, "
                f"which is our {holder} already"
            )
        pages[mine] = other

    def forget(self, full_free: np.ndarray, swa_free: np.ndarray) -> None:
        """Parts what is not held any more (queued by a group counts as not held)."""
        self.full[full_free] = 0
        self.filled[full_free] = 0
        self.swa[swa_free] = 0

    def compare_mapping(self, ours: np.ndarray, theirs: np.ndarray) -> None:
        """Every granted token of every held page has the same SWA slot, or none on both sides.

        Args:
          ours: int32[F+1] by page.
          theirs: int64[slots] by token.
        """
        held = np.flatnonzero(self.full)
        offsets = np.arange(self.page)
        got = theirs[self.full[held][:, None] * self.page + offsets]
        of_swa = ours[held]
        for i in np.flatnonzero((of_swa > 0) & (self.swa[of_swa] == 0)):
            self._join(self.swa, int(of_swa[i]), int(got[i, 0] // self.page), "SWA")
        expected = self.swa[of_swa][:, None] * self.page + offsets
        expected = np.where(of_swa[:, None] > 0, expected, 0)
        wrong = (expected != got) & (offsets < self.filled[held][:, None])
        if wrong.any():
            i, offset = np.argwhere(wrong)[0]
            raise DifferenceError(
                f"token {offset} of our full page {held[i]} (their {self.full[held[i]]}) maps to "
                f"their SWA slot {got[i, offset]}, where {expected[i, offset]} is right"
            )
