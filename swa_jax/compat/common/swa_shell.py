"""Two pools and the mapping between them: what the allocators of hybrid models share."""

import numpy as np

from swa_jax import PoolConfig
from swa_jax.compat.common.errors import MisuseError
from swa_jax.compat.common.mapping_view import MappingView
from swa_jax.compat.common.pool_shell import PoolShell
from swa_jax.compat.common.pool_sizes import rank_tokens
from swa_jax.compat.common.segments import check_start
from swa_jax.compat.common.types import Cache, HostInts, Plain, Slots


class SwaShell(PoolShell):
    """Full and SWA slots together: both or none."""

    full_to_swa_index_mapping: Plain
    _size_full: int
    _size_swa: int

    @property
    def size_full(self) -> int:
        """Full tokens of all ranks."""
        return self._size_full

    @property
    def size_swa(self) -> int:
        """SWA tokens of all ranks."""
        return self._size_swa

    def full_available_size(self, dp_rank: int = 0) -> int:
        """Full tokens that can be granted."""
        return self.pools.sizes(dp_rank)[0]

    def swa_available_size(self, dp_rank: int = 0) -> int:
        """SWA tokens that can be granted."""
        return self.pools.sizes(dp_rank)[1]

    def new_pages_available(
        self, num_full_pages: int, num_swa_pages: int, dp_rank: int = 0
    ) -> bool:
        """Whether both pools have so many pages to grant."""
        full, of_swa = (tokens // self.page_size for tokens in self.pools.sizes(dp_rank))
        fits = num_full_pages <= full
        return fits and (self.pools.config.has_rings or num_swa_pages <= of_swa)

    def debug_print(self) -> str:
        """Both sizes, for a scheduler's log line."""
        return (
            f"SWA tokens available: {self.swa_available_size()}, "
            f"full tokens available: {self.full_available_size()}, "
        )

    def free_full(self, free_index: HostInts, dp_rank: int = 0) -> None:
        """Frees the full side of slots whose SWA side is gone; others are left and counted."""
        self.pools.free("free_full", free_index, dp_rank)

    def free_swa(self, free_index: HostInts, dp_rank: int = 0) -> None:
        """Frees the SWA side of int[T] full slots; pages that have none are counted, no more."""
        self.pools.free("free_swa", free_index, dp_rank)

    def free_swa_segment(self, free_index: HostInts, *, start_pos: int, dp_rank: int = 0) -> None:
        """`free_swa` of one request's slots from its token `start_pos` on."""
        check_start(start_pos, self.page_size)
        self.pools.free("free_swa_segment", free_index, dp_rank)

    def count_swa_mapped(self, indices: HostInts, dp_rank: int = 0) -> int:
        """How many of int[T] full slots (or of those in a bool mask) have an SWA side."""
        return int((self._swa_slots(indices, dp_rank) > 0).sum())

    def translate_loc_from_full_to_swa(self, kv_indices: HostInts, dp_rank: int = 0) -> Slots:
        """int[...] SWA slots of int[...] full slots, or of those in a mask; 0 where none is."""
        return self._out(self._swa_slots(kv_indices, dp_rank))

    def set_full_to_swa_mapping(
        self, full_indices: HostInts, swa_indices: HostInts, dp_rank: int = 0
    ) -> None:
        """Joins full and SWA slots that are held; see `swa_jax.set_full_to_swa_mapping`."""
        self.pools.set_mapping(full_indices, swa_indices, dp_rank)

    def clear_full_to_swa_mapping(self, full_indices: HostInts, dp_rank: int = 0) -> None:
        """Unmaps the pages of full slots; their SWA pages stay held by the caller."""
        self.pools.free("clear_mapping", full_indices, dp_rank)

    def _swa_slots(self, full_slots: HostInts, dp_rank: int) -> np.ndarray:
        places = np.asarray(full_slots)
        if places.size == 0:
            return np.zeros(places.shape, np.int32)
        if places.dtype.kind not in "iub":
            raise MisuseError(
                f"slots must be integers, or a bool mask, got dtype {places.dtype}: {full_slots!r}"
            )
        return np.asarray(self._view(dp_rank)[places])

    def _view(self, dp_rank: int) -> Slots:
        self.pools.state(dp_rank)  # raises for what is no rank
        views = self.full_to_swa_index_mapping
        return views[dp_rank] if isinstance(views, list) else views


def hybrid_config(size: int, size_swa: int, page_size: int, dp_size: int = 1) -> PoolConfig:
    """Both pools of one rank; what is left over from whole pages and ranks is not used."""
    sizes = (("size", size), ("size_swa", size_swa))
    full, of_swa = (rank_tokens(name, tokens, page_size, dp_size) for name, tokens in sizes)
    return PoolConfig(full, of_swa, page_size)


def tell_kvcache(kvcache: Cache, mapping: Plain) -> None:
    """Gives a KV cache the mapping in the way that it takes it."""
    if hasattr(kvcache, "register_mapping"):
        kvcache.register_mapping(mapping)
    elif hasattr(kvcache, "__dict__"):
        kvcache.full_to_swa_index_mapping = mapping


def mapping_views(shell: SwaShell, **options: Plain) -> list[MappingView]:
    """A view of the mapping of each rank."""
    length = shell.size_full // shell.dp_size + shell.page_size
    return [MappingView(shell.pools, rank, length, **options) for rank in range(shell.dp_size)]
