"""Which pages break a law. On the host, from the laws of `swa_jax.check`."""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from swa_jax.debug.pages import HELD, LOST, PADDING, PENDING, StatePages, pages_of
from swa_jax.state import NOBODY, PAD_PAGE, UNMAPPED, AllocatorState


class Pages(NamedTuple):
    """Page ids of each pool."""

    full: list[int]
    swa: list[int]


NO_PAGES = Pages([], [])


class Broken(NamedTuple):
    """A law that was broken."""

    law: str
    pages: Pages
    more: str = ""  # what is to be said beside the law's own text


def culprits(law: str, state: AllocatorState) -> Pages:
    """The pages that break a law; none where the law is about counts alone.

    Args:
      law: one of `swa_jax.check.LAWS` or `OWNER_LAWS`.
      state: in which it is broken.
    """
    return FINDERS[law](state, pages_of(state))


def _padding(state: AllocatorState, pages: StatePages) -> Pages:
    sides = [
        [PAD_PAGE] if side.status[PAD_PAGE] != PADDING else [] for side in (pages.full, pages.swa)
    ]
    return Pages([PAD_PAGE] if pages.mapping[PAD_PAGE] != UNMAPPED else sides[0], sides[1])


def _odd(state: AllocatorState, pages: StatePages) -> Pages:
    """Pages that are none of what a page can be: two things at once, or lost."""
    sides = []
    for side in (pages.full, pages.swa):
        odd = (side.queued > 1) | ((side.queued > 0) & (side.holders != 0)) | (side.status == LOST)
        sides.append(np.flatnonzero(odd).tolist())
    if state.config.pure_swa_pool:
        left = (pages.full.holders == 0) & (pages.swa.holders != 0)
        sides[0] = np.flatnonzero(left).tolist()
    return Pages(*sides)


def _shares(state: AllocatorState, pages: StatePages) -> Pages:
    full, swa = pages.full.holders, pages.swa.holders
    more = (pages.mapping != UNMAPPED) & (_at(swa, pages.mapping) > full)
    return Pages(np.flatnonzero((full < 0) | more).tolist(), np.flatnonzero(swa < 0).tolist())


def _whole(state: AllocatorState, pages: StatePages) -> Pages:
    outside = (pages.mapping < 0) | (pages.mapping >= pages.swa.holders.size)
    return Pages(np.flatnonzero(outside).tolist(), [])


def _queue(state: AllocatorState, pages: StatePages) -> Pages:
    mapped = np.zeros(pages.swa.holders.size, bool)
    inside = pages.mapping[(pages.mapping > 0) & (pages.mapping < mapped.size)]
    mapped[inside] = True
    both = [(side.queued > 0) & (side.holders != 0) for side in (pages.full, pages.swa)]
    both[1] |= mapped & (pages.swa.status == PENDING)
    return Pages(*(np.flatnonzero(side).tolist() for side in both))


def _stale(state: AllocatorState, pages: StatePages) -> Pages:
    has = pages.mapping != UNMAPPED
    if not state.config.has_rings:
        live = (pages.full.holders > 0) & (_at(pages.swa.holders, pages.mapping) > 0)
        has = has & ~live
    full = np.flatnonzero(has)
    return Pages(full.tolist(), _targets(pages, full))


def _shared(state: AllocatorState, pages: StatePages) -> Pages:
    has = pages.mapping != UNMAPPED
    values, counts = np.unique(pages.mapping[has], return_counts=True)
    wrong = has & np.isin(pages.mapping, values[counts > 1])
    if state.config.pure_swa_pool:
        own = np.arange(pages.mapping.size)
        live = (pages.swa.status == HELD) & (own != PAD_PAGE)
        wrong |= np.where(live, pages.mapping != own, has)
    full = np.flatnonzero(wrong)
    return Pages(full.tolist(), _targets(pages, full))


def _dirty(state: AllocatorState, pages: StatePages) -> Pages:
    return Pages(np.flatnonzero(np.asarray(state.scratch) != NOBODY).tolist(), [])


def _two_owners(state: AllocatorState, pages: StatePages) -> Pages:
    tags = state.owner_tags
    if tags is None:
        return NO_PAGES
    mapped = pages.mapping != UNMAPPED
    sides = _at(np.asarray(tags.swa), pages.mapping)
    full = np.flatnonzero(mapped & (sides != np.asarray(tags.full)))
    return Pages(full.tolist(), _targets(pages, full))


def _none(state: AllocatorState, pages: StatePages) -> Pages:
    return NO_PAGES


def _at(table: np.ndarray, index: np.ndarray) -> np.ndarray:
    """table[index], 0 for an index outside."""
    inside = (index >= 0) & (index < table.size)
    return np.where(inside, table[np.where(inside, index, 0)], 0)


def _targets(pages: StatePages, full: np.ndarray) -> list[int]:
    to = np.unique(pages.mapping[full])
    return to[(to > 0) & (to < pages.swa.holders.size)].tolist()


FINDERS: dict[str, Callable[[AllocatorState, StatePages], Pages]] = {
    "padding_page": _padding,
    "one_owner": _odd,
    "shares": _shares,
    "conservation": _odd,
    "within_size": _none,
    "whole_pages": _whole,
    "group_queue": _queue,
    "no_stale_mapping": _stale,
    "one_to_one": _shared,
    "int32_only": _none,
    "scratch_clean": _dirty,
    "owners_agree": _two_owners,
}
