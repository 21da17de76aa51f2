"""Data-parallel ranks: nothing crosses between them, and a router sees all."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import swa_jax as swa
from swa_jax import prefix_cache as pc
from swa_jax.data_parallel import each_rank, loads, new_ranks, one_rank, place

HERE = Path(__file__).parent
CONFIG = swa.PoolConfig(64, 64, 4, 8)
TEXT = jnp.arange(24, dtype=jnp.int32)


def run(processes, process=0, port=0):
    environment = dict(os.environ, JAX_PLATFORMS="cpu", PYTHONPATH=str(HERE.parent))
    each = 8 // processes
    environment["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={each}"
    arguments = [] if processes == 1 else [str(processes), str(process), str(port)]
    return subprocess.Popen(
        [sys.executable, str(HERE / "data_parallel_child.py"), *arguments],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


@pytest.mark.parametrize(
    "processes", [1, *(pytest.param(n, marks=pytest.mark.long) for n in (2, 4))]
)
def test_ranks_over_eight_devices(processes):
    with socket.socket() as free_port:
        free_port.bind(("localhost", 0))
        port = free_port.getsockname()[1]
    children = [run(processes, one, port) for one in range(processes)]
    for child in children:
        out, _ = child.communicate(timeout=400)
        assert child.returncode == 0, out[-3000:]
        assert "ranks agree" in out


def two_ranks():
    """Rank 1 has the text cached, rank 0 runs nothing."""
    states, caches = new_ranks(lambda: swa.init(CONFIG), 2), new_ranks(lambda: pc.init(CONFIG), 2)

    @jax.jit
    @each_rank
    def fill(state, cache, length):
        zero = jnp.zeros(1, jnp.int32)
        state, grant = swa.alloc_extend(state, zero, length[None], zero - 1, capacity=24)
        cache, state, _ = pc.insert(cache, state, TEXT, length, grant.slots)
        return state, cache

    return fill(states, caches, jnp.array([0, 16], jnp.int32))


def hold(states, tokens):
    """Every rank holds so many tokens more."""

    @each_rank
    def take(state, count):
        return swa.alloc(state, count, capacity=64)[0]

    return take(states, jnp.asarray(tokens, jnp.int32))


def test_a_request_goes_where_its_prefix_is():
    states, caches = two_ranks()
    got = place(states, caches, TEXT, 24)
    assert int(got.rank) == 1
    assert got.hit.tolist() == [0, 16]
    assert got.fits.tolist() == [True, True]
    assert int(place(states, caches, TEXT[::-1], 24).rank) == 0  # nobody has it: the first


def test_a_busy_rank_is_passed_over_for_all_its_prefix():
    states, caches = two_ranks()
    states = hold(states, [0, 32])
    assert int(place(states, caches, TEXT, 24).rank) == 0
    assert int(place(states, caches, TEXT, 24, slack=32).rank) == 1
    # 32 tokens of load for 16 of prefix: two each.
    assert int(place(states, caches, TEXT, 24, slack=32, per_token=1).rank) == 0
    assert int(place(states, caches, TEXT, 24, slack=32, per_token=2).rank) == 1
    waiting = jnp.array([33, 0], jnp.int32)
    assert int(place(states, caches, TEXT, 24, waiting=waiting, slack=32).rank) == 1


def test_a_rank_without_room_is_asked_only_where_none_has_any():
    states, caches = two_ranks()
    states = hold(states, [0, 40])
    got = place(states, caches, TEXT, 24, max_tokens=28, slack=64)
    assert got.fits.tolist() == [True, False]  # 64 - 40 less than the 28, but 16 of them are there
    assert int(got.rank) == 0
    states = hold(states, [44, 0])
    got = place(states, caches, TEXT, 24, max_tokens=28, slack=64)
    assert got.fits.tolist() == [False, False]
    assert int(got.rank) == 1


def test_loads_are_what_is_left():
    states, caches = two_ranks()
    states = hold(states, [8, 12])
    got = loads(states, caches)
    assert got.full_room.tolist() == [56, 52]
    assert got.swa_room.tolist() == [56, 52]
    assert got.busy.tolist() == [8, 12]
    assert loads(states).full_room.tolist() == [56, 36]
    assert int(swa.available_size(one_rank(states, 1))) == 36


def test_placing_changes_nothing_and_is_one_program():
    states, caches = two_ranks()
    before = [np.asarray(leaf) for leaf in jax.tree.leaves((states, caches))]
    place(states, caches, TEXT, 24)
    after = jax.tree.leaves((states, caches))
    assert all(np.array_equal(a, b) for a, b in zip(before, after, strict=True))


def test_what_cannot_be_is_refused():
    states, caches = two_ranks()
    with pytest.raises(ValueError, match="waiting must have one entry a rank, 2, got 3"):
        place(states, caches, TEXT, 24, waiting=[0, 0, 0])
    mesh = jax.make_mesh((1,), ("data",), devices=jax.devices()[:1])
    with pytest.raises(ValueError, match="axis must be one of"):
        each_rank(swa.free_group_begin, mesh=mesh, axis="tensor")
    with pytest.raises(ValueError, match="ranks"):
        new_ranks(lambda: swa.init(CONFIG), 0)


def test_what_cannot_be_placed_is_said():
    states, caches = two_ranks()
    for slack in (-1, 1.5, True):
        with pytest.raises(ValueError, match=r"slack must be an integer from 0"):
            place(states, caches, TEXT, 24, slack=slack)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match=r"per_token must be an integer from 1"):
        place(states, caches, TEXT, 24, per_token=0)
    with pytest.raises(ValueError, match="leading axis of ranks"):
        loads(swa.init(CONFIG))
    with pytest.raises(ValueError, match="one configuration"):
        place(states, new_ranks(lambda: pc.init(swa.PoolConfig(64, 64, 4, 4)), 2), TEXT, 24)
    with pytest.raises(ValueError, match="2 ranks of the states"):
        place(states, new_ranks(lambda: pc.init(CONFIG), 3), TEXT, 24)
    for rank in (-1, 2):
        with pytest.raises(ValueError, match="rank must be an integer from 0 to 1"):
            one_rank(states, rank)
    with pytest.raises(ValueError, match="axis of ranks"):
        each_rank(swa.snapshot, same=1)(states)


def test_waiting_below_nothing_is_nothing():
    states, caches = two_ranks()
    got = place(states, caches, TEXT, 24, waiting=[-(2**31), 0])
    assert got.fits.all()
    assert int(got.rank) == 1
