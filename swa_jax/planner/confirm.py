"""The real replay of one rank beside its simulation: page by page they must come to the same."""

import dataclasses

import numpy as np

from swa_jax.config import PoolConfig
from swa_jax.planner.planning import Plan
from swa_jax.replay.driver import ReplaySettings, run_replay
from swa_jax.replay.trace import Trace

_SAME = ("steps", "completed", "retracted", "peak_running")


def slowest_rank(plan: Plan) -> int:
    """The rank with the most steps."""
    return int(np.argmax(plan.ranks.steps))


def rank_trace(plan: Plan, rank: int) -> Trace:
    """The requests of one rank, in its order."""
    which = plan.accepted[plan.rank_of == rank]
    trace = plan.trace
    return dataclasses.replace(
        trace,
        arrival_ms=trace.arrival_ms[which],
        prompt_lens=trace.prompt_lens[which],
        output_lens=trace.output_lens[which],
        hash_ids=None,
        block_tokens=None,
    )


def pool_of(plan: Plan) -> PoolConfig:
    """The pools of one chip."""
    part, size, split = plan.chip_model, plan.settings.page_size, plan.split
    swa, window = split.swa_pages * size, part.past_window
    if part.pure_swa:
        return PoolConfig.pure_swa(swa, size, window, chunked=part.chunked)
    return PoolConfig(split.full_pages * size, swa, size, window, chunked=part.chunked)


def compare_with_replay(plan: Plan, rank: int) -> dict[str, tuple[int, int]]:
    """Replays one rank with pages that have names.

    Args:
      plan: that waits for nobody: a replay has no clock.
      rank: which.

    Returns:
      For each figure what was simulated, and what the replay came to.

    Raises:
      ValueError: a plan with arrival times.
    """
    if plan.settings.step_ms is not None:
        raise ValueError("--confirm replays as fast as memory allows: leave --step-ms out")
    settings = ReplaySettings(
        plan.settings.max_running, plan.settings.chunk_tokens, prefix_cache=False
    )
    replayed = run_replay(rank_trace(plan, rank), plan.chip_model, pool_of(plan), settings)
    simulated = plan.ranks.of(rank)
    pairs = {name: (simulated[name], getattr(replayed, name)) for name in _SAME}
    pairs["recomputed_tokens"] = (simulated["recomputed"], replayed.recomputed_tokens)
    pairs["peak_swa_pages"] = (simulated["peak_swa"], replayed.peak_swa_pages)
    if not plan.pure:
        pairs["peak_full_pages"] = (simulated["peak_full"], replayed.peak_full_pages)
    return {name: (int(one), int(other)) for name, (one, other) in pairs.items()}  # type: ignore[arg-type]
