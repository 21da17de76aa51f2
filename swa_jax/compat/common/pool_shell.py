"""What all allocators of all interfaces share: everything but how a batch is passed."""

import numpy as np

from swa_jax.compat.common.errors import MisuseError
from swa_jax.compat.common.host_arrays import host_ints
from swa_jax.compat.common.host_pools import Backup, HostPools
from swa_jax.compat.common.segments import check_start, disjoint
from swa_jax.compat.common.types import Cache, HostInts, Plain, Segments, Slots


class PoolShell:
    """Pools of independent ranks behind the methods that schedulers call.

    Slots are NumPy arrays of `page * page_size + offset`, from `page_size` on. A grant gives None
    where a pool is short, and raises `MisuseError` where the request itself cannot be right.
    Frees are whole pages. What is freed can be granted again at once, so there is nothing to merge.

    Args:
      size: tokens of all ranks together.
      page_size: tokens in a page.
      kvcache: whatever `get_kvcache` shall give back; not looked at.
      dp_size: ranks, each with a `dp_size`-th of the pages.
      pools: the states.
    """

    size: int

    def __init__(
        self, size: int, page_size: int, kvcache: Cache, dp_size: int, pools: HostPools
    ) -> None:
        """Takes the states over; see the class."""
        self.page_size = page_size
        self.dp_size = dp_size
        self.pools = pools
        self._kvcache = kvcache
        self._resized(size)

    def _resized(self, size: int) -> None:
        self.size = size
        self.size_per_rank = size // self.dp_size
        self.num_pages = size // self.page_size
        self.pages_per_rank = self.num_pages // self.dp_size

    def _out(self, slots: np.ndarray) -> Slots:
        """How int32 slots are handed out."""
        return slots

    def _granted(self, slots: np.ndarray | None) -> Slots:
        return None if slots is None else self._out(slots)

    # Sizes.

    def available_size(self, dp_rank: int = 0) -> int:
        """Tokens that can be granted; pages queued by a group are not among them."""
        return min(self.pools.sizes(dp_rank))

    def merge_and_sort_free(self, dp_rank: int = 0) -> None:
        """Nothing is left to merge."""

    def debug_print(self) -> str:
        """Text for a scheduler's log line."""
        return ""

    @property
    def debug_mode(self) -> bool:
        """Whether a free that counted a fault raises `MisuseError`; costs a look at the device."""
        return self.pools.strict

    @debug_mode.setter
    def debug_mode(self, value: bool) -> None:
        self.pools.strict = bool(value)

    def faults(self) -> dict[str, int]:
        """Misuse counted by the core, by kind: pages freed twice, slots out of range, ..."""
        return self.pools.faults()

    # Grants and frees. A segment is one request's slots in token order.

    def alloc(self, need_size: int, dp_rank: int = 0) -> Slots:
        """Grants whole pages.

        Args:
          need_size: tokens, a multiple of the page.
          dp_rank: of which rank.

        Returns:
          int[need_size] slots, or None.
        """
        return self._granted(self.pools.alloc(need_size, dp_rank))

    def free(self, free_index: HostInts, dp_rank: int = 0) -> None:
        """Frees the pages of int[T] slots; padding slots are passed over."""
        self.pools.free("free", free_index, dp_rank)

    def free_page_ids(self, page_ids: HostInts, dp_rank: int = 0) -> None:
        """Frees int[K] pages by id."""
        pages = host_ints("page_ids", page_ids)
        most = np.iinfo(np.int32).max // self.page_size
        if len(pages) and int(np.abs(pages.astype(np.int64)).max()) > most:
            raise MisuseError(f"page_ids go up to {most} at this page_size, got {pages.max()}")
        self.free(pages * np.int32(self.page_size), dp_rank)

    def free_segment(self, free_index: HostInts, *, start_pos: int, dp_rank: int = 0) -> None:
        """Frees slots of one request from its token `start_pos` on, which begins a page."""
        check_start(start_pos, self.page_size)
        self.pools.free("free_segment", free_index, dp_rank)

    def free_segments(self, segments: Segments, dp_rank: int = 0) -> None:
        """Frees `(slots, start_pos)` segments of one request that share no page."""
        for slots, start in disjoint(segments, self.page_size):
            self.free_segment(slots, start_pos=start, dp_rank=dp_rank)

    def free_full(self, free_index: HostInts, dp_rank: int = 0) -> None:
        """Frees the full side of slots whose SWA side is gone; with one pool, as `free`."""
        self.free(free_index, dp_rank)

    def free_full_segment(self, free_index: HostInts, *, start_pos: int, dp_rank: int = 0) -> None:
        """`free_full` of a segment."""
        check_start(start_pos, self.page_size)
        self.free_full(free_index, dp_rank)

    def free_full_segments(self, segments: Segments, dp_rank: int = 0) -> None:
        """`free_full` of `(slots, start_pos)` segments of one request that share no page."""
        for slots, start in disjoint(segments, self.page_size):
            self.free_full_segment(slots, start_pos=start, dp_rank=dp_rank)

    # Groups, backups, the cache behind it.

    def free_group_begin(self) -> None:
        """Queues what is freed from here on, in all ranks. Which pages those are is settled now."""
        self.pools.group_begin()

    def free_group_end(self) -> None:
        """Makes everything queued grantable."""
        self.pools.group_end()

    def backup_state(self) -> Backup:
        """A reference to the present state of all ranks."""
        return self.pools.backup()

    def restore_state(self, state: Backup) -> None:
        """Comes back to a `backup_state`, the mapping and an open group included.

        A radix cache over these pools that has taken or given up pages since the backup is not of
        that state: it raises `MisuseError` at every call until its `reset`.
        """
        self.pools.restore(state)

    def clear(self, dp_rank: int | None = None) -> None:
        """Gives everything back, of one rank or of all.

        A radix cache over these pools that has anything in it is to be `reset`, before or after.
        """
        self.pools.clear(dp_rank)

    def get_kvcache(self) -> Slots:
        """The `kvcache` given at the start."""
        return self._kvcache

    def get_cpu_copy(self, *args: Plain, **kwargs: Plain) -> Plain:
        """`kvcache.get_cpu_copy`."""
        return self._kvcache.get_cpu_copy(*args, **kwargs)

    def load_cpu_copy(self, *args: Plain, **kwargs: Plain) -> Plain:
        """`kvcache.load_cpu_copy`."""
        return self._kvcache.load_cpu_copy(*args, **kwargs)
