"""How this interface passes ranks and batches."""

import numpy as np

from swa_jax.compat.common.pool_shell import PoolShell
from swa_jax.compat.common.types import HostInts


class BaseTokenToKVPoolAllocator(PoolShell):
    """An allocator of `dp_size` ranks, with NumPy int32 slots in and out. See `PoolShell`."""

    @property
    def free_pages(self) -> list[np.ndarray] | None:
        """By rank int32[n] page ids, in the order in which grants take them."""
        return [self.pools.free_pages("full", rank) for rank in range(self.dp_size)]

    @property
    def release_pages(self) -> list[np.ndarray] | None:
        """By rank int32[0]: a freed page is among `free_pages` at once."""
        return [np.empty(0, np.int32) for _ in range(self.dp_size)]

    @property
    def is_not_in_free_group(self) -> bool:
        """False between `free_group_begin` and `free_group_end`."""
        return not self.pools.group_open

    @property
    def free_group(self) -> list[list[np.ndarray]]:
        """By rank, the arrays that frees in the open group named; a copy, to look at.

        Pages that a radix cache gives up in the group (`insert`, `evict`) are queued as well, but
        are not shown here.
        """
        return self.pools.queued

    def alloc_extend(
        self,
        prefix_lens: HostInts,
        seq_lens: HostInts,
        last_loc: HostInts,
        extend_num_tokens: int,
        dp_rank: int = 0,
    ) -> np.ndarray | None:
        """Grants slots for a batch of rows that grow, their last pages filled first.

        Args:
          prefix_lens: int[B] tokens held before.
          seq_lens: int[B] tokens held after.
          last_loc: int[B] slot of the last token held before, -1 for none.
          extend_num_tokens: tokens added in all.
          dp_rank: of which rank.

        Returns:
          int32[extend_num_tokens] slots, row by row, or None.
        """
        rows = prefix_lens, seq_lens, last_loc
        return self.pools.extend(rows, extend_num_tokens, dp_rank)

    def alloc_decode(
        self, seq_lens: HostInts, last_loc: HostInts, dp_rank: int = 0
    ) -> np.ndarray | None:
        """Grants one slot a row.

        Args:
          seq_lens: int[B] tokens of each row, the new one included.
          last_loc: int[B] slot of the token before it.
          dp_rank: of which rank.

        Returns:
          int32[B] slots, or None.
        """
        return self.pools.decode(seq_lens, last_loc, dp_rank)
