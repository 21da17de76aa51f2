"""Which laws a damaged state breaks: each by name, so that no check stands in for another."""

import jax.numpy as jnp
import pytest
from compare import config_of
from oracle import Sizes
from test_mutations import DAMAGE, lawful_state, with_mapping, with_pool

import swa_jax as swa

MORE_DAMAGE = {
    "a ring names no page": with_pool("full", ring=lambda x: x.at[5].set(-3)),
    "a pending place names no page": with_pool("swa", ring=lambda x: x.at[0].set(-1)),
    "a count below 0": with_pool("full", holders=lambda x: x.at[2].set(-1)),
    "an SWA side of more than its page": with_pool("swa", holders=lambda x: x.at[3].set(2)),
    "the padding page has two holders": with_pool("full", holders=lambda x: x.at[0].set(2)),
    "the SWA padding page has two": with_pool("swa", holders=lambda x: x.at[0].set(2)),
    "the SWA padding page is released": with_pool("swa", holders=lambda x: x.at[0].set(0)),
    "the head is below 0": with_pool("swa", head=lambda x: x - 9),
    "below 0 pages are free": with_pool(
        "swa", num_free=lambda x: x - 9, num_pending=lambda x: x + 9
    ),
}
BROKEN = {
    "two pages map to one": "one_to_one",
    "a free page is mapped": "no_stale_mapping one_to_one shares",
    "a pending page is mapped": "no_stale_mapping one_to_one shares",
    "a held page maps to a free one": "no_stale_mapping",
    "a held page maps to a pending one": "group_queue no_stale_mapping",
    "the padding page is mapped": "one_to_one padding_page",
    "a mapping out of the pool": "no_stale_mapping whole_pages",
    "a negative mapping": "whole_pages",
    "a held page is marked released": "conservation one_owner",
    "a free page is marked held": "conservation one_owner",
    "the padding page is released": "conservation one_owner padding_page shares",
    "a page is queued twice": "one_owner",
    "the padding page is queued": "one_owner padding_page",
    "more free pages than there are": "conservation one_owner within_size",
    "fewer free pages than there are": "conservation one_owner",
    "a pending page is forgotten": "conservation one_owner",
    "a negative count": "within_size",
    "the head is past the end": "one_owner within_size",
    "scratch is dirty": "scratch_clean",
    "a ring names no page": "one_owner padding_page",
    "a pending place names no page": "group_queue one_owner padding_page",
    "a count below 0": "shares",
    "an SWA side of more than its page": "shares",
    "the padding page has two holders": "shares",
    "the SWA padding page has two": "shares",
    "the SWA padding page is released": "conservation one_owner padding_page shares",
    "the head is below 0": "one_owner within_size",
    "below 0 pages are free": "within_size",
}


@pytest.mark.parametrize("name", BROKEN)
def test_damage_breaks_just_these_laws(name):
    damaged = (DAMAGE | MORE_DAMAGE)[name](lawful_state())
    laws = swa.invariants(damaged)
    assert sorted(law for law, holds in laws.items() if not holds) == BROKEN[name].split()


def test_every_damage_is_listed():
    assert set(BROKEN) == set(DAMAGE | MORE_DAMAGE)


@pytest.mark.parametrize("tokens", [0, 8, 32])
def test_empty_and_full_pools_are_lawful(tokens):
    """Also with the head at the end of the ring, where the used part goes round."""
    state = swa.init(config_of(Sizes(32, 32, 4, window=4)))
    for _ in range(3):
        assert all(swa.invariants(state).values())
        state, grant = swa.alloc(state, jnp.int32(tokens), capacity=32)
        assert all(swa.invariants(state).values())
        state = swa.free_swa_grouped(state, grant.slots)
        assert all(swa.invariants(state).values())
        state = swa.free(swa.free_group_end(state), grant.slots)


def pure_state():
    state = swa.init(swa.PoolConfig.pure_swa(16, page_size=4, sliding_window=4))
    state, _ = swa.alloc(state, jnp.int32(12), capacity=16)
    return swa.free_swa(state, jnp.asarray([4], jnp.int32))


PURE = {
    "as it should be": ({}, ""),
    "a held page maps to none": ({3: 0}, "one_to_one"),
    "a held page maps to another": ({2: 3, 3: 2}, "one_to_one"),
    "a released page maps to itself": ({1: 1}, "no_stale_mapping one_to_one"),
}


@pytest.mark.parametrize("name", PURE)
def test_a_page_of_a_pure_pool_is_its_own_swa_side(name):
    state, (change, broken) = pure_state(), PURE[name]
    for page, to in change.items():
        state = with_mapping(page, to)(state)
    laws = swa.invariants(state)
    assert sorted(law for law, holds in laws.items() if not holds) == broken.split()


def all_pending():
    """No SWA page is free: the first place of the ring is one that waits."""
    state = swa.init(swa.PoolConfig(16, 16, 4, 4))
    state, grant = swa.alloc(state, jnp.int32(16), capacity=16)
    return swa.free_swa_grouped(state, grant.slots)


ENDS = {
    "as it should be": (lambda s: s, ""),
    "a page that waits first is held": (
        with_pool("swa", holders=lambda x: x.at[1].set(1)),
        "conservation group_queue one_owner",
    ),
    "a negative mapping is nobody's": (with_mapping(2, -1), "whole_pages"),
}


@pytest.mark.parametrize("name", ENDS)
def test_the_ends_of_a_ring_and_of_a_pool_are_looked_at(name):
    damage, broken = ENDS[name]
    laws = swa.invariants(damage(all_pending()))
    assert sorted(law for law, holds in laws.items() if not holds) == broken.split()


def test_a_pure_ring_that_names_a_page_twice_is_seen():
    state = with_pool("swa", ring=lambda x: x.at[3].set(1))(pure_state())
    laws = swa.invariants(state)
    assert [law for law, holds in laws.items() if not holds] == ["one_owner"]


def broken_by_step(before, after, grant):
    laws = swa.step_invariants(before, after, grant)
    return [law for law, holds in laws.items() if not holds]


@pytest.mark.parametrize(("full", "of_swa"), [(8, 16), (16, 8), (16, 16)])
def test_a_step_says_what_a_grant_did(full, of_swa):
    before = swa.init(swa.PoolConfig(full, of_swa, 4, 4))
    after, grant = swa.alloc(before, jnp.int32(12), capacity=16)
    assert bool(grant.ok) == (full == of_swa)
    assert broken_by_step(before, after, grant) == []
    misused, refused = swa.alloc(before, jnp.int32(-1), capacity=16)
    assert broken_by_step(before, misused, refused) == []
    assert broken_by_step(before, before, refused) == ["enough_said"]
    if grant.ok:
        assert broken_by_step(before, before, grant) == ["granted_was_free"]
