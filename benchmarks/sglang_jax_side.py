"""sglang-jax's `SWATokenToKVPoolAllocator`, NumPy.

Its KV pool is made without buffers. It is given arrays rather than the lists of its signature,
which is the faster of the two.
"""

import importlib

import numpy as np

from swa_jax.bench.side import BySlots, Maker, Native, granted
from swa_jax.bench.workload import Point

DIFFERS = "maps every token, not every page; its `free` of unmapped pages is its `free_full`"


def load() -> Maker:
    """Imports its allocator.

    Raises:
      ImportError: it is not there, or is the release on PyPI (0.0.1.post1), which has none.
    """
    module = importlib.import_module("sgl_jax.srt.mem_cache.allocator")
    if not hasattr(module, "SWATokenToKVPoolAllocator"):
        raise ImportError("this release has no SWA allocator, the repository has")
    pools = importlib.import_module("sgl_jax.srt.mem_cache.memory_pool")

    def make(point: Point) -> "SglangJaxSide":
        kv_pool = object.__new__(pools.SWAKVPool)  # its __init__ would make the KV buffers
        kv_pool.full_kv_pool = kv_pool.swa_kv_pool = None
        tokens = point.pool_tokens
        allocator = module.SWATokenToKVPoolAllocator(tokens, tokens, kv_pool, point.page_size)
        return SglangJaxSide(allocator, point)

    return make


class SglangJaxSide(BySlots):
    """sglang-jax's allocator on NumPy arrays."""

    name = "sglang-jax"
    lacks = frozenset({"extend_tail", "free_segment", "free_swa_segment"})

    def __init__(self, allocator: Native, point: Point) -> None:
        """Drives this allocator."""
        self._allocator, self._size = allocator, point.page_size
        self.last_page = point.pool_tokens // point.page_size

    def native(self, values: np.ndarray) -> np.ndarray:
        """int32[N]."""
        return np.asarray(values, np.int32)

    def numpy(self, values: np.ndarray) -> np.ndarray:
        """int32[N]."""
        return values

    def available(self) -> tuple[int, int]:
        """Tokens that can be granted: full, SWA."""
        return self._allocator.full_available_size(), self._allocator.swa_available_size()

    def extend(self, rows: tuple[np.ndarray, ...], num_tokens: int) -> np.ndarray:
        """Slots of the new tokens, row by row."""
        if self._size == 1:  # pages of one token have a call of their own
            return granted(self._allocator.alloc(num_tokens))
        return granted(self._allocator.alloc_extend(*rows, num_tokens))

    def extend_tail(
        self, rows: tuple[np.ndarray, ...], tails: np.ndarray, num_tokens: int
    ) -> np.ndarray:
        """Has no counterpart."""
        raise NotImplementedError

    def decode(self, seq_lens: np.ndarray, last: np.ndarray) -> np.ndarray:
        """One slot a row."""
        if self._size == 1:
            return granted(self._allocator.alloc(last.size))
        return granted(self._allocator.alloc_decode(seq_lens, last))

    def free(self, slots: np.ndarray) -> None:
        """Frees both sides."""
        self._allocator.free(slots)

    def free_swa(self, slots: np.ndarray) -> None:
        """Frees the SWA side."""
        self._allocator.free_swa(slots)

    def free_full(self, slots: np.ndarray) -> None:
        """Frees the full side of pages whose SWA side is gone."""
        self._allocator.free(slots)

    def free_segment(self, slots: np.ndarray) -> None:
        """Has no counterpart."""
        raise NotImplementedError

    def free_swa_segment(self, slots: np.ndarray) -> None:
        """Has no counterpart."""
        raise NotImplementedError

    def group_begin(self) -> None:
        """Queues the frees that follow."""
        self._allocator.free_group_begin()

    def group_end(self) -> None:
        """Releases what was queued."""
        self._allocator.free_group_end()
