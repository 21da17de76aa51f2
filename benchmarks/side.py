"""The one form in which every allocator is driven, so that all do the same work."""

from collections.abc import Callable
from typing import Any, Protocol, TypeAlias

import numpy as np

# What an allocator takes and gives: a JAX array, a NumPy array, a torch tensor, a list.
Native: TypeAlias = Any


class Side(Protocol):
    """One allocator with a full and an SWA pool of equal size.

    Grants give native slots and raise `RuntimeError` when refused. A call returns when its
    result is there.
    """

    name: str
    lacks: frozenset[str]  # methods that this allocator has no counterpart for
    pads: bool  # frees ignore slot 0, so that arrays can be padded to one length

    def native(self, values: np.ndarray) -> Native:
        """The array in the form that the allocator's callers use."""
        ...

    def numpy(self, values: Native) -> np.ndarray:
        """The array as NumPy's."""
        ...

    def available(self) -> tuple[int, int]:
        """Tokens that can be granted: full, SWA."""
        ...

    def extend(
        self, prefix_lens: Native, seq_lens: Native, last_loc: Native, num_tokens: int
    ) -> Native:
        """Slots for `num_tokens` tokens in all, row by row."""
        ...

    def decode(self, seq_lens: Native, last_loc: Native) -> Native:
        """One slot a row; `seq_lens` counts the new token."""
        ...

    def free(self, slots: Native) -> None:
        """Frees both sides."""
        ...

    def free_swa(self, slots: Native) -> None:
        """Frees the SWA side."""
        ...

    def free_full(self, slots: Native) -> None:
        """Frees the full side of pages whose SWA side is gone."""
        ...

    def free_segment(self, slots: Native) -> None:
        """Frees both sides, slots in token order from a page boundary."""
        ...

    def free_swa_segment(self, slots: Native) -> None:
        """Frees the SWA side, slots in token order from a page boundary."""
        ...

    def group_begin(self) -> None:
        """Queues the frees that follow."""
        ...

    def group_end(self) -> None:
        """Releases what was queued."""
        ...


Maker: TypeAlias = Callable[[int, int], Side]  # tokens in each pool, page_size
