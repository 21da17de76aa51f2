"""Slots, lengths and rings from a hostile or buggy caller, beside others who hold pages.

Ann and Bob are at work while Mallory calls whatever she likes. What she names may be negative,
huge, past the pool, padding, named before, free, queued, unmapped or her own. It is refused and
counted as plain Python says, and the pages of Ann and Bob, their mappings and their holders stay
as they were bit for bit.

She never names a page of theirs here: without owner tags nothing in a slot says whose it is, and
`test_a_page_of_somebody_else_cannot_be_told_apart` says so.
"""

import functools
from dataclasses import dataclass, field, replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import swa_jax as swa
from swa_jax.models import get_model

PAGE, WINDOW = 4, 8
SLOTS, ROWS, WIDTH = 8, 3, 4  # slots in a call, rows in a batch, pages in a row's table
INT_MAX, INT_MIN = 2**31 - 1, -(2**31)
CONFIGS = {
    "two pools": swa.PoolConfig(80, 64, PAGE, WINDOW),
    "one pool": swa.PoolConfig.pure_swa(80, PAGE, WINDOW),
    "rings": swa.PoolConfig.request_ring(80, 6, page_size=PAGE, sliding_window=WINDOW),
    "one budget": swa.PoolConfig.unified(
        100 * PAGE * get_model("gpt-oss-20b").full_bytes_per_token,
        get_model("gpt-oss-20b"),
        PAGE,
        sliding_window=WINDOW,
    ),
}
MORE = ("one pool", "one budget")
FREES = ("free", "free_swa", "free_full", "free_swa_grouped", "free_segment", "free_swa_segment")
LISTS = (*FREES, "share", "clear_full_to_swa_mapping")
GRANTS = ("alloc_extend", "alloc_extend_swa_tail", "alloc_decode", "copy_on_write")
OTHERS = ("alloc", "free_out_of_window", "set_full_to_swa_mapping", "free_group_begin")
READS = ("translate_full_to_swa", "page_tables", "window_page_tables")
RINGS = ("ring_acquire", "ring_release", "ring_slots")


@dataclass
class Record:
    """Who holds what, in plain Python: full pages in order, and rings."""

    pages: dict[str, list[int]] = field(default_factory=dict)
    rings: dict[str, int] = field(default_factory=dict)

    def others(self) -> list[int]:
        return sorted({page for who in ("ann", "bob") for page in self.pages[who]})

    def slots(self, who: str) -> list[int]:
        return [page * PAGE for page in self.pages[who]]


@functools.cache
def at_work(kind: str) -> tuple[swa.AllocatorState, Record]:
    """Ann with three pages, Bob on the first of them and two of his own, Mallory with four."""
    state, record = swa.init(CONFIGS[kind]), Record()
    lens = {"ann": 10, "bob": 7, "mallory": 15}
    for who, length in lens.items():
        state, grant = swa.alloc_extend(state, [0] * ROWS, [length, 0, 0], [-1] * ROWS, capacity=16)
        assert grant.ok
        slots = np.asarray(grant.slots[:length])
        record.pages[who] = list(dict.fromkeys((slots // PAGE).tolist()))
    state = swa.share(state, padded([record.pages["ann"][0] * PAGE]))
    record.pages["bob"].insert(0, record.pages["ann"][0])
    if state.config.has_rings:
        state, granted = swa.ring_acquire(state, [0] * ROWS)
        record.rings = dict(zip(lens, np.asarray(granted.rings).tolist(), strict=True))
    else:
        # Bob has left a window; one page of Mallory's has no SWA side.
        state = swa.free_swa(state, padded(record.slots("mallory")[:1]))
    assert not any(swa.faults(state).values())
    swa.check(state)
    return state, record


def padded(slots, width=SLOTS):
    return jnp.asarray([*slots, *[0] * (width - len(slots))], jnp.int32)


def kept(state: swa.AllocatorState, record: Record) -> list[np.ndarray]:
    """Everything that the state says of Ann's and Bob's pages and rings."""
    pages = np.asarray(record.others())
    sides = np.asarray(state.full_to_swa)[pages]
    if state.config.has_rings:
        sides = np.asarray([record.rings["ann"], record.rings["bob"]])
    return [
        np.asarray(state.full.holders)[pages],
        np.asarray(state.full_to_swa)[pages],
        np.asarray(state.swa.holders)[sides],
    ]


# ---- what Mallory may name ---------------------------------------------------------------------


def names(state: swa.AllocatorState, record: Record) -> list[int]:
    """Slots that are not Ann's or Bob's: nobody's, nowhere, padding, and her own."""
    top = state.config.full_tokens + PAGE
    others = set(record.others())
    pages = [page for page in range(1, top // PAGE) if page not in others]
    inside = [page * PAGE + offset for page in pages for offset in (0, PAGE - 1)]
    nowhere = [top, top + 1, -1, -PAGE, -top, INT_MAX, INT_MAX - 1, INT_MIN, INT_MIN + 1]
    own = [page * PAGE + offset for page in record.pages["mallory"] for offset in range(PAGE)]
    return [0, 1, PAGE - 1] * 3 + nowhere * 3 + own * 2 + inside


PICK = st.integers(0, 10**6)
NUMBER = st.sampled_from(
    [0, 1, 2, 3, 5, 8, 15, 16, 17, 40, -1, -5, INT_MAX, INT_MIN]
) | st.integers(0, 24)
CALL = st.tuples(
    st.sampled_from(LISTS + GRANTS + OTHERS + READS + RINGS),
    st.lists(PICK, min_size=SLOTS, max_size=SLOTS),
    st.lists(NUMBER, min_size=3 * ROWS, max_size=3 * ROWS),
)


# ---- what plain Python expects -----------------------------------------------------------------


def place_faults(state: swa.AllocatorState, name: str, slots: list[int]) -> dict[str, int]:
    """Places out of the pool and pages that nobody holds, of a call that takes a list of slots."""
    top = state.config.full_tokens + PAGE
    held = np.asarray(state.full.holders) > 0
    looked = slots[::PAGE] if name.endswith("segment") else slots
    inside = [slot for slot in looked if 0 <= slot < top]
    straight = [slot for slot in inside if slot < PAGE or slot % PAGE == 0]
    of_pages = straight if name.endswith("segment") else inside
    return {
        "out_of_range": len(looked) - len(inside),
        "misaligned": len(inside) - len(straight) if name.endswith("segment") else 0,
        "double_free": len({slot // PAGE for slot in of_pages if not held[slot // PAGE]}),
    }


def ill_formed(state, name, rows, last) -> list[bool]:
    """Rows of a grant that plain arithmetic refuses, whatever else is asked."""
    top = state.config.full_tokens + PAGE
    prefix, seq, tail = rows
    if name == "alloc_decode":
        prefix, tail = [length - 1 for length in seq], [0] * ROWS
    if name == "copy_on_write":
        seq, tail = prefix, [0] * ROWS
    bad = []
    for start, end, loc, swa_tail in zip(prefix, seq, last, tail, strict=True):
        wrong = start < 0 or end < start
        wrong |= name == "alloc_extend_swa_tail" and not 0 <= swa_tail <= end - start
        part = start % PAGE and (end > start or name == "copy_on_write")
        wrong |= bool(part) and not 0 <= loc < top
        bad.append(wrong)
    return bad


def same_but_faults(before, after) -> bool:
    pairs = zip(
        jax.tree.leaves(replace(before, faults=after.faults)), jax.tree.leaves(after), strict=True
    )
    return all(np.array_equal(old, new) for old, new in pairs)


# ---- one call ----------------------------------------------------------------------------------


class Mallory:
    """Calls with what she drew, and compares what comes of it with the record."""

    def __init__(self, kind: str) -> None:
        self.state, self.record = at_work(kind)
        self.record = Record({**self.record.pages}, {**self.record.rings})
        self.before = kept(self.state, self.record)
        self.names = names(self.state, self.record)

    def call(self, name: str, picks: list[int], numbers: list[int]) -> None:
        slots = [self.names[pick % len(self.names)] for pick in picks]
        rows = [numbers[at : at + ROWS] for at in range(0, 3 * ROWS, ROWS)]
        config = self.state.config
        if name in RINGS and not config.has_rings:
            return
        if config.has_rings and (name in READS or "mapping" in name):
            return
        if config.pure_swa_pool and "mapping" in name:
            return
        before = self.state
        after = self._after(name, slots, rows)
        self.state = before if after is None else after
        self._verify(before, name)

    def _after(self, name, slots, rows) -> swa.AllocatorState | None:
        if name in LISTS:
            return self._list(name, slots)
        if name in GRANTS:
            return self._grant(name, rows, slots[:ROWS])
        return getattr(self, f"_{name}")(slots, rows)

    def _counts(self, before, after, **counts) -> None:
        """These kinds of fault were counted exactly so often."""
        added = {
            kind: count - swa.faults(before)[kind] for kind, count in swa.faults(after).items()
        }
        for kind, count in counts.items():
            assert added[kind] == count, (kind, added, counts)

    def _list(self, name: str, slots: list[int]) -> swa.AllocatorState:
        after = getattr(swa, name)(self.state, padded(slots))
        self._counts(self.state, after, **place_faults(self.state, name, slots))
        return after

    def _grant(self, name, rows, last) -> swa.AllocatorState:
        bad = ill_formed(self.state, name, rows, last)
        prefix, seq, tail = rows
        if name == "alloc_decode":
            after, grant = swa.alloc_decode(self.state, seq, last)
            bad = [length < 1 or wrong for length, wrong in zip(seq, bad, strict=True)]
        elif name == "copy_on_write":
            after, grant = swa.copy_on_write(self.state, prefix, last)
        elif name == "alloc_extend":
            after, grant = swa.alloc_extend(self.state, prefix, seq, last, capacity=16)
        else:
            after, grant = swa.alloc_extend_swa_tail(
                self.state, prefix, seq, last, tail, capacity=16
            )
        if not grant.ok:
            assert same_but_faults(self.state, after)
            short = int(grant.full_short) + int(grant.swa_short)
            assert bool((after.faults != self.state.faults).any()) or short
            return after
        assert not any(bad)
        assert swa.faults(after) == swa.faults(self.state)
        self._takes(grant.target if isinstance(grant, swa.PageCopies) else grant.slots)
        return after

    def _takes(self, slots) -> None:
        """What was granted was nobody's: no page of Ann's or Bob's, and no padding page."""
        pages = {slot // PAGE for slot in np.asarray(slots).reshape(-1).tolist() if slot}
        assert not pages & {0, *self.record.others()}

    def _alloc(self, slots, rows) -> swa.AllocatorState:
        count = rows[0][0]
        after, grant = swa.alloc(self.state, count, capacity=16)
        if not 0 <= count <= 16 or count % PAGE:
            assert not grant.ok
        if not grant.ok:
            assert same_but_faults(self.state, after)
        self._takes(grant.slots)
        return after

    def _free_out_of_window(self, slots, rows) -> swa.AllocatorState:
        table = np.asarray((slots + slots)[: ROWS * WIDTH]).reshape(ROWS, WIDTH)
        seq, evicted, _ = rows
        after, new = swa.free_out_of_window(self.state, table, seq, evicted, stride=PAGE)
        bad = [done < 0 or done % PAGE != 0 for done in evicted]
        assert [int(n) for n, wrong in zip(new, bad, strict=True) if wrong] == [
            done for done, wrong in zip(evicted, bad, strict=True) if wrong
        ]
        self._counts(self.state, after, misaligned=sum(d >= 0 and d % PAGE != 0 for d in evicted))
        return after

    def _set_full_to_swa_mapping(self, slots, rows) -> swa.AllocatorState:
        """To SWA slots that are not Ann's or Bob's either."""
        theirs = set(self.before[1].tolist())
        top = self.state.config.swa_tokens + PAGE
        others = [
            slot
            for slot in (3, top, -1, INT_MAX, INT_MIN, *range(PAGE, top))
            if not 0 < slot // PAGE < top // PAGE or slot // PAGE not in theirs
        ]
        to = [others[(slot * 7 + rows[0][0]) % len(others)] for slot in slots]
        return swa.set_full_to_swa_mapping(self.state, padded(slots), padded(to))

    def _free_group_begin(self, slots, rows) -> swa.AllocatorState:
        if rows[0][0] % 2:
            return swa.free_group_end(self.state)
        after = swa.free_group_begin(self.state)
        self._counts(self.state, after, nested_group=int(self.state.group_open))
        return after

    def _translate_full_to_swa(self, slots, rows) -> None:
        top = self.state.config.full_tokens + PAGE
        found = np.asarray(swa.translate_full_to_swa(self.state, padded(slots))).tolist()
        mapping = np.asarray(self.state.full_to_swa)
        for slot, side in zip(slots, found, strict=True):
            page = mapping[slot // PAGE] if 0 <= slot < top else 0
            assert side == (-1 if slot == -1 else page * PAGE + slot % PAGE if page else 0)

    def _page_tables(self, slots, rows) -> None:
        table = np.asarray((slots + slots)[: ROWS * WIDTH]).reshape(ROWS, WIDTH)
        found = swa.page_tables(self.state, table, rows[0], rows[1])
        self._reads(found.full_page_indices, found.swa_page_indices)

    def _window_page_tables(self, slots, rows) -> None:
        table = np.asarray((slots + slots)[: ROWS * WIDTH]).reshape(ROWS, WIDTH)
        found = swa.window_page_tables(self.state, table, rows[0], rows[1], max_queries=4)
        self._reads(None, found.swa_page_indices)

    def _reads(self, full, sides) -> None:
        """Tables lead to padding or into the pool, and never to Ann or Bob."""
        if full is not None:
            assert set(np.asarray(full).reshape(-1).tolist()).isdisjoint(self.record.others())
            assert 0 <= int(full.min()) <= int(full.max()) <= self.state.config.full_pages
        theirs = set(self.before[1].tolist()) - {0}
        assert set(np.asarray(sides).reshape(-1).tolist()).isdisjoint(theirs)
        assert 0 <= int(sides.min()) <= int(sides.max()) <= self.state.config.swa_pages

    def _rings(self, numbers) -> list[int]:
        theirs = {self.record.rings["ann"], self.record.rings["bob"]}
        return [0 if number in theirs else number for number in numbers]

    def _ring_acquire(self, slots, rows) -> swa.AllocatorState:
        rings = self._rings(rows[0])
        after, granted = swa.ring_acquire(self.state, rings)
        held = np.asarray(self.state.swa.holders) > 0
        bad = [ring and not (0 < ring < held.size and held[ring]) for ring in rings]
        self._counts(self.state, after, out_of_range=sum(map(bool, bad)))
        if not granted.ok:
            assert same_but_faults(self.state, after)
            assert np.asarray(granted.rings).tolist() == rings
        else:
            new = np.asarray(granted.rings).tolist()
            assert {self.record.rings["ann"], self.record.rings["bob"]}.isdisjoint(new)
        return after

    def _ring_release(self, slots, rows) -> swa.AllocatorState:
        rings = self._rings(rows[0])
        after = swa.ring_release(self.state, rings)
        held = np.asarray(self.state.swa.holders) > 0
        outside = [ring < 0 or ring >= held.size for ring in rings]
        inside = [ring for ring, out in zip(rings, outside, strict=True) if ring and not out]
        good = {ring for ring in inside if held[ring]}
        self._counts(
            self.state, after, out_of_range=sum(outside), double_free=len(inside) - len(good)
        )
        return after

    def _ring_slots(self, slots, rows) -> None:
        config = self.state.config
        found = np.asarray(swa.ring_slots(config, rows[0], rows[1], rows[2]))
        for ring, place, length, slot in zip(*rows, found.tolist(), strict=True):
            size = config.swa_unit_tokens
            there = 0 < ring <= config.swa_units and 0 <= place < length <= place + size
            assert slot == (PAGE + (ring - 1) * size + place % size if there else 0)

    def _verify(self, before: swa.AllocatorState, name: str) -> None:
        for old, new in zip(self.before, kept(self.state, self.record), strict=True):
            np.testing.assert_array_equal(old, new, err_msg=name)
        laws = {
            law for law, holds in jax.device_get(swa.invariants(self.state)).items() if not holds
        }
        assert not laws, (name, laws)
        assert bool((self.state.faults >= before.faults).all())


KINDS = ["two pools", "rings", *(pytest.param(kind, marks=pytest.mark.long) for kind in MORE)]


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=settings().max_examples // 2)
@given(calls=st.lists(CALL, min_size=4, max_size=12))
def test_whatever_mallory_calls_ann_and_bob_keep_what_they_hold(kind, calls):
    mallory = Mallory(kind)
    for name, picks, numbers in calls:
        mallory.call(name, picks, numbers)


def test_every_call_is_among_them():
    """What takes slots, lengths, rings or counts, of the public names; the rest only reads."""
    asks = set(LISTS + GRANTS + OTHERS + READS + RINGS) | {"rebalance"}
    no_choice = {"init", "clear", "check", "faults", "snapshot", "state_bytes", "invariants"}
    no_choice |= {"step_invariants", "free_group_end", "frontier", "unified_available"}
    no_choice |= {"available_size", "full_available_size", "swa_available_size"}
    no_choice |= {"hand_over", "owner_of"}  # in test_owners.py
    functions = {name for name in swa.__all__ if name[0].islower()}
    assert functions == asks | no_choice


def test_a_page_of_somebody_else_cannot_be_told_apart():
    """A slot does not say who names it: the one share that Ann had is given up for her."""
    state, record = at_work("two pools")
    own = record.pages["ann"][1]
    after = swa.free(state, padded([own * PAGE]))
    assert swa.faults(after) == swa.faults(state)
    assert int(after.full.holders[own]) == 0
    # A page that Bob holds too loses one share, and only one: no call takes both.
    both = record.pages["ann"][0]
    once = swa.free(state, padded([both * PAGE] * SLOTS))
    assert int(once.full.holders[both]) == 1
    assert int(once.full_to_swa[both]) == int(state.full_to_swa[both])
    # And what several hold is not one caller's to unmap, to move or to write into.
    for refused in (
        swa.clear_full_to_swa_mapping(state, padded([both * PAGE])),
        swa.set_full_to_swa_mapping(state, padded([both * PAGE]), padded([9 * PAGE])),
        swa.alloc_decode(state, [3, 0, 0], [both * PAGE + 1, 0, 0], [True, False, False])[0],
    ):
        assert swa.faults(refused)["still_mapped"] == 1
        assert same_but_faults(state, refused)


@pytest.mark.parametrize("full", [0, 3, -1, INT_MAX, INT_MIN])
@pytest.mark.parametrize("of_swa", [0, 3, INT_MAX, INT_MIN])
def test_any_split_that_is_asked_for_leaves_pages_where_they_are(full, of_swa):
    state, record = at_work("one budget")
    after = swa.rebalance(state, full, of_swa)
    for old, new in zip(kept(state, record), kept(after, record), strict=True):
        np.testing.assert_array_equal(old, new)
    assert all(jax.device_get(swa.invariants(after)).values())
    assert swa.faults(after) == swa.faults(state)
