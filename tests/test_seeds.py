"""The three bugs this allocator must never have, and a long mixed run."""

import functools

import jax
import pytest
import soak
from compare import assert_invariants, free_queue, held_pages, pending_queue
from oracle import Sizes
from pair import Ask, Pair, granted, pages_of

import swa_jax as swa


@pytest.mark.parametrize("strategy", ["group", "snapshot"])
@pytest.mark.parametrize("order", ["set, then clear", "clear, then set"])
def test_free_swa_group_owns_mapping_at_enqueue_time(order, strategy):
    """A free that takes effect later releases the page that was mapped when it was asked for."""
    pair = Pair(Sizes(8, 8, 1))
    old_full, new_full = granted(pair.alloc(1)), granted(pair.alloc(1))
    old_swa, new_swa = pair.swa_of(old_full), pair.swa_of(new_full)
    then = pair.snapshot()
    if strategy == "group":
        pair.free_group_begin()
        pair.free_swa(old_full)
        assert pair.swa_of(old_full) == [0]
    if order == "set, then clear":
        pair.set_mapping(old_full, new_swa)
        assert pair.swa_of(new_full) == [0]  # setting a mapping moves it
        pair.clear_mapping(new_full)
    else:
        pair.clear_mapping(new_full)
        pair.set_mapping(old_full, new_swa)
    if strategy == "group":
        assert pair.left == (6, 6)
        pair.free_group_end()
    else:
        pair.free_swa(old_full, owner=then)

    assert pair.swa_of(old_full) == new_swa
    assert pair.swa_of(new_full) == [0]
    assert pair.left == (6, 7)
    assert pair.no_faults()
    assert old_swa[0] in free_queue(pair.state.swa)
    assert held_pages(pair.state.swa) == set(new_swa)
    drained = granted(pair.alloc(6))
    pair.free_full(new_full)
    drained += granted(pair.alloc(1))
    assert pair.left == (0, 0)
    granted_swa = pair.swa_of(drained)
    assert old_swa[0] in granted_swa
    assert new_swa[0] not in granted_swa


def test_swa_memory_pool_paged_free_clears_full_page_mapping():
    """Freeing one token of an SWA page frees the page, once, and unmaps all its tokens."""
    pair = Pair(Sizes(16, 16, 4, window=4))
    slots = granted(pair.alloc(4))
    assert pair.left == (12, 12)
    assert all(pair.swa_of(slots))
    pair.free_swa(slots[:1])
    assert pair.left == (12, 16)
    assert pair.swa_of(slots) == [0] * 4
    pair.free_swa(slots[1:2])
    assert pair.left == (12, 16)
    assert pair.faults == {"unmapped": 1}
    pair.free(slots)
    assert pair.left == (16, 16)
    assert pair.faults == {"unmapped": 1}


@pytest.mark.parametrize("stale", [False, True])
@pytest.mark.parametrize("tail", [0, 1, 4, 6, 15])
def test_swa_tail_clears_recycled_mappings(tail, stale):
    """Pages that served another request carry nothing over into a grant with a short tail."""
    pair = Pair(Sizes(32, 32, 4, window=4))
    pair.free(pair.extend(0, 32))  # every page has had a mapping
    other = pair.extend(0, 8)
    of_other = pair.swa_of(other)
    other_swa = set(pages_of(of_other, 4))
    if stale:
        theirs = sorted(other_swa) * 2
        pair.inject_mapping(dict(zip(free_queue(pair.state.full)[:4], theirs, strict=True)))
    left = pair.left
    slots = granted(pair.alloc_extend_swa_tail(Ask(0, 16, tail=tail)))
    pair.lawful = True
    pair.verify()

    live = -(-(tail + 0) // 4) * 4  # the tail ends on a page here, so it is rounded up
    assert pair.swa_of(slots[: 16 - live]) == [0] * (16 - live)
    assert all(pair.swa_of(slots[16 - live :]))
    assert pair.left == (left[0] - 16, left[1] - live)

    def untouched():
        released = free_queue(pair.state.swa) + pending_queue(pair.state.swa)
        return pair.swa_of(other) == of_other and other_swa.isdisjoint(released)

    assert pair.free_out_of_window([slots], [16], [0]) == [12]
    assert untouched()
    assert pair.left[1] == left[1] - min(live, 4)
    pair.free_swa(slots)
    assert untouched()
    assert pair.left[1] == left[1]
    pair.free(slots)
    assert untouched()
    assert pair.left == left
    pair.free(other)
    assert pair.left == (32, 32)


@functools.partial(jax.jit, static_argnames=("requests", "stale_tail"))
def soaked(load, requests, stale_tail=False):
    return soak.run(load, requests, stale_tail=stale_tail)


def test_mixed_requests_soak():
    load = soaked(soak.start(0), requests=10_240)
    assert int(load.finished) == 10_240
    assert not bool(load.broken)
    assert int(load.refused) > 0
    assert not any(swa.faults(load.state).values())
    assert int(swa.full_available_size(load.state)) == soak.CONFIG.full_tokens
    assert int(swa.swa_available_size(load.state)) == soak.CONFIG.swa_tokens
    assert_invariants(load.state)
    swa.check(load.state)


@pytest.mark.long
def test_mixed_requests_soak_sees_a_stale_tail():
    """The same loop with the old bug put back: it must not get far."""
    load = soaked(soak.start(0), requests=10_240, stale_tail=True)
    assert bool(load.broken)
    assert int(load.finished) < 10_240
