"""What a transition may cost at most: bytes, buffers, memory, and nothing that follows the pool."""

import re

import jax
import jax.numpy as jnp
import pytest

import swa_jax as swa
from benchmarks import limit_cases, limits

PAGE, ROWS, SLOTS = 16, 8, 256
SMALL, LARGE = 2**12, 2**14  # tokens

CLEARS = "clear_full_to_swa_mapping"

# Bytes that the compiled program may touch for each that it must. Small calls are mostly overhead.
MOST = {"alloc_extend": 60, "alloc_decode": 12, "free": 60, "free_segment": 24}


def case(name, tokens):
    config = limits.config_of(tokens, PAGE)
    found = {limit.name: limit for limit in limit_cases.limits_of(config, ROWS, SLOTS)}
    return config, found[name]


@pytest.fixture(scope="module")
def programs():
    return {
        name: [limits.lowered(limit, config).compile() for config, limit in both]
        for name in MOST
        if (both := [case(name, tokens) for tokens in (SMALL, LARGE)])
    }


@pytest.mark.parametrize("name", MOST)
def test_every_array_of_the_state_is_reused(programs, name):
    config, limit = case(name, LARGE)
    arrays = jax.tree.leaves(jax.eval_shape(lambda: limits.donated(limit, config)))
    assert limits.aliased_buffers(programs[name][1]) == len(arrays)


@pytest.mark.parametrize("name", MOST)
def test_bytes_stay_under_a_bound_in_a_pool_of_any_size(programs, name):
    """`cost_analysis` counts the table that a gather or a write in place goes into as a whole."""
    small, large = (limits.touched_bytes(program) for program in programs[name])
    pages = (LARGE - SMALL) // PAGE
    per_page = (large - small) / pages
    touched = large - per_page * (LARGE // PAGE)
    _, limit = case(name, LARGE)
    assert touched <= MOST[name] * limit.must
    assert per_page % 4 == 0  # whole tables of int32, and nothing else, follow the pool
    work = [program.cost_analysis()["flops"] for program in programs[name]]
    assert work[0] == work[1]


@pytest.mark.parametrize("name", MOST)
def test_only_writes_in_place_are_as_long_as_the_pool(programs, name):
    text = programs[name][1].as_text()
    sizes = f"{LARGE // PAGE}|{LARGE // PAGE + 1}"
    made = re.findall(rf"%?([\w.-]+) = \w+\[(?:{sizes})\]\S* (?!parameter|get-tuple)(\w+)\(", text)
    assert {operation for _, operation in made} <= {"fusion", "scatter"}
    assert all("scatter" in name or operation == "scatter" for name, operation in made)


def test_a_lone_row_or_slot_copies_no_table():
    """A scatter of one index would be compiled to a write into a copy."""
    config = limits.config_of(LARGE, PAGE)
    for limit in limit_cases.limits_of(config, 1, 1):
        if limit.name not in {*MOST, "free_swa", "share", "copy_on_write", CLEARS}:
            continue
        text = limits.lowered(limit, config).compile().as_text() or ""
        copied = {int(size) for size in re.findall(r"\w+\[(\d+)\]\S* copy\(", text)}
        assert not {size for size in copied if size >= LARGE // PAGE}, limit.name


def test_small_operations_stay_on_one_thread():
    """XLA splits an operation of long chains over threads, which takes longer than the work."""
    config = limits.config_of(2**18, PAGE)
    for limit in limit_cases.limits_of(config, 64, 16_384):
        if limit.name not in {"alloc_extend", "alloc_decode", "free_segment", "free_swa_segment"}:
            continue
        text = limits.lowered(limit, config).compile().as_text() or ""
        split = re.findall(r"%?([\w.-]+) = \S+ fusion\(.*outer_dimension_partitions", text)
        assert not [name for name in split if "scatter" not in name], limit.name


@pytest.mark.parametrize("page_size", [1, 16])
def test_a_page_takes_16_bytes_and_an_swa_page_8(page_size):
    def size(full, of_swa):
        config = swa.PoolConfig(full * page_size, of_swa * page_size, page_size)
        return swa.state_bytes(config)

    assert size(101, 50) - size(100, 50) == 16
    assert size(100, 51) - size(100, 50) == 8
    assert size(100, 50) - 16 * 100 - 8 * 50 < 100


@pytest.mark.parametrize("name", ["alloc_decode", "free_segment"])
def test_one_program_and_no_transfer_in_repeated_calls(name):
    config, limit = case(name, SMALL)
    traces = 0

    def counted(*arguments):
        nonlocal traces
        traces += 1
        return limit.call(*arguments)

    step = jax.jit(counted, donate_argnums=0)
    (state,) = limits.donated(limit, config)
    asks = [tuple(each + jnp.int32(turn) for each in limit.arguments) for turn in range(3)]
    for ask in asks:
        with jax.transfer_guard("disallow"):
            result = step(state, *ask)
        state = result[0] if isinstance(result, tuple) else result
    assert traces == 1
