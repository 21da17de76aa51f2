"""One pool: token by token, or by pages."""

import numpy as np

from swa_jax import PoolConfig
from swa_jax.compat.common.host_pools import HostPools
from swa_jax.compat.common.pool_sizes import rank_tokens
from swa_jax.compat.common.types import Cache
from swa_jax.compat.sgl_jax.base import BaseTokenToKVPoolAllocator


class TokenToKVPoolAllocator(BaseTokenToKVPoolAllocator):
    """Slots for models whose layers all attend alike, in pages of one token.

    Args:
      size: tokens of all ranks together.
      kvcache: for `get_kvcache`, `get_cpu_copy` and `load_cpu_copy`.
      dp_size: ranks.
    """

    def __init__(self, size: int, kvcache: Cache, dp_size: int = 1) -> None:
        """All pages free; see the class."""
        # The core's one-pool configuration: a page is its own SWA side.
        pools = HostPools(PoolConfig.pure_swa(rank_tokens("size", size, 1, dp_size)), dp_size)
        super().__init__(size, 1, kvcache, dp_size, pools)
        self.origin_size = self.size_per_rank

    @property
    def free_slots(self) -> list[np.ndarray]:
        """By rank int32[n] slots, in the order in which grants take them."""
        return [self.pools.free_pages("full", rank) for rank in range(self.dp_size)]


class PagedTokenToKVPoolAllocator(BaseTokenToKVPoolAllocator):
    """Pages for models whose layers all attend alike.

    Args:
      size: tokens of all ranks together; what is left over from whole pages and ranks is not used.
      page_size: tokens in a page.
      kvcache: for `get_kvcache`, `get_cpu_copy` and `load_cpu_copy`.
      debug_mode: raise where a free counted a fault.
      dp_size: ranks.
    """

    def __init__(
        self,
        size: int,
        page_size: int,
        kvcache: Cache,
        debug_mode: bool = False,
        dp_size: int = 1,
    ) -> None:
        """All pages free; see the class."""
        tokens = rank_tokens("size", size, page_size, dp_size)
        pools = HostPools(PoolConfig.pure_swa(tokens, page_size), dp_size)
        super().__init__(size, page_size, kvcache, dp_size, pools)
        self.debug_mode = debug_mode
