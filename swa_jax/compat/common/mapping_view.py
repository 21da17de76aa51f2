"""A live view, token by token, of the mapping that the core keeps by page."""

import jax
import numpy as np
from numpy.lib.mixins import NDArrayOperatorsMixin

from swa_jax.compat.common.errors import MisuseError
from swa_jax.compat.common.host_arrays import host_ints
from swa_jax.compat.common.host_pools import HostPools
from swa_jax.compat.common.types import HostInts, Plain, Slots


class MappingView(NDArrayOperatorsMixin):
    """Reads like an array of SWA slots by full slot, always as of now.

    Arithmetic, comparisons and `np.asarray` give plain arrays. As part of a pytree it is an array.
    It is written by any key that an array takes. Writing slots is `set_full_to_swa_mapping`,
    writing 0 is `clear_full_to_swa_mapping`, both for whole pages, with what they count and leave
    as it was. What could be no mapping at all raises before anything is written.

    Args:
      pools: whose mapping.
      rank: of which rank.
      length: how many full slots it covers.
      dtype: what it reads as.
      ends_with_no_location: one place more at the end holds -1, so that -1 reads as -1.
    """

    ndim = 1
    tokens: int  # full slots that it covers

    def __init__(
        self,
        pools: HostPools,
        rank: int,
        length: int,
        dtype: Plain = np.int32,
        *,
        ends_with_no_location: bool = False,
    ) -> None:
        """A view, of nothing yet read."""
        self._pools, self._rank, self.tokens = pools, rank, length
        self._ends = int(ends_with_no_location)
        self.dtype = np.dtype(dtype)

    @property
    def shape(self) -> tuple[int]:
        """As of an array."""
        return (len(self),)

    @property
    def size(self) -> int:
        """As of an array."""
        return len(self)

    def __len__(self) -> int:
        return self.tokens + self._ends

    def __array__(self, dtype: Plain = None, copy: bool | None = None) -> np.ndarray:
        if copy is False:
            raise ValueError("a view of the mapping is computed: it cannot be had without a copy")
        return self._read(np.arange(len(self))).astype(dtype or self.dtype, copy=False)

    def __getitem__(self, key: Plain) -> Slots:
        places = np.asarray(key) if not isinstance(key, slice | tuple) and key is not None else None
        if places is None or places.dtype.kind not in "iu" or places.size == 0:
            return self._read(np.arange(len(self))[key])
        count = len(self)
        if int(places.min()) < -count or int(places.max()) >= count:
            raise IndexError(f"slots must be below {count}, got {places.min()} .. {places.max()}")
        return self._read(np.where(places < 0, places + count, places))

    def _read(self, places: np.ndarray) -> Slots:
        size, pages = self._pools.config.page_size, self._pools.mapping(self._rank)
        full_page = np.minimum(places // size, len(pages) - 1)
        of_swa = np.where(places // size < len(pages), pages[full_page], 0)
        slots = np.where(of_swa > 0, of_swa * size + places % size, 0)
        slots = np.where(places == self.tokens, -1, slots) if self._ends else slots
        return slots.astype(self.dtype)[()]

    def __setitem__(self, key: Plain, value: HostInts) -> None:
        full_slots, swa_slots = self._pairs(key, value)
        joined = swa_slots > 0
        gone = full_slots[~joined]
        mapped = np.asarray(self._read(gone)) > 0
        self._pools.free("clear_mapping", gone[mapped], self._rank)
        self._pools.set_mapping(full_slots[joined], swa_slots[joined], self._rank)

    def _pairs(self, key: Plain, value: HostInts) -> tuple[np.ndarray, np.ndarray]:
        """int[T] full slots and the int[T] SWA slots to write there, 0 for none."""
        key = np.asarray(key) if hasattr(key, "__array__") else key
        places, values = np.arange(len(self))[key], np.asarray(value)
        host_ints("SWA slots", values)
        try:
            values = np.broadcast_to(values, np.shape(places)).reshape(-1)
        except ValueError:
            raise MisuseError(
                f"{np.size(places)} places of the mapping cannot be written with {values.size} "
                "slots"
            ) from None
        places = np.reshape(places, -1)
        at_end = places == self.tokens
        if (values[at_end] != -1).any():
            raise MisuseError(
                f"place {self.tokens} of the mapping holds -1 for ever, so that -1 reads as -1; "
                "the slots are those before it"
            )
        places, values = places[~at_end], values[~at_end]
        self._check(places, values)
        return places, values

    def _check(self, places: np.ndarray, values: np.ndarray) -> None:
        """Raises where `values` at `places` could be no mapping, whatever is held."""
        size, joined = self._pools.config.page_size, values > 0
        most = self._pools.config.swa_tokens + size - 1
        if values.size and not 0 <= int(values.min()) <= int(values.max()) <= most:
            raise MisuseError(
                f"SWA slots must be 0 (none) .. {most}, got {values.min()} .. {values.max()}"
            )
        if (values[joined] % size != places[joined] % size).any():
            raise MisuseError(
                f"a full and an SWA slot lie at one place in their pages of {size} tokens, got "
                f"full slots {places[joined]} and SWA slots {values[joined]}"
            )
        both = np.intersect1d(places[joined] // size, places[~joined] // size)
        if both.size:
            raise MisuseError(f"full pages {both} would be mapped in part: write whole pages")

    def fill(self, value: int) -> None:
        """Refused: `clear` of the allocator empties the mapping with the pools."""
        raise MisuseError(f"the mapping cannot be filled with {value!r}: use the allocator's clear")

    def __array_ufunc__(
        self, ufunc: np.ufunc, method: str, *inputs: Plain, **kwargs: Plain
    ) -> Slots:
        if any(isinstance(out, MappingView) for out in kwargs.get("out", ())):
            raise MisuseError("the mapping is not written into: it follows from grants and frees")
        plain = [np.asarray(one) if isinstance(one, MappingView) else one for one in inputs]
        return getattr(ufunc, method)(*plain, **kwargs)

    def __getattr__(self, name: str) -> Slots:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(np.asarray(self), name)  # copy, sum, tolist, ...

    def __repr__(self) -> str:
        return f"MappingView({np.asarray(self)!r})"


def _flatten(view: MappingView) -> tuple[tuple[np.ndarray], None]:
    return (np.asarray(view),), None


def _unflatten(_: None, children: tuple[Plain]) -> Plain:
    return children[0]


jax.tree_util.register_pytree_node(MappingView, _flatten, _unflatten)
