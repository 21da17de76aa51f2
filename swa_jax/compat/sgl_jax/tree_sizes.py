"""How much the trees hold: what can be evicted, and what locks protect."""

from typing import NoReturn

from swa_jax.compat.sgl_jax.forest import Forest


class TreeSizes(Forest):
    """Sizes in tokens, for one rank or by rank, read from the device once a state."""

    def full_evictable_size(self, dp_rank: int = 0) -> int:
        """Full tokens that no lock holds."""
        return self._size(0, dp_rank)

    def full_protected_size(self, dp_rank: int = 0) -> int:
        """Full tokens that are locked."""
        return self._size(1, dp_rank)

    def swa_evictable_size(self, dp_rank: int = 0) -> int:
        """SWA tokens that no SWA lock holds."""
        return self._size(2, dp_rank)

    def swa_protected_size(self, dp_rank: int = 0) -> int:
        """SWA tokens that are locked."""
        return self._size(3, dp_rank)

    def evictable_size(self, dp_rank: int = 0) -> int:
        """The smaller of the two evictable sizes."""
        return min(self.full_evictable_size(dp_rank), self.swa_evictable_size(dp_rank))

    def protected_size(self, dp_rank: int = 0) -> NoReturn:
        """Not one number: there is one for each kind."""
        raise NotImplementedError("use full_protected_size and swa_protected_size")

    @property
    def full_evictable_size_(self) -> dict[int, int]:
        """`full_evictable_size` by rank, as of now."""
        return self._by_rank(0)

    @property
    def full_protected_size_(self) -> dict[int, int]:
        """`full_protected_size` by rank, as of now."""
        return self._by_rank(1)

    @property
    def swa_evictable_size_(self) -> dict[int, int]:
        """`swa_evictable_size` by rank, as of now."""
        return self._by_rank(2)

    @property
    def swa_protected_size_(self) -> dict[int, int]:
        """`swa_protected_size` by rank, as of now."""
        return self._by_rank(3)

    def full_lru_list_evictable_size(self) -> int:
        """Full tokens that no lock holds, over all ranks."""
        return sum(self.full_evictable_size_.values())

    def swa_lru_list_evictable_size(self) -> int:
        """SWA tokens that no SWA lock holds, over all ranks."""
        return sum(self.swa_evictable_size_.values())

    def total_size(self) -> tuple[int, int]:
        """Full and SWA tokens in the tree, over all ranks."""
        sizes = [self._sizes(rank) for rank in range(len(self._trees))]
        return sum(s[0] + s[1] for s in sizes), sum(s[2] + s[3] for s in sizes)

    def _size(self, which: int, dp_rank: int) -> int:
        """Past the last rank there is nothing: its tokens are counted with the last."""
        return self._sizes(dp_rank)[which] if 0 <= dp_rank < len(self._trees) else 0

    def _by_rank(self, which: int) -> dict[int, int]:
        return {rank: self._size(which, rank) for rank in range(self._pools.ranks)}

    def _sizes(self, rank: int) -> list[int]:
        return self._read("sizes", rank, lambda tree: tree.sizes().tolist())
