"""Two pools: the allocator of hybrid models, and of models that have no full layers."""

import numpy as np

from swa_jax import PoolConfig
from swa_jax.compat.common.host_arrays import host_ints
from swa_jax.compat.common.host_pools import HostPools
from swa_jax.compat.common.pool_sizes import rank_tokens
from swa_jax.compat.common.pure_shell import PureShell, same_slots
from swa_jax.compat.common.swa_shell import SwaShell, hybrid_config, mapping_views, tell_kvcache
from swa_jax.compat.common.types import Cache, HostInts
from swa_jax.compat.sgl_jax.base import BaseTokenToKVPoolAllocator
from swa_jax.compat.sgl_jax.side import OneSide


class _TwoSided(SwaShell, BaseTokenToKVPoolAllocator):
    """What both kinds share."""

    @property
    def free_pages(self) -> None:
        """None: each side has its own."""
        return None

    @property
    def release_pages(self) -> None:
        """None: each side has its own."""
        return None

    def alloc_extend_swa_tail(
        self,
        prefix_lens: HostInts,
        seq_lens: HostInts,
        last_loc: HostInts,
        extend_num_tokens: int,
        swa_tail_len: HostInts,
        dp_rank: int = 0,
    ) -> np.ndarray | None:
        """As `alloc_extend`, with an SWA side only for the last `swa_tail_len` tokens of a row.

        Args:
          prefix_lens: int[B], as for `alloc_extend`.
          seq_lens: int[B], as for `alloc_extend`.
          last_loc: int[B], as for `alloc_extend`.
          extend_num_tokens: tokens added in all.
          swa_tail_len: int or int[B] tokens.
          dp_rank: of which rank.

        Returns:
          int32[extend_num_tokens] full slots, or None.
        """
        rows = prefix_lens, seq_lens, last_loc
        tails = host_ints("swa_tail_len", swa_tail_len)
        return self.pools.extend(rows, extend_num_tokens, dp_rank, swa_tails=tails)


class SWATokenToKVPoolAllocator(_TwoSided):
    """Full and SWA slots together: both or none.

    Args:
      size: full tokens of all ranks together.
      size_swa: SWA tokens of all ranks together.
      kvcache: for `get_kvcache` and the copies; told of the mapping by `register_mapping` or by
        its attribute `full_to_swa_index_mapping`, whichever it has; its `full_kv_pool` and
        `swa_kv_pool` are the sides' caches. None of these is needed.
      page_size: tokens in a page.
      dp_size: ranks.
    """

    def __init__(
        self, size: int, size_swa: int, kvcache: Cache, page_size: int = 1, dp_size: int = 1
    ) -> None:
        """All pages free; see the class."""
        pools = HostPools(hybrid_config(size, size_swa, page_size, dp_size), dp_size)
        super().__init__(size, page_size, kvcache, dp_size, pools)
        self._size_full, self._size_swa = size, size_swa
        self.full_attn_allocator, self.swa_attn_allocator = (
            OneSide(side, tokens, getattr(kvcache, f"{side}_kv_pool", None), dp_size, pools)
            for side, tokens in (("full", size), ("swa", size_swa))
        )
        views = mapping_views(self)
        self.full_to_swa_index_mapping = views[0] if dp_size == 1 else views
        tell_kvcache(kvcache, self.full_to_swa_index_mapping)


class PureSWATokenToKVPoolAllocator(PureShell, _TwoSided):
    """One pool for models in which every layer is SWA: a slot is its own SWA slot.

    Args:
      size_swa: tokens of all ranks together.
      kvcache: as for `SWATokenToKVPoolAllocator`.
      page_size: tokens in a page.
      dp_size: ranks.
    """

    def __init__(self, size_swa: int, kvcache: Cache, page_size: int = 1, dp_size: int = 1) -> None:
        """All pages free; see the class."""
        tokens = rank_tokens("size_swa", size_swa, page_size, dp_size)
        pools = HostPools(PoolConfig.pure_swa(tokens, page_size), dp_size)
        super().__init__(size_swa, page_size, kvcache, dp_size, pools)
        self._size_full = self._size_swa = size_swa
        of_swa = getattr(kvcache, "swa_kv_pool", None)
        self.swa_attn_allocator = OneSide("swa", size_swa, of_swa, dp_size, pools)
        self.full_attn_allocator = self.swa_attn_allocator
        views = [same_slots(self.size_per_rank + page_size) for _ in range(dp_size)]
        self.full_to_swa_index_mapping = views[0] if dp_size == 1 else views
        tell_kvcache(kvcache, self.full_to_swa_index_mapping)
