"""What differs between two states: page by page, mapping, counters, misuse and laws."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TypeVar

import jax
import numpy as np
from jax.core import Tracer

import swa_jax as swa
from swa_jax.debug.owners import Names, Owners, held_by, owners_of_slots
from swa_jax.debug.pages import HELD, PoolPages, StatePages, name_pages, pages_of
from swa_jax.state import AllocatorState


@dataclass(frozen=True)
class Change:
    """What became of one page, in words."""

    page: int
    before: str
    after: str


@dataclass(frozen=True)
class Remapped:
    """What became of the mapping of one full page."""

    page: int
    before: int  # SWA page, 0 = none
    after: int


_C = TypeVar("_C", Change, Remapped)


@dataclass(frozen=True, repr=False)
class Difference:
    """What differs between two states. Its text has a line for each run of pages.

    It is false where nothing differs.
    """

    full: tuple[Change, ...]  # full pages
    swa: tuple[Change, ...]  # SWA pages, or rings
    mapping: tuple[Remapped, ...]
    counters: Mapping[str, tuple[object, object]]
    faults: Mapping[str, tuple[int, int]]
    laws: Mapping[str, tuple[bool, bool]]  # whether it holds
    has_rings: bool = False

    def __bool__(self) -> bool:
        """Whether anything differs."""
        return any((self.full, self.swa, self.mapping, self.counters, self.faults, self.laws))

    def __str__(self) -> str:
        """Grouped by pool, mapping, counters, misuse and laws."""
        return "\n".join(self.lines())

    def __repr__(self) -> str:
        """As for people: notebooks show it."""
        return str(self)

    def lines(self, most: int = 100) -> list[str]:
        """The text, with at most so many lines for a pool or for the mapping."""
        unit = "ring" if self.has_rings else "page"
        groups = [
            ("full pool", _page_lines(self.full, "page"), most),
            ("rings" if self.has_rings else "SWA pool", _page_lines(self.swa, unit), most),
            ("mapping", _mapping_lines(self.mapping), most),
            ("counters", _counts(self.counters, str), most),
            ("misuse", _counts(self.faults, str), most),
            ("laws", _counts(self.laws, lambda holds: "holds" if holds else "broken"), most),
        ]
        lines: list[str] = []
        for title, texts, room in groups:
            found = list(texts)
            if found:
                lines += [title, *(f"  {text}" for text in found[:room])]
            if len(found) > room:
                lines.append(f"  and {len(found) - room} more lines")
        return lines or ["nothing differs"]


def diff(
    before: AllocatorState,
    after: AllocatorState,
    owners: Mapping[str, Iterable[int]] | None = None,
) -> Difference:
    """What differs between two states of one allocator.

    Args:
      before: one state.
      after: another, as a rule a later one.
      owners: int32[T] full slots that each name holds, so that pages are told as theirs. They are
        the holders in both states, wherever a page of theirs is held.

    Returns:
      `Difference`; `str` of it has lines such as "page 17: held by request 3 -> pending".

    Raises:
      ValueError: states of two configurations, or a batch of states.
    """
    for name, state in (("before", before), ("after", after)):
        if not isinstance(state, AllocatorState):
            raise ValueError(f"{name} must be an AllocatorState, got {type(state).__name__}")
        leaves = [leaf for leaf in jax.tree.leaves(state) if isinstance(leaf, jax.Array)]
        if any(leaf.is_deleted() for leaf in leaves if not isinstance(leaf, Tracer)):
            raise ValueError(
                f"{name} has no values any more: it was donated to a later call, or deleted. Keep "
                "swa_jax.snapshot(state) of it"
            )
    if owners is None:
        return difference(before, after, Owners(), Owners())
    maps = [np.asarray(state.full_to_swa) for state in (before, after)]
    named = [owners_of_slots(before.config, mapping, owners) for mapping in maps]
    return difference(before, after, *named)


def difference(
    before: AllocatorState, after: AllocatorState, were: Owners, are: Owners
) -> Difference:
    """As `diff`, with the holders of each state by page."""
    if before.config != after.config:
        raise ValueError(
            f"both states must be of one configuration, got {before.config} and {after.config}"
        )
    one, other = pages_of(before), pages_of(after)
    return Difference(
        full=tuple(_changes(one.full, other.full, were.full, are.full)),
        swa=tuple(_changes(one.swa, other.swa, were.swa, are.swa)),
        mapping=tuple(_mapped(one, other)),
        counters=_counters(before, after),
        faults=_faults(before, after),
        laws=_laws(before, after),
        has_rings=before.config.has_rings,
    )


def _changes(one: PoolPages, other: PoolPages, were: Names, are: Names) -> Iterator[Change]:
    differ = (one.status != other.status) | (one.holders != other.holders)
    for page in were.keys() & are.keys():  # it changed hands, though its count is the same
        differ[page] |= set(were[page]) != set(are[page]) and one.status[page] == HELD
    for page in np.flatnonzero(differ).tolist():
        yield Change(page, _in_words(one, page, were), _in_words(other, page, are))


def _in_words(pool: PoolPages, page: int, names: Names) -> str:
    status, holders, name = str(pool.status[page]), int(pool.holders[page]), held_by(names, page)
    if status == HELD and holders > 1:
        return f"shared by {name} ({holders} holders)" if name else f"held by {holders} holders"
    return f"{status} by {name}" if status == HELD and name else status


def _mapped(one: StatePages, other: StatePages) -> Iterator[Remapped]:
    for page in np.flatnonzero(one.mapping != other.mapping).tolist():
        yield Remapped(page, int(one.mapping[page]), int(other.mapping[page]))


def _counters(before: AllocatorState, after: AllocatorState) -> dict[str, tuple[object, object]]:
    values = [_counters_of(state) for state in (before, after)]
    return {
        name: (old, values[1][name]) for name, old in values[0].items() if old != values[1][name]
    }


def _counters_of(state: AllocatorState) -> dict[str, object]:
    config = state.config
    counters: dict[str, object] = {"free group": "open" if state.group_open else "closed"}
    pools = {"full": state.full, "rings" if config.has_rings else "SWA": state.swa}
    if config.pure_swa_pool:
        del pools["full"]
    for name, pool in pools.items():
        counters[f"{name} free"] = int(pool.num_free)
        counters[f"{name} pending"] = int(pool.num_pending)
    if state.block_is_full is not None:
        counters["blocks of full pages"] = int(np.sum(np.asarray(state.block_is_full)))
    if state.owner_tags is not None:
        tags = state.owner_tags
        counters["owner tags"] = _whose(np.asarray(tags.heir), np.asarray(state.full.holders) > 0)
        if config.has_rings:
            held = np.asarray(state.swa.holders) > 0
            counters["owners of rings"] = _whose(np.asarray(tags.swa), held)
    return counters


def _whose(owners: np.ndarray, held: np.ndarray) -> str:
    """How many held pages each owner has."""
    ids, pages = np.unique(owners[1:][held[1:]], return_counts=True)
    counts = zip(ids.tolist(), pages.tolist(), strict=True)
    return ", ".join(f"{owner}: {count}" for owner, count in counts) or "none"


def _faults(before: AllocatorState, after: AllocatorState) -> dict[str, tuple[int, int]]:
    was, now = swa.faults(before), swa.faults(after)
    return {kind: (was[kind], now[kind]) for kind in now if was[kind] != now[kind]}


def _laws(before: AllocatorState, after: AllocatorState) -> dict[str, tuple[bool, bool]]:
    one, other = jax.device_get((swa.invariants(before), swa.invariants(after)))
    return {law: (bool(one[law]), bool(other[law])) for law in one if one[law] != other[law]}


def _page_lines(changes: Iterable[Change], word: str) -> Iterator[str]:
    """Neighbours that became the same share a line."""
    for run in _runs(changes, lambda one: (one.before, one.after)):
        pages = name_pages((change.page for change in run), word)
        yield f"{pages}: {run[0].before} -> {run[0].after}"


def _mapping_lines(changes: Iterable[Remapped]) -> Iterator[str]:
    """Neighbours that map to neighbours share a line."""
    for run in _runs(changes, _shift):
        before, after = ([_sides(one)[i] for one in run] for i in (0, 1))
        pages = name_pages(one.page for one in run)
        yield f"{pages}: {_targets(before)} -> {_targets(after)}"


def _shift(one: Remapped) -> tuple[int | None, ...]:
    """How far each side's SWA page lies from the full page; None where there is none."""
    return tuple(to - one.page if to else None for to in _sides(one))


def _sides(one: Remapped) -> tuple[int, int]:
    return one.before, one.after


def _targets(pages: list[int]) -> str:
    return name_pages(pages, "SWA page") if pages[0] else "none"


def _runs(changes: Iterable[_C], kind: Callable[[_C], object]) -> Iterator[list[_C]]:
    """Changes of neighbouring pages that are of one kind."""
    run: list[_C] = []
    for change in changes:
        if run and (change.page != run[-1].page + 1 or kind(change) != kind(run[-1])):
            yield run
            run = []
        run.append(change)
    if run:
        yield run


def _counts(pairs: Mapping[str, tuple], show: Callable[[object], str]) -> Iterator[str]:
    return (f"{name}: {show(old)} -> {show(new)}" for name, (old, new) in pairs.items())
