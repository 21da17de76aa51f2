"""A few calls on both sides, by hand: each side is given the slots that it granted itself."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import numpy as np

import swa_jax as swa
from benchmarks.sglang_classes import load_sglang

WIDTH = 32


@dataclasses.dataclass(frozen=True)
class Slots:
    """The same tokens on both sides; None where that side refused them."""

    ours: list[int] | None
    theirs: list[int] | None

    def __getitem__(self, which: slice) -> Slots:
        ours, theirs = (None if each is None else each[which] for each in (self.ours, self.theirs))
        return Slots(ours, theirs)

    @property
    def last(self) -> Slots:
        return self[-1:]


NOTHING = Slots([-1], [-1])  # the last slot of a request that has none


def both(*slots: int) -> Slots:
    """The same slots on both sides."""
    return Slots([*slots], [*slots])


class Both:
    """Two allocators with pools of so many pages."""

    def __init__(self, full_pages: int = 4, swa_pages: int = 4, page: int = 4) -> None:
        sizes = (full_pages * page, swa_pages * page)
        self.state = swa.init(swa.PoolConfig(*sizes, page))
        self.sglang = load_sglang()
        self.theirs = self.sglang.new_allocator(*sizes, page)

    def alloc(self, tokens: int) -> Slots:
        self.state, grant = swa.alloc(self.state, tokens, capacity=WIDTH)
        return self._granted(grant, self.theirs.alloc(tokens))

    def extend(
        self, prefix: int, seq: int, last: Slots = NOTHING, tail: int | None = None
    ) -> Slots:
        args = [prefix], [seq], _one(last.ours)
        numbers = [self._ints([each]) for each in (prefix, prefix, seq, seq)]
        numbers.append(self._ints(_one(last.theirs)))
        new = seq - prefix
        if tail is None:
            self.state, grant = swa.alloc_extend(self.state, *args, capacity=WIDTH)
            return self._granted(grant, self.theirs.alloc_extend(*numbers, new))
        self.state, grant = swa.alloc_extend_swa_tail(self.state, *args, [tail], capacity=WIDTH)
        return self._granted(grant, self.theirs.alloc_extend_swa_tail(*numbers, new, tail))

    def decode(self, seq: int, last: Slots) -> Slots:
        self.state, grant = swa.alloc_decode(self.state, [seq], _one(last.ours))
        lens = self._ints([seq])
        return self._granted(
            grant, self.theirs.alloc_decode(lens, lens, self._ints(_one(last.theirs)))
        )

    def do(self, name: str, *lists: Slots) -> None:
        """A call that grants nothing, on both sides."""
        self.do_ours(name, *lists)
        self.do_theirs(name, *lists)

    def do_ours(self, name: str, *lists: Slots) -> None:
        ours = [(each.ours or []) + [0] * (WIDTH - len(each.ours or [])) for each in lists]
        self.state = getattr(swa, name)(self.state, *ours)

    def do_theirs(self, name: str, *lists: Slots) -> None:
        more = {"start_pos": 0} if name.endswith("segment") else {}
        getattr(self.theirs, name)(*(self._ints(each.theirs) for each in lists), **more)

    @property
    def left(self) -> tuple[tuple[int, int], tuple[int, int]]:
        """Tokens that can be granted, (full, SWA), of ours and of theirs."""
        sizes = jax.device_get(
            (swa.full_available_size(self.state), swa.swa_available_size(self.state))
        )
        theirs = (self.theirs.full_available_size(), self.theirs.swa_available_size())
        return (int(sizes[0]), int(sizes[1])), theirs

    def swa_of(self, slots: Slots) -> tuple[list[int], list[int]]:
        """The SWA slots, of ours and of theirs."""
        ours = swa.translate_full_to_swa(self.state, slots.ours or [])
        theirs = self.theirs.translate_loc_from_full_to_swa(self._ints(slots.theirs))
        return np.asarray(ours).tolist(), theirs.tolist()

    @property
    def faults(self) -> dict[str, int]:
        """What we counted."""
        return {kind: count for kind, count in swa.faults(self.state).items() if count}

    def _granted(self, grant: swa.Grant, theirs: Any) -> Slots:
        ours = np.asarray(grant.slots).tolist()[: int(grant.count)] if grant.ok else None
        return Slots(ours, None if theirs is None else theirs.tolist())

    def _ints(self, values: list[int] | None) -> Any:
        return self.sglang.torch.as_tensor(np.asarray(values, np.int64))


def _one(slots: list[int] | None) -> list[int]:
    assert slots is not None
    return slots
