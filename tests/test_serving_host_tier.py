"""The serving loop over a host tier: right tokens, and more of them from the cache."""

import functools

import numpy as np
import pytest
from ledger_model import Ledger

import swa_jax as swa
from swa_jax import prefix_cache as pc
from swa_jax.host_cache import HostCache, HostConfig, HostedServing, MemoryStorage
from swa_jax.host_cache.check import check_index
from swa_jax.serving import (
    ServingConfig,
    finish_reasons,
    make_requests,
    new_world,
    outputs,
    run_steps,
    submit,
)
from swa_jax.serving.world_pools import world_pools

MODEL = Ledger(6)
POOL = swa.PoolConfig(80, 48, 4, 5)
CONFIG = ServingConfig(POOL, max_context=64, max_running=2, chunk_tokens=8)
NEW = 6


@functools.cache
def prompts():
    """Six texts of which three begin alike; each is asked twice, others in between."""
    random = np.random.default_rng(3)
    shared = random.integers(0, 90, 24).tolist()
    texts = [
        [*(shared if number % 2 else random.integers(0, 90, 24).tolist()), *[number] * 9]
        for number in range(6)
    ]
    return texts + [[*text, 7, 7, 7] for text in texts]


def world_of():
    requests = make_requests(prompts(), max_new_tokens=NEW, prompt_columns=64)
    world, places = submit(CONFIG, new_world(MODEL, CONFIG, len(prompts())), requests)
    assert np.asarray(places).tolist() == list(range(len(prompts())))
    return world


def check_served(world):
    places = np.arange(len(prompts()))
    assert np.asarray(finish_reasons(world, places)[0]).all()
    tokens, counts = outputs(CONFIG, world, places)
    for place, prompt in enumerate(prompts()):
        got = np.asarray(tokens[place])[: int(counts[place])].tolist()
        assert got == MODEL.continuation(prompt, NEW), place
    assert not any(swa.faults(world.allocator).values())
    pc.check(world.cache, world.allocator)
    held = swa.full_available_size(world.allocator) + pc.full_evictable_size(world.cache)
    assert int(held) == POOL.full_tokens


def hosted(policy, full_tokens=800, **options):
    world = world_of()
    assert world.cache is not None
    pools = world_pools(MODEL, CONFIG, world)
    tier = HostConfig.beside(POOL, full_tokens, 400)
    host = HostCache(tier, world.cache, pools, policy, **options)
    return world, HostedServing(host, MODEL, CONFIG, slice_steps=8)


@functools.cache
def cached_without_host():
    world = run_steps(MODEL, None, CONFIG, world_of(), 2000)
    check_served(world)
    return int(world.stats.cached)


@pytest.mark.parametrize("policy", ["write_through", "write_back", "write_through_selective"])
def test_tokens_are_right_and_more_of_them_come_from_the_cache(policy) -> None:
    world, serving = hosted(policy)
    world = serving.run(None, world, 2000)
    check_served(world)
    check_index(serving.host.index)
    if policy == "write_through_selective":  # what was of use twice, and that was on the device
        assert 0 < serving.host.index.full_pages < 20
        return
    assert serving.host.index.full_pages > 40
    assert serving.restored_full > 0
    assert serving.restored_swa > 0
    assert int(world.stats.cached) > cached_without_host()


def test_write_back_loses_nothing_inside_the_loop() -> None:
    """All that was ever cached can still be used at the end, from the device or the host."""
    world, serving = hosted("write_back")
    world = serving.run(None, world, 2000)
    assert world.cache is not None
    for prompt in prompts():
        row = np.zeros(64, np.int32)
        row[: len(prompt)] = prompt
        told = serving.host.match(world.cache, world.allocator, row, len(prompt))
        assert told.length == len(prompt) // 4 * 4


def test_what_the_host_lost_comes_back_from_storage() -> None:
    storage = MemoryStorage()
    options = {"storage": storage, "fingerprint": b"ledger"}
    world, serving = hosted("write_through", **options)
    check_served(serving.run(None, world, 2000))
    serving.host.close()
    assert len(storage) > 0
    world, serving = hosted("write_through", **options)
    world = serving.run(None, world, 2000)
    check_served(world)
    assert int(world.queue.cached[0]) == 32  # the very first request: from another process's files


def test_a_loop_without_a_prefix_cache_has_no_host_tier() -> None:
    _, serving = hosted("write_back")
    bare = ServingConfig(POOL, max_context=64, prefix_cache=False)
    with pytest.raises(ValueError, match="prefix_cache is False"):
        HostedServing(serving.host, MODEL, bare)
