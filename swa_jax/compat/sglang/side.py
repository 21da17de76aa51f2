"""One pool of the two, for callers that reach for it."""

import numpy as np

from swa_jax.compat.common.side_shell import SideShell
from swa_jax.compat.common.types import Cache, HostInts, Slots
from swa_jax.compat.sglang.base import BaseTokenToKVPoolAllocator


class OneSide(SideShell, BaseTokenToKVPoolAllocator):
    """`full_attn_allocator` and `swa_attn_allocator` of an SWA allocator. See `SideShell`.

    Args:
      side: "full" or "swa".
      size: tokens of this pool.
      whole: the allocator whose pool it is.
      kvcache: the KV of this side, if there is one.
    """

    def __init__(
        self, side: str, size: int, whole: BaseTokenToKVPoolAllocator, kvcache: Cache
    ) -> None:
        """A view of what `whole` holds; see the class."""
        SideShell.__init__(self, side, size, kvcache, 1, whole.pools)
        self._whole = whole
        self.dtype, self.device, self.need_sort = whole.dtype, whole.device, whole.need_sort

    def _out(self, slots: np.ndarray) -> Slots:
        return self._whole._out(slots)

    @property
    def free_pages(self) -> Slots:
        """int64[n] page ids of this pool, in the order in which grants take them."""
        return self._out(self.pools.free_pages(self.side))

    def alloc_extend(
        self,
        prefix_lens: HostInts,
        prefix_lens_cpu: HostInts,
        seq_lens: HostInts,
        seq_lens_cpu: HostInts,
        last_loc: HostInts,
        extend_num_tokens: int,
        num_new_pages: int | None = None,
    ) -> Slots | None:
        """Grants as the whole allocator does, without an SWA side; the full pool only."""
        return self._extend((prefix_lens_cpu, seq_lens_cpu, last_loc), extend_num_tokens)

    def alloc_decode(
        self, seq_lens: HostInts, seq_lens_cpu: HostInts, last_loc: HostInts
    ) -> Slots | None:
        """Grants as the whole allocator does, without an SWA side; the full pool only."""
        lens = np.asarray(seq_lens_cpu)
        return self._extend((lens - 1, lens, last_loc), len(lens))
