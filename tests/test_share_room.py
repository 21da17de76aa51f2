"""Pages that a fork holds beside the tree: no room for others, and nobody's to bring back."""

import jax.numpy as jnp
import numpy as np
import pytest

import swa_jax as swa
from swa_jax import disagg
from swa_jax import prefix_cache as pc

CONFIG = swa.PoolConfig(16, 16, 4, 8)
TEXT = np.arange(1, 17)


def forked(config=CONFIG, tokens=16):
    """A text in the tree whose pages a fork runs on, and its slots."""
    state, cache = swa.init(config), pc.init(config)
    state, grant = swa.alloc_extend(state, [0], [tokens], [-1], capacity=16)
    state = swa.share(state, grant.slots)
    cache, state, _ = pc.insert(cache, state, TEXT, tokens, grant.slots)
    return state, cache, grant.slots


def lawful(state, cache):
    swa.check(state)
    pc.check(cache, state)


def test_what_a_fork_holds_is_not_evictable():
    state, cache, slots = forked()
    assert int(pc.full_evictable_size(cache, state)) == 0
    assert int(pc.swa_evictable_size(cache, state)) == 0
    cache, state, gone = pc.evict(cache, state, full_tokens=16, swa_tokens=16)
    assert (int(gone.full_tokens), int(gone.swa_tokens)) == (0, 0)
    assert int(pc.match_prefix(cache, state, TEXT, 16)[1].length) == 16
    state = swa.free(state, slots)  # the fork ends
    cache, state, gone = pc.evict(cache, state, full_tokens=16)
    assert int(gone.full_tokens) == int(swa.available_size(state)) == 16
    lawful(state, cache)


def test_an_eviction_passes_over_it_and_takes_what_gives_a_page():
    state, cache, _ = forked(tokens=12)
    state, grant = swa.alloc_extend(state, [0], [4], [-1], capacity=16)
    cache, state, _ = pc.insert(cache, state, TEXT[::-1].copy(), 4, grant.slots)
    cache, state, gone = pc.evict(cache, state, full_tokens=4)
    assert int(gone.full_tokens) == int(swa.full_available_size(state)) == 4
    assert int(pc.match_prefix(cache, state, TEXT, 12)[1].length) == 12
    lawful(state, cache)


def test_an_ancestor_of_a_shared_page_stays():
    state, cache, slots = forked()
    state = swa.free(state, slots[:8])  # the fork holds the second half alone
    assert int(pc.full_evictable_size(cache, state)) == 0
    cache, state, _ = pc.evict(cache, state, full_tokens=16)
    lawful(state, cache)


def test_the_swa_side_that_the_tree_alone_holds_can_go():
    state, cache, slots = forked()
    state = swa.free_swa(state, slots[:8])  # half of the text has left the fork's window
    assert int(pc.swa_evictable_size(cache, state)) == 8
    cache, state, gone = pc.evict(cache, state, swa_tokens=16)
    assert (int(gone.full_tokens), int(gone.swa_tokens)) == (0, 8)
    assert int(swa.swa_available_size(state)) == 8
    lawful(state, cache)


def test_a_reservation_is_refused_where_a_fork_holds_the_room():
    state, cache, _ = forked()
    inbox = disagg.new_inbox(CONFIG, 2, 16)
    inbox, state, cache, got = disagg.preallocate(inbox, state, cache, jnp.arange(100, 116), 8)
    assert not got.ok
    assert cache is not None
    assert (int(got.full_short), int(got.swa_short)) == (2, 2)
    disagg.check(inbox, state, cache)
    assert int(pc.match_prefix(cache, state, TEXT, 16)[1].length) == 16


def test_a_tombstone_that_a_fork_holds_is_not_brought_back():
    """It would be taken for the fork's own SWA page when that leaves its window."""
    config = swa.PoolConfig(64, 64, 4, 8)
    state, cache = swa.init(config), pc.init(config)
    state, grant = swa.alloc_extend_swa_tail(state, [0], [16], [-1], [8], capacity=16)
    state = swa.share(state, grant.slots)
    cache, state, _ = pc.insert(cache, state, TEXT, 16, grant.slots)
    state, other = swa.alloc_extend(state, [0], [8], [-1], capacity=16)
    cache, state, again = pc.insert(cache, state, TEXT, 8, other.slots)
    assert int(again.length) == 0  # the copy stays with its owner
    cache, _ = pc.lock(cache, state, again.node)
    state, _ = swa.free_out_of_window(state, grant.slots[None], [16], [0])
    lawful(state, cache)


def test_in_a_pure_pool_a_fork_holds_nothing_behind_its_window():
    state = swa.init(swa.PoolConfig.pure_swa(32, 4, 4))
    state, grant = swa.alloc_extend(state, [0], [8], [-1], capacity=8)
    state = swa.share(state, grant.slots)
    state, evicted = swa.free_out_of_window(state, grant.slots[None], [8], [0])
    live = np.arange(8) >= int(evicted[0])
    state = swa.share(state, grant.slots, live)
    kept = jnp.where(jnp.asarray(live), grant.slots, 0)
    for slots in (grant.slots, kept, kept):
        state = swa.free(state, slots)
    assert int(swa.available_size(state)) == 32
    swa.check(state)


def test_no_reservation_beside_request_rings():
    with pytest.raises(ValueError, match="a reservation"):
        disagg.new_inbox(swa.PoolConfig.request_ring(64, 2, page_size=4, sliding_window=8), 2, 16)


@pytest.mark.parametrize("extra", [False, 0.0, -1, "1"])
def test_tokens_in_flight_are_a_number(extra):
    with pytest.raises(ValueError, match="extra_tokens must be"):
        swa.PoolConfig.request_ring(64, 2, sliding_window=8, extra_tokens=extra)


def test_nothing_is_shared_with_nobody():
    state = swa.init(CONFIG)
    assert int(swa.available_size(swa.share(state, [], []))) == 16
