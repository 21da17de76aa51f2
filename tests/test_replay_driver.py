"""The host side of the replay: who is rejected, what is reported, and that slices do not show."""

import dataclasses
import json

import numpy as np
import pytest
from compare import config_of
from oracle import Sizes
from replay_oracle import Scheduler
from replay_record import trace_of

import swa_jax as swa
from swa_jax.models import ModelConfig
from swa_jax.replay.driver import (
    ReplayResult,
    ReplaySettings,
    Sample,
    final_lengths,
    reject,
    run_replay,
)

# A full page weighs three times an SWA page, in figures that float32 holds exactly.
HYBRID = ModelConfig("hybrid", 4, 3, 1, kv_heads=1, head_dim=1, sliding_window=8)
WINDOWS = ModelConfig("windows", 4, 0, 4, kv_heads=1, head_dim=1, sliding_window=8)
SIZES = Sizes(48, 28, 4, 8)
PROMPTS = [30, 1, 49, 12, 5, 20, 3, 40, 9, 17, 2, 60]
OUTPUTS = [10, 30, 1, 0, 25, 29, 1, 9, 20, 31, 46, 1]
TIMES = ("wall_s", "compile_s", "timeline")


def settings(**changes: int) -> ReplaySettings:
    return dataclasses.replace(ReplaySettings(max_running=4, chunk_tokens=12), **changes)


def expected(sizes: Sizes, rejected: set[int], chunk: int = 12) -> Scheduler:
    finals = final_lengths(trace_of(PROMPTS, OUTPUTS)).tolist()
    return Scheduler(sizes, 4, chunk, PROMPTS, finals, frozenset(rejected)).run()


def replay(model: ModelConfig, sizes: Sizes, **changes: int) -> tuple[ReplayResult, list[Sample]]:
    seen: list[Sample] = []
    trace, pool = trace_of(PROMPTS, OUTPUTS), config_of(sizes)
    return run_replay(trace, model, pool, settings(**changes), seen.append), seen


def check_figures(result: ReplayResult, plain: Scheduler, served: list[int]) -> None:
    figures = plain.figures
    assert result.requests == len(PROMPTS)
    assert result.completed == figures.completed == len(served)
    assert result.rejected == len(PROMPTS) - len(served)
    assert result.prompt_tokens == sum(PROMPTS[number] for number in served)
    assert result.output_tokens == sum(OUTPUTS[number] for number in served)
    assert (result.steps, result.retracted) == (figures.steps, figures.retracted)
    assert result.recomputed_tokens == figures.recomputed
    assert result.peak_running == figures.peak_running
    assert (result.peak_full_pages, result.peak_swa_pages) == (figures.peak_full, figures.peak_swa)
    assert (result.leaked_full_pages, result.leaked_swa_pages) == (0, 0)
    assert not any(result.faults.values())


@pytest.fixture(scope="module")
def every_step() -> tuple[ReplayResult, list[Sample]]:
    return replay(HYBRID, SIZES, slice_steps=1)


def test_figures_of_a_replay(every_step):
    result, _ = every_step
    too_long = {2, 11}
    plain = expected(SIZES, too_long)
    check_figures(result, plain, [n for n in range(len(PROMPTS)) if n not in too_long])
    assert result.retracted > 0
    assert result.rejected_reasons == {"longer than the full pool": 2}
    full, window, size = HYBRID.full_bytes_per_token, HYBRID.swa_bytes_per_token, 4
    assert result.kv_bytes_peak == max(size * (f * full + s * window) for f, s in plain.pairs)
    assert result.kv_bytes_peak_full_only == plain.figures.peak_all_full * size * (full + window)
    assert result.kv_bytes_pool == (48 + size) * full + (28 + size) * window


def test_samples_show_each_slice(every_step):
    result, seen = every_step
    plain = expected(SIZES, {2, 11})
    assert seen == result.timeline
    assert [sample.step for sample in seen] == list(range(1, result.steps + 1))
    assert [(sample.full_pages, sample.swa_pages) for sample in seen] == plain.pairs
    assert [sample.running for sample in seen] == [len(one) for one in plain.lengths]
    assert {sample.completed + sample.running + sample.waiting for sample in seen} == {10}
    assert {sample.rejected for sample in seen} == {2}


def test_slices_do_not_change_the_figures(every_step):
    once, seen = replay(HYBRID, SIZES, slice_steps=10_000)
    assert len(seen) == 1
    left = {k: v for k, v in dataclasses.asdict(once).items() if k not in TIMES}
    right = {k: v for k, v in dataclasses.asdict(every_step[0]).items() if k not in TIMES}
    assert left == right


def test_a_pure_swa_model_serves_what_is_longer_than_its_pool():
    """Also with a chunk that no pool could take, which is then not kept room for."""
    sizes = Sizes(36, 36, 4, 8, pure=True)
    result, _ = replay(WINDOWS, sizes, chunk_tokens=10**9)
    plain = expected(sizes, set(), chunk=10**9)
    check_figures(result, plain, list(range(len(PROMPTS))))
    assert result.kv_bytes_peak == 4 * plain.figures.peak_swa * WINDOWS.swa_bytes_per_token
    assert result.kv_bytes_pool == (36 + 4) * WINDOWS.swa_bytes_per_token


def test_a_trace_that_is_rejected_whole():
    result, seen = replay(HYBRID, SIZES, max_context=1)
    assert seen == result.timeline == []
    assert (result.completed, result.rejected, result.steps) == (0, len(PROMPTS), 0)
    assert result.rejected_reasons == {"longer than max_context": len(PROMPTS)}
    assert (result.prompt_tokens, result.output_tokens) == (0, 0)
    assert (result.peak_full_pages, result.kv_bytes_peak, result.leaked_full_pages) == (0, 0, 0)


def test_the_figures_go_into_json(every_step):
    figures = every_step[0].to_dict()
    assert "timeline" not in figures
    assert json.loads(json.dumps(figures, allow_nan=False)) == figures


def reasons_of(pool: swa.PoolConfig, prompts, outputs, **changes: int) -> dict[str, list[int]]:
    marks = reject(trace_of(prompts, outputs), pool, settings(**changes))
    return {reason: np.flatnonzero(which).tolist() for reason, which in marks.items()}


def test_the_last_generated_token_needs_no_room():
    pool = swa.PoolConfig(16, 8, page_size=4, sliding_window=4)
    got = reasons_of(pool, [16, 16, 16, 17, 1, 1], [0, 1, 2, 0, 16, 17])
    assert got == {"longer than the full pool": [2, 3, 5]}


def test_without_a_window_the_swa_pool_limits_too():
    got = reasons_of(swa.PoolConfig(16, 8, page_size=4), [8, 9, 17], [1, 1, 1])
    assert got == {"longer than the full pool": [2], "longer than the SWA pool": [1]}


def test_a_pure_pool_limits_only_without_a_window():
    prompts, outputs = [8, 9, 2**31 - 1], [1, 1, 2**31 - 1]
    assert reasons_of(swa.PoolConfig.pure_swa(8, 4, 4), prompts, outputs) == {}
    got = reasons_of(swa.PoolConfig.pure_swa(8, 4), prompts, outputs)
    assert got == {"longer than the SWA pool": [1, 2]}


def test_lengths_near_the_end_of_int32_do_not_wrap():
    pool = swa.PoolConfig(16, 8, page_size=4, sliding_window=4)
    got = reasons_of(pool, [2**31 - 1, 1], [2**31 - 1, 2**31 - 1], max_context=2**40)
    assert got == {"longer than max_context": [], "longer than the full pool": [0, 1]}


def test_max_context_counts_prompt_and_output_and_is_the_first_reason():
    pool = swa.PoolConfig(16, 8, page_size=4, sliding_window=4)
    got = reasons_of(pool, [5, 5, 40], [5, 6, 1], max_context=10)
    assert got == {"longer than max_context": [1, 2], "longer than the full pool": []}


@pytest.mark.parametrize("name", ["max_running", "chunk_tokens", "slice_steps", "max_context"])
def test_settings_that_cannot_work(name):
    with pytest.raises(ValueError, match=f"{name} must be at least 1, got 0"):
        settings(**{name: 0})
