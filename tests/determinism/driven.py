"""Programs whose loop is the host's: a disaggregated pair, a host tier, a replay."""

import dataclasses
import json
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

import swa_jax as swa
from swa_jax import disagg
from swa_jax.disagg.bundles import BundleSize
from swa_jax.disagg.decode_worker import DecodeWorker
from swa_jax.disagg.jobs import Job
from swa_jax.disagg.one_process import join_here
from swa_jax.disagg.prefill_worker import PrefillWorker
from swa_jax.host_cache import HostCache, HostConfig, HostedServing
from swa_jax.models import get_model
from swa_jax.replay.driver import ReplaySettings, run_replay
from swa_jax.replay.trace import load_trace
from swa_jax.serving import ServingConfig, make_requests, new_world, submit, unfinished
from swa_jax.serving.world_pools import world_pools

from .program import Driven, Tree
from .serving import MODEL, WINDOW, prompts

# ---- prefill on one worker, decode on another -----------------------------------------------

_NEW, _LONGEST, _PLACES, _TURNS = 8, 30, 8, 8
_DECODE_POOL = swa.PoolConfig(80, 32, 4, WINDOW - 1)
_PREFILL_POOL = swa.PoolConfig(
    72, 40, 2, disagg.prefill_window(swa.PoolConfig(72, 40, 2, WINDOW - 1), _DECODE_POOL, 0)
)
_DECODE = ServingConfig(
    _DECODE_POOL,
    _LONGEST + _NEW,
    max_running=3,
    chunk_tokens=8,
    prefill_rows=2,
    max_new_tokens=_NEW,
)
_PREFILL = dataclasses.replace(_DECODE, pool=_PREFILL_POOL, role="prefill")
_SIZE = BundleSize(pieces=4, full_tokens=8, swa_tokens=8)


def _pair(devices: list[Any]) -> Iterator[Tree]:
    """Both worlds every few turns, and the texts at the end."""
    prefill = PrefillWorker(MODEL, _PREFILL, None, places=_PLACES, size=_SIZE)
    decode = DecodeWorker(MODEL, _DECODE, None, places=_PLACES, reservations=4, size=_SIZE)
    prefill.world = jax.device_put(prefill.world, devices[0])
    decode.world, decode.arrivals = jax.device_put((decode.world, decode.arrivals), devices[-1])
    one, other = join_here(prefill, decode, devices[-1])
    texts = prompts(40_000, 24, _LONGEST)
    other.submit([Job(name, tuple(text), _NEW) for name, text in enumerate(texts)])
    outcomes, turns = {}, 0
    while other.open_jobs or prefill.open_jobs:
        one.turn()
        outcomes |= {outcome.name: outcome for outcome in other.turn()}
        turns += 1
        if turns % _TURNS == 0:
            yield {"prefill": prefill.world, "decode": decode.world, "inbox": decode.arrivals}
    said = [(name, outcomes[name].reason, outcomes[name].tokens) for name in sorted(outcomes)]
    yield {
        "prefill": prefill.world,
        "decode": decode.world,
        "inbox": decode.arrivals,
        "texts": _as_leaf(said),
    }


# ---- a serving loop over a host tier --------------------------------------------------------

_TIER_POOL = swa.PoolConfig(80, 48, 4, WINDOW - 1)
_TIER = ServingConfig(_TIER_POOL, max_context=64, max_running=2, chunk_tokens=8)
_SLICE = 8


def _host_tier(policy: str) -> Driven:
    def run(devices: list[Any]) -> Iterator[Tree]:
        texts = prompts(41_000, 10, 36)
        texts += [[*text, 7, 7, 7] for text in texts]
        requests = make_requests(texts, max_new_tokens=6, prompt_columns=64)
        world, _ = submit(_TIER, new_world(MODEL, _TIER, len(texts)), requests)
        world = jax.device_put(world, devices[-1])
        assert world.cache is not None
        pools = world_pools(MODEL, _TIER, world)
        tier = HostConfig.beside(_TIER_POOL, 480, 240)
        host = HostCache(tier, world.cache, pools, policy)
        serving = HostedServing(host, MODEL, _TIER, slice_steps=_SLICE)
        while bool(unfinished(world)):
            world = serving.run(None, world, _SLICE)
            index = host.index
            figures = [index.full_pages, index.swa_pages]
            figures += [serving.restored_full, serving.restored_swa]
            yield {"world": world, "host": np.asarray(figures, np.int32)}

    return Driven(f"host tier, {policy}", run, f"a slice of {_SLICE} steps")


# ---- replays of the bundled trace -----------------------------------------------------------

_TIMES = ("wall_s", "compile_s")


def _replay(name: str, count: int, model: str, **settings: Any) -> Driven:
    def run(devices: list[Any]) -> Iterator[Tree]:
        seen: list[Tree] = []
        known = get_model(model)
        pool = swa.PoolConfig(64 * 1024, 32 * 1024, 64, known.past_window)
        result = run_replay(
            load_trace("mooncake-conversation", limit=count),
            known,
            pool,
            ReplaySettings(max_running=16, chunk_tokens=4096, slice_steps=64, **settings),
            on_slice=lambda carry: seen.append(jax.device_get(carry)),
        )
        yield from seen
        figures = {k: v for k, v in dataclasses.asdict(result).items() if k not in _TIMES}
        yield {"figures": _as_leaf(figures)}

    return Driven(f"replay, {name}", run, "a slice of 64 steps")


def _as_leaf(said: object) -> np.ndarray:
    return np.frombuffer(json.dumps(said, sort_keys=True).encode(), np.uint8)


PROGRAMS = [
    Driven("disaggregated pair", _pair, f"{_TURNS} turns"),
    _host_tier("write_through"),
    _host_tier("write_back"),
    _replay("cache", 24, "gpt-oss-20b"),
    _replay("no cache", 24, "gemma-3-27b", prefix_cache=False),
    _replay("host tier", 6, "gpt-oss-20b", host_bytes=2**28),
]
