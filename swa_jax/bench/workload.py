"""What is done to every allocator, in numbers: a main point, and one thing varied at a time."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np


@dataclass(frozen=True)
class Point:
    """Sizes of one measurement."""

    pool_tokens: int = 2**20  # in each pool
    page_size: int = 16
    batch: int = 256  # rows that decode
    rows: int = 256  # of a batch that is extended and freed
    row_tokens: int = 256

    def __post_init__(self) -> None:
        """Refuses sizes that no allocator could serve."""
        for name, tokens in (("pool_tokens", self.pool_tokens), ("row_tokens", self.row_tokens)):
            if tokens < 1 or tokens % self.page_size:
                raise ValueError(
                    f"{name} must be a positive multiple of the page, so that a batch is a valid "
                    f"segment; got {tokens} with pages of {self.page_size}"
                )

    @property
    def slots(self) -> int:
        """Slots that one extend hands out, and one free takes back."""
        return self.rows * self.row_tokens

    def prompt_lens(self) -> np.ndarray:
        """int32[batch] tokens before the first decode step.

        Staggered, so that about batch / page_size rows open a page in every step.
        """
        return (1 + np.arange(self.batch) % self.page_size).astype(np.int32)

    def decode_tokens(self, steps: int) -> int:
        """Tokens of the pages that the rows hold after so many steps."""
        pages = -(-(self.prompt_lens() + steps) // self.page_size)
        return int(pages.sum()) * self.page_size


@dataclass(frozen=True)
class Workload:
    """Which points are timed, and how long a repetition is."""

    main: Point = Point()
    pools: tuple[int, ...] = (2**16, 2**18, 2**20, 2**22, 2**24)
    pages: tuple[int, ...] = (1, 16, 64, 256)
    batches: tuple[int, ...] = (1, 32, 256, 1024)
    slots: tuple[int, ...] = (2**10, 2**14, 2**16, 2**18)
    long_row: int = 2**17  # tokens of the row that is extended alone
    tail_tokens: int = 4096  # of a row's end that get SWA slots in a tail extend
    loop_steps: int = 240  # decode steps of one compiled loop; more do not fit the smallest pool
    call_steps: int = 48  # decode steps of one repetition, a call at a time
    loop_turns: int = 20
    call_turns: int = 2
    most_sets: int = 64  # that one compiled loop extends or frees, one after the other
    least_repeats: int = 5
    most_repeats: int = 31
    seconds: float = 0.2  # for the repetitions of one job, preparation included

    @property
    def at_pools(self) -> tuple[Point, ...]:
        """The main point in each pool."""
        return tuple(replace(self.main, pool_tokens=pool) for pool in self.pools)

    @property
    def at_pages(self) -> tuple[Point, ...]:
        """The main point with each page."""
        return tuple(replace(self.main, page_size=page) for page in self.pages)

    @property
    def at_batches(self) -> tuple[Point, ...]:
        """The main point with each batch that decodes."""
        return tuple(replace(self.main, batch=batch, rows=batch) for batch in self.batches)

    @property
    def at_slots(self) -> tuple[Point, ...]:
        """The main point with so many slots extended and freed."""
        rows = [slots // self.main.row_tokens for slots in self.slots]
        return tuple(replace(self.main, batch=count, rows=count) for count in rows)

    @property
    def at_long_row(self) -> Point:
        """The main point with one long row."""
        return replace(self.main, batch=1, rows=1, row_tokens=self.long_row)

    def points(self) -> Iterator[Point]:
        """Every point, the main one included; some more than once."""
        yield from (self.main, *self.at_pools, *self.at_pages, *self.at_batches, *self.at_slots)
        yield self.at_long_row

    def sets(self, point: Point) -> int:
        """Batches that one compiled loop extends or frees: as many as the pool holds, at most."""
        room = min(point.pool_tokens, self.main.pool_tokens) // point.slots
        return max(1, min(self.most_sets, room))


SMOKE = Workload(
    main=Point(1024, 4, 8, 8, 16),
    pools=(1024,),
    pages=(4,),
    batches=(8,),
    slots=(128,),
    long_row=128,
    tail_tokens=64,
    loop_steps=16,
    call_steps=8,
    loop_turns=2,
    call_turns=2,
    most_sets=2,
    least_repeats=2,
    most_repeats=2,
    seconds=0.0,
)
