"""One pool: token by token, or by pages."""

from swa_jax import PoolConfig
from swa_jax.compat.common.host_pools import HostPools
from swa_jax.compat.common.pool_sizes import rank_tokens
from swa_jax.compat.common.types import Cache, Plain
from swa_jax.compat.sglang.base import BaseTokenToKVPoolAllocator


class PagedTokenToKVPoolAllocator(BaseTokenToKVPoolAllocator):
    """Pages for models whose layers all attend alike.

    Args:
      size: tokens; what is left over from whole pages is not used.
      page_size: tokens in a page.
      dtype: of the KV.
      device: of the KV.
      kvcache: for `get_kvcache`, `get_cpu_copy` and `load_cpu_copy`.
      need_sort: not needed.
    """

    def __init__(
        self,
        size: int,
        page_size: int,
        dtype: Plain,
        device: Plain,
        kvcache: Cache,
        need_sort: bool,
    ) -> None:
        """All pages free; see the class."""
        pools = HostPools(_one_pool(size, page_size))
        super().__init__(size, page_size, dtype, device, kvcache, need_sort, pools)

    def resize(self, config: Plain) -> None:
        """Starts anew with `config.max_total_num_tokens` tokens."""
        size = int(config.max_total_num_tokens)
        self.pools.resize(_one_pool(size, self.page_size))
        self._resized(size)


class TokenToKVPoolAllocator(PagedTokenToKVPoolAllocator):
    """Slots for models whose layers all attend alike, in pages of one token.

    Args:
      size: tokens.
      dtype: of the KV.
      device: of the KV.
      kvcache: for `get_kvcache`, `get_cpu_copy` and `load_cpu_copy`.
      need_sort: not needed.
    """

    def __init__(
        self, size: int, dtype: Plain, device: Plain, kvcache: Cache, need_sort: bool
    ) -> None:
        """All slots free; see the class."""
        super().__init__(size, 1, dtype, device, kvcache, need_sort)


def _one_pool(size: int, page_size: int) -> PoolConfig:
    """The core's one-pool configuration: a page is its own SWA side."""
    return PoolConfig.pure_swa(rank_tokens("size", size, page_size), page_size)
