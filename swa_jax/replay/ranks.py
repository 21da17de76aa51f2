"""A replay on data-parallel ranks: pools and a prefix cache for each, one trace for all."""

import dataclasses
import time
from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from swa_jax.check import check
from swa_jax.choices import PLACEMENTS
from swa_jax.config import PoolConfig
from swa_jax.data_parallel import one_rank
from swa_jax.models import ModelConfig
from swa_jax.replay.content import content_of
from swa_jax.replay.driver import (
    ReplayResult,
    ReplaySettings,
    Sample,
    check_grants,
    final_lengths,
    loop_config,
    reject,
    result_of,
    weight_of,
)
from swa_jax.replay.engine import Carry, ReuseFigures
from swa_jax.replay.rank_loop import Looks, RankLoop, world_of
from swa_jax.replay.rank_placer import Placer
from swa_jax.replay.trace import Trace
from swa_jax.replay.world import Load
from swa_jax.wide import wide_value

SLICE_STEPS = 16  # most steps of a rank between two placements


@dataclass(frozen=True)
class RankSettings:
    """How the requests are spread."""

    ranks: int
    placement: str = "prefix"  # or "round-robin": in turn
    compare: bool = True  # replay in turn and on one rank too, for their hit rates
    devices: int | None = None  # at most so many; all by default

    def __post_init__(self) -> None:
        if self.ranks < 1:
            raise ValueError(f"ranks must be at least 1, got {self.ranks}")
        if self.placement not in PLACEMENTS:
            wanted = ", ".join(PLACEMENTS)
            raise ValueError(f"placement must be one of {wanted}, got {self.placement!r}")
        if self.devices is not None and self.devices < 1:
            raise ValueError(f"devices must be at least 1, got {self.devices}")


@dataclass(frozen=True)
class RanksResult:
    """The figures of a replay on ranks."""

    total: ReplayResult  # counts are sums; steps, peaks and pools are the largest of a rank
    ranks: tuple[ReplayResult, ...]  # of the requests that each was given; rejected ones to none
    settings: RankSettings
    devices: int  # that the ranks are spread over
    hit_rate_in_turn: float | None = None  # of the prompt tokens, None where it was not looked at
    hit_rate_one_rank: float | None = None  # one rank serves all, with the pools of one rank

    def balance(self) -> dict[str, float]:
        """The largest of a rank over the mean of all, 1 where there is nothing."""
        return {
            "requests": _balance([rank.completed for rank in self.ranks]),
            "prompt_tokens": _balance([rank.prompt_tokens for rank in self.ranks]),
            "computed_tokens": _balance([computed_tokens(rank) for rank in self.ranks]),
            "steps": _balance([rank.steps for rank in self.ranks]),
        }


def computed_tokens(result: ReplayResult) -> int:
    """Tokens whose KV was computed: those of the prompts that were not hit, and the outputs'."""
    return result.prompt_tokens - result.reuse.hit_tokens + result.output_tokens


def _balance(values: list[int]) -> float:
    mean = sum(values) / len(values)
    return max(values) / mean if mean else 1.0


def run_ranks(
    trace: Trace,
    model: ModelConfig,
    pool: PoolConfig,
    settings: ReplaySettings,
    spread: RankSettings,
    on_progress: Callable[[Sample], None] | None = None,
) -> RanksResult:
    """Serves a trace on ranks that share nothing but the queue.

    Each request goes to a rank when those before it have been placed and a rank has few waiting.
    There it is admitted, retracted and served as by `run_replay`: on one rank the figures are the
    same, and where requests are dealt in turn, those of a replay of each rank's part.

    Args:
      trace: the requests.
      model: gives the bytes of a token's KV.
      pool: the two pools of each rank.
      settings: how a rank serves.
      spread: how many ranks there are, and who goes where.
      on_progress: called after each slice, of the comparisons too, with sums over the ranks of
        requests, and the largest of a rank of steps and pages.

    Raises:
      ValueError: settings that cannot work.
    """
    if settings.host_bytes is not None:
        raise ValueError("ranks have no host tier: leave host_bytes out, or replay on one rank")
    reasons = reject(trace, pool, settings)
    accepted = np.ones(len(trace), bool)
    for marks in reasons.values():
        accepted &= ~marks
    started = time.perf_counter()
    loop = _loop(trace, model, pool, settings, spread, accepted)
    compile_s = time.perf_counter() - started

    rejected = int((~accepted).sum())
    started = time.perf_counter()
    end, rank_of, timeline = _serve(loop, accepted, spread.placement, rejected, on_progress)
    wall_s = time.perf_counter() - started
    parts = _results(trace, model, pool, end, rank_of, spread.ranks)
    total = dataclasses.replace(
        _sum_of(parts),
        requests=len(trace),
        rejected=rejected,
        rejected_reasons={name: int(marks.sum()) for name, marks in reasons.items() if marks.any()},
        timeline=timeline,
        wall_s=wall_s,
        compile_s=compile_s,
    )
    result = RanksResult(total, parts, spread, loop.devices)
    if not (spread.compare and total.prefix_cache and total.prompt_tokens):
        return result

    def hit_rate(placement: str) -> float:
        end, _, _ = _serve(loop, accepted, placement, rejected, on_progress)
        hits = wide_value(jax.device_get(end.reuse.hit_tokens))
        return int(hits.sum()) / total.prompt_tokens

    in_turn = spread.placement == "round-robin" or spread.ranks == 1
    return dataclasses.replace(
        result,
        hit_rate_in_turn=total.hit_rate if in_turn else hit_rate("round-robin"),
        hit_rate_one_rank=total.hit_rate if spread.ranks == 1 else hit_rate("one"),
    )


def _loop(
    trace: Trace,
    model: ModelConfig,
    pool: PoolConfig,
    settings: ReplaySettings,
    spread: RankSettings,
    accepted: np.ndarray,
) -> RankLoop:
    final = final_lengths(trace)
    made = final - np.asarray(trace.prompt_lens, np.int64)
    content = content_of(trace) if settings.prefix_cache and not pool.pure_swa_pool else None
    load = Load(
        jnp.asarray(trace.prompt_lens, jnp.int32),
        jnp.asarray(np.minimum(final, 2**31 - 1), jnp.int32),
    )
    return RankLoop(
        loop_config(final[accepted], made[accepted], pool, settings),
        load,
        content,
        jnp.asarray(weight_of(model), jnp.int32),
        settings.policy,
        spread.ranks,
        min(settings.slice_steps, SLICE_STEPS) if spread.ranks > 1 else settings.slice_steps,
        spread.devices,
    )


def _serve(
    loop: RankLoop,
    accepted: np.ndarray,
    placement: str,
    rejected: int,
    on_progress: Callable[[Sample], None] | None,
) -> tuple[Carry, np.ndarray, list[Sample]]:
    """The end of a replay, int32[N] the rank of each request (-1: none), and its course."""
    ranks, order = loop.ranks, np.flatnonzero(accepted).astype(np.int32)
    waiting = np.zeros((ranks, len(accepted)), bool)
    dealt = np.full(len(accepted), -1, np.int32)
    chosen = placement == "prefix" and ranks > 1
    if not chosen:  # nothing depends on what happens: all can be sent at once
        turns = np.arange(len(accepted), dtype=np.int32) % (1 if placement == "one" else ranks)
        dealt[order] = turns[order]
        waiting[dealt[order], order] = True
    placer = Placer(loop, order if chosen else order[:0])
    carry, timeline = loop.start(waiting), []
    queued, running = waiting.sum(1, dtype=np.int32), np.zeros(ranks, np.int32)
    while placer.left or queued.any() or running.any():
        carry = loop.advance(placer.fill(carry, queued), more=placer.left > 0)
        looks = loop.look(carry)
        check_grants(int(looks.refused.sum()))
        queued, running = looks.waiting, looks.running
        timeline.append(_sample(looks, rejected, placer.left))
        if on_progress is not None:
            on_progress(timeline[-1])
    return carry, placer.rank_of if chosen else dealt, timeline


def _sample(looks: Looks, rejected: int, left: int) -> Sample:
    return Sample(
        step=int(looks.steps.max()),
        completed=int(looks.completed.sum()),
        rejected=rejected,
        running=int(looks.running.sum()),
        waiting=int(looks.waiting.sum()) + left,
        full_pages=int(looks.full_pages.max()),
        swa_pages=int(looks.swa_pages.max()),
    )


def _results(
    trace: Trace,
    model: ModelConfig,
    pool: PoolConfig,
    end: Carry,
    rank_of: np.ndarray,
    ranks: int,
) -> tuple[ReplayResult, ...]:
    """The figures of each rank, its state checked against the laws."""
    end, found = jax.device_get(end), []
    for rank in range(ranks):
        carry = jax.tree.map(jnp.asarray, one_rank(end, rank))
        world, part = world_of(carry), part_of(trace, np.flatnonzero(rank_of == rank))
        check(world.allocator)
        served = np.ones(len(part), bool)
        found.append(result_of(part, model, pool, served, {}, world, carry))
    return tuple(found)


def part_of(trace: Trace, numbers: np.ndarray) -> Trace:
    """The requests int[K] of a trace, as a trace."""
    ids = trace.hash_ids
    return dataclasses.replace(
        trace,
        arrival_ms=trace.arrival_ms[numbers],
        prompt_lens=trace.prompt_lens[numbers],
        output_lens=trace.output_lens[numbers],
        hash_ids=None if ids is None else tuple(ids[number] for number in numbers.tolist()),
    )


_SUMS = (
    "completed",
    "retracted",
    "prompt_tokens",
    "output_tokens",
    "recomputed_tokens",
    "leaked_full_pages",
    "leaked_swa_pages",
    "prompt_blocks",
)
_LARGEST = (
    "peak_full_pages",
    "peak_swa_pages",
    "kv_bytes_peak",
    "kv_bytes_peak_full_only",
    "steps",
    "peak_running",
)


def _sum_of(parts: tuple[ReplayResult, ...]) -> ReplayResult:
    """What `RanksResult.total` says."""
    values = {name: sum(getattr(part, name) for part in parts) for name in _SUMS}
    values |= {name: max(getattr(part, name) for part in parts) for name in _LARGEST}
    names = [field.name for field in dataclasses.fields(ReuseFigures)]
    reuse = ReuseFigures(*(sum(getattr(part.reuse, name) for part in parts) for name in names))
    faults = {kind: sum(part.faults[kind] for part in parts) for kind in parts[0].faults}
    tokens = values["prompt_tokens"]
    hit_rate = reuse.hit_tokens / tokens if tokens else 0.0
    return dataclasses.replace(parts[0], **values, reuse=reuse, faults=faults, hit_rate=hit_rate)
