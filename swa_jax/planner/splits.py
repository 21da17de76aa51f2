"""The splits of a KV budget that are tried, and which of them is best."""

from dataclasses import dataclass

import numpy as np

from swa_jax.config import MAX_SLOTS
from swa_jax.heavier import page_weight
from swa_jax.models import ModelConfig
from swa_jax.models.planning import window_pages

CLOSE = 1.02  # splits with so many times the fewest steps are as good, and told apart by the rest
PATIENCE = 1.25  # a split that takes so many times the steps of the first to end is given up


@dataclass(frozen=True)
class Split:
    """Pages of the two pools of one chip, without the padding page of each."""

    full_pages: int
    swa_pages: int


@dataclass(frozen=True)
class PageBytes:
    """Bytes of a page on one chip; a pure SWA model has no full pages."""

    full: int
    swa: int

    @staticmethod
    def of(model: ModelConfig, page_size: int) -> "PageBytes":
        """Of a model's part on one chip."""
        return PageBytes(
            model.full_bytes_per_token * page_size, model.swa_bytes_per_token * page_size
        )

    @property
    def weight(self) -> tuple[int, int]:
        """Of either kind, relative to each other."""
        return page_weight(self.full, self.swa)

    def total(self, split: Split) -> int:
        """Bytes of the two pools, padding included."""
        swa = (split.swa_pages + 1) * self.swa
        return swa + (split.full_pages + 1) * self.full if self.full else swa


def split_with(budget: int, page: PageBytes, page_size: int, swa_pages: int) -> Split:
    """The split with so many SWA pages; what is left is full pages, as far as int32 goes."""
    most = (MAX_SLOTS - page_size) // page_size
    full = (budget - (swa_pages + 1) * page.swa) // page.full - 1
    return Split(min(full, most), min(swa_pages, most))


def bounds(model: ModelConfig, budget: int, page_size: int, longest: int) -> tuple[int, int]:
    """The fewest and the most SWA pages of a split in which the longest request fits.

    More SWA pages than full ones are of no use.

    Args:
      model: one chip's part of it, with layers of both kinds.
      budget: bytes of KV on one chip.
      page_size: tokens.
      longest: full pages that some request comes to.
    """
    page = PageBytes.of(model, page_size)
    alike = budget // (page.full + page.swa) - 1
    beside = (budget - (longest + 1) * page.full) // page.swa - 1
    least = window_pages(model, page_size)
    return least, max(min(alike, beside), least)


def spread(low: int, high: int, count: int) -> list[int]:
    """Up to `count` whole numbers from `low` to `high`, in equal ratios."""
    return sorted({round(value) for value in np.geomspace(low, high, count).tolist()})


def around(tried: list[int], best: int, count: int) -> list[int]:
    """Up to `count` numbers between the two that were tried next to `best`."""
    place = tried.index(best)
    low, high = tried[max(place - 1, 0)], tried[min(place + 1, len(tried) - 1)]
    return [value for value in spread(low, high, count + 2) if value not in tried][:count]


@dataclass(frozen=True)
class Outcome:
    """What one split came to, over the ranks that were looked at."""

    split: Split
    finished: bool  # False: given up, its figures are those so far
    steps: int  # of all ranks
    retracted: int
    recomputed: int  # tokens
    running: float  # requests at once in the mean of the steps
    peak_running: int  # on one rank
    fullest: float  # the largest part of a pool that was ever held


def best_of(outcomes: list[Outcome]) -> Outcome:
    """The least retraction among the splits with about the fewest steps.

    The fewest steps alone would be a matter of luck among splits that hardly differ, and the least
    retraction alone a server that runs one request at a time. Of equal ones that which leaves
    most room in the fuller of its pools.
    """
    ended = [outcome for outcome in outcomes if outcome.finished]
    fewest = min(outcome.steps for outcome in ended)
    close = [outcome for outcome in ended if outcome.steps <= CLOSE * fewest]
    return min(close, key=lambda o: (o.retracted, o.recomputed, o.steps, o.fullest))


def is_enough(done: np.ndarray, steps: np.ndarray, ranks: int) -> bool:
    """Whether what has not ended can be given up.

    Args:
      done: bool[C * D] whether each server is at its end, the D ranks of a split side by side.
      steps: int[C * D].
      ranks: D.
    """
    ended = done.reshape(-1, ranks).all(axis=1)
    sums = steps.reshape(-1, ranks).sum(axis=1, dtype=np.int64)
    return bool(ended.any() and sums[~ended].min(initial=2**62) > PATIENCE * sums[ended].min())
