"""Each law that only a call shows is broken once, and the call is named."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

import swa_jax as swa
from swa_jax import debug
from swa_jax.debug.step_laws import STEP_LAWS

CONFIG = swa.PoolConfig(32, 32, 4, 4)
RIGHT = {name: getattr(swa, name) for name in debug.CALLS if name != "damage_mapping"}


def put_slot(grant, place, slot):
    return dataclasses.replace(grant, slots=grant.slots.at[place].set(slot))


def remap(state, page, to):
    return dataclasses.replace(state, full_to_swa=state.full_to_swa.at[page].set(to))


def hold(state, page, holders):
    pool = dataclasses.replace(state.full, holders=state.full.holders.at[page].set(holders))
    return dataclasses.replace(state, full=pool)


def of_alloc(change):
    """`alloc` with another state and grant."""

    def alloc(state, num_tokens, *, capacity):
        return change(*RIGHT["alloc"](state, num_tokens, capacity=capacity))

    return alloc


def frees_a_neighbour(state, slots):
    return RIGHT["free"](RIGHT["free"](state, slots), jnp.full(32, 8, jnp.int32))


def evicts_a_page_more(state, **arguments):
    state, new = RIGHT["free_out_of_window"](state, **arguments)
    return state, new + 4


def copies_and_stays(state, seq_lens, last_loc):
    state, copies = RIGHT["copy_on_write"](state, seq_lens, last_loc)
    return state, dataclasses.replace(copies, last_loc=jnp.asarray(last_loc))


TAKEN = (debug.Call("alloc", {"num_tokens": 12, "capacity": 32}, "request 1"),)
ALLOC = debug.Call("alloc", {"num_tokens": 4, "capacity": 32}, "request 2")
TOO_MUCH = debug.Call("alloc", {"num_tokens": 24, "capacity": 32})
FREE = debug.Call("free", {"slots": ["1[0:4]", "0*28"]})
FREE_SWA = debug.Call("free_swa", {"slots": ["1[0:4]", "0*28"]})
WINDOW = debug.Call(
    "free_out_of_window",
    {"req_to_token": [["1[0:12]", "0*20"]], "seq_lens": [9], "evicted_lens": [0], "max_pages": 2},
)
SHARE = debug.Call("share", {"slots": ["1[0:12]", "0*20"]}, "request 2")
COPY = debug.Call("copy_on_write", {"seq_lens": [10], "last_loc": ["1[9]"]}, "request 2")
REVERSED = jnp.asarray([3, 2, 1, 0, *range(4, 32)])
# law: call that breaks it, what `swa_jax` is given in its place, pages that are named
BROKEN = {
    "all_or_nothing": (TOO_MUCH, of_alloc(lambda s, g: (remap(s, 2, 0), g)), [2]),
    "padding_never_granted": (ALLOC, of_alloc(lambda s, g: (s, put_slot(g, 0, 1))), [0]),
    "granted_was_free": (ALLOC, of_alloc(lambda s, g: (s, put_slot(g, 0, 32))), [8]),
    "enough_said": (
        TOO_MUCH,
        of_alloc(lambda s, g: (s, dataclasses.replace(g, full_short=0, swa_short=0))),
        [],
    ),
    "others_untouched": (FREE, frees_a_neighbour, [2]),
    "granted_once": (ALLOC, of_alloc(lambda s, g: (s, put_slot(g, 0, 4))), [1]),
    "granted_in_full": (ALLOC, of_alloc(lambda s, g: (s, put_slot(g, 3, 0))), []),
    "granted_mapping": (ALLOC, of_alloc(lambda s, g: (remap(s, 4, 0), g)), [4]),
    "settled_at_the_call": (FREE_SWA, lambda state, slots: state, [1]),
    "window_kept": (WINDOW, evicts_a_page_more, [2]),
    "as_asked": (FREE, lambda state, slots: state, [1]),
    "granted_in_order": (
        ALLOC,
        of_alloc(lambda s, g: (s, dataclasses.replace(g, slots=g.slots[REVERSED]))),
        [4],
    ),
    "copied_as_asked": (COPY, copies_and_stays, []),
    "as_recorded": (
        dataclasses.replace(ALLOC, outcome=debug.Outcome((16, 20), False, {"unmapped": 1})),
        RIGHT["alloc"],
        [],
    ),
}


def test_every_law_of_a_call_is_broken_here():
    assert set(BROKEN) == set(STEP_LAWS)


@pytest.mark.parametrize("law", BROKEN)
def test_a_call_that_breaks_a_law_is_named(law, monkeypatch):
    call, wrong, pages = BROKEN[law]
    first = (*TAKEN, SHARE) if call is COPY else TAKEN
    program = debug.Program(CONFIG, (*first, call))
    answers = iter([RIGHT["alloc"], wrong] if call.name == "alloc" else [wrong])
    monkeypatch.setattr(swa, call.name, lambda *args, **kwargs: next(answers)(*args, **kwargs))
    failure = debug.first_failure(program)
    assert failure is not None
    assert (failure.call, failure.name) == (len(program), call.name)
    assert law in failure.laws
    assert set(pages) <= set(failure.full_pages)
    assert f"broke {law} (" in str(failure) or f"| {law} (" in str(failure)
    if law == "as_recorded":
        assert "16/20 tokens were left, and 16/16 are; it was refused, and is granted; it" in str(
            failure
        )


def faults_more(state, kind=0):
    return dataclasses.replace(state, faults=state.faults.at[kind].add(1))


def with_swa(state, page, holders):
    pool = dataclasses.replace(state.swa, holders=state.swa.holders.at[page].set(holders))
    return dataclasses.replace(state, swa=pool)


def of(name, change):
    """A transition whose state is changed; whatever else it gives is as it was."""

    def call(state, *args, **kwargs):
        made = RIGHT[name](state, *args, **kwargs)
        return (change(made[0]), *made[1:]) if isinstance(made, tuple) else change(made)

    return call


SLOTS = {"slots": ["1[0:12]", "0*20"]}
SET = debug.Call(
    "set_full_to_swa_mapping",
    {"full_slots": ["1[0:4]", "0*28"], "swa_slots": ["swa 1[4:8]", "0*28"]},
)
REFUSED_SET = debug.Call(
    "set_full_to_swa_mapping", {"full_slots": ["1[0:4]", "0*28"], "swa_slots": [29, "0*31"]}
)
CLEAR_MAPPING = debug.Call("clear_full_to_swa_mapping", {"full_slots": ["1[0:4]", "0*28"]})
BEGIN, END = debug.Call("free_group_begin"), debug.Call("free_group_end")
# calls after `TAKEN`, which of `swa_jax` is replaced, by what
BUGS = {
    "share does nothing": ([SHARE], "share", lambda state, slots: state),
    "share counts two": (
        [SHARE],
        "share",
        lambda state, slots: RIGHT["share"](RIGHT["share"](state, slots), slots),
    ),
    "free takes all shares": (
        [SHARE, FREE],
        "free",
        lambda state, slots: RIGHT["free"](RIGHT["free"](state, slots), slots),
    ),
    "free_swa keeps a share": ([SHARE, FREE_SWA], "free_swa", lambda state, slots: state),
    "free counts a fault": ([FREE], "free", of("free", faults_more)),
    "free_full does nothing": (
        [FREE_SWA, debug.Call("free_full", FREE.arguments)],
        "free_full",
        lambda state, slots: state,
    ),
    "the group does not end": ([BEGIN, FREE, END], "free_group_end", lambda state: state),
    "a group does not queue": (
        [BEGIN, FREE],
        "free",
        lambda state, slots: dataclasses.replace(
            RIGHT["free"](dataclasses.replace(state, group_open=jnp.asarray(False)), slots),
            group_open=jnp.asarray(True),
        ),
    ),
    "clearing the mapping frees": (
        [CLEAR_MAPPING],
        "clear_full_to_swa_mapping",
        lambda state, full_slots: RIGHT["free_swa"](state, full_slots),
    ),
    "the mapping is not cleared": (
        [CLEAR_MAPPING],
        "clear_full_to_swa_mapping",
        lambda state, full_slots: state,
    ),
    "the mapping is not set": (
        [SET],
        "set_full_to_swa_mapping",
        lambda state, full_slots, swa_slots: state,
    ),
    "a refused mapping unmaps": (
        [REFUSED_SET],
        "set_full_to_swa_mapping",
        of("set_full_to_swa_mapping", lambda state: remap(state, 1, 0)),
    ),
    "a copy leaves its share": (
        [SHARE, COPY],
        "copy_on_write",
        of("copy_on_write", lambda state: hold(state, 3, 2)),
    ),
    "a window is not left": (
        [WINDOW],
        "free_out_of_window",
        lambda state, evicted_lens, **more: (state, jnp.asarray(evicted_lens)),
    ),
    "a window loses what it keeps": (
        [WINDOW],
        "free_out_of_window",
        of("free_out_of_window", lambda state: with_swa(remap(state, 2, 0), 2, 0)),
    ),
}


@pytest.mark.parametrize("bug", BUGS)
def test_a_call_that_does_not_do_what_it_says_is_named(bug, monkeypatch):
    calls, name, wrong = BUGS[bug]
    program = debug.Program(CONFIG, (*TAKEN, *calls))
    assert debug.first_failure(program) is None
    monkeypatch.setattr(swa, name, wrong)
    failure = debug.first_failure(program)
    assert failure is not None
    assert (failure.call, failure.name) == (len(program), name)
    assert {"as_asked", "copied_as_asked", "window_kept"} & set(failure.laws)


def test_pages_are_told_with_their_owners(monkeypatch):
    monkeypatch.setattr(swa, "free", lambda state, slots: hold(state, 2, 0))
    failure = debug.first_failure(debug.Program(CONFIG, (*TAKEN, FREE)))
    assert failure is not None
    assert "full page 2 (lost: released, and not in the ring; was request 1's)" in str(failure)
    assert "full page 1 (held by request 1)" in str(failure)
    assert "one_owner" in failure.laws
    np.testing.assert_array_equal(sorted(failure.full_pages), [1, 2])
