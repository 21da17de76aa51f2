"""Checked mode: the laws after every call of a compiled program, and who broke one."""

import dataclasses

import jax
import jax.numpy as jnp
import mutants
import numpy as np
import pytest
from test_debug_shrink import put_back
from test_mutations import DAMAGE, lawful_state
from test_recorded import FOLDER

import swa_jax as swa
from swa_jax import checked
from swa_jax.checked_program import run_checked
from swa_jax.debug import load, run
from swa_jax.odd_pages import odd_pages

CONFIG = swa.PoolConfig(32, 32, 4, 4)
RIGHT = {name: getattr(swa, name) for name in ("alloc", "copy_on_write", "free_group_begin")}


def served(state, breaks_at):
    """Two requests decode for a while; in one step the mapping of the second is damaged."""
    state, grant = checked.alloc_extend(
        state, [0, 0], [3, 6], [-1, -1], capacity=16, owner=jnp.asarray([7, 8])
    )
    last = jnp.stack([grant.slots[2], grant.slots[8]])

    def step(carry, number):
        state, last, lens = carry
        state, grant = checked.alloc_decode(state, lens + 1, last, owner=jnp.asarray([7, 8]))
        mapping = state.state.full_to_swa
        damaged = jnp.where(number == breaks_at, mapping.at[grant.slots[1] // 4].set(8), mapping)
        state = dataclasses.replace(
            state, state=dataclasses.replace(state.state, full_to_swa=damaged)
        )
        state = checked.free_group_end(state)
        return (state, grant.slots, lens + 1), grant.ok

    start = (state, last, jnp.asarray([3, 6], jnp.int32))
    (state, _, _), ok = jax.lax.scan(step, start, jnp.arange(7, dtype=jnp.int32))
    return checked.free_group_begin(state), ok


SERVED = checked.checking(served)


def test_a_program_that_keeps_the_laws_comes_to_the_same():
    state, ok = SERVED(checked.init(CONFIG), -1)
    assert ok.all()
    assert int(state.calls) == 16
    assert not bool(state.failed)
    assert int(checked.full_available_size(state)) == 32 - 12 - 16
    np.testing.assert_array_equal(state.full_owner[1:8], [7, 8, 8, 7, 8, 7, 8])
    np.testing.assert_array_equal(state.swa_owner, state.full_owner)
    checked.check(state)


def test_the_first_call_that_breaks_a_law_is_named_inside_a_scan():
    with pytest.raises(swa.InvariantError) as raised:
        SERVED(checked.init(CONFIG), 5)
    text = str(raised.value)
    assert text.startswith("call 13, free_group_end at test_checked.py:")
    assert "broke no_stale_mapping (Laws 7 and 8" in text
    assert text.endswith("full page 5 (held by request 8), SWA page 8 (released)")
    assert "\n" not in text


@pytest.mark.long
def test_a_donated_state_in_a_while_loop_and_names_of_owners():
    def turn(carry):
        state, number = carry
        state, grant = checked.alloc(state, 8, capacity=32, owner=number % 2)
        slots = jnp.where(number == 3, 0, grant.slots)
        return checked.free_swa(state, slots), number + 1

    def program(state, breaks):
        start = (state, jnp.int32(0))
        state, _ = jax.lax.while_loop(lambda carry: carry[1] < 4, turn, start)
        mapping = state.state.full_to_swa.at[1].set(jnp.where(breaks, 2, 0))
        state = dataclasses.replace(
            state, state=dataclasses.replace(state.state, full_to_swa=mapping)
        )
        return checked.free_group_end(state)

    run_it = checked.checking(program, names=["Anna", "Bert"], donate_argnums=0)
    state = run_it(checked.init(CONFIG), False)
    assert int(state.calls) == 9
    np.testing.assert_array_equal(state.full_owner[1:], [0, 0, 1, 1, 0, 0, 1, 1])
    with pytest.raises(swa.InvariantError, match=r"call 9, .* page 1 \(held by Anna\), SWA page 2"):
        run_it(checked.init(CONFIG), True)


def broken_state():
    """A page of the full pool is lost."""
    state = checked.init(CONFIG)
    full = dataclasses.replace(state.state.full, num_free=state.state.full.num_free - 1)
    return dataclasses.replace(state, state=dataclasses.replace(state.state, full=full))


def test_a_call_that_is_not_compiled_is_looked_at_and_may_name_its_state():
    state = checked.free(state=checked.init(CONFIG), slots=[0])
    assert repr(state).startswith("Checked after 1 call\nAllocatorState: 8 full")
    assert "not known here" in jax.eval_shape(lambda s: s, state).__repr__()
    with pytest.raises(swa.InvariantError, match=r"call 1, free at .*.py:\d+, broke cons"):
        checked.free(broken_state(), [0])


def test_a_call_that_is_passed_on_is_named_where_it_is_passed():
    def program(state, now):
        return jax.lax.cond(now, checked.free_group_begin, lambda state: state, state)

    line = program.__code__.co_firstlineno + 1
    with pytest.raises(swa.InvariantError, match=f"begin at test_checked.py:{line}, broke"):
        checked.checking(program)(broken_state(), True)


def test_a_program_that_is_compiled_without_checking_says_what_to_use():
    with pytest.raises(ValueError, match=r"must be compiled by swa_jax.checked.checking\(serve\)"):
        jax.jit(lambda state: checked.free(state, [0]))(checked.init(CONFIG))


def changes_though_refused(state, seq_lens, last_loc):
    answer = RIGHT["copy_on_write"](state, seq_lens, last_loc)[1]
    state, _ = RIGHT["alloc"](state, 4, capacity=32)
    return state, dataclasses.replace(answer, ok=jnp.asarray(False))


# replaced, by what, arguments, law
BUGS = {
    "a refusal changes the state": (
        "copy_on_write",
        changes_though_refused,
        ([0], [-1]),
        "all_or_nothing",
    ),
    "a share is not counted": ("share", lambda state, slots: state, ([4],), "as_asked"),
    "a free takes nothing": ("free", lambda state, slots: state, ([4],), "as_asked"),
    "a group stays open": ("free_group_end", RIGHT["free_group_begin"], (), "as_asked"),
}


@pytest.mark.parametrize("bug", BUGS)
def test_a_call_that_does_not_do_what_it_says_is_named(bug, monkeypatch):
    name, wrong, arguments, law = BUGS[bug]
    state, _ = checked.alloc(checked.init(CONFIG), 8, capacity=32)
    getattr(checked, name)(state, *arguments)
    monkeypatch.setattr(swa, name, wrong)
    with pytest.raises(swa.InvariantError, match=f"call 2, {name} at .* broke {law} "):
        getattr(checked, name)(state, *arguments)


def test_everything_of_the_package_is_there():
    for name in swa.__all__:
        assert getattr(checked, name) is not None
    assert set(swa.__all__) <= set(dir(checked))
    with pytest.raises(AttributeError, match="allocate"):
        _ = checked.allocate
    assert checked.PoolConfig is swa.PoolConfig


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda s: checked.alloc(swa.init(CONFIG), 4, capacity=4), "takes a Checked here"),
        (lambda s: checked.alloc(s, 4, capacity=4, owner=[1, 2]), "must be one number"),
        (lambda s: checked.alloc(s, 4, capacity=0), "capacity must be"),
    ],
)
def test_what_cannot_work_is_refused(call, words):
    with pytest.raises(ValueError, match=words):
        checked.checking(call)(checked.init(CONFIG))


@pytest.mark.parametrize("name", DAMAGE)
def test_odd_pages_are_those_of_a_broken_law(name):
    state = lawful_state()
    odd = jax.jit(odd_pages)
    assert not any(jnp.any(side) for side in odd(state))
    damaged = odd(DAMAGE[name](state))
    if name not in ("the head is past the end", "a negative count"):
        assert any(bool(jnp.any(side)) for side in damaged)


@pytest.mark.long
@pytest.mark.parametrize(
    "name", ["late_free_by_snapshot", "one_budget_rebalanced", "request_rings"]
)
def test_a_recorded_program_comes_to_the_same_when_it_is_compiled_as_one(name):
    compiled_is_the_same(load(FOLDER / f"{name}.json"))


def compiled_is_the_same(program):
    state = run_checked(program)
    assert int(state.calls) == len(program)
    right = run(program).state
    for mine, its in zip(jax.tree.leaves(state.state), jax.tree.leaves(right), strict=True):
        np.testing.assert_array_equal(mine, its)


def test_a_bug_is_named_by_the_call_of_the_program_and_by_its_owners():
    program = load(FOLDER / "one_token_frees_its_swa_page_once.json")
    program = dataclasses.replace(program, calls=program.calls[:2])
    compiled_is_the_same(program)
    with (
        put_back(mutants.page_freed_again_for_each_token),
        pytest.raises(swa.InvariantError) as raised,
    ):
        run_checked(program)
    text = str(raised.value)
    assert text.startswith("call 2, free_swa at test_checked.py:")
    assert "full page 1 (held by request 1), SWA page 1 (released; was request 1's)" in text


def test_a_program_that_damages_a_state_is_not_for_checked_mode():
    with pytest.raises(ValueError, match=r"call 4 \(damage_mapping\) breaks laws on purpose"):
        run_checked(load(FOLDER / "swa_tail_clears_recycled_mappings.json"))
