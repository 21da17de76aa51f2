"""What a host replay needs of an allocator with a prefix cache, and the plainest one."""

from typing import Protocol

import numpy as np

from benchmarks.host_tree import HostPools, HostTree, Lock
from swa_jax.config import PoolConfig


class Store(Protocol):
    """Pages of the rows of a batch, and of a cache that keeps what they have computed.

    Rows are numbers below the batch's size. Lengths are in tokens, `tokens` of a request being its
    prompt and what it will generate. Nothing is told twice: a store knows what its rows hold.
    """

    name: str
    hashed_s: float  # seconds that `prepare` spent on hashing, which is no conversion

    def prepare(self, tokens: list[np.ndarray], prompts: list[int]) -> None:
        """Gets int32[...] tokens of every request, and how many are its prompt. Not timed."""
        ...

    def match(self, row: int, request: int, length: int) -> int:
        """Starts a row with the longest cached prefix of whole pages below `length`, held."""
        ...

    def unmatch(self, row: int) -> None:
        """Undoes a match: the request does not fit."""
        ...

    def fits(self, full_pages: int, swa_pages: int) -> bool:
        """Whether so many more pages are free or can be evicted."""
        ...

    def room(self) -> int:
        """Pages of each kind that can be granted at once."""
        ...

    def make_room(self, pages: int) -> None:
        """Evicts until so many pages of each kind can be granted, or nothing is left to evict."""
        ...

    def held(self) -> tuple[int, int]:
        """Pages that are not free: full, SWA."""
        ...

    def decode(self, rows: np.ndarray, lengths: np.ndarray) -> None:
        """One token for each of int64[K] `rows`, behind int64[K] `lengths`."""
        ...

    def prefill(self, row: int, length: int, tokens: int) -> None:
        """So many tokens more for one row."""
        ...

    def leave(self, rows: np.ndarray, starts: np.ndarray, ends: np.ndarray) -> None:
        """Frees the SWA pages of int64[K] rows between two lengths, on page boundaries."""
        ...

    def take_over(self, row: int, length: int, evicted: int) -> int:
        """Caches what a running row has computed. Returns the tokens that are the cache's now.

        SWA pages before `evicted` have left the row's window.
        """
        ...

    def finish(self, row: int, length: int, evicted: int) -> None:
        """Caches what a row has computed and ends it."""
        ...

    def retract(self, row: int, length: int, evicted: int) -> None:
        """Ends a row; what it holds by itself is freed."""
        ...

    def release_passed(self, row: int, frontier: int) -> None:
        """Lets SWA pages of the matched prefix go that a row has left behind."""
        ...


class PlainStore:
    """Lists of pages and `HostTree`."""

    name = "plain Python"
    hashed_s = 0.0

    def __init__(self, config: PoolConfig, rows: int) -> None:
        """All free, for a batch of `rows`."""
        self.size = config.page_size
        self.pools = HostPools(config.full_pages, config.swa_pages)
        self.sizes = config.full_pages, config.swa_pages
        self.tree = HostTree(self.pools, self.size, config.sliding_window or config.full_tokens)
        self.pages: list[list[int]] = [[] for _ in range(rows)]
        self.locks = [Lock(self.tree.root, 0)] * rows
        self.keys = [b""] * rows
        self.requests: list[bytes] = []
        self.last_page = np.zeros(rows, np.int64)

    def prepare(self, tokens: list[np.ndarray], prompts: list[int]) -> None:
        """As bytes, which compare fastest."""
        self.requests = [each.tobytes() for each in tokens]

    def match(self, row: int, request: int, length: int) -> int:
        """See `Store`."""
        key = self.requests[request]
        count, node = self.tree.match(key, (length - 1) // self.size)
        self.locks[row] = self.tree.lock(node)
        self.pages[row] = self.tree.pages_to(node, 0)
        self.keys[row] = key
        return count * self.size

    def unmatch(self, row: int) -> None:
        """See `Store`."""
        self.tree.unlock(self.locks[row])
        self.pages[row] = []

    def fits(self, full_pages: int, swa_pages: int) -> bool:
        """See `Store`."""
        full = len(self.pools.full) + self.tree.full_evictable
        return full_pages <= full and swa_pages <= len(self.pools.swa) + self.tree.swa_evictable

    def room(self) -> int:
        """See `Store`."""
        return min(len(self.pools.full), len(self.pools.swa))

    def make_room(self, pages: int) -> None:
        """A little more than is lacking, as `swa_jax.prefix_cache.evict_lacking` does."""
        full, swa = pages - len(self.pools.full), pages - len(self.pools.swa)
        if full > 0 or swa > 0:
            self.tree.evict(*evict_amounts(full, swa, self.sizes))

    def held(self) -> tuple[int, int]:
        """See `Store`."""
        return self.sizes[0] - len(self.pools.full), self.sizes[1] - len(self.pools.swa)

    def decode(self, rows: np.ndarray, lengths: np.ndarray) -> None:
        """A page for each row whose last one is full; the slots of all tokens."""
        opens = rows[lengths % self.size == 0].tolist()
        taken = self.pools.take(len(opens))
        for row, page in zip(opens, taken, strict=True):
            self.pages[row].append(page)
        self.last_page[opens] = taken
        self.slots = self.last_page[rows] * self.size + lengths % self.size

    def prefill(self, row: int, length: int, tokens: int) -> None:
        """See `Store`."""
        held = self.pages[row]
        held += self.pools.take(-(-(length + tokens) // self.size) - len(held))
        self.last_page[row] = held[-1]
        pages = np.array(held[length // self.size :])
        slots = (pages[:, None] * self.size + np.arange(self.size)).reshape(-1)
        start = length % self.size
        self.slots = slots[start : start + tokens]

    def leave(self, rows: np.ndarray, starts: np.ndarray, ends: np.ndarray) -> None:
        """See `Store`."""
        begins, stops = (starts // self.size).tolist(), (ends // self.size).tolist()
        left: list[int] = []
        for row, begin, stop in zip(rows.tolist(), begins, stops, strict=True):
            left += self.pages[row][begin:stop]
        self.pools.give_swa(left)

    def take_over(self, row: int, length: int, evicted: int) -> int:
        """See `Store`."""
        held, lock = self.pages[row], self.locks[row]
        count, own = length // self.size, lock.node.end
        node = self.tree.insert(self.keys[row], held[:count], own, evicted // self.size)
        self.locks[row] = self.tree.lock(node)
        self.tree.unlock(lock)
        held[own : node.end] = self.tree.pages_to(node, own)
        self.last_page[row] = held[-1]
        return node.end * self.size

    def finish(self, row: int, length: int, evicted: int) -> None:
        """See `Store`."""
        self.take_over(row, length, evicted)
        self.retract(row, length, evicted)

    def retract(self, row: int, length: int, evicted: int) -> None:
        """See `Store`."""
        del length, evicted  # the pages know
        self.pools.give(self.pages[row][self.locks[row].node.end :])
        self.unmatch(row)

    def release_passed(self, row: int, frontier: int) -> None:
        """See `Store`."""
        self.locks[row] = self.tree.release_passed(self.locks[row], frontier // self.size)


def evict_amounts(full: int, swa: int, sizes: tuple[int, int]) -> tuple[int, int]:
    """Pages to evict where so many are lacking: a few steps' worth, to do it less often."""

    def amount(lacking: int, size: int) -> int:
        extra = max(size // 64, min(3 * lacking, size // 64 * 8))
        return lacking + extra if lacking > 0 else 0

    return amount(full, sizes[0]), amount(swa, sizes[1])
