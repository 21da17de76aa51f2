"""One call in the form that both sides are driven with: numbers for rows, and lists of slots.

Slots are named as swa_jax granted them; the other side's are found by `renaming`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

ROWS = 4


@dataclasses.dataclass(frozen=True)
class Shape:
    """Sizes of both pools, and how many slots a call may name or grant."""

    page: int
    full_pages: int
    swa_pages: int
    width: int

    @property
    def full_tokens(self) -> int:
        return self.full_pages * self.page

    @property
    def swa_tokens(self) -> int:
        return self.swa_pages * self.page


# Small, so that either pool runs out often and every held page can be looked at after every call.
SHAPES = {
    1: Shape(1, 48, 40, 64),
    4: Shape(4, 40, 32, 192),
    16: Shape(16, 32, 26, 576),
}


@dataclasses.dataclass(frozen=True)
class Row:
    """A request that grows from `prefix` to `seq` tokens; `tail` of them get an SWA side."""

    prefix: int
    seq: int
    last_loc: int = -1
    tail: int = 0


@dataclasses.dataclass(frozen=True)
class Call:
    """`slots` are full slots; `more` are SWA slots (`set_full_to_swa_mapping` alone has them).

    In the frees of segments a row says which tokens of the request the next slots are.
    """

    name: str
    rows: tuple[Row, ...] = ()
    slots: tuple[int, ...] = ()
    more: tuple[int, ...] = ()

    @property
    def grants(self) -> bool:
        return self.name.startswith("alloc")


def encode(calls: Sequence[Call], names: Sequence[str], width: int) -> tuple[np.ndarray, ...]:
    """int32 arrays for a scan: op code [N], rows [N, 4, ROWS], slots and more [N, width]."""
    code = np.array([names.index(call.name) for call in calls], np.int32)
    rows = np.zeros((len(calls), 4, ROWS), np.int32)
    rows[:, 2] = -1
    slots = np.zeros((2, len(calls), width), np.int32)
    for i, call in enumerate(calls):
        for j, row in enumerate(call.rows):
            rows[i, :, j] = dataclasses.astuple(row)
        slots[0, i, : len(call.slots)] = call.slots
        slots[1, i, : len(call.more)] = call.more
    return code, rows, slots[0], slots[1]
