"""Who has which page: one state on the host, page by page, ready to be drawn or listed.

Legend: F full pages, S SWA pages (or rings), N pages of either pool. Arrays are by page id, the
padding page 0 included.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import jax
import numpy as np
from jax.typing import ArrayLike

from swa_jax.config import PoolConfig
from swa_jax.state import PAD_PAGE, AllocatorState, PagePool
from swa_jax.state_summary import StateSummary, UnreadableError, on_host, summarize
from swa_jax.viz.looks import (
    ABSENT,
    FIRST_OWNER,
    FREE,
    HELD,
    LEFT,
    MOST_OWNERS,
    OTHERS,
    PADDING,
    PENDING,
    SHARED,
    STALE,
    UNMAPPED,
)

Owners = Mapping[str, ArrayLike | Sequence[int]]
HostOwners = Mapping[str, np.ndarray]


@dataclass(frozen=True, eq=False)
class PoolView:
    """One pool."""

    kind: np.ndarray  # int8[N+1] index into the map's looks
    holders: np.ndarray  # int[N+1] how many hold it
    names: np.ndarray  # int[N+1] how many owners name it
    partner: np.ndarray  # int[N+1] page of the other pool that goes with it, 0 for none


@dataclass(frozen=True, eq=False)
class StateView:
    """A state: a full and an SWA pool, or the one pool of a pure SWA state."""

    config: PoolConfig
    summary: StateSummary
    full: PoolView | None  # None for a pure SWA state
    swa: PoolView
    names: tuple[str, ...]  # of the owners, in the order of their looks

    def pools(self) -> list[tuple[str, PoolView]]:
        """The pools by name."""
        full = [] if self.full is None else [("full", self.full)]
        return [*full, ("SWA", self.swa)]


def view_state(
    state: AllocatorState,
    owners: Owners | None = None,
    rings: Owners | None = None,
    names: Sequence[str] | None = None,
) -> StateView:
    """Looks at every page of a state once. Waits for the device.

    Args:
      state: one state, not a batch.
      owners: int32 full slots that each name holds, of any shape; 0 and -1 in unused places. A name
        holds the SWA pages that those are mapped to as well.
      rings: int32 rings that each name holds, 0 for none, where the SWA side is request rings.
      names: owners in the order of their looks; by default those of `owners` and `rings`, the ones
        with the most pages where there are too many to be told apart.

    Raises:
      ValueError: a batch, a state without values, slots outside the pool, rings where there are
        none.
    """
    host, summary = _look(state)
    owners, rings = host_owners("owners", owners), host_owners("rings", rings)
    config = state.config
    if rings and not config.has_rings:
        raise ValueError("rings are for a pool with request rings; name full slots with owners")
    if names is None:
        names = choose_names([owners, rings])
    of_full = _named(owners, names, config.page_size, config.full_pages, "owners")
    full, of_swa = None, of_full
    if not config.pure_swa_pool:
        full = _full_view(host, of_full)
        if config.has_rings:
            of_swa = _named(rings, names, 1, config.swa_units, "rings")
        else:
            of_swa = _through(np.asarray(host.full_to_swa), of_full, config.swa_pages)
    return StateView(config, summary, full, _swa_view(host, of_swa, summary), tuple(names))


def host_owners(name: str, owners: Owners | None) -> HostOwners:
    """int[K] slots or rings by owner, on the host: one transfer for all of them.

    Raises:
      ValueError: no mapping, or something that is no integer.
    """
    if not isinstance(owners, Mapping | None):
        raise ValueError(f"{name} must map names to slots, got {type(owners).__name__}")
    owners, found = owners or {}, {}
    every = jax.device_get(list(owners.values()))  # a dict would come back in another order
    for owner, given in zip(owners, every, strict=True):
        slots = np.asarray(given).reshape(-1)
        if slots.size and slots.dtype.kind not in "iu":
            raise ValueError(f"{name}[{owner!r}] must hold integers, got {slots.dtype}")
        found[owner] = slots.astype(np.int64)
    return found


def choose_names(maps: Sequence[HostOwners]) -> list[str]:
    """Names in the order of their first mention, `OTHERS` for the smallest of too many."""
    sizes: dict[str, int] = {}
    for owners in maps:
        for name, slots in owners.items():
            sizes[name] = sizes.get(name, 0) + int(np.count_nonzero(slots > 0))
    if len(sizes) <= MOST_OWNERS:
        return list(sizes)
    largest = sorted(sizes, key=lambda name: -sizes[name])[:MOST_OWNERS]
    return [*(name for name in sizes if name in largest), OTHERS]


def _look(state: AllocatorState) -> tuple[AllocatorState, StateSummary]:
    if not isinstance(state, AllocatorState):
        raise ValueError(f"state must be an AllocatorState, got {type(state).__name__}")
    try:
        host = on_host(state)
        summary = summarize(host)
    except UnreadableError as error:
        raise ValueError(f"the state cannot be drawn: {error}") from None
    if summary.batch:
        raise ValueError(
            f"one state can be drawn, this is a batch of shape {summary.batch}: choose one, such "
            "as jax.tree.map(lambda leaf: leaf[0], states)"
        )
    return host, summary


@dataclass(frozen=True, eq=False)
class _Named:
    """Who names each page, int[N+1]."""

    who: np.ndarray  # place of the last owner that names it, -1 for nobody
    count: np.ndarray  # owners that name it


def _named(owners: HostOwners, names: Sequence[str], size: int, pages: int, what: str) -> _Named:
    """Pages from slots; `size` is 1 where they are named themselves."""
    place = {name: at for at, name in enumerate(names)}
    who, count = _nobody(pages)
    for name, slots in owners.items():
        if slots.size and (slots.min() < -1 or slots.max() >= (pages + 1) * size):
            raise ValueError(
                f"{what}[{name!r}] must lie within the pool, 0 .. {(pages + 1) * size - 1}; got "
                f"{slots.min()} to {slots.max()}"
            )
        named = np.zeros(pages + 1, bool)  # a mark for each page needs no sort of the slots
        named[slots[slots >= size] // size] = True
        who[named] = place.get(name, place.get(OTHERS, -1))
        count += named
    return _Named(who, count)


def _nobody(pages: int) -> tuple[np.ndarray, np.ndarray]:
    return np.full(pages + 1, -1, np.int8), np.zeros(pages + 1, np.int32)


def _through(mapping: np.ndarray, of_full: _Named, pages: int) -> _Named:
    """Who names the SWA side of a full page names its SWA page."""
    mapped = _mapped(mapping, pages)
    target = mapping[mapped]
    who, count = _nobody(pages)
    who[target], count[target] = of_full.who[mapped], of_full.count[mapped]
    return _Named(who, count)


def _mapped(mapping: np.ndarray, pages: int) -> np.ndarray:
    """Full pages that have an SWA page; what a broken state maps outside the pool is left out."""
    return np.flatnonzero((mapping > 0) & (mapping <= pages))


def _full_view(host: AllocatorState, named: _Named) -> PoolView:
    layout, is_full = host.config.unified_layout, host.block_is_full
    absent = None
    if layout is not None and is_full is not None:
        absent = np.repeat(~np.asarray(is_full), layout.full_pages)
    kind = _kinds(host.full, named, absent)
    mapping = np.asarray(host.full_to_swa)
    mapped = _mapped(mapping, host.config.swa_units)
    partner = np.zeros_like(mapping)
    partner[mapped] = mapping[mapped]
    return PoolView(kind, np.asarray(host.full.holders), named.count, partner)


def _swa_view(host: AllocatorState, named: _Named, summary: StateSummary) -> PoolView:
    config, mapping = host.config, np.asarray(host.full_to_swa)
    layout, is_full = config.unified_layout, host.block_is_full
    absent = None
    if layout is not None and is_full is not None:
        absent = np.repeat(np.asarray(is_full), layout.swa_pages)
    two_sides = not (config.pure_swa_pool or config.has_rings)
    kind = _kinds(host.swa, named, absent, by_mapping=two_sides)
    partner = np.zeros(config.swa_units + 1, np.int32)
    if config.pure_swa_pool:
        left = (np.asarray(host.full.holders) > 0) & ((kind == FREE) | (kind == STALE))
        kind[left] = LEFT
    elif not config.has_rings:
        mapped = _mapped(mapping, config.swa_pages)
        partner[mapping[mapped]] = mapped
        alone = (np.asarray(host.swa.holders) > 0) & (partner == 0) & (kind != PADDING)
        kind[alone] = UNMAPPED
    return PoolView(kind, np.asarray(host.swa.holders), named.count, partner)


def _kinds(
    pool: PagePool, named: _Named, absent: np.ndarray | None, *, by_mapping: bool = False
) -> np.ndarray:
    """int8[N+1] what each page is.

    With `by_mapping` names are those of the full side: of its several holders a single one may have
    the SWA side still.
    """
    holders = np.asarray(pool.holders)
    several = holders > 1 if by_mapping else (holders > 1) | (named.count > 1)
    kind = named.who + np.int8(FIRST_OWNER)
    # Of several names it cannot be told which one has it.
    kind[(named.who < 0) | (named.count > 1)] = HELD
    kind[several] = SHARED
    released = holders == 0
    kind[released] = FREE
    kind[released & (named.count > 0)] = STALE
    size = pool.ring.shape[0]
    count = min(max(int(pool.num_pending), 0), size)  # a broken state is drawn, too
    places = int(pool.head) + int(pool.num_free) + np.arange(count)
    waiting = np.asarray(pool.ring)[places % size]
    waiting = waiting[(waiting > PAD_PAGE) & (waiting < holders.size)]
    kind[waiting[np.isin(kind[waiting], (FREE, STALE))]] = PENDING  # named or not
    if absent is not None:
        kind[1:][absent & (kind[1:] == FREE)] = ABSENT
    kind[PAD_PAGE] = PADDING
    return kind
