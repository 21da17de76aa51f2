"""Ranks, sums and runs against NumPy."""

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from swa_jax.paging import first_places, sum_exceeds
from swa_jax.rank import exclusive_sum, rank, ranks, read_marks, read_runs
from swa_jax.state import NOBODY


@pytest.mark.parametrize("count", [1, 2, 31, 32, 33, 511, 512, 513, 2048, 5000, 40_000])
@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
def test_rank_counts_the_marks_before(count, share):
    marks = np.random.default_rng(count).random(count) < share
    places, total = rank(jnp.asarray(marks))
    np.testing.assert_array_equal(places, np.cumsum(marks) - marks)
    assert int(total) == marks.sum()
    assert places.dtype == total.dtype == jnp.int32


def test_ranks_keep_their_rows_apart():
    marks = np.random.default_rng(0).random((3, 700)) < 0.5
    places, totals = ranks(jnp.asarray(marks))
    np.testing.assert_array_equal(places, np.cumsum(marks, axis=1) - marks)
    np.testing.assert_array_equal(totals, marks.sum(axis=1))


def test_nothing_has_no_rank():
    places, total = rank(jnp.zeros(0, bool))
    assert places.shape == (0,)
    assert int(total) == 0


@given(st.lists(st.integers(0, 1000), min_size=1, max_size=9))
def test_exclusive_sum(values):
    padded = np.array(values + [0] * (9 - len(values)), np.int32)
    np.testing.assert_array_equal(exclusive_sum(jnp.asarray(padded)), np.cumsum(padded) - padded)


@given(st.lists(st.integers(0, 5), min_size=6, max_size=6))
def test_runs_are_laid_end_to_end(lengths):
    runs = read_runs(jnp.array(lengths, jnp.int32), 32)
    right = [(row, place) for row, length in enumerate(lengths) for place in range(length)]
    real = np.asarray(runs.real)
    assert real.sum() == len(right)
    assert real[: len(right)].all()
    got = zip(np.asarray(runs.run)[real], np.asarray(runs.within)[real], strict=True)
    assert [(int(a), int(b)) for a, b in got] == right


@given(st.lists(st.integers(1, 10), min_size=8, max_size=8))
def test_first_places_find_the_first_of_each_page(pages):
    nowhere = 10
    scratch = jnp.full(nowhere, NOBODY, jnp.int32)
    is_first, first, after = first_places(scratch, jnp.array(pages, jnp.int32))
    for place, page in enumerate(pages):
        right = pages.index(page) if page < nowhere else 8
        assert int(first[place]) == right
        assert bool(is_first[place]) == (right == place)
    np.testing.assert_array_equal(after, scratch)


@given(st.lists(st.integers(0, 2**31 - 1), min_size=4, max_size=4), st.integers(1, 2**31 - 1))
def test_sums_past_int32_are_seen(values, limit):
    got = sum_exceeds(jnp.array(values, jnp.int32), limit)
    assert bool(got) == (sum(values) > limit)


def test_sums_of_the_largest_batch():
    rows = jnp.full(2**15 - 1, 2**31 - 1, jnp.int32)
    assert bool(sum_exceeds(rows, 2**31 - 1))
    ones = jnp.ones(2**15 - 1, jnp.int32)
    assert not bool(sum_exceeds(ones, 2**15 - 1))
    assert bool(sum_exceeds(ones, 2**15 - 2))


@pytest.mark.parametrize("marked", [[], [0], [31], [32, 33], [5, 31, 32, 63, 64, 99], range(100)])
def test_marks_are_read_by_number_and_end_past_the_places(marked):
    marks = jnp.asarray([place in marked for place in range(100)])
    read = read_marks(marks)
    assert int(read.count) == len(marked)
    nth = jnp.arange(102, dtype=jnp.int32)
    assert read.read(nth).tolist() == [*marked, *[100] * (102 - len(marked))]
