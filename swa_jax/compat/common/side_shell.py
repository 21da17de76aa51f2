"""One pool of the two, for callers that reach for it."""

from swa_jax.compat.common.host_pools import HostPools
from swa_jax.compat.common.pool_shell import PoolShell
from swa_jax.compat.common.segments import check_start
from swa_jax.compat.common.types import Cache, HostInts, Slots


class SideShell(PoolShell):
    """A view of the full or of the SWA pool of shared states.

    What is granted here has no other side: a full slot maps to nothing, and an SWA slot is no
    full slot's until `set_full_to_swa_mapping` joins them. What is freed here leaves the other
    side held, and unmapped, so that a freed page has no mapping. Groups, backups and `clear` are
    those of the whole allocator.

    Args:
      side: "full" or "swa".
      size: tokens of this pool in all ranks.
      kvcache: the KV of this side, if there is one.
      dp_size: ranks.
      pools: the shared states.
    """

    def __init__(
        self, side: str, size: int, kvcache: Cache, dp_size: int, pools: HostPools
    ) -> None:
        """A view of one pool; see the class."""
        PoolShell.__init__(self, size, pools.config.page_size, kvcache, dp_size, pools)
        self.side = side

    def available_size(self, dp_rank: int = 0) -> int:
        """Tokens that this pool can grant."""
        return self.pools.sizes(dp_rank)[self.side == "swa"]

    def alloc(self, need_size: int, dp_rank: int = 0) -> Slots:
        """Grants whole pages of this pool alone."""
        return self._granted(self.pools.alloc_side(self.side, need_size, dp_rank))

    def free(self, free_index: HostInts, dp_rank: int = 0) -> None:
        """Frees the pages of int[T] slots of this pool."""
        self.pools.free_side(self.side, free_index, dp_rank)

    def free_segment(self, free_index: HostInts, *, start_pos: int, dp_rank: int = 0) -> None:
        """Frees slots of one request from its token `start_pos` on, which begins a page."""
        check_start(start_pos, self.page_size)
        self.pools.free_side(self.side, free_index, dp_rank)

    def _extend(
        self, rows: tuple[HostInts, HostInts, HostInts], num_tokens: int, dp_rank: int = 0
    ) -> Slots | None:
        """Slots for a batch that extends in the full pool alone; see `HostPools.extend`."""
        if self.side != "full":
            raise NotImplementedError("SWA slots follow full slots: extend the whole allocator")
        tails = None if self.pools.config.pure_swa_pool else 0
        return self._granted(self.pools.extend(rows, num_tokens, dp_rank, swa_tails=tails))
