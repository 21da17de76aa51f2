"""A replay stopped at a step: the state then, and which request has which pages."""

import jax
import numpy as np

from swa_jax.config import PoolConfig
from swa_jax.models import ModelConfig
from swa_jax.replay.driver import ReplaySettings, run_replay
from swa_jax.replay.engine import Carry
from swa_jax.replay.shared_world import SharedWorld
from swa_jax.replay.trace import Trace
from swa_jax.replay.world import NO_REQUEST, World

CACHE = "prefix cache"


class _Reached(Exception):  # noqa: N818 - no error: the loop has come as far as it should
    """Ends a replay in the middle."""

    def __init__(self, carry: Carry) -> None:
        super().__init__()
        self.carry = carry


def replay_until(
    trace: Trace, model: ModelConfig, pool: PoolConfig, settings: ReplaySettings
) -> Carry:
    """What the loop of a replay carries after its first slice of `settings.slice_steps` steps.

    Args:
      trace: the requests; a short one may be done before.
      model: gives the bytes of a token's KV.
      pool: the two pools.
      settings: how to serve.

    Raises:
      ValueError: settings that cannot work, or a trace with nothing to serve.
    """

    def stop(carry: Carry) -> None:
        raise _Reached(carry)

    try:
        run_replay(trace, model, pool, settings, on_slice=stop)
    except _Reached as reached:
        return reached.carry
    raise ValueError("no request of the trace can be served, so there is no moment to look at")


def world_of(carry: Carry) -> World:
    """The world in it."""
    return carry.world if isinstance(carry, SharedWorld) else carry


def owners_of(carry: Carry) -> dict[str, np.ndarray]:
    """int32 full slots by owner: running requests, and the prefix cache where there is one.

    A page that the tree has is the tree's, also while requests stand on it.
    """
    world = world_of(carry)
    page = world.allocator.config.page_size
    rows = world.rows
    pure = world.allocator.config.pure_swa_pool
    # What a row no longer has: in a pure SWA pool what left its window, elsewhere what is cached.
    first = rows.evicted if pure else getattr(carry, "owned_from", np.zeros_like(rows.evicted))
    request, length, gone, table = map(
        np.asarray, jax.device_get((rows.request, rows.length, first, rows.table))
    )
    held, gone = -(-length // page), -(-gone // page)
    owners: dict[str, np.ndarray] = {}
    if isinstance(carry, SharedWorld):
        owners[CACHE] = np.flatnonzero(jax.device_get(carry.cache.in_tree)) * page
    for row in np.flatnonzero(request != NO_REQUEST).tolist():
        owners[f"request {request[row]}"] = table[row, gone[row] : held[row]]
    return owners
