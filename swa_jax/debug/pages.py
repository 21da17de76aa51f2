"""What each page of a state is, in words, read on the host. A damaged state is read as well."""

from collections.abc import Iterable
from dataclasses import dataclass

import jax
import numpy as np

from swa_jax.counts import absent_pages
from swa_jax.state import PAD_PAGE, AllocatorState, PagePool

PADDING, HELD, FREE, PENDING, ABSENT = "padding", "held", "free", "pending", "absent"
LOST = "lost: released, and not in the ring"
HELD_AND_QUEUED = "held, and in the ring as well"
QUEUED_TWICE = "in the ring more than once"
BELOW_ZERO = "held by less than nobody"


@dataclass(frozen=True)
class PoolPages:
    """One pool, page by page."""

    status: np.ndarray  # str[N+1] by page id
    holders: np.ndarray  # int32[N+1]
    queued: np.ndarray  # int32[N+1] how often the used part of the ring names each page


@dataclass(frozen=True)
class StatePages:
    """A whole state."""

    full: PoolPages
    swa: PoolPages
    mapping: np.ndarray  # int32[F+1]


def pages_of(state: AllocatorState) -> StatePages:
    """Reads a state.

    Args:
      state: one state, no batch of them. Waits for the device.

    Raises:
      ValueError: a batch of states.
    """
    if np.ndim(state.full.head):
        raise ValueError(
            f"one state is looked at here, got a batch of shape {np.shape(state.full.head)}: take "
            "one of them with jax.tree.map(lambda leaf: leaf[i], states)"
        )
    host = jax.device_get(state)
    away = [np.asarray(gone) for gone in absent_pages(state)]
    full = _read(host.full, away[0], has_ring=not state.config.pure_swa_pool)
    return StatePages(full, _read(host.swa, away[1], has_ring=True), np.asarray(host.full_to_swa))


def _read(pool: PagePool, absent: np.ndarray, *, has_ring: bool) -> PoolPages:
    holders = np.asarray(pool.holders)
    queued, waits = np.zeros_like(holders), np.zeros(holders.shape, bool)
    if has_ring:
        free, pending = queues(pool)
        for pages in (free, pending):
            np.add.at(queued, pages[(pages >= 0) & (pages < holders.size)], 1)
        waits[pending[(pending >= 0) & (pending < holders.size)]] = True
    held, once = holders != 0, queued == 1
    status = np.select(
        [holders < 0, held & (queued > 0), queued > 1, held, once & waits, once, absent],
        [BELOW_ZERO, HELD_AND_QUEUED, QUEUED_TWICE, HELD, PENDING, FREE, ABSENT],
        LOST if has_ring else FREE,
    )
    if status[PAD_PAGE] == HELD:
        status[PAD_PAGE] = PADDING
    return PoolPages(status, holders, queued)


def queues(pool: PagePool) -> tuple[np.ndarray, np.ndarray]:
    """int32[] pages that can be granted, the next one first, and those that are pending."""
    ring, size = np.asarray(pool.ring), pool.ring.shape[0]
    free = min(max(int(pool.num_free), 0), size)
    pending = min(max(int(pool.num_pending), 0), size - free)
    places = (int(pool.head) + np.arange(free + pending)) % size
    return ring[places[:free]], ring[places[free:]]


def name_pages(pages: Iterable[int], word: str = "page", most: int = 8) -> str:
    """Page ids in words: "page 7", "pages 3-5, 9"; of many the first ones and how many more."""
    ids = sorted(set(pages))
    runs: list[list[int]] = []
    for page in ids:
        if runs and page == runs[-1][-1] + 1:
            runs[-1][1:] = [page]
        else:
            runs.append([page])
    names = ["-".join(map(str, run)) for run in runs]
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return f"{word}{'' if len(ids) == 1 else 's'} {', '.join(names[:most])}{more}"
