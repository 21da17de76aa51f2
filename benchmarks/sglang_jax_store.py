"""sglang-jax's SWA allocator and `SWARadixCache` as a store of the host replay."""

import importlib
import types

import numpy as np

from benchmarks.replay_store import evict_amounts
from swa_jax.bench.side import Native
from swa_jax.config import PoolConfig


class Table:
    """What the cache uses of `ReqToTokenPool`: the slots of each row's tokens."""

    def __init__(self, rows: int, longest: int) -> None:
        """All 0."""
        self.req_to_token = np.zeros((rows, longest), np.int32)

    def write(self, place: Native, slots: np.ndarray) -> None:
        """Called by the cache with the slots that it holds of a running request."""
        self.req_to_token[place] = slots


class SglangJaxStore:
    """Their classes, called as their scheduler does; allocation is by the batch."""

    name = "sglang-jax"
    hashed_s = 0.0

    def __init__(self, config: PoolConfig, rows: int, longest: int) -> None:
        """All free."""
        allocators = importlib.import_module("sgl_jax.srt.mem_cache.allocator")
        pools = importlib.import_module("sgl_jax.srt.mem_cache.memory_pool")
        trees = importlib.import_module("sgl_jax.srt.mem_cache.swa_radix_cache")
        self.calls = importlib.import_module("sgl_jax.srt.mem_cache.base_prefix_cache")
        self.key = importlib.import_module("sgl_jax.srt.mem_cache.radix_cache").RadixKey
        kv_pool = object.__new__(pools.SWAKVPool)  # its __init__ would make the KV buffers
        kv_pool.full_kv_pool = kv_pool.swa_kv_pool = None
        self.size = config.page_size
        self.pages = config.full_pages, config.swa_pages
        self.allocator = allocators.SWATokenToKVPoolAllocator(
            config.full_tokens, config.swa_tokens, kv_pool, config.page_size
        )
        self.table = Table(rows, longest)
        self.tree = trees.SWARadixCache(
            self.table, self.allocator, config.sliding_window, config.page_size
        )
        self.rows: list[Native] = [None] * rows
        self.requests: list[list[int]] = []

    def prepare(self, tokens: list[np.ndarray], prompts: list[int]) -> None:
        """Lists of ints, as tokenizers give them."""
        del prompts
        self.requests = [each.tolist() for each in tokens]

    def match(self, row: int, request: int, length: int) -> int:
        """See `Store`."""
        tokens = self.requests[request]
        key = self.key(tokens[: length - 1])
        found = self.tree.match_prefix(self.calls.MatchPrefixParams(key=key))
        slots, node = found.device_indices, found.last_device_node
        lock = self.tree.inc_lock_ref(node)
        self.table.req_to_token[row, : len(slots)] = slots
        self.rows[row] = types.SimpleNamespace(
            tokens=tokens,
            req_pool_idx=row,
            extra_key=None,
            dp_rank=None,
            last_node=node,
            swa_uuid_for_lock=lock.swa_uuid_for_lock,
            cache_protected_len=len(slots),
            swa_evicted_seqlen=len(slots),
            output_ids=[],
        )
        return len(slots)

    def unmatch(self, row: int) -> None:
        """See `Store`."""
        self._unlock(self.rows[row])
        self.rows[row] = None

    def _unlock(self, request: Native) -> None:
        lock = self.calls.DecLockRefParams(swa_uuid_for_lock=request.swa_uuid_for_lock)
        self.tree.dec_lock_ref(request.last_node, lock)

    def free_pages(self) -> tuple[int, int]:
        """Full, SWA."""
        full = self.allocator.full_available_size() // self.size
        return full, self.allocator.swa_available_size() // self.size

    def fits(self, full_pages: int, swa_pages: int) -> bool:
        """See `Store`."""
        full, swa = self.free_pages()
        full += self.tree.full_evictable_size() // self.size
        return full_pages <= full and swa_pages <= swa + self.tree.swa_evictable_size() // self.size

    def room(self) -> int:
        """See `Store`."""
        return min(self.free_pages())

    def make_room(self, pages: int) -> None:
        """See `Store`."""
        free = self.free_pages()
        full, swa = pages - free[0], pages - free[1]
        if full > 0 or swa > 0:
            full, swa = evict_amounts(full, swa, self.pages)
            self.tree.evict(
                self.calls.EvictParams(num_tokens=full * self.size, swa_num_tokens=swa * self.size)
            )

    def held(self) -> tuple[int, int]:
        """See `Store`."""
        full, swa = self.free_pages()
        return self.pages[0] - full, self.pages[1] - swa

    def decode(self, rows: np.ndarray, lengths: np.ndarray) -> None:
        """See `Store`."""
        table = self.table.req_to_token
        if self.size == 1:
            slots = self.allocator.alloc(len(rows))
        else:
            slots = self.allocator.alloc_decode(lengths + 1, table[rows, lengths - 1])
        assert slots is not None
        table[rows, lengths] = slots

    def prefill(self, row: int, length: int, tokens: int) -> None:
        """See `Store`."""
        table = self.table.req_to_token
        last = int(table[row, length - 1]) if length else -1
        if self.size == 1:
            slots = self.allocator.alloc(tokens)
        else:
            slots = self.allocator.alloc_extend([length], [length + tokens], [last], tokens)
        assert slots is not None
        table[row, length : length + tokens] = slots

    def leave(self, rows: np.ndarray, starts: np.ndarray, ends: np.ndarray) -> None:
        """All rows in one call."""
        table = self.table.req_to_token
        spans = zip(rows.tolist(), starts.tolist(), ends.tolist(), strict=True)
        self.allocator.free_swa(np.concatenate([table[row, a:b] for row, a, b in spans]))

    def take_over(self, row: int, length: int, evicted: int) -> int:
        """See `Store`."""
        request = self.rows[row]
        request.fill_ids = request.tokens[:length]
        request.swa_evicted_seqlen = evicted
        self.tree.cache_unfinished_req(request)
        return request.cache_protected_len

    def finish(self, row: int, length: int, evicted: int) -> None:
        """See `Store`."""
        request = self.rows[row]
        request.origin_input_ids = request.tokens
        request.swa_evicted_seqlen = evicted
        request.pop_committed_kv_cache = lambda: length
        self.tree.cache_finished_req(request)
        self.rows[row] = None

    def retract(self, row: int, length: int, evicted: int) -> None:
        """See `Store`."""
        del evicted  # its mapping knows
        request = self.rows[row]
        request.origin_input_ids = request.tokens
        request.pop_committed_kv_cache = lambda: length
        self.tree.cache_finished_req(request, is_insert=False)
        self.rows[row] = None

    def release_passed(self, row: int, frontier: int) -> None:
        """It has no such call."""
