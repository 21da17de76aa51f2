"""Two pools: the allocator of hybrid models, and of models that have no full layers."""

import numpy as np

from swa_jax import PoolConfig
from swa_jax.compat.common.errors import MisuseError
from swa_jax.compat.common.host_arrays import host_ints
from swa_jax.compat.common.host_pools import HostPools
from swa_jax.compat.common.mapping_view import MappingView
from swa_jax.compat.common.pool_sizes import rank_tokens
from swa_jax.compat.common.pure_shell import PureShell, same_slots
from swa_jax.compat.common.swa_shell import SwaShell, hybrid_config, mapping_views, tell_kvcache
from swa_jax.compat.common.types import Cache, HostInts, Plain, Slots
from swa_jax.compat.sglang.base import BaseTokenToKVPoolAllocator
from swa_jax.compat.sglang.scheduler_hooks import SwaSchedulerHooks
from swa_jax.compat.sglang.side import OneSide


class SWATokenToKVPoolAllocator(SwaShell, SwaSchedulerHooks, BaseTokenToKVPoolAllocator):
    """Full and SWA slots together: both or none.

    Args:
      size: full tokens.
      size_swa: SWA tokens.
      page_size: tokens in a page.
      dtype: of the KV.
      device: of the KV.
      kvcache: for `get_kvcache` and the copies; told of the mapping by `register_mapping` or by
        its attribute `full_to_swa_index_mapping`, whichever it has; its `full_kv_pool` and
        `swa_kv_pool` are the sides' caches. None of these is needed.
      need_sort: not needed.
      req_to_token_pool: gives the number of request slots, with `available_size()`. Needed where
        `kvcache.swa_req_ring_size` is set: the SWA side is then a ring of so many tokens for each
        request slot, nothing is mapped, and grants and frees are of full pages alone.
    """

    def __init__(
        self,
        size: int,
        size_swa: int,
        page_size: int,
        dtype: Plain,
        device: Plain,
        kvcache: Cache,
        need_sort: bool,
        req_to_token_pool: Plain = None,
    ) -> None:
        """All pages free; see the class."""
        self._req_to_token_pool = req_to_token_pool
        ring = getattr(kvcache, "swa_req_ring_size", None)
        self._ring = ring if isinstance(ring, int) else None
        self.page_size = page_size
        pools = HostPools(self._config(size, size_swa))
        super().__init__(size, page_size, dtype, device, kvcache, need_sort, pools)
        self._take_sizes(size, size_swa)
        self.full_attn_allocator, self.swa_attn_allocator = (
            self._side(side, tokens) for side, tokens in (("full", size), ("swa", size_swa))
        )
        self.full_to_swa_index_mapping = self._make_mapping()
        tell_kvcache(kvcache, self.full_to_swa_index_mapping)

    def _config(self, size: int, size_swa: int) -> PoolConfig:
        if self._ring is None:
            return hybrid_config(size, size_swa, self.page_size)
        if self._req_to_token_pool is None:
            raise MisuseError("with a ring for each request, req_to_token_pool says how many")
        requests, ring = self._req_to_token_pool.available_size(), self.swa_ring_cost_tokens
        full = rank_tokens("size", size, self.page_size)
        return PoolConfig(full, requests * ring, self.page_size, self._ring - 1, ring_tokens=ring)

    def _take_sizes(self, size: int, size_swa: int) -> None:
        rings = self.pools.config.has_rings
        self._size_full = size
        self._size_swa = self.pools.config.swa_tokens if rings else size_swa
        self.size = min(self._size_full, self._size_swa)

    @property
    def swa_req_ring(self) -> bool:
        """Whether the SWA side is a ring for each request."""
        return self.pools.config.has_rings

    @property
    def swa_ring_cost_tokens(self) -> int:
        """Tokens of one ring, in whole pages; 0 without rings."""
        return 0 if self._ring is None else -(-self._ring // self.page_size) * self.page_size

    def available_size(self, dp_rank: int = 0) -> int:
        """Tokens that can be granted; with rings, what the full pool can."""
        full, of_swa = self.pools.sizes(dp_rank)
        return full if self.swa_req_ring else min(full, of_swa)

    def swa_available_size(self, dp_rank: int = 0) -> int:
        """SWA tokens that can be granted; with rings, those of the free request slots."""
        if self.swa_req_ring:
            return self._req_to_token_pool.available_size() * self.swa_ring_cost_tokens
        return super().swa_available_size(dp_rank)

    def _side(self, side: str, tokens: int) -> OneSide:
        return OneSide(side, tokens, self, getattr(self._kvcache, f"{side}_kv_pool", None))

    def _make_mapping(self) -> MappingView:
        return mapping_views(self, dtype=np.int64, ends_with_no_location=True)[0]

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
        prefix_lens_cpu: HostInts,
        seq_lens: HostInts,
        seq_lens_cpu: HostInts,
        last_loc: HostInts,
        extend_num_tokens: int,
        swa_tail_len: HostInts,
    ) -> Slots | None:
        """As `alloc_extend`, with an SWA side only for the last `swa_tail_len` tokens of a row.

        Args:
          prefix_lens: not read.
          prefix_lens_cpu: int[B], as for `alloc_extend`; any number of rows.
          seq_lens: not read.
          seq_lens_cpu: int[B], as for `alloc_extend`.
          last_loc: int[B], as for `alloc_extend`.
          extend_num_tokens: tokens added in all.
          swa_tail_len: int or int[B] tokens.

        Returns:
          int64[extend_num_tokens] full slots, or None.
        """
        rows = prefix_lens_cpu, seq_lens_cpu, last_loc
        tails = host_ints("swa_tail_len", swa_tail_len)
        return self._granted(self.pools.extend(rows, extend_num_tokens, swa_tails=tails))

    def translate_swa_indices_for_transfer(self, kv_indices: HostInts) -> Slots:
        """int64[...] places in the SWA buffers of int[...] full slots."""
        return self.translate_loc_from_full_to_swa(kv_indices)

    def resize(self, config: Plain) -> None:
        """Starts anew with `full_max_total_num_tokens` and `swa_max_total_num_tokens` of `config`.

        The mapping that was handed out goes on, as long as the new full pool.
        """
        full = int(config.full_max_total_num_tokens)
        of_swa = int(config.swa_max_total_num_tokens)
        self.pools.resize(self._config(full, of_swa))
        self._take_sizes(full, of_swa)
        self.full_attn_allocator._resized(full)
        self.swa_attn_allocator._resized(of_swa)
        self.full_to_swa_index_mapping.tokens = full + self.page_size


class PureSWATokenToKVPoolAllocator(PureShell, SWATokenToKVPoolAllocator):
    """One pool for models in which every layer is SWA: a slot is its own SWA slot.

    Args:
      size_swa: tokens.
      page_size: tokens in a page.
      dtype: of the KV.
      device: of the KV.
      kvcache: as for `SWATokenToKVPoolAllocator`.
      need_sort: not needed.
    """

    def __init__(
        self,
        size_swa: int,
        page_size: int,
        dtype: Plain,
        device: Plain,
        kvcache: Cache,
        need_sort: bool,
    ) -> None:
        """All slots free; see the class."""
        tokens = rank_tokens("size_swa", size_swa, page_size)
        pools = HostPools(PoolConfig.pure_swa(tokens, page_size))
        self._ring = self._req_to_token_pool = None
        rest = (dtype, device, kvcache, need_sort, pools)
        BaseTokenToKVPoolAllocator.__init__(self, size_swa, page_size, *rest)
        self._size_full = self._size_swa = size_swa
        self.full_attn_allocator = self.swa_attn_allocator = self._side("swa", size_swa)
        mapping = same_slots(size_swa + page_size, np.int64, ends_with_no_location=True)
        self.full_to_swa_index_mapping = self._out(mapping)
        tell_kvcache(kvcache, self.full_to_swa_index_mapping)

    def resize(self, config: Plain) -> None:
        """Not to be had: the mapping of slots to themselves has been handed out.

        Raises:
          NotImplementedError: always.
        """
        raise NotImplementedError("make another allocator for a pool of another size")


def is_swa_req_ring(allocator: Plain) -> bool:
    """Whether an allocator's SWA side is a ring for each request."""
    return getattr(allocator, "swa_req_ring", False) is True
