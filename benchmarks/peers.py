"""The allocators of today's engines on the host, driven as they are.

* **sglang**: `SWATokenToKVPoolAllocator` over an `SWAKVPool`, both its own code, unchanged, with
  tensors on the CPU, where the class takes its torch-native branch. `benchmarks/sglang_classes.py`
  says how it is imported and which two settings are made.
* **sglang-jax**: `SWATokenToKVPoolAllocator` of `sgl_jax/srt/mem_cache/allocator.py`, NumPy. The
  release on PyPI (0.0.1.post1) has no such class, the repository
  https://github.com/sgl-project/sglang-jax has. Its KV pool is made without buffers. It is given
  arrays rather than the lists of its signature, which is the faster of the two. It has no
  `free_full`: its `free` of pages whose SWA side is gone does that.

Neither is installed with swa_jax. The `peers` extra has what their imports need, far less than they
require to run; `make peers` is the first two lines:

    pip install -e '.[peers]'
    pip install --no-deps sglang==0.5.23
    pip install --no-deps --ignore-requires-python 'git+https://github.com/sgl-project/sglang-jax@cddbf6f#subdirectory=python'
"""

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version

import numpy as np

from benchmarks.sglang_classes import load_sglang
from benchmarks.side import Maker, Native, Side

_SEGMENTS = frozenset({"free_segment", "free_swa_segment"})


@dataclass(frozen=True)
class Peer:
    """How to make one, or why it is not there."""

    name: str
    make: Maker | None
    note: str


def find_peers() -> list[Peer]:
    """Both peers, installed or not."""
    return [_find("sglang", _load_sglang), _find("sglang-jax", _load_sglang_jax)]


def _find(package: str, load: Callable[[], Maker]) -> Peer:
    try:
        note = version(package)
        return Peer(package, load(), note)
    except PackageNotFoundError:
        return Peer(package, None, "not installed")
    except (ImportError, AttributeError, OSError, RuntimeError) as error:
        return Peer(package, None, f"installed, but does not import: {error}")


def _load_sglang() -> Maker:
    classes = load_sglang()

    def make(tokens: int, page_size: int) -> Side:
        return SglangSide(classes.torch, classes.new_allocator(tokens, tokens, page_size))

    return make


class SglangSide:
    """sglang's allocator on CPU tensors."""

    name = "sglang"
    lacks: frozenset[str] = frozenset()
    pads = False

    def __init__(self, torch: Native, allocator: Native) -> None:
        """Drives this allocator."""
        self._torch = torch
        self._allocator = allocator

    def native(self, values: np.ndarray) -> Native:
        """int64[N] on the CPU."""
        return self._torch.from_numpy(values.astype(np.int64))

    def numpy(self, values: Native) -> np.ndarray:
        """int64[N]."""
        return values.numpy()

    def available(self) -> tuple[int, int]:
        """Tokens that can be granted: full, SWA."""
        return self._allocator.full_available_size(), self._allocator.swa_available_size()

    def extend(
        self, prefix_lens: Native, seq_lens: Native, last_loc: Native, num_tokens: int
    ) -> Native:
        """Slots of the new tokens, row by row."""
        slots = self._allocator.alloc_extend(
            prefix_lens, prefix_lens, seq_lens, seq_lens, last_loc, num_tokens
        )
        return _granted(slots)

    def decode(self, seq_lens: Native, last_loc: Native) -> Native:
        """One slot a row."""
        return _granted(self._allocator.alloc_decode(seq_lens, seq_lens, last_loc))

    def free(self, slots: Native) -> None:
        """Frees both sides."""
        self._allocator.free(slots)

    def free_swa(self, slots: Native) -> None:
        """Frees the SWA side."""
        self._allocator.free_swa(slots)

    def free_full(self, slots: Native) -> None:
        """Frees the full side of pages whose SWA side is gone."""
        self._allocator.free_full(slots)

    def free_segment(self, slots: Native) -> None:
        """Frees both sides, one slot a page looked at."""
        self._allocator.free_segment(slots, start_pos=0)

    def free_swa_segment(self, slots: Native) -> None:
        """Frees the SWA side, one slot a page looked at."""
        self._allocator.free_swa_segment(slots, start_pos=0)

    def group_begin(self) -> None:
        """Queues the frees that follow."""
        self._allocator.free_group_begin()

    def group_end(self) -> None:
        """Releases what was queued."""
        self._allocator.free_group_end()


def _load_sglang_jax() -> Maker:
    module = importlib.import_module("sgl_jax.srt.mem_cache.allocator")
    if not hasattr(module, "SWATokenToKVPoolAllocator"):
        raise ImportError("this release has no SWA allocator, the repository has")
    pools = importlib.import_module("sgl_jax.srt.mem_cache.memory_pool")

    def make(tokens: int, page_size: int) -> Side:
        kv_pool = object.__new__(pools.SWAKVPool)  # its __init__ would make the KV buffers
        kv_pool.full_kv_pool = kv_pool.swa_kv_pool = None
        return SglangJaxSide(module.SWATokenToKVPoolAllocator(tokens, tokens, kv_pool, page_size))

    return make


class SglangJaxSide:
    """sglang-jax's allocator on NumPy arrays."""

    name = "sglang-jax"
    lacks = _SEGMENTS
    pads = False

    def __init__(self, allocator: Native) -> None:
        """Drives this allocator."""
        self._allocator = allocator

    def native(self, values: np.ndarray) -> np.ndarray:
        """int32[N]."""
        return np.asarray(values, np.int32)

    def numpy(self, values: np.ndarray) -> np.ndarray:
        """int32[N]."""
        return values

    def available(self) -> tuple[int, int]:
        """Tokens that can be granted: full, SWA."""
        return self._allocator.full_available_size(), self._allocator.swa_available_size()

    def extend(
        self,
        prefix_lens: np.ndarray,
        seq_lens: np.ndarray,
        last_loc: np.ndarray,
        num_tokens: int,
    ) -> np.ndarray:
        """Slots of the new tokens, row by row."""
        return _granted(self._allocator.alloc_extend(prefix_lens, seq_lens, last_loc, num_tokens))

    def decode(self, seq_lens: np.ndarray, last_loc: np.ndarray) -> np.ndarray:
        """One slot a row."""
        return _granted(self._allocator.alloc_decode(seq_lens, last_loc))

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


def _granted(slots: Native) -> Native:
    if slots is None:
        raise RuntimeError("the allocator has no room")
    return slots
