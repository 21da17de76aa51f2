"""Each law that only a call shows is broken once, and the call is named."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

import swa_jax as swa
from swa_jax import debug
from swa_jax.debug.step_laws import STEP_LAWS

CONFIG = swa.PoolConfig(32, 32, 4, 4)
RIGHT = {name: getattr(swa, name) for name in ("alloc", "free", "free_swa", "free_out_of_window")}


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


TAKEN = (debug.Call("alloc", {"num_tokens": 12, "capacity": 32}, "request 1"),)
ALLOC = debug.Call("alloc", {"num_tokens": 4, "capacity": 32}, "request 2")
TOO_MUCH = debug.Call("alloc", {"num_tokens": 24, "capacity": 32})
FREE = debug.Call("free", {"slots": ["1[0:4]", "0*28"]})
FREE_SWA = debug.Call("free_swa", {"slots": ["1[0:4]", "0*28"]})
WINDOW = debug.Call(
    "free_out_of_window",
    {"req_to_token": [["1[0:12]", "0*20"]], "seq_lens": [9], "evicted_lens": [0], "max_pages": 2},
)
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
    program = debug.Program(CONFIG, (*TAKEN, call))
    answers = iter([RIGHT["alloc"], wrong] if call.name == "alloc" else [wrong])
    monkeypatch.setattr(swa, call.name, lambda *args, **kwargs: next(answers)(*args, **kwargs))
    failure = debug.first_failure(program)
    assert failure is not None
    assert (failure.call, failure.name) == (2, call.name)
    assert law in failure.laws
    assert set(pages) <= set(failure.full_pages)
    assert f"broke {law} (" in str(failure) or f"| {law} (" in str(failure)
    if law == "as_recorded":
        assert "16/20 tokens were left, and 16/16 are; it was refused, and is granted; it" in str(
            failure
        )


def test_pages_are_told_with_their_owners(monkeypatch):
    monkeypatch.setattr(swa, "free", lambda state, slots: hold(state, 2, 0))
    failure = debug.first_failure(debug.Program(CONFIG, (*TAKEN, FREE)))
    assert failure is not None
    assert "full page 2 (lost: released, and not in the ring; was request 1's)" in str(failure)
    assert "full page 1 (held by request 1)" in str(failure)
    assert "one_owner" in failure.laws
    np.testing.assert_array_equal(sorted(failure.full_pages), [1, 2])
