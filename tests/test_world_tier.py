"""The host tier when memory or disk end, and at the end of the cache's clock.

A tier is a cache: whatever it cannot do, requests get their own tokens, and all laws hold.
"""

import contextlib
import dataclasses
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_serving_host_tier import CONFIG, MODEL, check_served, hosted, world_of
from world_faults import full_disk, no_memory

from swa_jax.host_cache import FileStorage, MemoryStorage, StorageWorker, memory
from swa_jax.host_cache import rows as rows_of_tier
from swa_jax.host_cache import tier as the_tier
from swa_jax.host_cache.check import check_index
from swa_jax.host_cache.memory import NumpyMemory
from swa_jax.out_of_memory import is_out_of_memory
from swa_jax.serving import run_steps

NAMED: dict[str, Any] = {"fingerprint": b"ledger"}
MOST = 2**31 - 1


@contextlib.contextmanager
def nothing_is_compiled_to_disk():
    jax.config.update("jax_enable_compilation_cache", False)
    yield
    jax.config.update("jax_enable_compilation_cache", True)


class Failing:
    """A function that finds no memory every so many calls.

    Args:
      function: in its place.
      every: calls.
      fail: raises.
    """

    def __init__(self, function, every, fail):
        self.function, self.every, self.fail, self.calls = function, every, fail, 0

    def __call__(self, *args):
        self.calls += 1
        if self.calls % self.every == 0:
            self.fail()
        return self.function(*args)

    def put_in(self, monkeypatch, owner, name):
        monkeypatch.setattr(owner, name, lambda *args: self(*args))


def no_host_memory():
    return np.zeros(2**58, np.int64)


class Image:
    """Pages that were gathered, and cannot be brought over."""

    def __init__(self, image, land):
        self.image, self.land = image, land

    def copy_to_host_async(self):
        pass

    def is_ready(self):
        return True

    def __array__(self, dtype=None, copy=None):
        return self.land(self.image)


def served_by(serving, world):
    world = serving.run(None, world, 2000)
    serving.host.wait()
    check_served(world)
    check_index(serving.host.index)
    assert not serving.host.rows._copies
    return world


# ---- no memory


def _gathers(monkeypatch):
    failing = Failing(memory.gather, 3, no_memory)
    failing.put_in(monkeypatch, memory, "gather")
    return failing


def _lands(monkeypatch):
    failing = Failing(np.array, 4, no_host_memory)
    gather = memory.gather
    monkeypatch.setattr(
        memory, "gather", lambda *args: tuple(Image(one, failing) for one in gather(*args))
    )
    return failing


def _reads(monkeypatch):
    failing = Failing(NumpyMemory.read, 2, no_memory)
    failing.put_in(monkeypatch, NumpyMemory, "read")
    return failing


def _loads(monkeypatch):
    failing = Failing(NumpyMemory.load, 5, no_host_memory)
    failing.put_in(monkeypatch, NumpyMemory, "load")
    return failing


@pytest.mark.parametrize("what", [_gathers, _lands, _reads, _loads])
@pytest.mark.parametrize(
    "policy", ["write_through", pytest.param("write_back", marks=pytest.mark.long)]
)
def test_copies_that_find_no_memory(what, policy, monkeypatch):
    world, serving = hosted(policy, storage=MemoryStorage(), **NAMED)
    failing = what(monkeypatch)
    served_by(serving, world)
    assert failing.calls >= failing.every
    assert serving.host.failed > 0
    assert serving.host.index.full_pages > 0


def test_pages_from_storage_that_find_no_memory(monkeypatch):
    storage = MemoryStorage()
    world, serving = hosted("write_through", storage=storage, **NAMED)
    served_by(serving, world)
    serving.host.close()
    assert len(storage) > 0
    world, serving = hosted("write_through", storage=storage, **NAMED)
    failing = Failing(NumpyMemory.save, 3, no_host_memory)
    failing.put_in(monkeypatch, NumpyMemory, "save")
    served_by(serving, world)
    assert serving.host.failed > 0


def test_what_was_donated_is_gone_and_it_says_so(monkeypatch):
    """Pages are claimed and their images cannot be written: nobody may match them."""
    world, serving = hosted("write_through")
    monkeypatch.setattr(the_tier, "scatter", no_memory)
    with pytest.raises(jax.errors.JaxRuntimeError, match="RESOURCE_EXHAUSTED"):
        serving.run(None, world, 2000)


def test_a_copy_that_failed_is_not_read_as_one_that_came(monkeypatch):
    """Whoever waits for a later copy ends the earlier ones too: their errors are not his."""
    layers = (jnp.arange(6 * 4, dtype=jnp.int32).reshape(6, 4),)
    kept = NumpyMemory(layers, 4)
    failing = Failing(np.array, 1, no_host_memory)
    with monkeypatch.context() as patch:
        gather = memory.gather
        patch.setattr(memory, "gather", lambda *a: tuple(Image(i, failing) for i in gather(*a)))
        first = kept.write([0, 1], layers, [2, 3])
    second = kept.write([2], layers, [5])
    assert kept.load(2)[0].tolist() == [[20, 21, 22, 23]]  # it was the first that failed
    second.wait()
    assert first.done()
    for call in (first.wait, lambda: kept.load(0), lambda: kept.read([2, 1])):
        with pytest.raises(MemoryError):
            call()
    kept.write([0], layers, [4]).wait()
    assert kept.load(0)[0].tolist() == [[16, 17, 18, 19]]
    kept.save(1, [np.zeros((1, 4), np.int32)])
    assert kept.load(1)[0].tolist() == [[0] * 4]


def test_host_memory_beyond_all_there_is():
    layers = cast("tuple[jax.Array]", (jax.ShapeDtypeStruct((2, 4, 2**20), jnp.int32),))
    with pytest.raises(MemoryError, match=r"Unable to allocate .* for an array with shape"):
        NumpyMemory(layers, 2**31)


# ---- no disk


def test_a_full_disk_below_the_tier(tmp_path):
    """Nothing is stored and every failure counted; when there is room again, it is used."""
    with FileStorage(tmp_path, NAMED["fingerprint"], 1 << 20) as storage:
        worker = StorageWorker(storage)
        world, serving = hosted("write_through", storage=worker, **NAMED)
        with nothing_is_compiled_to_disk(), full_disk(64):
            served_by(serving, world)
            worker.wait()
        assert worker.failed > 10
        assert (len(storage), storage.used_bytes) == (0, 0)
        assert list(tmp_path.iterdir()) == []
        world, serving = hosted("write_through", storage=worker, **NAMED)
        served_by(serving, world)
        worker.close()
        assert len(storage) > 10
        world, serving = hosted("write_through", storage=storage, **NAMED)
        with nothing_is_compiled_to_disk(), full_disk(0):  # what is there can still be read
            world = served_by(serving, world)
        serving.host.close()
    assert int(world.queue.cached[0]) == 32


# ---- the end of the cache's clock


@pytest.mark.parametrize("left", [0, 5])
def test_a_cache_at_the_end_of_its_clock(left):
    """It orders no more by use, and that is all."""
    world = world_of()
    assert world.cache is not None
    cache = dataclasses.replace(world.cache, clock=jnp.int32(MOST - left))
    world = dataclasses.replace(world, cache=cache)
    check_served(run_steps(MODEL, None, CONFIG, jax.tree.map(jnp.copy, world), 2000))
    _, serving = hosted("write_through")
    world = served_by(serving, world)
    assert world.cache is not None
    assert int(world.cache.clock) == MOST
    assert serving.restored_full > 0


def test_errors_that_are_no_want_of_memory_are_raised(monkeypatch):
    world, serving = hosted("write_through")
    failing = Failing(rows_of_tier.HostRows.stage, 1, {}.popitem)
    failing.put_in(monkeypatch, rows_of_tier.HostRows, "stage")
    with pytest.raises(KeyError):
        serving.run(None, world, 2000)
    assert serving.host.failed == 0


def test_what_is_want_of_memory():
    for error in (MemoryError(), jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: no")):
        assert is_out_of_memory(error)
    for error in (jax.errors.JaxRuntimeError("INTERNAL: no"), ValueError("RESOURCE_EXHAUSTED")):
        assert not is_out_of_memory(error)
