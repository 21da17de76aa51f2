"""A device without memory: what says so, and what is left of the state that a call was given.

The server's end is in test_world_http.py, the host tier in test_world_tier.py.
"""

import functools
import subprocess
from dataclasses import dataclass
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ledger_model import Ledger
from world_faults import child_environment, no_memory, python

import swa_jax as swa
from swa_jax import cli
from swa_jax.commands import app
from swa_jax.out_of_memory import device_memory
from swa_jax.serving import ServingConfig, new_world
from swa_jax.serving_pools import memory_for

POOL = swa.PoolConfig(64, 32, 4, 8)


@pytest.mark.long
def test_pools_beyond_the_memory_are_told_as_such_and_harm_nothing():
    """A process of its own, with little memory: `init`, and a command after it."""
    tokens = str(2**28)
    command = ["replay", "mooncake-conversation", "--model", "gpt-oss-20b", "--limit", "3"]
    command += ["--full-tokens", tokens, "--swa-tokens", tokens, "--page-size", "1", "--quiet"]
    run = subprocess.run(
        python("world_memory.py", *command),
        env=child_environment(),
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert run.stdout.startswith("JaxRuntimeError RESOURCE_EXHAUSTED: Out of memory allocating")
    assert run.returncode == 2, run.stderr
    (said,) = [line for line in run.stderr.splitlines() if line.startswith("swa-jax: ")]
    assert "no memory for the state of 268,435,456 full and 268,435,456 SWA pages; give" in said
    assert said.endswith(" GiB in all")


@dataclass(frozen=True)
class Huge(Ledger):
    """KV of an exbibyte."""

    def init_kv(self, pool):
        return tuple(
            jnp.zeros((pages, pool.page_size, 2**53), jnp.int32)
            for pages in (pool.full_pages, pool.swa_pages)
        )


def test_kv_beyond_the_memory_is_told_with_what_to_change():
    config = ServingConfig(POOL, max_context=32)
    said = r"no memory for the model beside 64 full and 32 SWA tokens of KV: give a smaller --hbm"
    with pytest.raises(ValueError, match=f"{said}.*GiB in all"), memory_for(POOL):
        jax.block_until_ready(new_world(Huge(8), config, 4))


def test_what_a_device_has_is_said_where_it_is_known(monkeypatch):
    assert device_memory().startswith("; cpu has ")
    accelerator = SimpleNamespace(platform="gpu", memory_stats=lambda: {"bytes_limit": 80 * 2**30})
    monkeypatch.setattr(jax, "local_devices", lambda: [accelerator])
    assert device_memory() == "; gpu has 80.0 GiB in all"
    accelerator.memory_stats = lambda: None
    assert device_memory() == ""


def too_much(state):
    """Grants pages, and makes an array that fits no memory."""
    state, grant = swa.alloc(state, 12, capacity=12)
    return state, grant, jnp.zeros((2**42,), jnp.int32) + grant.count


def granted():
    state, grant = swa.alloc(swa.init(POOL), 8, capacity=8)
    return state, grant.slots


def test_a_state_that_was_not_donated_is_bit_for_bit_as_before():
    state, slots = granted()
    before = jax.tree.map(np.array, state)
    with pytest.raises(jax.errors.JaxRuntimeError, match="RESOURCE_EXHAUSTED"):
        jax.block_until_ready(jax.jit(too_much)(state))
    same = jax.tree.map(lambda one, two: np.array_equal(one, two), before, state)
    assert jax.tree.all(same)
    swa.check(swa.free(state, slots))


def test_a_state_that_was_donated_is_gone_and_its_snapshot_is_not():
    state, slots = granted()
    kept = swa.snapshot(state)
    with pytest.raises(jax.errors.JaxRuntimeError, match="RESOURCE_EXHAUSTED"):
        jax.block_until_ready(jax.jit(too_much, donate_argnums=0)(state))
    with pytest.raises((RuntimeError, ValueError), match="has been deleted"):
        swa.check(state)
    again = swa.free(kept, slots)
    swa.check(again)
    assert int(swa.full_available_size(again)) == POOL.full_tokens


@pytest.mark.parametrize("fail", [no_memory, functools.partial(np.zeros, 2**58)])
def test_a_command_for_which_memory_is_lacking_says_so(fail, monkeypatch, capsys):
    command = SimpleNamespace(main=lambda *_args, **_kwargs: fail())
    monkeypatch.setattr(app, "app_command", lambda: command)
    assert cli.main(["doctor"]) == 2
    said = capsys.readouterr().err
    assert said.startswith("swa-jax: out of memory: ")
    assert "llocat" in said
    assert said.count("\n") == 1
