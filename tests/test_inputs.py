"""What a caller may pass: host mistakes raise and say what was wrong, device values never wrap."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import swa_jax as swa
from swa_jax import inputs

CONFIG = swa.PoolConfig(32, 16, 4, 4)
wrong: Any = swa  # calls that a type checker would not let pass


@pytest.fixture
def state():
    return swa.init(CONFIG)


def total(state):
    return sum(swa.faults(state).values())


@pytest.mark.parametrize("slots", [[4, 5], (4, 5), np.array([4, 5]), np.array([4, 5], np.uint8)])
def test_lists_and_numpy_arrays_are_taken(state, slots):
    state, _ = swa.alloc(state, 8, capacity=8)
    assert int(swa.full_available_size(swa.free(state, slots))) == 28


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda s: wrong.free(s, [1.5]), "slots must hold integers"),
        (lambda s: swa.free(s, jnp.ones(3)), "slots must hold integers"),
        (lambda s: swa.free(s, [[4]]), r"slots must be an array of 1 dimension\(s\), got shape"),
        (lambda s: swa.free(s, 4), r"slots must be an array of 1 dimension\(s\)"),
        (lambda s: swa.free(s, [2**31]), "slots must fit int32"),
        (lambda s: swa.alloc(s, [4], capacity=4), "num_tokens must be a scalar"),
        (lambda s: swa.alloc(s, 4, capacity=0), "capacity must be 1"),
        (lambda s: wrong.alloc(s, 4, capacity=4.0), "capacity must be a positive Python int"),
        (lambda s: swa.alloc_extend(s, [0], [4, 4], [-1], capacity=8), "agree in length"),
        (lambda s: swa.alloc_decode(s, [1, 1], [-1, -1], [True]), "agree in length"),
        (lambda s: wrong.alloc_decode(s, [1], [-1], [1]), "active must be a bool array"),
        (lambda s: swa.alloc_decode(s, [], []), "a batch takes 1 .. 32767 rows"),
        (lambda s: swa.set_full_to_swa_mapping(s, [4], [4, 8]), "agree in length"),
        (lambda s: swa.free_out_of_window(s, [4], [1], [0]), "req_to_token must be"),
        (lambda s: swa.free_out_of_window(s, [[4]], [1], [0], stride=2), "stride must be 1 or"),
        (lambda s: swa.free_out_of_window(s, [[4]], [1], [0], max_pages=0), "max_pages must be"),
        (
            lambda s: swa.free_swa(s, [4], owner=swa.init(swa.PoolConfig(8, 8))),
            "owner must be an earlier state of the same allocator",
        ),
    ],
)
def test_host_mistakes_raise_and_say_what(state, call, words):
    with pytest.raises(ValueError, match=words):
        call(state)


def test_capacity_must_be_known_before_tracing(state):
    with pytest.raises(ValueError, match="known before tracing"):
        jax.jit(lambda s, c: swa.alloc(s, 4, capacity=c))(state, 8)


def test_a_window_call_needs_a_window():
    state = swa.init(swa.PoolConfig(32, 16, 4))
    with pytest.raises(ValueError, match="give PoolConfig a sliding_window"):
        swa.free_out_of_window(state, [[4]], [8], [0])


def test_mapping_calls_need_two_pools():
    state = swa.init(swa.PoolConfig.pure_swa(32, 4))
    with pytest.raises(ValueError, match="needs two pools"):
        swa.set_full_to_swa_mapping(state, [4], [4])
    with pytest.raises(ValueError, match="needs two pools"):
        swa.clear_full_to_swa_mapping(state, [4])


def test_unsigned_device_values_are_clipped_not_wrapped(state):
    state, _ = swa.alloc(state, 8, capacity=8)
    huge = jnp.array([2**32 - 12, 4], jnp.uint32)  # -12 if it wrapped
    after = swa.free(state, huge)
    assert swa.faults(after)["out_of_range"] == 1
    assert int(swa.full_available_size(after)) == 28


def test_an_empty_array_frees_nothing(state):
    state, _ = swa.alloc(state, 8, capacity=8)
    for call in (swa.free, swa.free_swa, swa.free_segment, swa.free_swa_grouped):
        after = call(state, [])
        assert int(swa.full_available_size(after)) == 24
        assert total(after) == 0


@pytest.mark.parametrize("length", [2**31 - 1, 2**31 - 5, 2**30])
def test_lengths_near_the_int32_limit_are_refused(state, length):
    state, grant = swa.alloc_extend(state, [0, 0], [length, 4], [-1, -1], capacity=16)
    assert not bool(grant.ok)
    assert swa.faults(state)["bad_length"] == 1
    state, grant = swa.alloc_extend(state, [0] * 3, [length] * 3, [-1] * 3, capacity=16)
    assert not bool(grant.ok)
    table = np.zeros((1, 8), np.int32)
    state, evicted = swa.free_out_of_window(state, table, [length], [2**31 - 4])
    assert evicted.tolist() == [2**31 - 4]
    swa.check(state)
    assert int(swa.available_size(state)) == 16


def test_a_row_that_only_grows_by_little_may_be_very_long():
    # Lengths are the caller's; only the pages that a call takes must exist.
    state = swa.init(swa.PoolConfig(32, 16, 4))
    far = 2**31 - 9  # three tokens into a page
    state, first = swa.alloc(state, 4, capacity=4)
    assert far % 4 == 3
    state, grant = swa.alloc_decode(state, [far + 1], [int(first.slots[2])])
    assert bool(grant.ok)
    assert grant.slots.tolist() == [7]


def refused(words, call, *arguments):
    with pytest.raises(ValueError, match=words):
        call(*arguments)


def test_integers_are_taken_up_to_the_borders_of_int32():
    borders = [-(2**31), 2**31 - 1]
    for value in (borders, np.array(borders), jnp.asarray(borders, jnp.int32)):
        assert inputs.as_int32("x", value, 1).tolist() == borders
    assert inputs.as_int32("x", jnp.asarray([-3, 7], jnp.int16), 1).tolist() == [-3, 7]
    assert inputs.as_int32("x", jnp.asarray([2**32 - 1], jnp.uint32), 1).tolist() == [2**31 - 1]
    assert inputs.as_int32("x", [[1], [2]], None).shape == (2, 1)
    assert inputs.as_int32("x", [], 1).shape == (0,)
    refused("fit int32", inputs.as_int32, "x", [-(2**31) - 1, 0], 1)
    refused("fit int32", inputs.as_int32, "x", [2**31, 0], 1)
    refused("must hold integers", inputs.as_int32, "x", np.array([], bool), 1)
    refused("must be a scalar, got shape", inputs.as_int32, "x", [1], 0)
    refused("of 1 dimension", inputs.as_int32, "x", [[1]], 1)


def test_marks_are_bools_in_one_dimension():
    assert inputs.as_bool("x", [True, False]).tolist() == [True, False]
    refused("bool array of 1 dimension", inputs.as_bool, "x", [[True]])
    refused("bool array of 1 dimension", inputs.as_bool, "x", [1])


def test_rows_and_capacities_up_to_their_most():
    most = inputs.MAX_ROWS
    inputs.check_rows(a=jnp.zeros(1), b=jnp.zeros(1))
    inputs.check_rows(a=jnp.zeros(most))
    refused("1 .. 32767 rows", lambda: inputs.check_rows(a=jnp.zeros(most + 1)))
    refused("1 .. 32767 rows", lambda: inputs.check_rows(a=jnp.zeros(0)))
    right: list[Any] = [1, 2**31 - 1, np.int64(8)]
    for capacity in right:
        assert inputs.check_capacity(capacity) == capacity
    for capacity in (0, 2**31, -1):
        refused("must be 1 ..", inputs.check_capacity, capacity)
    for capacity in (True, 4.0, None):
        refused("positive Python int", inputs.check_capacity, capacity)


def test_whole_numbers_from_the_least_to_the_most():
    assert [inputs.whole_number("x", each, 2, 5) for each in (2, np.int8(3), 5)] == [2, 3, 5]
    for wrong in (1, 6, True, np.bool_(True), 3.0, "3", None):
        refused("x must be an integer from 2 to 5", inputs.whole_number, "x", wrong, 2, 5)
    refused("integer from 0 to", inputs.whole_number, "x", True, 0)
