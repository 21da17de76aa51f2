"""What a call must change, worked out on the host from the state before it and its arguments.

Plain loops over the pages that it names, in the words of the docstrings: nothing here is shared
with the programs that run on the device.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import jax
import numpy as np

from swa_jax.config import PoolConfig
from swa_jax.debug.own_arguments import own_arguments
from swa_jax.debug.play import Step
from swa_jax.debug.window_law import row_moves
from swa_jax.faults import FOREIGN
from swa_jax.state import PAD_PAGE, AllocatorState

_MOST = 2**31 - 1


class View(NamedTuple):
    """What is read of a state, on the host."""

    full: np.ndarray  # int32[F+1] holders
    swa: np.ndarray  # int32[S+1] holders
    mapping: np.ndarray  # int32[F+1]


def view(state: AllocatorState) -> View:
    """Reads a state. Waits for the device."""
    return View(*jax.device_get((state.full.holders, state.swa.holders, state.full_to_swa)))


@dataclass
class Wanted:
    """What a state must be after a call. Starts as the state before it."""

    config: PoolConfig
    full: np.ndarray  # int32[F+1] holders
    swa: np.ndarray
    mapping: np.ndarray
    faults: dict[str, int] = field(default_factory=dict)  # that it adds, by kind

    def fault(self, kind: str, count: int = 1) -> None:
        """Counts misuse."""
        self.faults[kind] = self.faults.get(kind, 0) + count

    def pages(self, slots: np.ndarray, *, segment: bool = False) -> list[int]:
        """Full pages that slots name, each once; what lies outside is counted as misuse."""
        size, found = self.config.page_size, dict[int, None]()
        for slot in slots[:: size if segment else 1].tolist():
            if not 0 <= slot < self.config.full_tokens + size:
                self.fault("out_of_range")
            elif slot >= size and segment and slot % size:
                self.fault("misaligned")
            elif slot >= size:
                found[slot // size] = None
        return list(found)

    def held(self, slots: np.ndarray, *, segment: bool = False) -> Iterator[int]:
        """Those that somebody holds; the others are counted as freed twice."""
        for page in self.pages(slots, segment=segment):
            if self.full[page] > 0:
                yield page
            else:
                self.fault("double_free")


def wanted(step: Step, before: View) -> Wanted | None:
    """What a call must leave, None where that hangs on the order in which pages are granted.

    Args:
      step: a call that was made.
      before: the state before it.
    """
    rule = RULES.get(step.call.name)
    if rule is None or not _can_be_told(step, before):
        return None
    made = Wanted(step.before.config, before.full.copy(), before.swa.copy(), before.mapping.copy())
    own, foreign = own_arguments(step, before.full)
    if own is None:
        return None
    made.fault(FOREIGN, foreign)
    rule(made, own)
    return made


def _can_be_told(step: Step, before: View) -> bool:
    """Whether the mapping is one to one. A damaged one may ask two things of one page."""
    earlier = step.arguments.get("as_of")
    tables = [before.mapping, *([] if earlier is None else [np.asarray(earlier.full_to_swa)])]
    for table in tables:
        to = table[table != 0]
        if np.unique(to).size < to.size or np.any((to < 0) | (to >= before.swa.size)):
            return False
        if step.before.config.has_rings and to.size:
            return False
    return bool(np.all(before.full >= 0) and np.all(before.swa >= 0) and not before.mapping[0])


def _free(want: Wanted, step: Step, *, segment: bool = False) -> None:
    """One share of each page. The SWA side goes as far as the full side."""
    for page in want.held(step.arguments["slots"], segment=segment):
        left, to = want.full[page] - 1, want.mapping[page]
        want.full[page] = left
        if to and want.swa[to] > left:
            want.swa[to] = left
        if not left:
            want.mapping[page] = 0


def _free_segment(want: Wanted, step: Step) -> None:
    _free(want, step, segment=True)


def _free_full(want: Wanted, step: Step) -> None:
    for page in want.held(step.arguments["slots"]):
        to = want.mapping[page]
        if to and max(want.swa[to], 1) >= want.full[page]:
            want.fault("still_mapped")
        else:
            want.full[page] -= 1


def _free_swa(want: Wanted, step: Step, *, segment: bool = False) -> None:
    if "as_of" in step.arguments:
        _free_swa_as_of(want, step)
        return
    for page in want.held(step.arguments["slots"], segment=segment):
        if not want.mapping[page] and not want.config.has_rings:
            want.fault("unmapped")
        _leave_swa(want, page, 1)


def _free_swa_segment(want: Wanted, step: Step) -> None:
    _free_swa(want, step, segment=True)


def _leave_swa(want: Wanted, page: int, shares: int) -> None:
    """So many shares of a page's SWA side; with the last one the mapping goes."""
    to = want.mapping[page]
    if not to:
        return
    left = max(want.swa[to] - shares, 0)
    if want.config.pure_swa_pool and want.swa[to] and left:
        want.full[page] = left
    want.swa[to] = left
    if not left:
        want.mapping[page] = 0


def _free_swa_as_of(want: Wanted, step: Step) -> None:
    earlier, now = view(step.arguments["as_of"]), want.mapping.copy()
    swa_now = want.swa.copy()
    for page in want.pages(step.arguments["slots"]):
        to = earlier.mapping[page]
        if earlier.full[page] <= 0:
            want.fault("double_free")
        elif not to:
            want.fault("unmapped", 0 if want.config.has_rings else 1)
        else:
            if not swa_now[to]:
                want.fault("double_free")
            here = now[page] == to
            if not here and to in now:
                continue  # another page has it now
            left = max(swa_now[to] - 1, 0)
            want.swa[to] = left
            if want.config.pure_swa_pool and left:
                want.full[page] = left
            if here and not left:
                want.mapping[page] = 0


def _out_of_window(want: Wanted, step: Step) -> None:
    table, size = step.arguments["req_to_token"], want.config.page_size
    stride, slots = step.arguments.get("stride", 1), []
    for row, start, new, fault in row_moves(step):
        if fault is not None:
            want.fault(fault)
        else:
            slots += [int(table[row, token // stride]) for token in range(start, new, size)]
    shares: dict[int, int] = {}
    for slot in slots:
        if slot >= size and slot < want.config.full_tokens + size:
            shares[slot // size] = shares.get(slot // size, 0) + 1
    for page in want.held(np.asarray(slots, np.int64)):
        _leave_swa(want, page, shares[page])


def _share(want: Wanted, step: Step) -> None:
    slots, size = step.arguments["slots"], want.config.page_size
    live = step.arguments.get("live", np.ones(slots.shape, bool))
    speaks: dict[int, bool] = {}
    for slot, mark in zip(slots.tolist(), live.tolist(), strict=True):
        speaks.setdefault(slot // size, mark)
    for page in want.held(slots):
        if want.full[page] == _MOST:
            want.fault("bad_length")
            continue
        if speaks[page] or not want.config.pure_swa_pool:
            want.full[page] += 1
        to = want.mapping[page]
        if speaks[page] and to and want.swa[to] > 0:
            want.swa[to] += 1


def _clear_mapping(want: Wanted, step: Step) -> None:
    for page in want.held(step.arguments["full_slots"]):
        if want.full[page] > 1 and want.mapping[page]:
            want.fault("still_mapped")
        else:
            want.mapping[page] = 0


def _set_mapping(want: Wanted, step: Step) -> None:
    pairs = list(_straight_pairs(want, step))
    by_full: dict[int, int] = {}
    by_swa: dict[int, int] = {}
    for page, to in pairs:
        by_full.setdefault(page, to)
        by_swa.setdefault(to, page)
    joined = {page: to for page, to in pairs if by_full[page] == to and by_swa[to] == page}
    want.fault("misaligned", sum(joined.get(page) != to for page, to in pairs))
    for to in joined.values():
        want.mapping[want.mapping == to] = 0
    for page, to in joined.items():
        want.mapping[page] = to


def _straight_pairs(want: Wanted, step: Step) -> Iterator[tuple[int, int]]:
    """Pages of the places that name two lone holders' pages at one offset."""
    size, given = want.config.page_size, step.arguments
    for slot, swa_slot in zip(
        given["full_slots"].tolist(), given["swa_slots"].tolist(), strict=True
    ):
        if 0 <= slot < size and 0 <= swa_slot < size:
            continue
        holders = (
            _holders_at(want.full, slot, want.config.full_tokens, size),
            _holders_at(want.swa, swa_slot, want.config.swa_tokens, size),
        )
        if not all(holders):
            want.fault("out_of_range")
        elif max(holders) > 1:
            want.fault("still_mapped")
        elif slot % size != swa_slot % size:
            want.fault("misaligned")
        else:
            yield slot // size, swa_slot // size


def _holders_at(holders: np.ndarray, slot: int, tokens: int, size: int) -> int:
    return int(holders[slot // size]) if size <= slot < tokens + size else 0


def _ring_release(want: Wanted, step: Step) -> None:
    for ring in step.arguments["rings"].tolist():
        if not 0 <= ring < want.swa.size:
            want.fault("out_of_range")
        elif ring and not want.swa[ring]:
            want.fault("double_free")
        elif ring:
            want.swa[ring] = 0


def _group_begin(want: Wanted, step: Step) -> None:
    want.fault("nested_group", int(step.before.group_open))


def _nothing(want: Wanted, step: Step) -> None:
    """It moves no page from or to a holder."""


def _hand_over(want: Wanted, step: Step) -> None:
    """Who holds what stays as it is."""
    list(want.held(step.arguments["slots"]))


RULES: dict[str, Callable[[Wanted, Step], None]] = {
    "free": _free,
    "free_segment": _free_segment,
    "free_full": _free_full,
    "free_swa": _free_swa,
    "free_swa_segment": _free_swa_segment,
    "free_swa_grouped": _free_swa,
    "free_out_of_window": _out_of_window,
    "free_group_begin": _group_begin,
    "free_group_end": _nothing,
    "share": _share,
    "set_full_to_swa_mapping": _set_mapping,
    "clear_full_to_swa_mapping": _clear_mapping,
    "ring_release": _ring_release,
    "hand_over": _hand_over,
    "rebalance": _nothing,
}
assert PAD_PAGE == 0  # the pages of padding slots are told by their number being below page_size
