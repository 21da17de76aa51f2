"""The one form in which every allocator is driven, so that all do the same work."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import numpy as np

from swa_jax.bench.workload import Point

# What an allocator takes and gives: a JAX array, a NumPy array, a torch tensor, a list, or what
# names requests where an allocator knows no slots.
Native: TypeAlias = Any


class Side(Protocol):
    """One allocator with a full and an SWA pool of equal size.

    Grants give native values and raise `RuntimeError` when refused. A call returns when its
    result is there.
    """

    name: str
    lacks: frozenset[str]  # what this allocator has no counterpart for
    last_page: int  # the largest id of a page

    def native(self, values: np.ndarray) -> Native:
        """The array in the form that the allocator's callers use."""
        ...

    def numpy(self, values: Native) -> np.ndarray:
        """The slots as NumPy's."""
        ...

    def fresh_rows(self, lens: np.ndarray) -> tuple[Native, ...]:
        """What `extend` is given for rows without a prefix; made beforehand, so not timed."""
        ...

    def decode_rows(self, seq_lens: np.ndarray) -> Native:
        """What `decode` is given of the lengths, the new token counted; made beforehand."""
        ...

    def last_of(self, granted: Native, places: np.ndarray) -> Native:
        """What `decode` is given of the tokens before: `places` are those of each row's last."""
        ...

    def available(self) -> tuple[int, int]:
        """Tokens that can be granted: full, SWA."""
        ...

    def extend(self, rows: tuple[Native, ...], num_tokens: int) -> Native:
        """Slots for `num_tokens` tokens in all, row by row."""
        ...

    def extend_tail(self, rows: tuple[Native, ...], tails: Native, num_tokens: int) -> Native:
        """As `extend`, with SWA slots for the last `tails` tokens of each row only."""
        ...

    def decode(self, seq_lens: Native, last: Native) -> Native:
        """One slot a row."""
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

    def give_back(self, heads: np.ndarray) -> None:
        """Frees the pages of which these are the first slots, as it likes; never timed."""
        ...

    def give_back_full(self, heads: np.ndarray) -> None:
        """The same for pages whose SWA side is gone already."""
        ...

    def nothing(self) -> None:
        """A call that does nothing, where a call is a compiled program."""
        ...


Maker: TypeAlias = Callable[[Point], Side]


@dataclass(frozen=True)
class Peer:
    """How to make one, or why it is not there.

    Attributes:
      name: of the engine.
      make: None where it cannot be timed.
      note: its version, or what is missing and how it is installed.
      differs: what it does otherwise, for the reader of a table.
      per_point: it is made for one point's rows, so two points do not share one.
      reaches: whether it is timed at a point: not where a single call would take seconds.
    """

    name: str
    make: Maker | None
    note: str
    differs: str = ""
    per_point: bool = False
    reaches: Callable[[Point], bool] = lambda _: True


class BySlots:
    """What allocators have in common that are called with arrays of slots."""

    last_page: int

    def native(self, values: np.ndarray) -> Native:
        """The array in the form that the allocator's callers use."""
        raise NotImplementedError

    def numpy(self, values: Native) -> np.ndarray:
        """The slots as NumPy's."""
        raise NotImplementedError

    def free(self, slots: Native) -> None:
        """Frees both sides."""
        raise NotImplementedError

    def fresh_rows(self, lens: np.ndarray) -> tuple[Native, ...]:
        """The rows' prefix_lens, seq_lens and last_loc."""
        nothing = np.zeros_like(lens)
        return self.native(nothing), self.native(lens), self.native(nothing - 1)

    def decode_rows(self, seq_lens: np.ndarray) -> Native:
        """The lengths as they are."""
        return self.native(seq_lens)

    def last_of(self, granted: Native, places: np.ndarray) -> Native:
        """The last slot of each row."""
        return self.native(self.numpy(granted)[places])

    def give_back(self, heads: np.ndarray) -> None:
        """One call."""
        self.free(self.native(heads))

    def give_back_full(self, heads: np.ndarray) -> None:
        """The same for pages whose SWA side is gone already."""
        self.give_back(heads)

    def nothing(self) -> None:
        """Costs a host's allocator nothing."""


class ByRequest:
    """What allocators have in common that keep each request's pages themselves.

    They free a request, never a set of slots, so their frees are those of segments; and they
    have no groups.
    """

    lacks = frozenset({"extend_tail", "free", "free_swa", "free_full", "group_begin", "group_end"})

    def give_back(self, heads: np.ndarray) -> None:
        """As its requests are kept."""
        raise NotImplementedError

    def give_back_full(self, heads: np.ndarray) -> None:
        """The same for pages whose SWA side is gone already."""
        self.give_back(heads)

    def native(self, values: np.ndarray) -> Native:
        """As it is."""
        return values

    def extend_tail(self, rows: tuple[Native, ...], tails: Native, num_tokens: int) -> Native:
        """Has no counterpart."""
        raise NotImplementedError

    def free(self, slots: Native) -> None:
        """Has no counterpart."""
        raise NotImplementedError

    def free_swa(self, slots: Native) -> None:
        """Has no counterpart."""
        raise NotImplementedError

    def free_full(self, slots: Native) -> None:
        """Has no counterpart."""
        raise NotImplementedError

    def group_begin(self) -> None:
        """Has no counterpart."""
        raise NotImplementedError

    def group_end(self) -> None:
        """Has no counterpart."""
        raise NotImplementedError

    def nothing(self) -> None:
        """Costs a host's allocator nothing."""


def granted(slots: Native) -> Native:
    """The slots; None is an engine's refusal."""
    if slots is None:
        raise RuntimeError("the allocator has no room")
    return slots


def slots_of(pages: Sequence[int], start: int, end: int, page_size: int) -> np.ndarray:
    """int64[end - start] slots of these tokens of a request, from the ids of its pages."""
    tokens = np.arange(start, end)
    return np.asarray(pages)[tokens // page_size] * page_size + tokens % page_size
