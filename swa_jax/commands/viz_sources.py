"""What `swa-jax viz` looks at: an example, a saved state, or a replay stopped at a step."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import jax
import numpy as np

from swa_jax.commands.progress import Shown
from swa_jax.commands.replay_run import Sizes
from swa_jax.models import get_model
from swa_jax.prefix_cache import PrefixCache
from swa_jax.replay.driver import ReplaySettings
from swa_jax.replay.interruptible import interruptible
from swa_jax.replay.report import no_cache_reason
from swa_jax.replay.session import lacks_told
from swa_jax.replay.shared_world import SharedWorld
from swa_jax.replay.trace import load_trace
from swa_jax.saved_state import open_state
from swa_jax.state import AllocatorState
from swa_jax.viz.examples import small_tree, two_pools
from swa_jax.viz.moment import CACHE, owners_of, replay_until, world_of
from swa_jax.viz.pool_view import Owners

DEFAULT_STEP = 64  # of a replay, where none is named


@dataclass(frozen=True)
class Asked:
    """What to look at."""

    source: str | None  # None: an example
    at_step: int | None  # of a replay
    limit: int | None
    model: str


@dataclass(frozen=True)
class Serving:
    """How a trace is replayed."""

    max_running: int
    chunk_tokens: int
    prefix_cache: bool

    def settings(self, slice_steps: int = 64) -> ReplaySettings:
        """As the loop takes them."""
        return ReplaySettings(
            self.max_running,
            self.chunk_tokens,
            slice_steps=slice_steps,
            prefix_cache=self.prefix_cache,
        )


@dataclass(frozen=True, eq=False)
class Seen:
    """What was found at a source."""

    title: str | None  # None: the sizes say it all
    state: AllocatorState
    cache: PrefixCache | None
    no_cache: str  # why there is none
    owners: Owners


def example_pools() -> Seen:
    """Two pools with something of everything."""
    moment = two_pools()
    return Seen(None, moment.state, None, "", moment.owners)


def example_tree() -> Seen:
    """A small prefix tree."""
    state, cache = small_tree()
    return Seen(None, state, cache, "", {})


def look(
    asked: Asked, serving: Serving, sizes: Sizes, example: Callable[[], Seen], shown: Shown
) -> Seen:
    """The state at a source.

    Args:
      asked: which.
      serving: of a trace.
      sizes: of the pools for a trace.
      example: what there is to see without a source.
      shown: called as the work goes on.

    Raises:
      ValueError: there is nothing that can be looked at.
    """
    if asked.source is None or Path(asked.source).is_dir():
        if asked.at_step is not None:
            raise ValueError("--at-step is for a trace, which is replayed: name one")
        return example() if asked.source is None else _saved(asked.source)
    return _replayed(asked, serving, sizes, shown)


def _saved(source: str) -> Seen:
    try:
        state, cache = open_state(source)
    except (FileNotFoundError, ImportError) as error:
        raise ValueError(str(error)) from None
    owners: dict[str, np.ndarray] = {}
    if cache is not None:
        owners[CACHE] = np.flatnonzero(jax.device_get(cache.in_tree)) * state.config.page_size
    return Seen(f"saved in {source}", state, cache, "none was saved", owners)


def _replayed(asked: Asked, serving: Serving, sizes: Sizes, shown: Shown) -> Seen:
    assert asked.source is not None
    model, trace = get_model(asked.model), load_trace(asked.source, asked.limit)
    settings = serving.settings(asked.at_step or DEFAULT_STEP)
    pool = sizes.pool(model, settings, trace)
    shown("compiling the loop, and replaying")
    with lacks_told(pool):
        carry = interruptible(lambda: replay_until(trace, model, pool, settings))
    world = world_of(carry)
    steps = int(jax.device_get(world.tally.steps))
    return Seen(
        title=f"{trace.name} on {model.name} after {steps:,} steps",
        state=world.allocator,
        cache=carry.cache if isinstance(carry, SharedWorld) else None,
        no_cache=no_cache_reason(trace, pool, settings) or "",
        owners=owners_of(carry),
    )
