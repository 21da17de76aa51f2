"""How this interface passes batches: device and host lengths beside each other, one rank."""

import os

import numpy as np

from swa_jax.compat.common.errors import MisuseError
from swa_jax.compat.common.host_pools import HostPools
from swa_jax.compat.common.pool_shell import PoolShell
from swa_jax.compat.common.types import Cache, HostInts, Plain, Slots
from swa_jax.compat.sglang.scheduler_hooks import SchedulerHooks


class BaseTokenToKVPoolAllocator(PoolShell, SchedulerHooks):
    """An allocator with int64 slots in and out. See `PoolShell`.

    Lengths come twice in this interface; those named `*_cpu` are read, so nothing waits for a
    device. `dtype`, `device` and `need_sort` are kept for callers: pages come back in the order in
    which they were freed. With SGLANG_DEBUG_MEMORY_POOL set, a free that counted a fault raises.

    Args:
      size: tokens.
      page_size: tokens in a page.
      dtype: of the KV.
      device: of the KV.
      kvcache: whatever `get_kvcache` shall give back.
      need_sort: not needed.
      pools: the state.
    """

    def __init__(
        self,
        size: int,
        page_size: int,
        dtype: Plain,
        device: Plain,
        kvcache: Cache,
        need_sort: bool,
        pools: HostPools,
    ) -> None:
        """Takes the state over; see the class."""
        super().__init__(size, page_size, kvcache, 1, pools)
        self.dtype, self.device, self.need_sort = dtype, device, need_sort
        if os.environ.get("SGLANG_DEBUG_MEMORY_POOL", "").lower() in ("1", "true"):
            self.debug_mode = True

    def _out(self, slots: np.ndarray) -> Slots:
        return slots.astype(np.int64)

    @property
    def free_pages(self) -> Slots | None:
        """int64[n] page ids, in the order in which grants take them."""
        return self._out(self.pools.free_pages("full"))

    @property
    def release_pages(self) -> Slots | None:
        """int64[0]: a freed page is among `free_pages` at once."""
        return self._out(np.empty(0, np.int32))

    def get_all_free_pages(self) -> Slots | None:
        """`free_pages`: there are no others."""
        return self.free_pages

    @property
    def free_group(self) -> list[Slots] | None:
        """The arrays that frees in the open group named, None where none is open; to look at.

        Pages that a tree over these pools gives up in the group are not among them.
        """
        if not self.pools.group_open:
            return None
        return [self._out(slots) for slots in self.pools.queued[0]]

    def free_group_begin(self) -> None:
        """Opens a group.

        Raises:
          MisuseError: one is open.
        """
        if self.pools.group_open:
            raise MisuseError("a free group is open already: groups do not nest")
        super().free_group_begin()

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
        """Grants slots for a batch of rows that grow, their last pages filled first.

        Args:
          prefix_lens: not read.
          prefix_lens_cpu: int[B] tokens held before.
          seq_lens: not read.
          seq_lens_cpu: int[B] tokens held after.
          last_loc: int[B] slot of the last token held before, -1 for none.
          extend_num_tokens: tokens added in all.
          num_new_pages: not needed.

        Returns:
          int64[extend_num_tokens] slots, row by row, or None.
        """
        rows = prefix_lens_cpu, seq_lens_cpu, last_loc
        return self._granted(self.pools.extend(rows, extend_num_tokens))

    def alloc_decode(
        self, seq_lens: HostInts, seq_lens_cpu: HostInts, last_loc: HostInts
    ) -> Slots | None:
        """Grants one slot a row.

        Args:
          seq_lens: not read.
          seq_lens_cpu: int[B] tokens of each row, the new one included.
          last_loc: int[B] slot of the token before it.

        Returns:
          int64[B] slots, or None.
        """
        return self._granted(self.pools.decode(seq_lens_cpu, last_loc))

    def translate_kv_indices_for_transfer(self, kv_indices: HostInts) -> HostInts:
        """The same: slots are places in the KV buffers."""
        return kv_indices
