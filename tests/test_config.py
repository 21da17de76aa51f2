"""Sizes that cannot work are refused where they are given, and say what would work."""

from typing import Any

import numpy as np
import pytest

import swa_jax as swa


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ((0, 8), "full_tokens must be a positive integer, got 0"),
        ((8, -4), "swa_tokens must be a positive integer, got -4"),
        ((10, 8, 4), "multiple of page_size=4, got 10; try 8"),
        ((8, 6, 4), "multiple of page_size=4, got 6; try 4"),
        ((8, 8, 0), "page_size must be a positive integer, got 0"),
        ((8, 8, 1, 0), "sliding_window must be a positive integer, got 0"),
        ((8, 8, 1.5), "page_size must be a positive integer, got 1.5"),
        ((True, 8), "full_tokens must be a positive integer, got True"),
        ((2**31 - 1, 8), r"at most 2\^31 - 1 slots"),
        ((2**31, 8, 16), r"at most 2\^31 - 1 slots"),
    ],
)
def test_impossible_sizes_are_named(args, words):
    with pytest.raises(ValueError, match=words):
        swa.PoolConfig(*args)


def test_the_largest_pool_is_accepted():
    assert swa.PoolConfig(2**31 - 2, 1).full_pages == 2**31 - 2
    assert swa.PoolConfig(2**31 - 32, 16, 16).full_tokens == 2**31 - 32
    with pytest.raises(ValueError, match="the most for this page is 2147483616"):
        swa.PoolConfig(2**31 - 16, 16, 16)


def test_numpy_sizes_are_taken_as_ints():
    sizes: Any = (np.int64(32), np.int32(16), np.int64(4), np.int64(4))
    config = swa.PoolConfig(*sizes)
    assert config == swa.PoolConfig(32, 16, 4, 4)
    assert type(config.full_tokens) is int
    assert hash(config) == hash(swa.PoolConfig(32, 16, 4, 4))


@pytest.mark.parametrize(
    ("page", "window", "least"), [(8, 4, 16), (4, 4, 8), (1, 4, 5), (16, 128, 144), (4, 6, 12)]
)
def test_b49_an_swa_pool_below_one_window_is_refused(page, window, least):
    swa.PoolConfig(1024 * page, least, page, window)
    with pytest.raises(ValueError, match=f"need at least {least} tokens"):
        swa.PoolConfig(1024 * page, least - page, page, window)


def test_b49_a_full_pool_smaller_than_the_window_needs_no_more_than_itself():
    assert swa.PoolConfig(16, 16, 4, 1000).min_swa_pages == 4


def test_pure_swa_has_one_pool():
    config = swa.PoolConfig.pure_swa(32, 4, 8)
    assert (config.full_tokens, config.swa_tokens, config.page_size) == (32, 32, 4)
    with pytest.raises(ValueError, match="one pool"):
        swa.PoolConfig(32, 16, 4, pure_swa_pool=True)
    with pytest.raises(ValueError, match="need at least 12 tokens"):
        swa.PoolConfig.pure_swa(8, 4, 8)


def test_chunked_windows_need_a_length():
    assert swa.PoolConfig(64, 16, 4, 8, chunked=True).min_swa_pages == 2
    assert swa.PoolConfig(64, 16, 4, 6, chunked=True).min_swa_pages == 3
    with pytest.raises(ValueError, match="chunked=True needs sliding_window"):
        swa.PoolConfig(64, 16, 4, chunked=True)


def test_state_bytes_follow_the_pages():
    small, large = swa.PoolConfig(1600, 160, 16), swa.PoolConfig(3200, 160, 16)
    assert swa.state_bytes(large) - swa.state_bytes(small) == 16 * 100
    wide = swa.PoolConfig(1600, 320, 16)
    assert swa.state_bytes(wide) - swa.state_bytes(small) == 8 * 10
