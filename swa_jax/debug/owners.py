"""Who holds which page, told from how the counts of holders change with each call."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np

from swa_jax.config import PoolConfig
from swa_jax.debug.play import Step

Names: TypeAlias = Mapping[int, tuple[str, ...]]  # by page id: its holders, one name for each


@dataclass(frozen=True)
class Owners:
    """Holders by name, of both pools."""

    full: Names = field(default_factory=dict)
    swa: Names = field(default_factory=dict)  # pages, or rings

    def after(self, step: Step) -> "Owners":
        """Who holds what after one more call.

        Pages that it hands out are the call's owner's, or "call 7"'s where it names none. A page
        that it takes from one of several is that owner's, or the last one's.
        """
        name = step.call.owner or f"call {step.number}"
        swa_pages = _follow(self.swa, step.before.swa.holders, step.after.swa.holders, name)
        full = _follow(self.full, step.before.full.holders, step.after.full.holders, name)
        if step.before.config.pure_swa_pool:
            full = _granted_again(full, swa_pages, step)
        return Owners(full, swa_pages)


def _granted_again(full: Names, of_swa: Names, step: Step) -> Names:
    """In a pure SWA pool a page is its SWA side, and the count of its full side may stay as it is.

    That is so where who left his window there never gave the full side back.
    """
    was, now = np.asarray(step.before.swa.holders), np.asarray(step.after.swa.holders)
    new = np.flatnonzero((was == 0) & (now > 0)).tolist()
    return {**full, **{page: of_swa[page] for page in new if page in of_swa}}


def _follow(names: Names, before: object, after: object, name: str) -> Names:
    was, now = np.asarray(before), np.asarray(after)
    changed = np.flatnonzero(was != now).tolist()
    if not changed:
        return names
    made = dict(names)
    for page in changed:
        holders, wanted = list(made.get(page, ())), max(int(now[page]), 0)
        if len(holders) < wanted:
            # Counts can be large, names of one and the same holder need not be.
            holders += [name] * min(wanted - len(holders), 8)
        while len(holders) > wanted:
            holders.remove(name) if name in holders else holders.pop()
        made[page] = tuple(holders)
        if not holders:
            del made[page]
    return made


def by_name(names: Names) -> dict[str, list[int]]:
    """The pages of each holder."""
    found: dict[str, list[int]] = {}
    for page in sorted(names):
        for name in dict.fromkeys(names[page]):
            found.setdefault(name, []).append(page)
    return found


def slots_by_name(config: PoolConfig, owners: Owners) -> dict[str, np.ndarray]:
    """int32[T] full slots of each holder, all of each page: what `swa_jax.viz.page_map` takes."""
    size = config.page_size
    offsets = np.arange(size)
    return {
        name: (np.asarray(pages)[:, None] * size + offsets).reshape(-1).astype(np.int32)
        for name, pages in by_name(owners.full).items()
    }


def owners_of_slots(
    config: PoolConfig, mapping: np.ndarray, slots: Mapping[str, Iterable[int]]
) -> Owners:
    """Holders by page of what is given by name.

    Args:
      config: of the pools.
      mapping: int32[F+1] SWA page of each full page, where the SWA sides are looked up.
      slots: full slots of each holder; padding and what is outside the pool is passed over.
    """
    full: dict[int, tuple[str, ...]] = {}
    swa: dict[int, tuple[str, ...]] = {}
    for name, held in slots.items():
        pages = np.unique(np.asarray(held, np.int64) // config.page_size)
        for page in pages[(pages > 0) & (pages < mapping.size)].tolist():
            full[page] = (*full.get(page, ()), name)
            to = int(mapping[page])
            if to:
                swa[to] = (*swa.get(to, ()), name)
    return Owners(full, swa)


def held_by(names: Names, page: int) -> str:
    """The holders of a page in words, "" where nobody is known."""
    found = list(dict.fromkeys(names.get(page, ())))
    return ", ".join(found[:4]) + (f" and {len(found) - 4} more" if len(found) > 4 else "")
