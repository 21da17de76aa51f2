"""One pool of the two, for callers that reach for it."""

import numpy as np

from swa_jax.compat.common.side_shell import SideShell
from swa_jax.compat.common.types import HostInts
from swa_jax.compat.sgl_jax.base import BaseTokenToKVPoolAllocator


class OneSide(SideShell, BaseTokenToKVPoolAllocator):
    """`full_attn_allocator` and `swa_attn_allocator` of an SWA allocator. See `SideShell`."""

    @property
    def free_pages(self) -> list[np.ndarray]:
        """By rank int32[n] page ids of this pool, in the order in which grants take them."""
        return [self.pools.free_pages(self.side, rank) for rank in range(self.dp_size)]

    @property
    def free_slots(self) -> list[np.ndarray]:
        """`free_pages`, as callers with pages of one token know it."""
        return self.free_pages

    @property
    def origin_size(self) -> int:
        """Tokens of this pool in one rank."""
        return self.size_per_rank

    def alloc_extend(
        self,
        prefix_lens: HostInts,
        seq_lens: HostInts,
        last_loc: HostInts,
        extend_num_tokens: int,
        dp_rank: int = 0,
    ) -> np.ndarray | None:
        """Grants as the whole allocator does, without an SWA side; the full pool only."""
        rows = prefix_lens, seq_lens, last_loc
        return self._extend(rows, extend_num_tokens, dp_rank)

    def alloc_decode(
        self, seq_lens: HostInts, last_loc: HostInts, dp_rank: int = 0
    ) -> np.ndarray | None:
        """Grants as the whole allocator does, without an SWA side; the full pool only."""
        lens = np.asarray(seq_lens)
        return self._extend((lens - 1, lens, last_loc), len(lens), dp_rank)
