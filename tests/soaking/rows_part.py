"""Parts that run an allocator alone."""

from __future__ import annotations

from collections import Counter

import jax.numpy as jnp

import swa_jax as swa
from swa_jax.counts import held_pages

from .part import Left
from .planted import Plant, no_plant
from .rows_calls import TO_EMPTY_ROWS, TO_LIVE_ROWS
from .rows_load import COUNTS, Rows, new_rows
from .rows_loop import give_all_up, law_names, run_block
from .watch import raise_if_broken
from .weather import Block

ROWS = 16
# Pools, and the most tokens of a row.
CONFIGS = {
    "pages": (swa.PoolConfig(384, 208, 4, 16), 64),
    # Rows would hold more than its 1,000 pages: it is full but for 0.1 % or less.
    "full": (swa.PoolConfig(1000, 1000, 1, 16), 96),
}
NAMES = [call.__name__ for call in TO_EMPTY_ROWS + TO_LIVE_ROWS]
_MIXED = dict.fromkeys(NAMES, 2) | {
    "finish": 4,
    "whole_pages": 1,
    "group": 1,
    "abort": 1,
    "fill": 1,
}
# By the name of a block; all others are mixed.
WEIGHTS = {
    "one token": dict.fromkeys(NAMES, 0) | {"prefill_one_token": 1, "finish": 8, "decode": 1,
                                            "abort": 1, "group": 1},
    "thrash": dict.fromkeys(NAMES, 0) | {"prefill": 1, "fill": 16, "decode": 2, "chunk": 2,
                                         "finish": 2, "group": 1},
    "conversations": _MIXED | {"fork": 12},
    "just over a page": _MIXED | {"whole_pages": 12, "decode": 12},
    "just over a window": _MIXED | {"leave_window": 12, "decode": 6},
}  # fmt: skip


class RowsPart:
    """Rows that live and die in one allocator."""

    group = "allocator"
    needs = tuple(COUNTS)

    def __init__(self, config: str, seed: int, plant: Plant | None = None) -> None:
        """Nothing is held."""
        self.name = f"allocator, {config}"
        sizes, width = CONFIGS[config]
        self._rows: Rows = new_rows(sizes, ROWS, width, seed)
        self._names = law_names(self._rows)
        self._plant = no_plant() if plant is None else plant

    def run(self, goal: int, quota: int, block: Block) -> Counter[str]:
        """See `Part.run`."""
        if not quota:
            self._rows = give_all_up(self._rows)
            return Counter()
        weights = WEIGHTS.get(block.name, _MIXED)
        before = int(self._rows.watch.steps)
        chances = jnp.array([weights[name] for name in NAMES], jnp.int32)
        self._rows = run_block(self._rows, chances, jnp.int32(goal), self._plant)
        watch = self._rows.watch
        raise_if_broken(self.name, self._names, watch)
        found = Counter({name: int(count) for name, count in self._rows.counts.items()})
        found["steps"], found["looks"] = int(watch.steps) - before, int(watch.looks)
        return found

    def close(self) -> Left:
        """See `Part.close`."""
        state = self._rows.state
        swa.check(state)
        held = [int(pages) for pages in held_pages(state)]
        return Left(sum(swa.faults(state).values()), sum(held))
