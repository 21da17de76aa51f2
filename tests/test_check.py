"""States that no transition makes are told apart from those that one does."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest

import swa_jax as swa
from swa_jax.check import law_says

CONFIG = swa.PoolConfig(64, 32, 4, 8)


def broken(change):
    return change(swa.init(CONFIG))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda s: replace(s, faults=s.faults[:3]), "faults is int32.3., .* int32.7."),
        (
            lambda s: replace(s, full=replace(s.full, holders=s.full.holders[:-1])),
            "full.holders is int32.16.",
        ),
        (lambda s: replace(s, full=s.swa, swa=s.full), "full.holders is int32.9."),
        (lambda s: replace(s, group_open=jnp.int32(0)), "group_open is int32"),
        (lambda s: replace(s, full=replace(s.full, num_free=s.full.num_free[None])), "num_free is"),
        (lambda s: replace(s, config=swa.PoolConfig(128, 32, 4, 8)), "its configuration makes"),
        (lambda s: replace(s, faults=None), "has 13 arrays, not 14"),
    ],
)
def test_a_state_of_the_wrong_build_is_named(change, words):
    with pytest.raises(swa.InvariantError, match=words):
        swa.check(broken(change))


def test_a_batch_of_states_is_checked_entry_by_entry():
    states = jax.vmap(lambda _: swa.init(CONFIG))(jnp.arange(3))
    swa.check(states)
    holders = states.full.holders.at[1, 5].set(1, mode="drop")
    with pytest.raises(swa.InvariantError, match=r"one_owner.*pages \[5\]"):
        swa.check(replace(states, full=replace(states.full, holders=holders)))


@pytest.mark.parametrize("window", [2**31, 2**40])
def test_a_window_past_int32_is_refused(window):
    with pytest.raises(ValueError, match="sliding_window must be at most"):
        swa.PoolConfig(64, 32, 4, window)


class TestOnePool:
    """Rows whose last token was kept nowhere: the page they go on in is not there yet."""

    def start(self):
        state = swa.init(swa.PoolConfig.pure_swa(64, 4, 8))
        state, grant = swa.alloc_extend_swa_tail(state, [0], [6], [-1], [0], capacity=32)
        assert grant.slots.tolist() == [0] * 32
        return state

    @pytest.mark.parametrize("tail", [0, 8, 12, 13, 14])
    def test_a_tail_after_an_empty_tail(self, tail):
        state, grant = swa.alloc_extend_swa_tail(self.start(), [6], [20], [0], [tail], capacity=32)
        first = (20 - tail) // 4 * 4 if tail else 20
        slots = grant.slots.tolist()
        for place, token in enumerate(range(6, 20)):
            assert (slots[place] > 0) == (token >= first)
            assert slots[place] == 0 or slots[place] % 4 == token % 4
        assert int(swa.available_size(state)) == 64 - (20 - first)
        swa.check(state)

    def test_it_can_extend_and_decode(self):
        state, grant = swa.alloc_extend(self.start(), [6, 0], [9, 2], [0, -1], capacity=8)
        assert [slot % 4 for slot in grant.slots[:5].tolist()] == [2, 3, 0, 0, 1]
        assert int(swa.available_size(state)) == 52
        state, grant = swa.alloc_decode(self.start(), [7, 1], [0, -1])
        assert [slot % 4 for slot in grant.slots.tolist()] == [2, 0]
        state, after = swa.alloc_decode(state, [8], grant.slots[:1])
        assert after.slots.tolist() == [int(grant.slots[0]) + 1]
        swa.check(state)
        assert not any(swa.faults(state).values())


def test_every_law_says_what_it_is():
    for name in swa.invariants(swa.init(swa.PoolConfig.pure_swa(64, 4, 8, owner_tags=True))):
        assert len(law_says(name)) > 20


def test_of_one_pool_what_is_given_back_has_left_the_window_too():
    state = swa.init(swa.PoolConfig.pure_swa(64, 4, 8))
    state, _ = swa.alloc_extend(state, [0], [6], [-1], capacity=8)
    page = int(jnp.argmax(state.full.holders[1:])) + 1
    gone = replace(state.full, holders=state.full.holders.at[page].set(0))
    assert swa.invariants(state)["one_owner"]
    assert not swa.invariants(replace(state, full=gone))["one_owner"]
