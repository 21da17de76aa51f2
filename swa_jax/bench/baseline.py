"""The obvious host allocator: two free lists, one mapping, plain Python.

What a competent engineer writes first. Pages leave a list at its end and come back there; the
mapping is a list by full page; a bytearray guards against a second free. It takes each page once,
checks before it grants (all or nothing in both pools), and works by page where it can: tokens of
a page are one `range`.
"""

from collections.abc import Iterable, Iterator, Sequence
from itertools import compress

import numpy as np

from swa_jax.bench.side import BySlots
from swa_jax.bench.workload import Point


class FreeListAllocator(BySlots):
    """Both pools hold `tokens` tokens; page 0 is padding."""

    name = "plain Python"
    lacks: frozenset[str] = frozenset()

    def __init__(self, tokens: int, page_size: int) -> None:
        """All pages are free, lowest first."""
        pages = self.last_page = tokens // page_size
        self._page_size = page_size
        self._full_free = list(range(pages, 0, -1))
        self._swa_free = list(range(pages, 0, -1))
        self._full_to_swa = [0] * (pages + 1)
        self._held = bytearray(pages + 1)
        self._queue: tuple[list[int], list[int]] | None = None

    @classmethod
    def at(cls, point: Point) -> "FreeListAllocator":
        """For the pools of a point."""
        return cls(point.pool_tokens, point.page_size)

    def native(self, values: np.ndarray) -> list[int]:
        """A list of ints."""
        return values.tolist()

    def numpy(self, values: Sequence[int]) -> np.ndarray:
        """int32[N]."""
        return np.array(values, np.int32)

    def available(self) -> tuple[int, int]:
        """Tokens that can be granted: full, SWA."""
        return len(self._full_free) * self._page_size, len(self._swa_free) * self._page_size

    def extend(self, rows: tuple[Sequence[int], ...], num_tokens: int) -> list[int]:
        """Slots of the new tokens, row by row."""
        needed = sum(self._pages_for(*row) for row in zip(*rows[:2], strict=True))
        return self._laid_out(rows, iter(self._take(needed, needed)), num_tokens)

    def extend_tail(
        self, rows: tuple[Sequence[int], ...], tails: Sequence[int], num_tokens: int
    ) -> list[int]:
        """As `extend`; only the pages of each row's tail get an SWA page."""
        size = self._page_size
        in_tail: list[bool] = []
        for prefix, seq, tail in zip(*rows[:2], tails, strict=True):
            count, mapped = self._pages_for(prefix, seq), -(-tail // size)
            in_tail += [False] * (count - mapped) + [True] * mapped
        pages = self._take(len(in_tail), sum(in_tail), in_tail)
        return self._laid_out(rows, iter(pages), num_tokens)

    def _pages_for(self, prefix: int, seq: int) -> int:
        return -(-seq // self._page_size) - -(-prefix // self._page_size)

    def _laid_out(
        self, rows: tuple[Sequence[int], ...], pages: Iterator[int], num_tokens: int
    ) -> list[int]:
        """Slots of the new tokens: what is left of each row's last page, then new pages."""
        size = self._page_size
        slots: list[int] = []
        for prefix, seq, last in zip(*rows, strict=True):
            left = seq - prefix
            rest = min(left, -prefix % size)  # what still fits the row's last page
            slots.extend(range(last + 1, last + 1 + rest))
            left -= rest
            while left > 0:
                first = next(pages) * size
                slots.extend(range(first, first + min(left, size)))
                left -= size
        if len(slots) != num_tokens:
            raise RuntimeError(f"extend gave {len(slots)} slots for {num_tokens} tokens")
        return slots

    def decode(self, seq_lens: Sequence[int], last: Sequence[int]) -> list[int]:
        """One slot a row."""
        size = self._page_size
        slots = [slot + 1 for slot in last]
        opening = [row for row, seq in enumerate(seq_lens) if seq % size == 1 or size == 1]
        for row, page in zip(opening, self._take(len(opening), len(opening)), strict=True):
            slots[row] = page * size
        return slots

    def _take(self, count: int, mapped: int, is_mapped: list[bool] | None = None) -> list[int]:
        """Full pages; all of them, or those marked, are mapped to an SWA page of their own."""
        if count > len(self._full_free) or mapped > len(self._swa_free):
            raise RuntimeError(f"no {count} free pages")
        if count == 0:
            return []
        full = self._full_free[-count:]
        del self._full_free[-count:]
        for page in full:
            self._held[page] = 1
        if mapped:
            swa = self._swa_free[-mapped:]
            del self._swa_free[-mapped:]
            with_swa = full if is_mapped is None else compress(full, is_mapped)
            for page, peer in zip(with_swa, swa, strict=True):
                self._full_to_swa[page] = peer
        return full

    def free(self, slots: Sequence[int]) -> None:
        """Frees both sides of every slot's page."""
        self._free(self._pages(slots))

    def free_swa(self, slots: Sequence[int]) -> None:
        """Frees the SWA side of every slot's page."""
        self._free_swa(self._pages(slots))

    def free_full(self, slots: Sequence[int]) -> None:
        """Frees the full side of pages whose SWA side is gone."""
        self._free_full(self._pages(slots))

    def free_segment(self, slots: Sequence[int]) -> None:
        """Frees both sides, one slot a page looked at."""
        self._free(self._pages(slots[:: self._page_size]))

    def free_swa_segment(self, slots: Sequence[int]) -> None:
        """Frees the SWA side, one slot a page looked at."""
        self._free_swa(self._pages(slots[:: self._page_size]))

    def group_begin(self) -> None:
        """Queues the frees that follow."""
        self._queue = ([], [])

    def group_end(self) -> None:
        """Releases what was queued."""
        if self._queue is not None:
            full, swa = self._queue
            self._queue = None
            self._full_free.extend(full)
            self._swa_free.extend(swa)

    def _pages(self, slots: Iterable[int]) -> list[int]:
        """The held pages of these slots, each once, in order."""
        size, held = self._page_size, self._held
        return [page for page in dict.fromkeys(slot // size for slot in slots) if held[page]]

    def _free(self, pages: list[int]) -> None:
        self._free_swa(pages)
        self._free_full(pages)

    def _free_swa(self, pages: list[int]) -> None:
        mapping = self._full_to_swa
        freed = [mapping[page] for page in pages if mapping[page]]
        for page in pages:
            mapping[page] = 0
        (self._swa_free if self._queue is None else self._queue[1]).extend(freed)

    def _free_full(self, pages: list[int]) -> None:
        freed = [page for page in pages if not self._full_to_swa[page]]
        for page in freed:
            self._held[page] = 0
        (self._full_free if self._queue is None else self._queue[0]).extend(freed)
