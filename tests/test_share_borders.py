"""Which place speaks for a shared page, and a batch of one row."""

import jax.numpy as jnp
import pytest

import swa_jax as swa


def two_pages(**pool):
    state = swa.init(swa.PoolConfig(**pool, page_size=4, sliding_window=4))
    return swa.alloc(state, jnp.int32(8), capacity=8)[0]


def test_the_first_place_of_a_page_says_whether_its_swa_side_is_shared():
    state = two_pages(full_tokens=16, swa_tokens=16)
    state = swa.share(state, jnp.asarray([4, 5, 9, 8]), jnp.asarray([False, True, True, False]))
    assert state.full.holders.tolist() == [1, 2, 2, 0, 0]
    assert state.swa.holders.tolist() == [1, 1, 2, 0, 0]


def test_in_a_pure_pool_the_first_place_says_whether_the_page_is_shared():
    state = swa.init(swa.PoolConfig.pure_swa(16, page_size=4, sliding_window=4))
    state, _ = swa.alloc(state, jnp.int32(8), capacity=8)
    state = swa.share(state, jnp.asarray([4, 5, 9, 8]), jnp.asarray([False, True, True, False]))
    assert state.full.holders.tolist() == [1, 1, 2, 0, 0]
    assert state.swa.holders.tolist() == [1, 1, 2, 0, 0]


@pytest.mark.parametrize("shared", [False, True])
def test_a_lone_row_gets_the_answer_of_one_row(shared):
    state = two_pages(full_tokens=16, swa_tokens=16)
    if shared:
        state = swa.share(state, jnp.asarray([4, 8]))
    state, copies = swa.copy_on_write(state, jnp.asarray([6]), jnp.asarray([9]))
    assert copies.source.shape == copies.target.shape == (1, 4)
    assert copies.source.tolist() == [[8, 9, 0, 0] if shared else [0] * 4]
    assert copies.last_loc.tolist() == [13 if shared else 9]
