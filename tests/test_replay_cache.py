"""The replay with prefix reuse: its figures against counts made without it."""

import dataclasses

import numpy as np
import pytest
from host_lru import HostLru

import swa_jax as swa
from swa_jax.models import get_model
from swa_jax.replay.driver import ReplaySettings, run_replay
from swa_jax.replay.pool_options import pool_from_options
from swa_jax.replay.trace import load_trace

MODEL = get_model("gpt-oss-20b")
PAGE = 256  # tokens: coarse pages keep the loops short


def short_trace(limit):
    """The bundled trace with two tokens generated for each prompt."""
    trace = load_trace("mooncake-conversation", limit=limit)
    return dataclasses.replace(trace, output_lens=np.full(limit, 2, np.int32))


def replay(trace, full, swa_tokens, **settings):
    pool = swa.PoolConfig(full, swa_tokens, PAGE, MODEL.past_window)
    return run_replay(trace, MODEL, pool, ReplaySettings(**settings))


def unlimited_block_hits(trace):
    seen, hits = set(), 0
    for ids in trace.hash_ids:
        for block in np.asarray(ids).tolist():
            hits += block in seen
            seen.add(block)
    return hits


def page_keys(trace, index):
    """What each whole page of a prompt is: its block, and the part of it."""
    ids, length = trace.hash_ids[index], int(trace.prompt_lens[index])
    parts = trace.block_tokens // PAGE
    return [(int(ids[page // parts]), page % parts) for page in range(length // PAGE)]


def reusable_block_hits(trace):
    """Unlimited hits, less blocks of which a prompt cannot reuse a single whole page."""
    seen, hits = set(), 0
    for index, ids in enumerate(trace.hash_ids):
        usable = (int(trace.prompt_lens[index]) - 1) // PAGE * PAGE
        for number, block in enumerate(np.asarray(ids).tolist()):
            hits += block in seen and usable > number * trace.block_tokens
        cached = int(trace.prompt_lens[index]) // PAGE * PAGE
        whole = [b for n, b in enumerate(ids.tolist()) if cached > n * trace.block_tokens]
        seen.update(whole)
    return hits


@pytest.fixture(scope="module")
def roomy():
    trace = short_trace(120)
    return trace, replay(trace, 2**21, 2**21, max_running=8, chunk_tokens=2**15)


def test_with_room_for_all_every_block_that_came_before_is_hit(roomy):
    trace, result = roomy
    assert result.completed == 120
    assert result.prefix_cache
    assert result.reuse.hit_blocks == reusable_block_hits(trace)
    assert result.reuse.hit_blocks >= 0.9 * unlimited_block_hits(trace)
    assert result.reuse.evicted_full_pages == result.reuse.evicted_swa_pages == 0


def test_nothing_leaks_and_the_cache_is_all_that_is_held(roomy):
    _, result = roomy
    assert (result.leaked_full_pages, result.leaked_swa_pages) == (0, 0)
    assert not any(result.faults.values())
    assert result.reuse.cached_full_pages > 0
    assert result.reuse.tombstones >= 0


def test_hits_are_at_least_those_of_a_host_cache_of_the_same_size():
    trace = short_trace(120)
    full, swa_tokens = 2**18, 2**16
    result = replay(trace, full, swa_tokens, max_running=1, chunk_tokens=2**15)
    host = HostLru(full // PAGE, swa_tokens // PAGE, -(-MODEL.past_window // PAGE))
    hits = sum(host.serve(page_keys(trace, index)) for index in range(len(trace)))
    assert result.completed == 120
    assert result.reuse.evicted_swa_pages > 0
    assert result.reuse.evicted_full_pages > 0
    assert result.reuse.hit_tokens >= hits * PAGE > 0
    assert (result.leaked_full_pages, result.leaked_swa_pages) == (0, 0)
    assert not any(result.faults.values())


def test_reuse_saves_prefill_and_changes_nothing_else():
    trace = short_trace(40)
    with_cache = replay(trace, 2**20, 2**20, max_running=4, chunk_tokens=2**13)
    without = replay(trace, 2**20, 2**20, max_running=4, chunk_tokens=2**13, prefix_cache=False)
    assert with_cache.completed == without.completed == 40
    assert with_cache.output_tokens == without.output_tokens
    assert not without.prefix_cache
    assert without.reuse.hit_tokens == 0
    assert without.hit_rate == 0
    assert with_cache.hit_rate == with_cache.reuse.hit_tokens / with_cache.prompt_tokens


def test_requests_that_fill_the_pool_are_retracted_and_still_finish():
    trace = short_trace(12)
    longest = int(trace.prompt_lens.max())
    tight = -(-(longest + 2) // PAGE) * PAGE + PAGE
    result = replay(trace, tight, 4 * PAGE, max_running=4, chunk_tokens=2**12)
    assert result.completed == 12
    assert (result.leaked_full_pages, result.leaked_swa_pages) == (0, 0)
    assert not any(result.faults.values())


@pytest.mark.long
def test_real_sizes_under_load_hit_at_least_what_a_host_cache_with_all_memory_to_itself_hits():
    # 40 GiB as the command shares it out. The host serves one request at a time, so nothing of its
    # memory is held by requests that run; here up to 256 run at once.
    trace = load_trace("mooncake-conversation")
    pool = pool_from_options(
        MODEL,
        hbm="40GiB",
        full_tokens=None,
        swa_tokens=None,
        page_size=PAGE,
        max_running=256,
        chunk_tokens=8192,
        prefix_cache=True,
    )
    result = run_replay(trace, MODEL, pool, ReplaySettings())
    host = HostLru(pool.full_pages, pool.swa_pages, -(-MODEL.past_window // PAGE))
    hits = sum(host.serve(page_keys(trace, index)) for index in range(len(trace)))
    assert result.completed == len(trace)
    assert result.peak_running > 64
    assert result.reuse.evicted_full_pages > 0
    assert result.reuse.hit_tokens >= hits * PAGE > 0
