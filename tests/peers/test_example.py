"""`examples/engine_step.py` on both stacks, and what it brought to light in one of them."""

from __future__ import annotations

import importlib.util
from importlib import import_module

import numpy as np
import pytest

from examples import engine_step

needs_theirs = [
    pytest.mark.peers,
    pytest.mark.filterwarnings("ignore"),  # of theirs, while it is imported
    pytest.mark.skipif(
        importlib.util.find_spec("sgl_jax") is None,
        reason="not installed: sgl_jax (benchmarks/peers.py says how)",
    ),
]
STACKS = ["ours", pytest.param("theirs", marks=needs_theirs)]


def test_the_example_serves_all_and_leaks_nothing():
    seen = engine_step.serve("ours", requests=10, full_tokens=192, swa_tokens=128)
    assert seen["completed"] == 10
    assert seen["wrong_answers"] == 0
    assert seen["leaked_tokens"] == 0
    for count in ("hit_tokens", "retractions", "evicted_full_tokens", "evicted_swa_tokens"):
        assert seen[count] > 0, count


@pytest.mark.parametrize("stack", STACKS)
def test_what_can_never_fit_is_refused_and_rounding_is_no_leak(stack):
    seen = engine_step.serve(stack, requests=4, full_tokens=18, swa_tokens=17)
    assert (seen["refused"], seen["completed"], seen["steps"]) == (4, 0, 0)
    assert seen["leaked_tokens"] == 0
    engine = engine_step.Engine(engine_step.load_stack(stack), 18, 17)
    for prompt, new, fits in ((12, 5, True), (12, 6, False), (16, 1, True), (17, 1, False)):
        assert engine.submit(engine_step.Request([1] * prompt, max_new_tokens=new)) == fits


@pytest.mark.long
@pytest.mark.parametrize("stack", STACKS[1:])
def test_both_stacks_print_the_same(stack):
    assert engine_step.serve(stack) == engine_step.serve("ours")


@pytest.mark.parametrize("stack", STACKS)
def test_d19_a_tombstone_that_a_request_reads_gets_its_swa_side_back(stack):
    """A request stands on full pages without an SWA side, and a copy with one is inserted."""
    classes = engine_step.load_stack(stack)
    pools = classes.SWATokenToKVPoolAllocator(64, 64, classes.kv_pool, page_size=4)
    cache = classes.SWARadixCache(engine_step.ReqToTokenPool(1, 64), pools, 8, 4)
    home = (
        "swa_jax.compat.sgl_jax" if stack == "ours" else "sgl_jax.srt.mem_cache.base_prefix_cache"
    )
    params = import_module(home).InsertParams
    text = list(range(24))
    first = pools.alloc_extend([0], [24], [-1], 24)
    cache.insert(params(key=classes.RadixKey(text[:12]), value=first[:12]))
    cache.insert(params(key=classes.RadixKey(text), value=first, prev_prefix_len=12))
    cache.evict(classes.EvictParams(num_tokens=0, swa_num_tokens=12))
    match = cache.match_prefix(classes.MatchPrefixParams(key=classes.RadixKey(text)))
    cache.inc_lock_ref(match.last_device_node)
    copy = pools.alloc_extend([0], [12], [-1], 12)
    cache.insert(params(key=classes.RadixKey(text[:12]), value=copy))
    granted = pools.alloc_extend([0], [40], [-1], 40)
    shared = np.intersect1d(granted, match.device_indices)
    # Theirs gives the request's slots of its first twelve tokens to somebody else.
    assert len(shared) == (0 if stack == "ours" else 12)
