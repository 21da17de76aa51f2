"""Replays that never ran: a trace, a model, pools, and figures to choose."""

import dataclasses
import itertools
from typing import Any

import numpy as np

from swa_jax import FAULT_KINDS, PoolConfig
from swa_jax.models import get_model
from swa_jax.replay.driver import ReplayResult, ReplaySettings, Sample
from swa_jax.replay.engine import ReuseFigures
from swa_jax.replay.report import Run
from swa_jax.replay.trace import Trace

GIB = 2**30
SAMPLES = [
    Sample(64, 0, 1, 2, 1, full_pages=60, swa_pages=20),
    Sample(128, 2, 1, 1, 0, full_pages=30, swa_pages=10),
    Sample(140, 3, 1, 0, 0, full_pages=0, swa_pages=0),
]
RESULT = ReplayResult(
    requests=4,
    completed=3,
    rejected=1,
    rejected_reasons={"longer than the full pool": 1},
    retracted=2,
    prompt_tokens=1500,
    output_tokens=50,
    recomputed_tokens=70,
    peak_full_pages=64,
    peak_swa_pages=22,
    leaked_full_pages=0,
    leaked_swa_pages=0,
    faults=dict.fromkeys(FAULT_KINDS, 0),
    kv_bytes_peak=GIB,
    kv_bytes_peak_full_only=4 * GIB,
    kv_bytes_pool=2 * GIB,
    wall_s=0.5,
    compile_s=1.25,
    steps=140,
    peak_running=2,
    timeline=SAMPLES,
)
# What a run with a prefix cache has besides, see `made_up_run`.
REUSED: dict[str, Any] = {
    "prefix_cache": True,
    "prompt_blocks": 8,
    "hit_rate": 0.4,
    "reuse": ReuseFigures(
        hit_tokens=600,
        hit_blocks=2,
        evicted_full_pages=1234,
        evicted_swa_pages=2345,
        tombstones=30,
        cached_full_pages=45,
        cached_swa_pages=15,
    ),
}


def made_up_trace(
    lengths: tuple[int, ...] = (100, 200, 1200, 90_000), name: str = "made-up"
) -> Trace:
    count = len(lengths)
    return Trace(
        name=name,
        source_format="azure",
        arrival_ms=np.zeros(count, np.int64),
        prompt_lens=np.array(lengths, np.int32),
        output_lens=np.ones(count, np.int32),
        hash_ids=None,
        block_tokens=None,
    )


def with_ids(trace: Trace) -> Trace:
    """A trace that says which prompts are equal: here none."""
    blocks = [-(-int(length) // 512) for length in trace.prompt_lens]
    ends = np.cumsum([0, *blocks])
    ids = tuple(np.arange(*pair) for pair in itertools.pairwise(ends.tolist()))
    return dataclasses.replace(trace, source_format="mooncake", hash_ids=ids, block_tokens=512)


def made_up_run(
    model: str = "gpt-oss-20b",
    *,
    trace: Trace | None = None,
    max_context: int | None = None,
    turned_off: bool = False,
    policy: str = "lru",
    **figures: object,
) -> Run:
    known = get_model(model)
    window = known.past_window
    pool = PoolConfig(1600, 1600, 16, window)
    if known.pure_swa:
        pool = PoolConfig.pure_swa(8000, 16, window)
    result = dataclasses.replace(RESULT, **figures)  # type: ignore[arg-type]
    settings = ReplaySettings(max_context=max_context, prefix_cache=not turned_off, policy=policy)
    return Run(trace or made_up_trace(), known, pool, settings, result)
