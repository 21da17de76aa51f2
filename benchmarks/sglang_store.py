"""sglang's SWA allocator and `UnifiedRadixCache` as a store of the host replay.

In 0.5.23 that class has taken the place of `SWARadixCache`; it is built of a part for full pages
and one for SWA. Its tree is compiled (Rust) where the bundled extension loads, Python otherwise;
`core` says which. Tensors on the CPU, as `benchmarks/sglang_classes.py` sets them up.
"""

import importlib
import types
from array import array
from dataclasses import dataclass

import numpy as np

from benchmarks.replay_store import evict_amounts
from benchmarks.sglang_classes import load_sglang, without_torchvision
from swa_jax.bench.side import Native
from swa_jax.config import PoolConfig


@dataclass
class Row:
    """A running request."""

    tokens: array  # int64
    lock: Native
    owned: int  # tokens that are the tree's
    branch: int  # tokens up to which the tree has all but the window; 0 where there is no such


class SglangTree:
    """The allocator and the tree, with the classes that their calls take."""

    def __init__(self, config: PoolConfig, table: Native, core: str | None) -> None:
        """All free. `table` is int32[rows, longest], the slots of each row."""
        self.classes = load_sglang()
        with without_torchvision():
            package = "sglang.srt.mem_cache."
            params = importlib.import_module(package + "cache_init_params")
            parts = importlib.import_module(package + "unified_cache.components").ComponentType
            trees = importlib.import_module(package + "unified_radix_cache")
            self.calls = importlib.import_module(package + "base_prefix_cache")
            self.key = importlib.import_module(package + "radix_cache").RadixKey
        self.swa_part = parts.SWA
        self.allocator = self.classes.new_allocator(
            config.full_tokens, config.swa_tokens, config.page_size
        )
        self.cache = trees.UnifiedRadixCache(
            params.CacheInitParams(
                disable=False,
                req_to_token_pool=types.SimpleNamespace(req_to_token=table),
                token_to_kv_pool_allocator=self.allocator,
                page_size=config.page_size,
                sliding_window_size=config.sliding_window,
                tree_components=(parts.FULL, parts.SWA),
                tree_core_backend=core,
            )
        )
        self.core = type(self.cache.tree_core).__name__

    def match(self, tokens: array, length: int) -> tuple[int, Native, int]:
        """Tokens of the longest prefix within `length` of them, its node, and `Row.branch`."""
        found = self.cache.match_prefix(
            self.calls.MatchPrefixParams(key=self.key(tokens, limit=length))
        )
        branch = found.swa_branching_seqlen or 0
        return found.device_prefix_len, found.last_device_node, branch

    def insert(
        self, tokens: array, slots: Native, owned: int, evicted: int, branch: int | None = None
    ) -> Native:
        """Caches `slots`, whole pages of which `owned` tokens are the tree's; the last node."""
        params = self.calls.InsertParams(
            key=self.key(tokens[: len(slots)]),
            value=slots,
            prev_prefix_len=owned,
            swa_branching_seqlen=branch,
        )
        params.set_evicted_seqlen(self.swa_part, evicted)
        return self.cache.insert(params).last_device_node

    def evict(self, full_tokens: int, swa_tokens: int) -> Native:
        """Frees so many tokens of each kind, or more."""
        params = self.calls.EvictParams(num_tokens=full_tokens, swa_num_tokens=swa_tokens)
        return self.cache.evict(params)


class SglangStore:
    """Allocation and the leaving of windows by the batch, the tree by the request."""

    name = "sglang"
    hashed_s = 0.0

    def __init__(
        self, config: PoolConfig, rows: int, longest: int, core: str | None = None
    ) -> None:
        """All free. `core`: "rust" or "python"; by default what sglang itself chooses."""
        self.torch = load_sglang().torch
        self.size, self.window = config.page_size, config.sliding_window or 0
        self.pages = config.full_pages, config.swa_pages
        self.table = self.torch.zeros((rows, longest), dtype=self.torch.int32)
        self.tree = SglangTree(config, self.table, core)
        self.allocator, self.cache = self.tree.allocator, self.tree.cache
        self.rows: list[Row | None] = [None] * rows
        self.requests: list[array] = []

    def prepare(self, tokens: list[np.ndarray], prompts: list[int]) -> None:
        """Arrays of int64, as its tree wants them."""
        del prompts
        self.requests = [array("q", each.astype(np.int64).tobytes()) for each in tokens]

    def _row(self, row: int) -> Row:
        found = self.rows[row]
        assert found is not None
        return found

    def match(self, row: int, request: int, length: int) -> int:
        """See `Store`."""
        tokens = self.requests[request]
        count, node, branch = self.tree.match(tokens, length - 1)
        lock = self.cache.lock(node)
        if count:
            self.table[row, :count] = self.cache.path_device_indices(node)[:count]
        self.rows[row] = Row(tokens, lock, count, branch)
        return count

    def unmatch(self, row: int) -> None:
        """See `Store`."""
        self.cache.unlock(self._row(row).lock)
        self.rows[row] = None

    def free_pages(self) -> tuple[int, int]:
        """Full, SWA."""
        full = self.allocator.full_available_size() // self.size
        return full, self.allocator.swa_available_size() // self.size

    def fits(self, full_pages: int, swa_pages: int) -> bool:
        """See `Store`."""
        full, swa = self.free_pages()
        full += self.cache.full_evictable_size() // self.size
        swa += self.cache.swa_evictable_size() // self.size
        return full_pages <= full and swa_pages <= swa

    def room(self) -> int:
        """See `Store`."""
        return min(self.free_pages())

    def make_room(self, pages: int) -> None:
        """See `Store`."""
        free = self.free_pages()
        full, swa = pages - free[0], pages - free[1]
        if full > 0 or swa > 0:
            full, swa = evict_amounts(full, swa, self.pages)
            self.tree.evict(full * self.size, swa * self.size)

    def held(self) -> tuple[int, int]:
        """See `Store`."""
        full, swa = self.free_pages()
        return self.pages[0] - full, self.pages[1] - swa

    def decode(self, rows: np.ndarray, lengths: np.ndarray) -> None:
        """See `Store`."""
        which, before = self.torch.from_numpy(rows), self.torch.from_numpy(lengths)
        last = self.table[which, before - 1].to(self.torch.int64)
        after = before + 1
        if self.size == 1:
            slots = self.allocator.alloc(len(rows))
        else:
            slots = self.allocator.alloc_decode(after, after, last)
        assert slots is not None
        self.table[which, before] = slots.to(self.torch.int32)

    def prefill(self, row: int, length: int, tokens: int) -> None:
        """See `Store`."""
        before, after = self.torch.tensor([length]), self.torch.tensor([length + tokens])
        last = self.table[row, length - 1 : length].to(self.torch.int64) if length else before - 1
        if self.size == 1:
            slots = self.allocator.alloc(tokens)
        else:
            slots = self.allocator.alloc_extend(before, before, after, after, last, tokens)
        assert slots is not None
        self.table[row, length : length + tokens] = slots.to(self.torch.int32)

    def leave(self, rows: np.ndarray, starts: np.ndarray, ends: np.ndarray) -> None:
        """Whole pages of all rows in one call."""
        spans = zip(rows.tolist(), starts.tolist(), ends.tolist(), strict=True)
        slots = self.torch.cat([self.table[row, start:end] for row, start, end in spans])
        self.allocator.free_swa_segment(slots.to(self.torch.int64), start_pos=0)

    def take_over(self, row: int, length: int, evicted: int) -> int:
        """As its scheduler does: what has left the window is freed and not cached in SWA.

        Where the tree has more of the prompt than could be used, for want of a window, the window
        is kept there: the chunk is cached up to that branch and the rest with the next one.
        """
        held = self._row(row)
        if not held.owned < held.branch <= length:
            return self._take_over_to(row, held, length // self.size * self.size, evicted, None)
        branch, held.branch = held.branch, 0
        return self._take_over_to(row, held, branch, evicted, branch)

    def _take_over_to(
        self, row: int, held: Row, whole: int, evicted: int, branch: int | None
    ) -> int:
        window = -(-max(self.window, self.size) // self.size) * self.size
        edge = (whole - 1 - window) // self.size * self.size
        if edge > evicted:
            slots = self.table[row, evicted:edge].to(self.torch.int64)
            self.allocator.free_swa_segment(slots, start_pos=evicted)
            evicted = edge
        return self._insert(row, held, whole, evicted, branch)

    def _insert(
        self, row: int, held: Row, whole: int, evicted: int, branch: int | None = None
    ) -> int:
        slots = self.table[row, :whole].to(self.torch.int64)
        node = self.tree.insert(held.tokens, slots, held.owned, evicted, branch)
        path = self.cache.path_device_indices(node)
        self.table[row, held.owned : len(path)] = path[held.owned :].to(self.torch.int32)
        before, held.lock = held.lock, self.cache.lock(node)
        self.cache.unlock(before)
        held.owned = len(path)
        return held.owned

    def finish(self, row: int, length: int, evicted: int) -> None:
        """See `Store`."""
        self._insert(row, self._row(row), length // self.size * self.size, evicted)
        self.retract(row, length, evicted)

    def retract(self, row: int, length: int, evicted: int) -> None:
        """See `Store`."""
        held = self._row(row)
        slots = self.table[row, :length].to(self.torch.int64)
        edge = max(evicted, held.owned)
        self.allocator.free_full_segment(slots[held.owned : edge], start_pos=held.owned)
        self.allocator.free_segment(slots[edge:], start_pos=edge)
        self.unmatch(row)

    def release_passed(self, row: int, frontier: int) -> None:
        """All of the SWA part, once the row has left the window that it stood in."""
        held = self._row(row)
        if frontier >= held.owned:
            self.cache.release_swa(held.lock)
