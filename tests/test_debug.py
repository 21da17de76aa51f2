"""Recording calls, stepping through states, comparing them."""

import dataclasses
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pair
import pytest
import test_laws as laws
from machine import long_walk
from oracle import Sizes
from test_mutations import DAMAGE, lawful_state

import swa_jax as swa
from swa_jax import debug
from swa_jax.check import LAWS, OWNER_LAWS
from swa_jax.debug.calls import COPIES, is_transition
from swa_jax.debug.calls import DAMAGE as DAMAGING
from swa_jax.debug.culprits import FINDERS, culprits
from swa_jax.debug.files import as_text, from_text
from swa_jax.debug.pages import name_pages, pages_of
from swa_jax.debug.watch import broken_laws

CONFIG = swa.PoolConfig(32, 32, 4, 4)


def first_page(slots):
    return np.where(np.arange(32) < 4, slots, 0)


def recorded():
    """Two requests, one of which leaves a window and ends."""
    recorder = debug.Recorder(CONFIG)
    with recorder.owner("request 1"):
        one = recorder.alloc(8, capacity=32).slots
    two = recorder.alloc(8, capacity=32, owner="request 2").slots
    recorder.free_swa(first_page(one), owner=None)
    recorder.free(one, owner="request 1")
    return recorder, one, two


# ---- no transition is forgotten --------------------------------------------------------------


def test_every_transition_of_the_package_can_be_recorded():
    found = {name for name in swa.__all__ if is_transition(name)}
    assert found == set(debug.CALLS) - {DAMAGING}
    assert set(COPIES) <= set(swa.__all__)


@pytest.mark.parametrize("name", [name for name in debug.CALLS if name != DAMAGING])
def test_a_call_takes_what_its_transition_takes(name):
    kind = debug.CALLS[name]
    takes = dict(list(inspect.signature(getattr(swa, name)).parameters.items())[1:])
    renamed = dict(kind.renamed)
    assert [renamed.get(own, own) for own in kind.arguments] == list(takes)
    has_default = [n for n, p in takes.items() if p.default is not inspect.Parameter.empty]
    assert [renamed.get(own, own) for own in kind.optional] == has_default
    gives = str(inspect.signature(getattr(swa, name)).return_annotation)
    assert ("tuple" in gives) == (kind.gives is not None)


def test_every_law_knows_its_pages():
    assert set(FINDERS) == set(LAWS) | set(OWNER_LAWS)


# ---- recording -------------------------------------------------------------------------------


def test_a_recorder_gives_what_the_transitions_give():
    recorder, one, two = recorded()
    state, grant = swa.alloc(swa.init(CONFIG), 8, capacity=32)
    np.testing.assert_array_equal(one, grant.slots)
    state, grant = swa.alloc(state, 8, capacity=32)
    np.testing.assert_array_equal(two, grant.slots)
    state = swa.free(swa.free_swa(state, first_page(one)), one)
    for mine, right in zip(jax.tree.leaves(recorder.state), jax.tree.leaves(state), strict=True):
        np.testing.assert_array_equal(mine, right)


def test_slots_are_written_down_by_who_handed_them_out():
    recorder, _, two = recorded()
    recorder.free_full([int(two[0]), *[0] * 30, 99])
    calls = recorder.program.calls
    assert calls[0].arguments == {"num_tokens": 8, "capacity": 32}
    assert [call.owner for call in calls] == ["request 1", "request 2", None, "request 1", None]
    assert calls[2].arguments == {"slots": ["1[0:4]", "0*28"]}
    assert calls[3].arguments == {"slots": ["1[0:8]", "0*24"]}
    assert calls[4].arguments == {"slots": ["2[0]", "0*30", 99]}
    assert calls[4].outcome == debug.Outcome((24, 24), None, {"still_mapped": 1, "out_of_range": 1})
    assert sorted(recorder.owners) == ["request 2"]
    np.testing.assert_array_equal(recorder.owners["request 2"], two[:8])


def test_a_recorder_looks_like_the_package():
    recorder = debug.Recorder(CONFIG)
    assert set(debug.CALLS) <= set(dir(recorder))
    assert "capacity" in inspect.signature(recorder.alloc).parameters
    assert "state" not in inspect.signature(recorder.alloc).parameters
    assert recorder.alloc.__doc__ == swa.alloc.__doc__


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda r: r.allocate(4), AttributeError, "no such call: 'allocate'"),
        (lambda r: r.alloc(4), TypeError, "missing a required argument: 'capacity'"),
        (lambda r: r.alloc(4, capacity=True), ValueError, "capacity must be"),
        (lambda r: r.alloc(2.5, capacity=4), ValueError, "num_tokens must hold integers"),
        (lambda r: r.alloc(4, capacity=4, owner="\x1b[2J"), ValueError, "owner must be printable"),
        (lambda r: r.alloc(4, capacity=4, owner=7), TypeError, "unexpected keyword"),
        (lambda r: r.alloc(4, capacity=4.9), ValueError, "capacity must be a positive Python int"),
        (lambda r: r.alloc(4, capacity="4"), ValueError, "capacity must be a positive Python int"),
        (
            lambda r: r.free_out_of_window(np.zeros((0, 8), np.int32), [], []),
            ValueError,
            "req_to_token must have at least one row",
        ),
        (lambda r: r.free(4, 5), TypeError, "too many positional"),
        (lambda r: r.free([[4]]), ValueError, "1 dimension"),
        (lambda r: r.free([2**31]), ValueError, "int32"),
        (lambda r: r.share([4], [1]), ValueError, "bool array"),
        (lambda r: r.free_swa([4], owner=swa.init(CONFIG)), ValueError, "earlier state of this"),
        (lambda r: r.rebalance(1, 1), ValueError, "unified"),
        (lambda r: r.ring_acquire([0]), ValueError, "request rings"),
        (lambda r: r.damage_mapping([99], [4]), ValueError, "slots of the pools"),
        (lambda r: r.damage_mapping([4], [4, 8]), ValueError, "agree in length"),
        (lambda r: jax.jit(lambda x: r.free(x))(jnp.zeros(2, jnp.int32)), ValueError, "jit"),
    ],
)
def test_a_call_that_is_refused_is_not_recorded(call, error, words):
    recorder = debug.Recorder(CONFIG)
    with pytest.raises(error, match=words):
        call(recorder)
    assert len(recorder.program) == 0
    assert not np.any(recorder.state.faults)


# ---- back and forth --------------------------------------------------------------------------


def test_a_timeline_steps_back_and_forth():
    recorder, one, two = recorded()
    timeline = debug.run(recorder.program)
    assert len(timeline) == 5
    assert timeline.failure is None
    assert timeline.at == 4
    assert timeline.state is timeline.states[4]
    assert timeline.back() is timeline.states[3]
    assert timeline.call is timeline.program.calls[2]
    assert list(timeline.owners) == ["request 1", "request 2"]
    np.testing.assert_array_equal(timeline.owners["request 1"], one[:8])
    assert timeline.rings == {}
    assert timeline.goto(0) is timeline.states[0]
    assert timeline.call is None
    assert not timeline.changes
    assert timeline.step(2) is timeline.states[2]
    np.testing.assert_array_equal(timeline.owners["request 2"], two[:8])
    for wrong in (5, -1, True):
        with pytest.raises(IndexError, match="states 0 to 4"):
            timeline.goto(wrong)
    with pytest.raises(IndexError):
        timeline.step(3)
    with pytest.raises(TypeError, match=r"must be an integer, got 0\.5"):
        timeline.goto(0.5)  # pyright: ignore[reportArgumentType]
    assert timeline.at == 2


def test_a_timeline_reads_like_a_list_of_calls():
    timeline = debug.run(recorded()[0].program)
    timeline.goto(3)
    assert str(timeline).splitlines() == [
        "    0 a new state  -> 32/32",
        "    1 alloc(num_tokens=8, capacity=32)  # request 1  -> 24/24",
        "    2 alloc(num_tokens=8, capacity=32)  # request 2  -> 16/16",
        ">   3 free_swa(slots=[1[0:4], 0*28])  -> 16/20",
        "    4 free(slots=[1[0:8], 0*24])  # request 1  -> 24/24",
    ]


def test_what_a_call_did_is_told_by_page_and_by_owner():
    timeline = debug.run(recorded()[0].program)
    timeline.goto(2)
    assert str(timeline.changes).splitlines() == [
        "full pool",
        "  pages 3-4: free -> held by request 2",
        "SWA pool",
        "  pages 3-4: free -> held by request 2",
        "mapping",
        "  pages 3-4: none -> SWA pages 3-4",
        "counters",
        "  full free: 6 -> 4",
        "  SWA free: 6 -> 4",
    ]
    assert str(timeline.diff(2, 3)).splitlines()[:2] == [
        "SWA pool",
        "  page 1: held by request 1 -> free",
    ]
    back = timeline.diff(4, 3)
    assert [change.page for change in back.full] == [1, 2]
    assert timeline.at == 2


# ---- diff of any two states ------------------------------------------------------------------


def test_a_difference_names_owners_laws_and_misuse():
    before = lawful_state()
    state = swa.free_group_begin(swa.free_group_end(before))
    state = swa.free(state, jnp.asarray([12, 12, -1], jnp.int32))
    told = str(debug.diff(before, state, owners={"request 3": [12, 13], "other": [0, 999]}))
    assert "page 3: held by request 3 -> pending" in told
    assert "page 1: pending -> free" in told
    assert "out_of_range: 0 -> 1" in told
    assert "free group" not in told  # open in both
    assert str(debug.diff(state, state)) == "nothing differs"
    damaged = dataclasses.replace(state, full_to_swa=state.full_to_swa.at[1].set(4))
    told = str(debug.diff(state, damaged))
    assert "no_stale_mapping: holds -> broken" in told
    assert "page 1: none -> SWA page 4" in told


def test_a_page_that_changed_hands_is_told_though_its_count_is_the_same():
    recorder = debug.Recorder(CONFIG)
    slots = recorder.alloc(8, capacity=32, owner="A").slots
    recorder.share(slots, owner="B")
    recorder.free(slots, owner="A")
    recorder.share(slots, owner="C")
    timeline = debug.run(recorder.program)
    assert "pages 1-2: held by A -> held by B" in str(timeline.diff(1, 3))
    told = "pages 1-2: shared by A, B (2 holders) -> shared by B, C (2 holders)"
    assert str(timeline.diff(2, 4)).splitlines() == [
        "full pool",
        f"  {told}",
        "SWA pool",
        f"  {told}",
    ]


def test_a_page_of_a_pure_swa_pool_is_whose_swa_side_it_is():
    recorder = debug.Recorder(swa.PoolConfig.pure_swa(32, 4, 4))
    slots = recorder.alloc(32, capacity=32, owner="A").slots
    recorder.free_swa(slots, owner="A")
    again = recorder.alloc(32, capacity=32, owner="B").slots
    np.testing.assert_array_equal(recorder.owners["B"], np.sort(again))
    assert list(recorder.owners) == ["B"]
    assert "pages 1-8: held by A -> held by B" in str(debug.run(recorder.program).diff(1, 3))


def test_what_has_no_values_any_more_is_not_compared():
    state, donated = swa.init(CONFIG), swa.snapshot(swa.init(CONFIG))
    for leaf in jax.tree.leaves(donated):
        leaf.delete()
    with pytest.raises(ValueError, match=r"before .* was donated .*snapshot\(state\)"):
        debug.diff(donated, state)
    for call in (debug.run, debug.first_failure):
        with pytest.raises(ValueError, match="program must be a Program, such as"):
            call(None)  # pyright: ignore[reportArgumentType]


def test_a_difference_is_of_two_states_of_one_allocator():
    state = swa.init(CONFIG)
    with pytest.raises(ValueError, match="one configuration"):
        debug.diff(state, swa.init(dataclasses.replace(CONFIG, sliding_window=3)))
    batch = jax.tree.map(lambda leaf: jnp.stack([leaf, leaf]), state)
    with pytest.raises(ValueError, match="a batch of shape"):
        debug.diff(state, batch)


def test_a_difference_of_many_pages_is_cut_short():
    one = swa.init(CONFIG)
    mapping = jnp.asarray(np.arange(9)[::-1], jnp.int32)
    difference = debug.diff(one, dataclasses.replace(one, full_to_swa=mapping))
    assert difference.lines(most=2)[:4] == [
        "mapping",
        "  page 0: none -> SWA page 8",
        "  page 1: none -> SWA page 7",
        "  and 6 more lines",
    ]


def test_a_page_that_lost_its_mapping_is_not_told_with_one_that_got_one():
    state = swa.init(CONFIG)
    one, other = (
        dataclasses.replace(state, full_to_swa=jnp.zeros_like(state.full_to_swa).at[page].set(page))
        for page in (1, 2)
    )
    assert debug.diff(one, other).lines()[1:3] == [
        "  page 1: SWA page 1 -> none",
        "  page 2: none -> SWA page 2",
    ]


def test_pages_are_named_in_runs():
    assert name_pages([7]) == "page 7"
    assert name_pages([5, 3, 4, 9]) == "pages 3-5, 9"
    assert name_pages(range(0, 40, 2)).endswith("and 12 more")


# ---- laws ------------------------------------------------------------------------------------

PAGES_OF = {
    "two pages map to one": ([3, 4], [4]),
    "a free page is mapped": ([8], [3]),
    "a pending page is mapped": ([1], [3]),
    "a mapping out of the pool": ([2], []),
    "a page is queued twice": ([], []),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_the_pages_of_a_damaged_state_are_found(name):
    state = DAMAGE[name](lawful_state())
    broken = {one.law: one.pages for one in broken_laws(state)}
    assert broken
    pages_of(state)
    if name not in ("the head is past the end", "a negative count"):  # they are of no page
        assert any(pages.full or pages.swa for pages in broken.values()), broken
    full, of_swa = PAGES_OF.get(name, ([], []))
    found_full = {page for pages in broken.values() for page in pages.full}
    found_swa = {page for pages in broken.values() for page in pages.swa}
    assert set(full) <= found_full
    assert set(of_swa) <= found_swa


def test_a_law_that_holds_has_no_culprits():
    state = lawful_state()
    for law in LAWS:
        assert not any(culprits(law, state)), law


# ---- a walk over everything: no false alarm, and the same again -------------------------------


def recording(recorder):
    """Calls of a `Pair` go through a recorder."""

    def compiled(name):
        def call(state, *args, **kwargs):
            if name not in debug.CALLS:
                return getattr(swa, name)(state, *args, **kwargs)
            assert state is recorder.state
            answer = getattr(recorder, name)(*args, **kwargs)
            return recorder.state if answer is None else (recorder.state, answer)

        return call

    return compiled


def walked(monkeypatch, sizes, steps):
    walker = laws.walker(sizes)()
    recorder = debug.Recorder(walker.pair.state.config)
    walker.pair.state = recorder.state
    monkeypatch.setattr(pair, "compiled", recording(recorder))
    monkeypatch.setattr(swa, "snapshot", lambda state: state)
    long_walk(walker, seed=3, steps=steps)
    return recorder


@pytest.mark.parametrize(
    "sizes",
    [Sizes(32, 32, 4, window=4), pytest.param(laws.ONE_POOL, marks=pytest.mark.long)],
    ids=["two pools", "one pool"],
)
def test_a_walk_raises_no_false_alarm_and_runs_the_same_again(monkeypatch, sizes):
    recorder = walked(monkeypatch, sizes, steps=150)
    program = recorder.program
    assert len(program) > 100
    again = from_text(as_text(program))
    assert again == program
    timeline = debug.run(again)
    assert timeline.failure is None, timeline.failure
    for mine, right in zip(
        jax.tree.leaves(timeline.state), jax.tree.leaves(recorder.state), strict=True
    ):
        np.testing.assert_array_equal(mine, right)
