"""Slot and page arithmetic at its borders, against plain Python."""

import jax.numpy as jnp
import numpy as np
import pytest

from swa_jax import paging
from swa_jax.state import NOBODY

INT_MAX = 2**31 - 1


@pytest.mark.parametrize("size", [1, 2, 3, 4, 6, 16])
def test_pages_of_any_size_are_those_of_a_division(size):
    tokens = [*range(40), INT_MAX - 1, INT_MAX]
    slots = jnp.asarray(tokens, jnp.int32)
    assert paging.page_of(slots, size).tolist() == [n // size for n in tokens]
    assert paging.offset_of(slots, size).tolist() == [n % size for n in tokens]
    assert paging.pages_for(slots, size).tolist() == [-(-n // size) for n in tokens]
    assert paging.floor_to_page(slots, size).tolist() == [n // size * size for n in tokens]


def test_past_the_end_is_absent_or_the_nearer_end_or_nowhere():
    table = jnp.asarray([5, 6, 7], jnp.int32)
    outside = jnp.asarray([-1, 0, 2, 3, INT_MAX], jnp.int32)
    assert paging.look_up(table, outside, 9).tolist() == [9, 5, 7, 9, 9]
    assert paging.fetch(table, outside).tolist() == [5, 5, 7, 7, 7]
    assert paging.put(table, outside[1:], jnp.int32(1)).tolist() == [1, 6, 1]
    assert paging.put(table, outside[3:4], jnp.int32(1)).tolist() == [5, 6, 7]
    assert paging.put(table, outside[2:3], jnp.int32(1)).tolist() == [5, 6, 1]


@pytest.mark.parametrize("pages", [[4], [3], [4, 4], [3, 1, 3, 4], [0, 0, 4, 2]])
def test_first_places_speak_for_their_pages(pages):
    scratch = jnp.full(4, NOBODY, jnp.int32)  # ids 0 .. 3; 4 names none
    is_first, first, after = paging.first_places(scratch, jnp.asarray(pages, jnp.int32))
    seen = [pages.index(page) for page in pages]
    real = [page < 4 for page in pages]
    places = range(len(pages))
    assert is_first.tolist() == [ok and seen[i] == i for i, ok in zip(places, real, strict=True)]
    assert first.tolist() == [at if ok else len(pages) for at, ok in zip(seen, real, strict=True)]
    np.testing.assert_array_equal(after, scratch)
