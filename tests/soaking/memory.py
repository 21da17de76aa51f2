"""What this process holds: memory and JAX arrays, and whether it stays as it is."""

from __future__ import annotations

import gc
import os
import resource
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import jax

STATM = Path("/proc/self/statm")
MOST_GROWTH, MOST_SHARE = 16 * 2**20, 0.02
MOST_ARRAYS = 8  # what waits for the host comes and goes


class Held(NamedTuple):
    """At one moment."""

    rss: int  # bytes in memory; where the system does not say, the most so far
    arrays: int  # live JAX arrays


def held_now() -> Held:
    """After what is garbage has gone."""
    gc.collect()
    return Held(_rss(), len(jax.live_arrays()))


def _rss() -> int:
    if STATM.exists():
        return int(STATM.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else most * 1024


def warm(seen: Sequence[Held]) -> Held:
    """The most that was held after the blocks of the second quarter: all is compiled by then."""
    some = seen[len(seen) // 4 : len(seen) // 2 + 1]
    return Held(max(held.rss for held in some), max(held.arrays for held in some))


def growth(seen: Sequence[Held]) -> Held:
    """How much more is held at the end."""
    before = warm(seen)
    return Held(seen[-1].rss - before.rss, seen[-1].arrays - before.arrays)


def is_constant(seen: Sequence[Held]) -> bool:
    """A few arrays more at most, and no more memory than 2 % or 16 MiB, whichever is more."""
    grown = growth(seen)
    most = max(MOST_GROWTH, MOST_SHARE * warm(seen).rss)
    return grown.rss <= most and grown.arrays <= MOST_ARRAYS
