"""sglang's `SWATokenToKVPoolAllocator` over an `SWAKVPool`, both its own code, unchanged.

`benchmarks/sglang_classes.py` says how they are imported and which settings are made. Tensors are
on the GPU where torch sees one, with the allocator's Triton kernels; else on the CPU, where it
takes its torch-native branch.
"""

import numpy as np

from benchmarks.sglang_classes import SglangClasses, load_sglang
from swa_jax.bench.side import BySlots, Maker, Native, granted
from swa_jax.bench.workload import Point

DIFFERS = "maps every token, not every page"


def load() -> Maker:
    """Imports sglang.

    Raises:
      ImportError: it, or what it needs, is not there.
    """
    classes = load_sglang()
    return lambda point: SglangSide(classes, point)


def device_of(classes: SglangClasses) -> str:
    """Where the tensors are."""
    return "cuda" if classes.torch.cuda.is_available() else "cpu"


class SglangSide(BySlots):
    """A call on the GPU is waited for, as it is in all others."""

    name = "sglang"

    def __init__(self, classes: SglangClasses, point: Point) -> None:
        """Makes the allocator."""
        self._torch, self._device = classes.torch, device_of(classes)
        self._allocator = classes.new_allocator(
            point.pool_tokens, point.pool_tokens, point.page_size, device=self._device
        )
        self._size = point.page_size
        self.last_page = point.pool_tokens // point.page_size
        # It has tails for pages of more than one token, and for one row alone.
        self.lacks = frozenset({"extend_tail"} if point.page_size == 1 else ())

    def native(self, values: np.ndarray) -> Native:
        """int64[N]."""
        return self._torch.from_numpy(values.astype(np.int64)).to(self._device)

    def numpy(self, values: Native) -> np.ndarray:
        """int64[N]."""
        return values.cpu().numpy()

    def fresh_rows(self, lens: np.ndarray) -> tuple[Native, ...]:
        """Lengths twice, once on the CPU, as its caller has them."""
        nothing = np.zeros_like(lens)
        prefix, seq, last = super().fresh_rows(lens)
        on_cpu = [self._torch.from_numpy(each.astype(np.int64)) for each in (nothing, lens)]
        return prefix, on_cpu[0], seq, on_cpu[1], last

    def decode_rows(self, seq_lens: np.ndarray) -> Native:
        """The lengths, here and on the CPU."""
        return self.native(seq_lens), self._torch.from_numpy(seq_lens.astype(np.int64))

    def available(self) -> tuple[int, int]:
        """Tokens that can be granted: full, SWA."""
        return self._allocator.full_available_size(), self._allocator.swa_available_size()

    def extend(self, rows: tuple[Native, ...], num_tokens: int) -> Native:
        """Slots of the new tokens, row by row."""
        if self._size == 1:  # pages of one token have a call of their own
            return self._done(granted(self._allocator.alloc(num_tokens)))
        return self._done(granted(self._allocator.alloc_extend(*rows, num_tokens)))

    def extend_tail(self, rows: tuple[Native, ...], tails: Native, num_tokens: int) -> Native:
        """As `extend`, of one row."""
        slots = self._allocator.alloc_extend_swa_tail(*rows, num_tokens, int(tails[0]))
        return self._done(granted(slots))

    def decode(self, seq_lens: Native, last: Native) -> Native:
        """One slot a row."""
        if self._size == 1:
            return self._done(granted(self._allocator.alloc(last.shape[0])))
        return self._done(granted(self._allocator.alloc_decode(*seq_lens, last)))

    def free(self, slots: Native) -> None:
        """Frees both sides."""
        self._done(self._allocator.free(slots))

    def free_swa(self, slots: Native) -> None:
        """Frees the SWA side."""
        self._done(self._allocator.free_swa(slots))

    def free_full(self, slots: Native) -> None:
        """Frees the full side of pages whose SWA side is gone."""
        self._done(self._allocator.free_full(slots))

    def give_back_full(self, heads: np.ndarray) -> None:
        """`free` would count the padding slot as freed where pages are single tokens."""
        self.free_full(self.native(heads))

    def free_segment(self, slots: Native) -> None:
        """Frees both sides, one slot a page looked at."""
        self._done(self._allocator.free_segment(slots, start_pos=0))

    def free_swa_segment(self, slots: Native) -> None:
        """Frees the SWA side, one slot a page looked at."""
        self._done(self._allocator.free_swa_segment(slots, start_pos=0))

    def group_begin(self) -> None:
        """Queues the frees that follow."""
        self._allocator.free_group_begin()

    def group_end(self) -> None:
        """Releases what was queued."""
        self._done(self._allocator.free_group_end())

    def _done(self, result: Native) -> Native:
        if self._device == "cuda":
            self._torch.cuda.synchronize()
        return result
