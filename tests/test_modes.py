"""One program, every way of running it: eager, jitted, scan, while_loop, vmap, donated, 64 bit."""

import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compare import assert_bitwise_equal, assert_same, config_of, counts, ints
from oracle import Sizes
from programs import draw, run_step, run_step_by_step, stack

import swa_jax as swa

SIZES = {
    "tokens": Sizes(48, 40, 1, window=5),
    "pages": Sizes(96, 64, 4, window=6),
}
LENGTH = 48
every_size = pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)


def scanned(state, steps):
    return jax.lax.scan(run_step, state, steps)


def looped(state, steps):
    """The same in a `while_loop`, without the grants."""

    def body(carry):
        i, state = carry
        state, _ = run_step(state, tuple(each[i] for each in steps))
        return i + 1, state

    length = steps[0].shape[0]
    return jax.lax.while_loop(lambda carry: carry[0] < length, body, (jnp.int32(0), state))[1]


# Compiled once for all tests: a program has many branches.
scan = jax.jit(scanned)
one_step = jax.jit(run_step)


@every_size
def test_scan_agrees_with_the_oracle(sizes):
    for seed in range(3):
        program, oracle = draw(sizes, seed, LENGTH)
        state, _ = scan(swa.init(config_of(sizes)), program.steps())
        if oracle.unsure:  # several rules broken in one call: only the kind of fault is open
            oracle.faults.update({k: v - oracle.faults[k] for k, v in swa.faults(state).items()})
        assert_same(state, oracle)


@every_size
def test_eager_jitted_scan_and_while_give_the_same_bits(sizes):
    program, _ = draw(sizes, 11, LENGTH)
    state, steps = swa.init(config_of(sizes)), program.steps()
    expected = run_step_by_step(state, steps, one_step)
    assert_bitwise_equal(scan(state, steps), expected)
    assert_bitwise_equal(jax.jit(looped)(state, steps), expected[0])
    short = tuple(each[:16] for each in steps)
    with jax.disable_jit():
        eager = run_step_by_step(state, short)
    assert_bitwise_equal(eager, run_step_by_step(state, short, one_step))


def test_vmap_keeps_three_allocators_apart():
    sizes = SIZES["pages"]
    programs = [draw(sizes, seed, LENGTH)[0] for seed in (21, 22, 23)]
    state = swa.init(config_of(sizes))
    states = jax.tree.map(lambda leaf: jnp.stack([leaf] * 3), state)
    together = jax.jit(jax.vmap(scanned))(states, stack(programs))
    for i, program in enumerate(programs):
        mine = jax.tree.map(lambda leaf, i=i: leaf[i], together)
        assert_bitwise_equal(mine, scan(state, program.steps()))


@every_size
def test_eval_shape_knows_the_result(sizes):
    program, _ = draw(sizes, 31, 4)
    state = swa.init(config_of(sizes))
    step = tuple(each[0] for each in program.steps())
    shapes, _ = jax.eval_shape(run_step, state, step)
    assert jax.tree.structure(shapes) == jax.tree.structure(state)
    for expected, leaf in zip(jax.tree.leaves(shapes), jax.tree.leaves(state), strict=True):
        assert (expected.shape, expected.dtype) == (leaf.shape, leaf.dtype)


def test_donation_frees_the_old_state_and_leaves_a_snapshot():
    sizes = SIZES["pages"]
    grow = jax.jit(swa.alloc, static_argnames="capacity", donate_argnums=0)
    give = jax.jit(swa.free, donate_argnums=0)
    state = swa.init(config_of(sizes))
    saved = swa.snapshot(state)
    new, grant = grow(state, jnp.int32(8), capacity=8)
    assert state.full.ring.is_deleted()
    assert state.full_to_swa.is_deleted()
    assert counts(new) == (88, 56)
    before_free = swa.snapshot(new)
    freed = give(new, grant.slots)
    assert new.full_to_swa.is_deleted()
    assert counts(freed) == (96, 64)
    assert counts(saved) == (96, 64)
    assert_bitwise_equal(saved, swa.init(config_of(sizes)))
    # A snapshot is a state like any other: go on from it.
    again, same = grow(swa.snapshot(saved), jnp.int32(8), capacity=8)
    assert same.slots.tolist() == grant.slots.tolist()
    assert_bitwise_equal(again, before_free)


def test_clear_gives_a_new_state():
    sizes = SIZES["pages"]
    program, _ = draw(sizes, 41, LENGTH)
    state, _ = scan(swa.init(config_of(sizes)), program.steps())
    assert_bitwise_equal(swa.clear(state), swa.init(config_of(sizes)))


def test_states_of_different_configurations_are_different_trees():
    trees = {jax.tree.structure(swa.init(config_of(sizes))) for sizes in SIZES.values()}
    assert len(trees) == len(SIZES)
    config = config_of(SIZES["pages"])
    assert hash(config) == hash(config_of(SIZES["pages"]))


def test_num_tokens_may_be_a_python_int():
    state = swa.init(config_of(SIZES["pages"]))
    by_int = swa.alloc(state, 8, capacity=8)
    by_array = swa.alloc(state, jnp.int32(8), capacity=8)
    assert_bitwise_equal(by_int, by_array)


_SCRIPT = """
import json, sys
sys.path.insert(0, {tests!r})
import jax, numpy as np
from compare import config_of
from oracle import Sizes
from programs import draw, run_step
import swa_jax as swa

sizes = Sizes(48, 32, 4, window=6)
program, _ = draw(sizes, 51, 40)
run = jax.jit(lambda state, steps: jax.lax.scan(run_step, state, steps))
out = run(swa.init(config_of(sizes)), program.steps())
leaves = jax.tree.leaves(out)
print(json.dumps({{
    "x64": bool(jax.config.jax_enable_x64),
    "dtypes": sorted({{str(leaf.dtype) for leaf in leaves}}),
    "values": [np.asarray(leaf).astype(int).tolist() for leaf in leaves],
}}))
"""


def run_script(x64):
    here = Path(__file__).parent
    env = {**os.environ, "JAX_ENABLE_X64": str(x64), "JAX_PLATFORMS": "cpu"}
    env["PYTHONPATH"] = os.pathsep.join(filter(None, [str(here.parent), env.get("PYTHONPATH")]))
    done = subprocess.run(
        [sys.executable, "-c", _SCRIPT.format(tests=str(here))],
        capture_output=True,
        text=True,
        env=env,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout)


def test_64_bit_mode_changes_no_integer():
    plain, wide = run_script(0), run_script(1)
    assert (plain["x64"], wide["x64"]) == (False, True)
    assert plain["dtypes"] == wide["dtypes"] == ["bool", "int32"]
    assert plain["values"] == wide["values"]
    assert np.asarray(ints([1])).dtype == np.int32
