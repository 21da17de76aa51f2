"""One pool that stands for both: what is different where every layer is SWA."""

from typing import NoReturn

import numpy as np

from swa_jax.compat.common.swa_shell import SwaShell
from swa_jax.compat.common.types import HostInts, Plain, Slots


class PureShell(SwaShell):
    """A slot is its own SWA slot, always; there is no full side to give back."""

    def free_full(self, free_index: HostInts, dp_rank: int = 0) -> None:
        """Nothing: what a slot had went with its SWA side."""

    def set_full_to_swa_mapping(
        self, full_indices: HostInts, swa_indices: HostInts, dp_rank: int = 0
    ) -> NoReturn:
        """Refused: the mapping is fixed.

        Raises:
          NotImplementedError: always.
        """
        raise NotImplementedError("with one pool a slot is its own SWA slot: nothing to map")

    def clear_full_to_swa_mapping(self, full_indices: HostInts, dp_rank: int = 0) -> NoReturn:
        """Refused: the mapping is fixed.

        Raises:
          NotImplementedError: always.
        """
        raise NotImplementedError("with one pool a slot is its own SWA slot: nothing to unmap")


def same_slots(
    length: int, dtype: Plain = np.int32, *, ends_with_no_location: bool = False
) -> Slots:
    """The fixed mapping of `length` slots to themselves, read-only; see `MappingView`."""
    mapping = np.arange(length + int(ends_with_no_location), dtype=dtype)
    if ends_with_no_location:
        mapping[-1] = -1
    mapping.flags.writeable = False
    return mapping
