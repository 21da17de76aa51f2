"""A pool's own functions at their borders: page ids past the end, ranks round the ring's end."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

from swa_jax import PoolConfig, alloc_extend, faults, free_group_begin, free_group_end, init
from swa_jax.pool import count_holders, give_back, holders_of, is_held, nowhere, peek, settle, take
from swa_jax.rank import read_runs
from swa_jax.state import PagePool

SIZE = 6  # grantable pages, 1 .. 6


def pool_with(head: int, free: int, pending: int = 0) -> PagePool:
    """A pool whose ring holds page `place + 1` at each place; all that is not free is held."""
    pool = init(PoolConfig(SIZE, SIZE)).full
    places = [(head + step) % SIZE for step in range(free + pending)]
    holders = jnp.ones(SIZE + 1, jnp.int32).at[jnp.asarray(places, jnp.int32) + 1].set(0)
    return dataclasses.replace(
        pool,
        ring=jnp.arange(1, SIZE + 1, dtype=jnp.int32),
        holders=holders,
        head=jnp.int32(head),
        num_free=jnp.int32(free),
        num_pending=jnp.int32(pending),
    )


def test_nobody_holds_a_page_past_the_end():
    pool = pool_with(0, 2)
    pages = jnp.asarray([1, 3, SIZE, SIZE + 1, SIZE + 9])
    assert holders_of(pool, pages).tolist() == [0, 1, 1, 0, 0]
    assert is_held(pool, pages).tolist() == [False, True, True, False, False]
    written = count_holders(pool, jnp.asarray([3, nowhere(pool), nowhere(pool)]), jnp.int32(4))
    assert written.holders.tolist() == [1, 0, 0, 4, 1, 1, 1]


@pytest.mark.parametrize("most", [2, 5, 6, 9])
@pytest.mark.parametrize("head", [0, 3, 5])
def test_ranks_go_round_the_end_of_the_ring(head, most):
    ranks = jnp.arange(min(most, SIZE), dtype=jnp.int32)
    right = [(head + rank) % SIZE + 1 for rank in range(min(most, SIZE))]
    assert peek(pool_with(head, SIZE), ranks, most).tolist() == right


@pytest.mark.parametrize("count", [0, 1, 5, 6])
@pytest.mark.parametrize("head", [0, 5])
def test_what_is_taken_is_held_and_the_head_goes_on(head, count):
    pool = pool_with(head, SIZE)
    pages = peek(pool, jnp.arange(SIZE, dtype=jnp.int32))
    granted = jnp.where(jnp.arange(SIZE) < count, pages, nowhere(pool))
    after = jax.jit(take)(pool, granted, jnp.int32(count))
    assert int(after.head) == (head + count) % SIZE
    assert int(after.num_free) == SIZE - count
    assert int(jnp.sum(after.holders[1:])) == count


def queue(pool: PagePool) -> tuple[list[int], set[int]]:
    """Grantable pages in order, and the pending ones behind them."""
    ring, head, free = pool.ring.tolist(), int(pool.head), int(pool.num_free)
    pages = [ring[(head + step) % SIZE] for step in range(free + int(pool.num_pending))]
    return pages[:free], set(pages[free:])


@pytest.mark.parametrize("head", [0, 4, 5])
@pytest.mark.parametrize(
    ("free", "pending"), [(0, 0), (1, 0), (1, 1), (0, 2), (1, 3), (2, 3), (5, 0)]
)
def test_what_comes_back_stands_behind_the_free_ones_and_before_the_pending(head, free, pending):
    pool = pool_with(head, free, pending)
    held = [page for page in range(1, SIZE + 1) if int(pool.holders[page])]
    last, others = held[-1], held[:-1]
    named = [nowhere(pool), last, *others]
    pages = jnp.asarray(named + [nowhere(pool)] * (SIZE + 1 - len(named)))
    # Of the others somebody still holds a share; a place that names none says 0, as `free` has it.
    left = jnp.where((pages == last) | (pages == nowhere(pool)), 0, 2)
    before, waiting = queue(pool)
    now = jax.jit(give_back)(pool, pages, left, jnp.zeros((), bool))
    assert queue(now) == ([*before, last], waiting)
    later = jax.jit(give_back)(pool, pages, left, jnp.ones((), bool))
    assert queue(later) == (before, {*waiting, last})
    grantable, none = queue(settle(later))
    assert (set(grantable), none) == ({*before, *waiting, last}, set())
    for after in (now, later):
        assert [int(after.holders[page]) for page in others] == [2] * len(others)
        assert int(after.holders[last]) == 0


@pytest.mark.parametrize("lengths", [[1, 1, 0], [0, 2], [2, 0, 0], [0, 0], [1, 0, 1]])
def test_runs_fill_their_room_to_the_last_place(lengths):
    runs = read_runs(jnp.asarray(lengths, jnp.int32), 2)
    right = [(run, place) for run, length in enumerate(lengths) for place in range(length)]
    got = list(zip(runs.run.tolist(), runs.within.tolist(), strict=True))
    assert got[: len(right)] == right
    assert runs.real.tolist() == [place < len(right) for place in range(2)]


@pytest.mark.parametrize("capacity", [12, 64])
def test_places_past_the_granted_tokens_hold_nothing(capacity):
    """Slots are laid down page by page, or found token by token where pages are long."""
    state = init(PoolConfig(64, 64, 16))
    _, grant = alloc_extend(state, [0, 0], [5, 3], [-1, -1], capacity=capacity)
    slots = [*range(16, 21), *range(32, 35)]
    assert grant.slots.tolist() == slots + [0] * (capacity - len(slots))


def test_a_row_that_cannot_be_is_counted_once_however_long_it_says_it_is():
    state = init(PoolConfig(64, 64, 16))
    after, grant = alloc_extend(state, [-1, 0], [40, 3], [-1, -1], capacity=12)
    assert not grant.ok
    assert sum(faults(after).values()) == faults(after)["bad_length"] == 1


def test_a_second_begin_is_counted_and_the_end_releases_both_pools():
    state = init(PoolConfig(SIZE, SIZE))
    state = dataclasses.replace(state, full=pool_with(1, 2, 3), swa=pool_with(0, 1, 2))
    begun = free_group_begin(free_group_begin(state))
    assert bool(begun.group_open)
    assert (sum(faults(begun).values()), faults(begun)["nested_group"]) == (1, 1)
    ended = free_group_end(begun)
    assert not bool(ended.group_open)
    counts = [(int(pool.num_free), int(pool.num_pending)) for pool in (ended.full, ended.swa)]
    assert counts == [(5, 0), (3, 0)]
