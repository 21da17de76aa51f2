"""sglang's side: its own allocator, driven by the same calls under their names for the slots."""

from __future__ import annotations

from typing import Any

import numpy as np

from benchmarks.sglang_classes import load_sglang
from tests.peers.calls import Call, Shape
from tests.peers.renaming import DifferenceError, Renaming


class SglangSide:
    """One allocator of theirs. `half_done` counts decodes that were refused and took pages."""

    def __init__(self, shape: Shape, *, need_sort: bool) -> None:
        self.classes = load_sglang()
        self.shape = shape
        self.allocator = self.classes.new_allocator(
            shape.full_tokens, shape.swa_tokens, shape.page, need_sort=need_sort
        )
        self.pools = (self.allocator.full_attn_allocator, self.allocator.swa_attn_allocator)
        self.half_done = 0

    def available(self) -> tuple[int, int]:
        """Tokens that can be granted: full, SWA."""
        return self.allocator.full_available_size(), self.allocator.swa_available_size()

    def mapping(self) -> np.ndarray:
        """int64[slots + 1] SWA slot of each full slot; a view of what they keep."""
        return self.allocator.full_to_swa_index_mapping.numpy()

    def run(self, call: Call, names: Renaming) -> np.ndarray | None:
        """Makes one call. Slots of a grant, None for a refused one and for other calls."""
        if call.name == "alloc_decode":
            return self._decode(call, names)
        if call.grants:
            return self._grant(call, names)
        slots = self._ints(names.full_slots(call.slots))
        method = getattr(self.allocator, call.name)
        if call.name == "set_full_to_swa_mapping":
            method(slots, self._ints(names.swa_slots(call.more)))
        elif call.name.endswith("segment"):
            method(slots, start_pos=call.rows[0].prefix)
        elif call.name.endswith("segments"):
            parts = slots.split([row.seq - row.prefix for row in call.rows])
            method([(part, row.prefix) for part, row in zip(parts, call.rows, strict=True)])
        elif call.name in ("clear", "free_group_begin", "free_group_end"):
            method()
        else:
            method(slots)
        return None

    def _grant(self, call: Call, names: Renaming) -> np.ndarray | None:
        prefix, seq = (self._ints([getattr(r, f) for r in call.rows]) for f in ("prefix", "seq"))
        if call.name == "alloc":
            return self._numpy(self.allocator.alloc(call.rows[0].seq))
        last = self._ints(names.full_slots([row.last_loc for row in call.rows]))
        tokens = sum(row.seq - row.prefix for row in call.rows)
        more = [row.tail for row in call.rows] if call.name == "alloc_extend_swa_tail" else []
        method = getattr(self.allocator, call.name)
        return self._numpy(method(prefix, prefix, seq, seq, last, tokens, *more))

    def _decode(self, call: Call, names: Renaming) -> np.ndarray | None:
        """A decode that fits one pool alone takes its pages there; they are put back, and counted.

        That is a difference of its own (`docs/differences-sglang.md`), and would hide all others.
        """
        before = [_lists_of(pool) for pool in self.pools]
        left = self.available()
        last = self._ints(names.full_slots([row.last_loc for row in call.rows]))
        seq = self._ints([row.seq for row in call.rows])
        slots = self.allocator.alloc_decode(seq, seq, last)
        if slots is None and self.available() != left:
            need = sum((row.seq - 1) % self.shape.page == 0 for row in call.rows) * self.shape.page
            taken = [a - b for a, b in zip(left, self.available(), strict=True)]
            if sorted(taken) != [0, need]:
                raise DifferenceError(f"a refused decode that needs {need} tokens took {taken}")
            for pool, lists in zip(self.pools, before, strict=True):
                pool.__dict__.update(lists)
            self.half_done += 1
        return self._numpy(slots)

    def check_lists(self, names: Renaming) -> None:
        """With no group open: every page is free once, or held."""
        for pool, held in zip(self.pools, (names.full, names.swa), strict=True):
            free = pool.get_all_free_pages().tolist()
            everywhere = sorted([*free, *held[held > 0].tolist()])
            if everywhere != list(range(1, held.size)):
                raise DifferenceError(f"free and held pages of a pool are {everywhere}")

    def _ints(self, values: Any) -> Any:
        return self.classes.torch.as_tensor(np.asarray(values, np.int64))

    def _numpy(self, slots: Any) -> np.ndarray | None:
        return None if slots is None else slots.numpy()


def _lists_of(pool: Any) -> dict[str, Any]:
    """Their free lists as they are: tensors are replaced there, never written."""
    names = ("free_pages", "release_pages", "staged_pages", "num_staged_pages")
    kept = {name: pool.__dict__[name] for name in names if name in pool.__dict__}
    return {name: [*value] if isinstance(value, list) else value for name, value in kept.items()}
