"""What is done to every allocator, in numbers."""

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Workload:
    """Sizes of the pools and of each call; tokens unless the name says otherwise."""

    pools: tuple[int, ...] = (2**18, 2**20, 2**22)
    page_size: int = 16
    batch: int = 256
    decode_steps: int = 512
    extend_rows: int = 256
    extend_tokens: int = 256
    scan_turns: int = 100
    call_turns: int = 3
    repeats: int = 7
    scan_repeats: int = 61  # of the decode loop: it is short, and its ratios are the goals

    def __post_init__(self) -> None:
        """Refuses a pool that would run out within a repetition."""
        pages = -(-(self.prompt_lens() + self.decode_steps) // self.page_size)
        needed = max(int(pages.sum()) * self.page_size, self.extend_slots)
        if self.extend_tokens % self.page_size:
            raise ValueError(
                "extend_tokens must be a multiple of the page, so that a batch is a valid "
                f"segment; got {self.extend_tokens} with pages of {self.page_size}"
            )
        for pool in self.pools:
            if pool % self.page_size or pool < needed:
                raise ValueError(
                    f"a pool must be a multiple of {self.page_size} tokens and hold the "
                    f"{needed} that one repetition takes, got {pool}"
                )

    @property
    def extend_slots(self) -> int:
        """Slots that one extend hands out, and one free takes back."""
        return self.extend_rows * self.extend_tokens

    def prompt_lens(self) -> np.ndarray:
        """int32[batch] tokens before the first decode step.

        Staggered, so that about batch / page_size rows open a page in every step.
        """
        return (self.extend_tokens + np.arange(self.batch) % self.page_size).astype(np.int32)


SMOKE = Workload(
    pools=(1024,),
    page_size=4,
    batch=8,
    decode_steps=16,
    extend_rows=8,
    extend_tokens=16,
    scan_turns=4,
    call_turns=2,
    repeats=2,
    scan_repeats=2,
)
