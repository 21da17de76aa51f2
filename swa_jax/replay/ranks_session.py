"""A replay on ranks from a user's wishes to its outputs."""

import contextlib
import os
from collections.abc import Callable

import jax

from swa_jax.config import PoolConfig
from swa_jax.models import ModelConfig
from swa_jax.replay.driver import ReplaySettings, Sample
from swa_jax.replay.ranks import RankSettings, run_ranks
from swa_jax.replay.ranks_report import RanksRun
from swa_jax.replay.report import Run
from swa_jax.replay.session import lacks_told
from swa_jax.replay.trace import Trace

_MOST_DEVICES = 64  # each has threads of its own


def rank_settings(
    dp: int | None,
    placement: str | None,
    *,
    compare: bool,
    refused: dict[str, object | None],
) -> RankSettings | None:
    """How a trace is spread over ranks; None for a replay without ranks.

    Args:
      dp: `--dp`.
      placement: `--placement`.
      compare: no `--no-compare`.
      refused: options that ranks do not have, with what was given.

    Raises:
      ValueError: options that do not go together.
    """
    if dp is None:
        if placement is not None or not compare:
            raise ValueError("--placement and --no-compare are about ranks: give --dp too")
        return None
    for option, value in refused.items():
        if value is not None:
            raise ValueError(
                f"{option} looks at one allocator and cache, and --dp {dp} has one a rank: leave "
                f"one of the two out; got {option} {value}"
            )
    return RankSettings(dp, placement or "prefix", compare)


def use_devices(ranks: int) -> None:
    """Lets JAX have a CPU device a rank, however few the cores.

    Ranks that share a device take turns in a loop around their loops, in which XLA copies their
    arrays: 8 ranks on 8 devices of two cores were 5 times as fast as on two. Nothing is changed
    where the user chose a number of devices, or JAX has started already.
    """
    if "xla_force_host_platform_device_count" in os.environ.get("XLA_FLAGS", ""):
        return
    if getattr(jax.config, "jax_num_cpu_devices", -1) > 0:  # not declared for type checkers
        return
    most = min(ranks, _MOST_DEVICES)
    devices = max(count for count in range(1, most + 1) if ranks % count == 0)
    with contextlib.suppress(RuntimeError):  # it has started
        jax.config.update("jax_num_cpu_devices", devices)


def run_ranks_session(
    trace: Trace,
    model: ModelConfig,
    pool: PoolConfig,
    settings: ReplaySettings,
    spread: RankSettings,
    on_progress: Callable[[Sample], None] | None,
) -> RanksRun:
    """`run_ranks`, with what the machine lacks told as a `ValueError`."""
    use_devices(spread.ranks)
    with lacks_told(pool, spread.ranks):
        result = run_ranks(trace, model, pool, settings, spread, on_progress)
    return RanksRun(Run(trace, model, pool, settings, result.total), result)
