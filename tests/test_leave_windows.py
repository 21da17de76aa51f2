"""Two helpers of the loops: what rows leave behind goes back, and pages are dealt to rows."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compare import assert_bitwise_equal, assert_invariants

import swa_jax as swa
from swa_jax.leave_windows import leave_windows
from swa_jax.share_pages import share_pages

CONFIG = swa.PoolConfig(256, 256, 4, sliding_window=8)
LENGTHS = [40, 13, 30, 21, 12, 0]  # tokens: frontiers 32, 4, 20, 12, 4 and 0
ACTIVE = [True, True, False, True, True, True]


def world():
    """Rows as LENGTHS says, and int32[R, 16] the first slot of each of their pages."""
    lengths = jnp.asarray(LENGTHS)
    state, grant = swa.alloc_extend(
        swa.init(CONFIG), jnp.zeros_like(lengths), lengths, jnp.full_like(lengths, -1), capacity=128
    )
    assert grant.ok
    table = np.zeros((len(LENGTHS), 16), np.int32)
    for row, start in enumerate(np.cumsum([0, *LENGTHS[:-1]])):
        pages = grant.slots[start : start + LENGTHS[row]][::4]
        table[row, : pages.shape[0]] = pages
    return state, jnp.asarray(table), lengths


@pytest.mark.parametrize(
    "kept", [[16, 100, 0, 0, 0, 0], pytest.param(None, marks=pytest.mark.long)], ids=str
)
def test_every_active_row_leaves_all_that_its_window_has_left(kept):
    state, table, lengths = world()
    kept = None if kept is None else jnp.asarray(kept)
    evicted, active = jnp.zeros_like(lengths), jnp.asarray(ACTIVE)
    edge = swa.frontier(CONFIG, lengths, kept)
    leave = jax.jit(functools.partial(leave_windows, step_pages=2))
    after, done = leave(state, table, lengths, evicted, active, insert_lens=kept)
    assert done.tolist() == jnp.where(active, edge, 0).tolist()
    assert not any(swa.faults(after).values())
    assert_invariants(after)
    gone = [slot for row, end in enumerate(done.tolist()) for slot in table[row, : end // 4]]
    assert_bitwise_equal(after.full_to_swa, swa.free_swa(state, jnp.asarray(gone)).full_to_swa)
    again, same = leave(after, table, lengths, done, active, insert_lens=kept)
    assert_bitwise_equal((again, same), (after, done))


def test_without_a_window_nothing_leaves():
    state = swa.init(swa.PoolConfig(16, 16, 4))
    rows = jnp.zeros(2, jnp.int32)
    table = jnp.zeros((2, 4), jnp.int32)
    after, done = leave_windows(state, table, rows + 16, rows, rows == 0, step_pages=1)
    assert_bitwise_equal((after, done), (state, rows))


def dealt(length, want, pages, size):
    """One row after another, in plain Python."""
    shares = []
    for has, wants in zip(length, want, strict=True):
        room = -has % size
        share = min(wants, room + pages * size)
        pages -= max(0, -(-(share - room) // size))
        shares.append(share)
        pages = pages if share == wants else -1
        if pages < 0:
            break
    return shares + [0] * (len(length) - len(shares))


@pytest.mark.parametrize("size", [1, 3, 4])
def test_pages_are_dealt_in_row_order_until_a_row_is_cut_short(size):
    rng = np.random.default_rng(size)
    deal = jax.jit(functools.partial(share_pages, page_size=size))
    for _ in range(150):
        length, want = rng.integers(0, 14, 4), rng.integers(0, 11, 4)
        pages = int(rng.integers(0, 12))
        got = deal(jnp.asarray(length, jnp.int32), jnp.asarray(want, jnp.int32), jnp.int32(pages))
        assert got.tolist() == dealt(length.tolist(), want.tolist(), pages, size), (length, want)
