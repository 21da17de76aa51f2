"""Pages under a count: forks, copies on write, and who may release what."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compare import assert_bitwise_equal, config_of, counts, fault_counts, ints
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from oracle import Sizes
from pair import compiled
from share_family import ROWS, WIDTH, Family
from unified_walk import unified_config

import swa_jax as swa

PAGES = Sizes(64, 40, 4, window=6)
TOKENS = Sizes(24, 16, 1, window=4)
PURE = Sizes(40, 40, 4, window=6, pure=True)
LONGEST = 28


# ---- any program of owners ------------------------------------------------------------------

_who = st.integers(0, 7)
_some = st.lists(_who, min_size=1, max_size=ROWS, unique=True)


class FamilyMachine(RuleBasedStateMachine):
    """Subclasses name the sizes."""

    sizes = PAGES

    def __init__(self) -> None:
        super().__init__()
        self.family = Family(self.sizes)

    def _rows(self, who: list[int], room: int) -> list[int]:
        owners = self.family.owners
        rows = dict.fromkeys(each % len(owners) for each in who) if owners else {}
        return [each for each in rows if len(owners[each].text) + room <= LONGEST]

    @rule(length=st.integers(1, 9))
    def start(self, length):
        if len(self.family.owners) < 3:
            self.family.start(length)

    @rule(who=_who, drop=st.integers(0, 5), times=st.integers(1, 3))
    def fork(self, who, drop, times):
        for _ in range(times):
            if self.family.owners and len(self.family.owners) < 8:
                self.family.fork(who % len(self.family.owners), max(0, drop - 2))

    @rule(who=_some, times=st.integers(1, 4))
    def decode(self, who, times):
        for _ in range(times):
            rows = self._rows(who, 1)
            if rows:
                self.family.grow(rows, [1] * len(rows), decode=True)

    @rule(who=_some, more=st.integers(1, 5))
    def extend(self, who, more):
        rows = self._rows(who[:2], more + 1)
        if rows:
            self.family.grow(rows, [more + i for i in range(len(rows))])

    @rule(who=_some)
    def leave(self, who):
        rows = self._rows(who, -LONGEST)
        if rows:
            self.family.leave(rows)

    @rule(who=_who)
    def leave_by_hand(self, who):
        if self.family.owners:
            self.family.leave_by_hand(who % len(self.family.owners))

    @rule(who=_who, swa_first=st.booleans())
    def finish(self, who, swa_first):
        if self.family.owners:
            self.family.finish(who % len(self.family.owners), swa_first=swa_first)

    @rule(begin=st.integers(0, 2))
    def group(self, begin):
        self.family.group(begin=begin == 0)

    @rule(slots=st.lists(st.integers(-2, 80), max_size=6))
    def share_nothing(self, slots):
        """Pages that nobody holds, padding, and slots outside the pool."""
        held = self.family.oracle.full
        self.family.share([slot for slot in slots if slot // self.sizes.page_size not in held])

    @invariant()
    def laws(self):
        self.family.verify()

    def teardown(self):
        while self.family.owners:
            self.family.finish(0)
        self.family.group(begin=False)
        self.family.verify()
        self.family.all_gone()


# Shrinking a walk of many steps takes minutes: look at the walk as it was found.
PHASES = (Phase.explicit, Phase.reuse, Phase.generate)


@pytest.mark.parametrize(
    "sizes",
    [
        pytest.param(PAGES, id="pages"),
        pytest.param(TOKENS, id="tokens", marks=pytest.mark.long),
        pytest.param(PURE, id="pure"),
    ],
)
def test_owners_that_fork_agree_with_the_oracle(sizes):
    machine = type("Machine", (FamilyMachine,), {"sizes": sizes})
    case = machine.TestCase
    case.settings = settings(
        max_examples=max(settings().max_examples // 2, 10),
        stateful_step_count=25,
        deadline=None,
        phases=PHASES,
        report_multiple_bugs=False,
    )
    case("runTest").runTest()


# ---- copies on write ------------------------------------------------------------------------


def siblings(sizes: Sizes, length: int, count: int) -> Family:
    """`count` owners of one text."""
    family = Family(sizes)
    assert family.start(length)
    for _ in range(count - 1):
        assert family.fork(0)
    family.verify()
    return family


def moved(family: Family, who: list[int]) -> int:
    """How many of these owners went over to a page of their own."""
    before = [family.owners[each].slots[-1] for each in who]
    assert family.copy_on_write(who)
    family.verify()
    return sum(family.owners[w].slots[-1] != at for w, at in zip(who, before, strict=True))


def test_of_n_holders_that_write_the_last_one_keeps_the_page():
    family = siblings(PAGES, 6, 4)
    assert moved(family, [0, 1, 2, 3]) == 3
    assert moved(family, [0, 1, 2, 3]) == 0
    assert family.grow([0, 1, 2, 3], [1, 1, 1, 1], decode=True)
    family.verify()


def test_rows_that_do_not_take_part_keep_reading_the_old_page():
    family = siblings(PAGES, 6, 3)
    assert moved(family, [0, 1]) == 2
    assert moved(family, [2]) == 0
    assert family.grow([0, 1, 2], [2, 2, 2])
    family.verify()


@pytest.mark.parametrize("sizes", [TOKENS, PAGES])
def test_a_full_last_page_is_shared_for_good(sizes):
    family = siblings(sizes, 8, 3)
    held = len(family.oracle.full)
    assert moved(family, [0, 1, 2]) == 0
    assert family.grow([0, 1, 2], [1, 1, 1], decode=True)
    assert len(family.oracle.full) == held + 3
    family.verify()


def test_a_shorter_fork_and_the_longer_one_part_at_their_page():
    family = siblings(PAGES, 7, 1)
    assert family.fork(0, 2)
    assert moved(family, [1]) == 1
    assert family.grow([0, 1], [3, 3])
    family.verify()


@pytest.mark.parametrize("lacks", ["full", "swa"])
def test_copies_are_granted_all_or_none(lacks):
    family = siblings(PAGES, 6, 3)
    if lacks == "full":
        for who in (3, 4):
            assert family.start(12)
            family.leave([who])
            assert family.grow([who], [12])
            family.leave([who])
        assert family.start(1)
    else:
        for length in (8, 8, 8, 4):
            assert family.start(length)
    left = family.oracle.left()
    assert left[lacks == "swa"] == 1 < left[lacks == "full"]
    before = family.state
    assert not family.copy_on_write([0, 1, 2])  # two are wanted
    assert_bitwise_equal(family.state, before)
    family.verify()
    assert moved(family, [0]) == 1
    assert not family.copy_on_write([1, 2])
    family.finish(4)
    assert moved(family, [1, 2]) == 1


def test_a_page_without_an_swa_side_is_copied_without_one():
    state = swa.init(config_of(PAGES))
    state, grant = compiled("alloc_extend")(state, *rows4([0], [6], [-1]), capacity=12)
    state = compiled("free_swa")(state, ints(grant.slots[4:6].tolist(), WIDTH))
    state = compiled("share")(state, ints(grant.slots.tolist(), WIDTH))
    state, copies = compiled("copy_on_write")(state, *rows4([6], [int(grant.slots[5])]), on(1))
    assert copies.ok
    target = copies.target[0, :2].tolist()
    assert target == [int(copies.last_loc[0]) - 1, int(copies.last_loc[0])]
    assert np.asarray(swa.translate_full_to_swa(state, ints(target))).tolist() == [0, 0]
    swa.check(state)


# ---- what a holder gives up -----------------------------------------------------------------


def test_one_call_is_one_holder_whatever_it_names():
    family = siblings(PAGES, 7, 1)
    slots = family.owners[0].slots
    family.share([*slots, *slots, 0, 1])
    family.owners *= 2  # one more reads the same slots
    family.verify()
    family.owners.pop()
    family.free(slots * 2)
    family.verify()
    family.finish(0)
    family.all_gone()
    family.verify()


@pytest.mark.parametrize("first", [0, 1])
def test_an_swa_page_stays_for_the_last_window_and_goes_with_it(first):
    family = siblings(PAGES, 8, 2)
    assert family.grow([first], [8])
    family.leave([first])
    family.verify()  # the other one still finds its window
    left = family.oracle.left()
    assert family.grow([1 - first], [8])
    family.leave([1 - first])
    assert family.oracle.left() == (left[0] - 2, left[1] - 2 + 2)  # two pages more each, two left
    family.verify()


def test_who_left_its_window_does_not_take_the_swa_side_of_who_did_not():
    family = siblings(PAGES, 8, 2)
    assert family.grow([1], [8])
    family.leave([1])
    family.finish(1)  # held twice, live once: the one who goes has left
    family.verify()
    family.finish(0, swa_first=True)
    family.all_gone()


def test_rows_of_one_call_are_holders_of_their_own():
    family = siblings(PAGES, 12, 3)
    left = family.oracle.left()
    family.leave([0, 1])
    assert family.oracle.left() == left  # the third is not past them
    family.leave([2])
    assert family.oracle.left() == (left[0], left[1] + 1)
    family.verify()


def test_a_fork_of_a_fork_behind_a_window_comes_back_too():
    family = siblings(PAGES, 8, 2)
    assert family.grow([0], [8])
    family.leave([0])
    assert family.fork(0)  # gets a share in what the second still reads
    family.verify()
    family.leave([2])
    for _ in range(3):
        family.finish(0)
        family.verify()
    family.all_gone()


def test_shares_given_up_in_a_group_wait_for_its_end():
    family = siblings(PAGES, 6, 2)
    family.group(begin=True)
    family.finish(1)
    assert family.oracle.pending == [0, 0]
    family.finish(0)
    assert family.oracle.pending == [2, 2]
    family.verify()
    family.group(begin=False)
    family.verify()
    family.all_gone()


def test_segments_and_snapshots_give_up_one_share():
    state = swa.init(config_of(PAGES))
    state, grant = compiled("alloc")(state, jnp.int32(8), capacity=WIDTH)
    state = compiled("share")(state, grant.slots)
    then = state
    state = compiled("free_swa_segment")(state, grant.slots)
    assert state.swa.holders[1:3].tolist() == [1, 1]
    state = compiled("free_swa")(state, grant.slots, then)
    assert state.swa.holders[1:3].tolist() == [0, 0]
    assert not state.full_to_swa.any()
    for left in (1, 0):
        state = compiled("free_segment")(state, grant.slots)
        assert state.full.holders[1:3].tolist() == [left, left]
    assert counts(state) == (64, 40)
    assert not any(fault_counts(state).values())


# ---- misuse ---------------------------------------------------------------------------------


def rows4(*columns: list[int]) -> list[jax.Array]:
    return [ints(column, ROWS) for column in columns]


def on(count: int) -> jax.Array:
    return jnp.arange(ROWS) < count


def kinds(state, before) -> dict[str, int]:
    new, old = fault_counts(state), fault_counts(before)
    return {kind: new[kind] - old[kind] for kind in new if new[kind] > old[kind]}


def test_rows_in_a_shared_page_are_refused_until_they_copied():
    family = siblings(PAGES, 6, 2)
    last = family.owners[0].slots[-1]
    before = family.state
    after, grant = compiled("alloc_decode")(before, *rows4([7], [last]), on(1))
    assert not grant.ok
    assert kinds(after, before) == {"still_mapped": 1}
    assert_bitwise_equal(after, before, but_faults=True)
    asks = rows4([6, 6], [8, 9], [last, last])
    after, grant = compiled("alloc_extend")(before, *asks, capacity=12)
    assert not grant.ok
    assert kinds(after, before) == {"still_mapped": 2}
    assert_bitwise_equal(after, before, but_faults=True)


@pytest.mark.parametrize(
    ("length", "last", "fault"),
    [
        (-1, 5, {"bad_length": 1}),
        (-(2**31), 5, {"bad_length": 1}),
        (6, -1, {"out_of_range": 1}),
        (6, 1, {"out_of_range": 1}),  # padding
        (6, 33, {"out_of_range": 1}),  # free
        (6, 68, {"out_of_range": 1}),  # past the pool
        (6, 2**31 - 1, {"out_of_range": 1}),
        (6, 8, {"misaligned": 1}),
        (8, -1, {}),  # nothing is filled in part, so nothing is looked at
        (2**31 - 4, 2**31 - 1, {}),
    ],
)
def test_a_row_that_cannot_be_refuses_the_batch(length, last, fault):
    family = siblings(PAGES, 6, 2)
    before, good = family.state, family.owners[0].slots[-1]
    after, copies = compiled("copy_on_write")(
        before, *rows4([6, length, 6], [good, last, -5]), on(2)
    )
    assert bool(copies.ok) == (not fault)
    assert kinds(after, before) == fault
    if fault:
        assert_bitwise_equal(after, before, but_faults=True)
        assert not copies.source.any()
        assert copies.last_loc.tolist() == [good, last, -5, 0]


def test_the_padding_page_and_free_pages_are_not_shared():
    family = Family(PAGES)
    family.share([0, 3, 40, 41, 67, 68, -1, 2**31 - 1])
    family.verify()
    assert (family.oracle.faults["double_free"], family.oracle.faults["out_of_range"]) == (2, 3)


def test_a_page_has_no_more_holders_than_an_int32_counts():
    most = 2**31 - 1
    family = siblings(PAGES, 4, 1)

    def held_by(count, of_swa):
        full, side = family.state.full, family.state.swa
        return replace(
            family.state,
            full=replace(full, holders=full.holders.at[1].set(count)),
            swa=replace(side, holders=side.holders.at[1].set(of_swa)),
        )

    slots = ints(family.owners[0].slots, WIDTH)
    before = held_by(most, most)
    after = compiled("share")(before, slots)
    assert kinds(after, before) == {"bad_length": 1}
    assert_bitwise_equal(after, before, but_faults=True)
    after = compiled("share")(held_by(most - 1, most - 1), slots)
    assert_bitwise_equal(after, before)
    assert compiled("free")(after, slots).full.holders[1] == most - 1


def test_shared_pages_are_not_one_callers_to_map():
    family = siblings(PAGES, 8, 2)
    before, slot = family.state, family.owners[0].slots[0]
    for after in (
        swa.clear_full_to_swa_mapping(before, [slot]),
        swa.set_full_to_swa_mapping(before, [slot], [8]),
    ):
        assert kinds(after, before) == {"still_mapped": 1}
        assert_bitwise_equal(after, before, but_faults=True)


def test_wrong_host_input_is_named():
    state = swa.init(config_of(PAGES))
    with pytest.raises(ValueError, match="slots must hold integers, got dtype float"):
        swa.share(state, np.array([1.0]))
    with pytest.raises(ValueError, match=r"slots must be an array of 1 dimension.*\(1, 1\)"):
        swa.share(state, [[4]])
    with pytest.raises(ValueError, match="slots must fit int32"):
        swa.share(state, [2**31])
    with pytest.raises(ValueError, match=r"slots and live must agree in length.*'live': 2"):
        swa.share(state, [4], [True, False])
    with pytest.raises(ValueError, match="live must be a bool array"):
        swa.share(state, [4], np.array([1]))
    with pytest.raises(ValueError, match=r"seq_lens and last_loc must agree.*'seq_lens': 1"):
        swa.copy_on_write(state, [4], [4, 5])
    with pytest.raises(ValueError, match=r"a batch takes 1 \.\. 32767 rows"):
        swa.copy_on_write(state, [], [])
    with pytest.raises(ValueError, match="active must be a bool array"):
        swa.copy_on_write(state, [4], [4], np.array([1]))
    with pytest.raises(ValueError, match="seq_lens and active must agree"):
        swa.copy_on_write(state, [4], [4], [True, False])


# ---- other pools ----------------------------------------------------------------------------


def test_a_pure_pool_shares_its_one_side():
    family = siblings(PURE, 8, 2)
    assert family.grow([0], [8])
    family.leave([0])
    family.verify()
    family.finish(0)
    family.finish(0)  # inside its window, alone with the pages by now
    family.verify()
    family.all_gone()


def test_a_pure_row_whose_last_token_is_kept_nowhere_has_nothing_to_copy():
    state = swa.init(config_of(PURE))
    state, grant = compiled("alloc_extend_swa_tail")(
        state, *rows4([0], [6], [-1]), ints([0], ROWS), capacity=12
    )
    assert grant.ok
    state, copies = compiled("copy_on_write")(state, *rows4([6], [0]), on(1))
    assert copies.ok
    state, grant = compiled("alloc_decode")(state, *rows4([7], [0]), on(1))
    assert grant.ok
    stale = compiled("free_swa")(state, ints(grant.slots.tolist(), WIDTH))
    refused, copies = compiled("copy_on_write")(stale, *rows4([7], [int(grant.slots[0])]), on(1))
    assert not copies.ok
    assert kinds(refused, stale) == {"out_of_range": 1}


def test_shared_pages_of_one_budget_are_held_like_others():
    state = swa.init(unified_config(8, 6, 2, 3))  # pages of two tokens
    state, grant = swa.alloc_extend(state, [0], [3], [-1], capacity=3)
    state = swa.share(state, grant.slots)
    state, copies = swa.copy_on_write(state, [3, 3], jnp.full(2, grant.slots[2]))
    assert copies.source.tolist() == [[int(grant.slots[2]), 0], [0, 0]]
    for kept in (grant.slots, jnp.append(grant.slots[:2], copies.last_loc[0])):
        state = swa.rebalance(state, 1000, 0)  # free blocks move, shared pages stay
        assert swa.translate_full_to_swa(state, kept).all()
        state = swa.free(state, kept)
        swa.check(state)
    assert not state.full.holders[1:].any()
    assert not state.swa.holders[1:].any()
    assert not any(fault_counts(state).values())


# ---- how it runs ----------------------------------------------------------------------------


def fork_and_write(state, lens, last):
    """Two forks of one row, copies for all, a token for each."""
    state = swa.share(state, last)
    state, copies = swa.copy_on_write(state, lens, last)
    state, grant = swa.alloc_decode(state, lens + 1, copies.last_loc)
    return state, (copies, grant)


def test_eager_compiled_scanned_and_batched_runs_agree():
    state, grant = swa.alloc(swa.init(config_of(PAGES)), 16, capacity=16)
    lens, last = jnp.array([6, 6], jnp.int32), jnp.full(2, grant.slots[5])
    jitted = jax.jit(fork_and_write)(state, lens, last)
    with jax.disable_jit():
        assert_bitwise_equal(fork_and_write(state, lens, last), jitted)

    def step(state, row):
        return fork_and_write(state, *row)

    other = jnp.full(2, grant.slots[13])  # a second pair of rows, in another page
    both = jnp.stack([lens, lens]), jnp.stack([last, other])
    scanned, outs = jax.lax.scan(step, state, both)
    middle, first = jitted
    after, second = jax.jit(fork_and_write)(middle, lens, other)
    assert_bitwise_equal(scanned, after)
    assert_bitwise_equal(jax.tree.map(lambda leaf: leaf[0], outs), first)
    assert_bitwise_equal(jax.tree.map(lambda leaf: leaf[1], outs), second)

    states = jax.tree.map(lambda a, b: jnp.stack([a, b]), state, middle)
    batched = jax.vmap(fork_and_write)(states, *both)
    for entry, right in enumerate((jitted, (after, second))):
        assert_bitwise_equal(jax.tree.map(lambda leaf, at=entry: leaf[at], batched), right)
    swa.check(after)
    with jax.enable_x64(True):
        wide = jax.jit(fork_and_write)(state, lens, last)
    assert_bitwise_equal(wide, jitted)
