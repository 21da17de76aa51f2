"""Blocks of a unified budget by the page, not by counts: how many are in use though part empty.

A count of pages says how many blocks there are at least. Requests that grow together share blocks,
and a block is free only when all who share it have gone. Pages are placed here as the allocator
does after it has moved the split: in blocks in use before others, in the fullest of them first.
"""

from collections import Counter, deque
from dataclasses import dataclass, field

from swa_jax.models import ModelConfig
from swa_jax.replay.driver import final_lengths
from swa_jax.replay.trace import Trace
from swa_jax.unified import UnifiedLayout


@dataclass
class Blocks:
    """Blocks of one kind of page, of which there are as many as are asked for."""

    pages: int  # of a block
    free: list[set[int]] = field(default_factory=list)  # blocks in use, by their free pages
    room: dict[int, int] = field(default_factory=dict)  # free pages of each block in use
    made: int = 0

    def __post_init__(self) -> None:
        """Nothing is in use."""
        self.free = [set() for _ in range(self.pages + 1)]

    @property
    def in_use(self) -> int:
        """Blocks of which somebody holds a page."""
        return len(self.room)

    def take(self, owner: Counter[int], count: int) -> None:
        """Gives a request so many pages more."""
        for _ in range(count):
            block = self._next()
            self._set(block, self.room.get(block, self.pages) - 1)
            owner[block] += 1

    def give(self, owner: Counter[int]) -> None:
        """Takes all pages of a request back."""
        for block, count in owner.items():
            self._set(block, self.room[block] + count)
        owner.clear()

    def _next(self) -> int:
        for blocks in self.free[1 : self.pages]:
            if blocks:
                return min(blocks)
        self.made += 1
        return self.made

    def _set(self, block: int, free: int) -> None:
        if block in self.room:
            self.free[self.room.pop(block)].discard(block)
        if free < self.pages:
            self.room[block] = free
            self.free[free].add(block)


@dataclass
class Running:
    """A request that runs."""

    target: int
    final: int
    length: int = 0
    left: int = 0  # SWA pages that it has left behind
    blocks: Counter[int] = field(default_factory=Counter)


@dataclass(frozen=True)
class InUse:
    """Blocks that pages take, and the least that so many pages can take."""

    peak: int
    peak_least: int
    scatter: float  # blocks for each that would do, in the mean of the steps


def blocks_in_use(
    trace: Trace, model: ModelConfig, layout: UnifiedLayout, page: int, rows: int, chunk: int
) -> InUse:
    """Places every page of a load that has all the memory it wants.

    Args:
      trace: the requests.
      model: gives the window.
      layout: of the budget.
      page: tokens.
      rows: requests that run at once.
      chunk: prompt tokens of a step.
    """
    if layout.swa_pages != 1:
        raise ValueError(f"SWA pages must be a block each, got {layout.swa_pages} in a block")
    waiting = deque(zip(trace.prompt_lens.tolist(), final_lengths(trace).tolist(), strict=True))
    running: list[Running] = []
    blocks, used, least = Blocks(layout.full_pages), list[int](), list[int]()
    while waiting or running:
        for one in running:
            one.left = _left(model, one.length, page)
            if one.length >= one.final:
                blocks.give(one.blocks)
        running = [one for one in running if one.length < one.final]
        while waiting and len(running) < rows:
            running.append(Running(*waiting.popleft()))
        full = swa = 0
        for one, tokens in zip(running, _growth(running, chunk), strict=True):
            before, one.length = -(-one.length // page), one.length + tokens
            pages = -(-one.length // page)
            blocks.take(one.blocks, pages - before)
            full, swa = full + pages, swa + pages - one.left
        used.append(blocks.in_use + swa)
        least.append(-(-full // layout.full_pages) + swa)
    return InUse(max(used), max(least), sum(used) / sum(least))


def _growth(running: list[Running], chunk: int) -> list[int]:
    """A token for who decodes, the chunk for the oldest of those that prefill."""
    tokens = []
    for one in running:
        given = 1 if one.length >= one.target else min(chunk, one.target - one.length)
        chunk -= given if one.length < one.target else 0
        tokens.append(given)
    return tokens


def _left(model: ModelConfig, length: int, page: int) -> int:
    window = model.past_window
    edge = length // window * window if model.chunked else max(length - window, 0)
    return edge // page
