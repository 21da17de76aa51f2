"""The part in which prompts are computed on one side and continued on the other."""

from __future__ import annotations

import dataclasses
from collections import Counter

import jax.numpy as jnp

import swa_jax as swa
from swa_jax import disagg
from swa_jax.serving import ServingConfig

from .asking import KINDS, Shape
from .laws import row_pages
from .pair_load import COUNTS, Pair, Sides, new_pair
from .pair_loop import law_names, run_block
from .part import Left
from .serving_part import MODEL, NEW, PLACES, VOCAB, WINDOW
from .take_apart import take_apart
from .traces import load_traces
from .watch import raise_if_broken
from .weather import Block

JOBS, PIECE = 8, 8
_DECODE_POOL = swa.PoolConfig(64, 28, 4, WINDOW - 1)
_PAGE = swa.PoolConfig(72, 40, 2, WINDOW - 1)
_PREFILL_POOL = dataclasses.replace(
    _PAGE, sliding_window=disagg.prefill_window(_PAGE, _DECODE_POOL, 0)
)
DECODE = ServingConfig(
    _DECODE_POOL, 68, max_running=3, chunk_tokens=8, prefill_rows=2, max_new_tokens=NEW
)
PREFILL = dataclasses.replace(DECODE, pool=_PREFILL_POOL, role="prefill")
_RARE = {"given_up_for_others", "sent"}  # the last: no reason of the side that decodes


class PairPart:
    """Two worlds and what is on its way between them."""

    name, group = "disaggregated", "disaggregated"
    needs = (*(name for name in COUNTS if name not in _RARE), *KINDS)

    def __init__(self, seed: int) -> None:
        """Nobody has come yet."""
        self._sides = Sides(MODEL, PREFILL, DECODE, Shape.of(DECODE, VOCAB, 2), PIECE)
        self._pair: Pair = new_pair(self._sides, JOBS, PLACES, seed)
        self._traces = load_traces()
        self._names = law_names(self._sides, self._pair)

    def run(self, goal: int, quota: int, block: Block) -> Counter[str]:
        """See `Part.run`."""
        before = int(self._pair.watch.steps)
        weather = dataclasses.replace(block, cancel=6).weather
        self._pair = run_block(
            self._sides, self._pair, self._traces, weather, jnp.int32(goal), jnp.int32(quota)
        )
        watch = self._pair.watch
        raise_if_broken(self.name, self._names, watch)
        found = Counter({name: int(count) for name, count in self._pair.counts.items()})
        found["steps"], found["looks"] = int(watch.steps) - before, int(watch.looks)
        return found

    def close(self) -> Left:
        """See `Part.close`."""
        pair = self._pair
        rows = row_pages(DECODE, pair.decode)
        held = int(rows.own.sum()), int(rows.live.sum())
        inbox = pair.arrivals.inbox
        disagg.check(inbox, pair.decode.allocator, pair.decode.cache, others=held)
        reserved = sum(int(pages) for pages in disagg.reserved_pages(inbox))
        left = [take_apart(world) for world in (pair.prefill, pair.decode)]
        leaked = reserved + sum(held) + sum(each.leaked for each in left)
        return Left(sum(each.faults for each in left), leaked)
