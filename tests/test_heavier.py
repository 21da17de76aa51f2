"""Which pair of pages takes more bytes: exactly, so that equal pairs are equal however compiled."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from swa_jax.heavier import MOST_WEIGHT, heavier, page_weight
from swa_jax.models import get_model, list_models
from swa_jax.planner import two_pools

MOST = 2**31 - 1
compiled = jax.jit(heavier)


def as_int32(*values):
    return jnp.asarray(np.asarray(values, np.int32))


pages = st.one_of(st.integers(0, 40), st.integers(0, MOST), st.integers(MOST - 40, MOST))
weights = st.one_of(st.integers(0, 60), st.integers(0, MOST_WEIGHT))


@given(st.tuples(pages, pages), st.tuples(pages, pages), st.tuples(weights, weights))
@example((MOST, MOST), (0, 0), (MOST_WEIGHT, MOST_WEIGHT))
@example((0, 0), (MOST, MOST), (MOST_WEIGHT, MOST_WEIGHT))
@example((MOST, 0), (0, MOST), (MOST_WEIGHT, MOST_WEIGHT))
@example((MOST, 0), (MOST - 1, 1), (MOST_WEIGHT, MOST_WEIGHT - 1))
def test_it_is_what_whole_numbers_of_any_size_say(pair, other, weight):
    def total(pages):
        return pages[0] * weight[0] + pages[1] * weight[1]

    got = compiled(as_int32(*pair), as_int32(*other), as_int32(*weight))
    assert bool(got) == (total(pair) > total(other))


def test_pairs_that_weigh_the_same_are_equal_in_a_batch_and_alone():
    """As floats, products fused into the sum made one of them the heavier, in one of the two."""
    full, of_swa = page_weight(5, 29)
    steps, rng = np.arange(-20, 21), np.random.default_rng(0)
    start = rng.integers(1000, 3000, (41, 2))
    other = start + np.stack([steps * of_swa, -steps * full], axis=1)
    pairs = as_int32(*start), as_int32(*other)
    weight = as_int32(full, of_swa)
    together = jax.jit(jax.vmap(heavier, (0, 0, None)))(*pairs, weight)
    alone = jax.jit(lambda pairs: jax.lax.map(lambda two: heavier(two[0], two[1], weight), pairs))(
        pairs
    )
    assert not together.any()
    assert not alone.any()


@pytest.mark.parametrize("name", list_models())
def test_weights_of_a_model_are_its_bytes_exactly(name):
    model = get_model(name)
    full, of_swa = page_weight(model.full_bytes_per_token, model.swa_bytes_per_token)
    assert full * model.swa_bytes_per_token == of_swa * model.full_bytes_per_token
    assert 0 < max(full, of_swa) < 100


@pytest.mark.parametrize(
    ("given", "weight"),
    [
        ((0, 7), (0, 1)),
        ((7, 0), (1, 0)),
        ((0, 0), (0, 0)),
        ((0.5, 0.5), (1, 1)),
        ((5 / 34, 29 / 34), (5, 29)),
        ((29 / 34, 5 / 34), (29, 5)),
        ((2**40 + 1, 2**40), (1, 1)),
        ((1, 2**40), (0, 1)),
        ((3 * 2**30, 2**31), (3, 2)),
    ],
)
def test_weights_are_small_whole_numbers(given, weight):
    assert page_weight(*given) == weight
    assert max(weight) <= MOST_WEIGHT


def test_a_planned_server_takes_weights_as_fractions():
    limits = two_pools(8, 4, 16, (5 / 34, 29 / 34))
    assert limits.weight.tolist() == [5, 29]
