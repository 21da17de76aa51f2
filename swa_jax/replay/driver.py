"""The host side of a replay: sizes the loop, runs it slice by slice, reads the figures."""

import dataclasses
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
import numpy as np

from swa_jax.check import check
from swa_jax.config import PoolConfig
from swa_jax.counts import held_pages
from swa_jax.heavier import page_weight
from swa_jax.host_cache.plan import plan_host
from swa_jax.models import ModelConfig
from swa_jax.prefix_cache import POLICIES
from swa_jax.replay.content import content_of
from swa_jax.replay.engine import (
    Carry,
    Engine,
    ReuseFigures,
    leaked_pages,
    plain_engine,
    reuse_figures,
    shared_engine,
)
from swa_jax.replay.host_tier import HostFigures
from swa_jax.replay.trace import Trace
from swa_jax.replay.world import Load, LoopConfig, World, running
from swa_jax.state import faults


@dataclass(frozen=True)
class ReplaySettings:
    """How the trace is served."""

    max_running: int = 256  # requests that run at once
    chunk_tokens: int = 8192  # prefill tokens of a step, over all requests
    max_context: int | None = None  # longer requests are rejected
    slice_steps: int = 64  # steps between two looks from the host
    prefix_cache: bool = True  # reuse prefixes, where the trace says which are equal
    policy: str = "lru"  # of the prefix cache: who leaves first
    host_bytes: int | None = None  # host memory for what the prefix cache evicts

    def __post_init__(self) -> None:
        for name, least in (("max_running", 1), ("chunk_tokens", 1), ("slice_steps", 1)):
            if getattr(self, name) < least:
                raise ValueError(f"{name} must be at least {least}, got {getattr(self, name)}")
        if self.max_context is not None and self.max_context < 1:
            raise ValueError(f"max_context must be at least 1, got {self.max_context}")
        if self.host_bytes is not None and not self.prefix_cache:
            raise ValueError(
                "a host tier keeps what the prefix cache evicts, and there is no prefix cache"
            )
        if self.policy not in POLICIES:
            raise ValueError(f"policy must be one of {', '.join(POLICIES)}, got {self.policy!r}")


@dataclass(frozen=True)
class Sample:
    """The state of a replay between two slices."""

    step: int
    completed: int
    rejected: int
    running: int
    waiting: int
    full_pages: int
    swa_pages: int


@dataclass(frozen=True)
class ReplayResult:
    """The figures of a finished replay."""

    requests: int
    completed: int
    rejected: int
    rejected_reasons: dict[str, int]
    retracted: int  # retractions; a request may be retracted more than once
    prompt_tokens: int  # of completed requests
    output_tokens: int  # of completed requests
    recomputed_tokens: int  # prefilled again after a retraction
    peak_full_pages: int
    peak_swa_pages: int
    leaked_full_pages: int
    leaked_swa_pages: int
    faults: dict[str, int]
    kv_bytes_peak: int
    kv_bytes_peak_full_only: int  # the same load where every layer keeps everything
    kv_bytes_pool: int
    wall_s: float  # without compilation
    compile_s: float
    steps: int
    peak_running: int
    prefix_cache: bool = False  # was there one: the trace must tell equal prompts apart
    prompt_blocks: int = 0  # blocks that the trace names, of accepted requests
    hit_rate: float = 0.0  # hit_tokens of the prompt tokens
    reuse: ReuseFigures = field(default_factory=ReuseFigures)
    host: HostFigures = field(default_factory=HostFigures)
    timeline: list[Sample] = field(default_factory=list, repr=False)

    def to_dict(self) -> dict[str, object]:
        """All figures but the timeline, ready for JSON."""
        figures = dataclasses.asdict(self)
        del figures["timeline"]
        return figures | figures.pop("reuse") | figures.pop("host")


def final_lengths(trace: Trace) -> np.ndarray:
    """Tokens whose KV exists at the end: the last token generated is never read again."""
    prompt = np.asarray(trace.prompt_lens, np.int64)
    return prompt + np.maximum(np.asarray(trace.output_lens, np.int64) - 1, 0)


def reject(trace: Trace, pool: PoolConfig, settings: ReplaySettings) -> dict[str, np.ndarray]:
    """bool[N] by reason: requests that can never be served, told apart before the run."""
    final = final_lengths(trace)
    pages = -(-final // pool.page_size)
    reasons: dict[str, np.ndarray] = {}
    if settings.max_context is not None:
        total = np.asarray(trace.prompt_lens, np.int64) + np.asarray(trace.output_lens, np.int64)
        reasons["longer than max_context"] = total > settings.max_context
    if not pool.pure_swa_pool:
        reasons["longer than the full pool"] = pages > pool.full_pages
    if pool.sliding_window is None:
        reasons["longer than the SWA pool"] = pages > pool.swa_pages
    taken = np.zeros(final.shape, bool)
    for reason, marks in reasons.items():
        reasons[reason] = marks & ~taken  # one reason each
        taken |= marks
    return reasons


def loop_config(
    final: np.ndarray, made: np.ndarray, pool: PoolConfig, settings: ReplaySettings
) -> LoopConfig:
    """The static sizes of the loop, from int64[N] final lengths and tokens made by each request."""
    longest = int(final.max(initial=1))
    pages = -(-longest // pool.page_size) + 1
    rows = min(settings.max_running, max(1, final.size))
    # No step can add more than there is to serve, nor more than a pool holds.
    most = min(settings.chunk_tokens, max(1, int(final.sum())), pool.full_tokens, pool.swa_tokens)
    return LoopConfig(pool, rows, most, pages, int(made.max(initial=0)))


def run_replay(
    trace: Trace,
    model: ModelConfig,
    pool: PoolConfig,
    settings: ReplaySettings | None = None,
    on_progress: Callable[[Sample], None] | None = None,
    on_slice: Callable[[Carry], None] | None = None,
) -> ReplayResult:
    """Serves every request of a trace in one compiled loop and reports what it took.

    Requests are served in the order of the trace, as fast as memory allows: arrival times are
    not waited for. The loop runs in slices of `slice_steps` steps so that progress can be shown;
    nothing crosses to the host inside a slice.

    Args:
      trace: the requests.
      model: gives the bytes of a token's KV.
      pool: the two pools; its window says what leaves it.
      settings: how to serve; the defaults if not given.
      on_progress: called after each slice.
      on_slice: called after each slice with all that the loop carries, a `SharedWorld` where there
        is a cache. The next slice takes its buffers: keep copies, not arrays.

    Raises:
      ValueError: settings that cannot work.
    """
    settings = settings or ReplaySettings()
    reasons = reject(trace, pool, settings)
    accepted = np.ones(len(trace.prompt_lens), bool)
    for marks in reasons.values():
        accepted &= ~marks
    final = final_lengths(trace)
    made = final - np.asarray(trace.prompt_lens, np.int64)
    config = loop_config(final[accepted], made[accepted], pool, settings)
    load = Load(
        jnp.asarray(trace.prompt_lens, jnp.int32),
        jnp.asarray(np.minimum(final, 2**31 - 1), jnp.int32),
    )
    weight = jnp.asarray(weight_of(model), jnp.int32)
    rejected = int((~accepted).sum())

    started = time.perf_counter()
    engine = _engine(trace, model, config, load, jnp.asarray(accepted), weight, settings)
    compile_s = time.perf_counter() - started

    timeline: list[Sample] = []
    started = time.perf_counter()
    carry = engine.start
    while bool(engine.go_on(carry)):
        carry = engine.advance(carry)
        check_grants(int(engine.world(carry).tally.refused))
        timeline.append(_sample(engine.world(carry), rejected))
        if on_progress is not None:
            on_progress(timeline[-1])
        if on_slice is not None:
            on_slice(carry)
    wall_s = time.perf_counter() - started
    check(engine.world(carry).allocator)
    result = result_of(trace, model, pool, accepted, reasons, engine.world(carry), carry)
    return dataclasses.replace(
        result,
        timeline=timeline,
        wall_s=wall_s,
        compile_s=compile_s,
        host=engine.host_figures(),
    )


def _engine(
    trace: Trace,
    model: ModelConfig,
    config: LoopConfig,
    load: Load,
    accepted: jax.Array,
    weight: jax.Array,
    settings: ReplaySettings,
) -> Engine:
    """The loop for this trace: with a cache where it can tell prompts apart.

    A pure SWA pool keeps nothing below the window, so there a prompt longer than the pool could
    not run under a lock on all of it: such models are replayed without a cache.
    """
    content = content_of(trace) if settings.prefix_cache else None
    steps = settings.slice_steps
    if content is None or config.pool.pure_swa_pool:
        if settings.host_bytes is not None:
            raise ValueError(
                "a host tier keeps what the prefix cache evicts, and there is none for this trace "
                "and model"
            )
        return plain_engine(config, load, accepted, weight, steps)
    host = None
    if settings.host_bytes is not None:
        host = plan_host(model, settings.host_bytes, config.pool.page_size)
    return shared_engine(config, load, content, accepted, weight, steps, settings.policy, host)


def check_grants(refused: int) -> None:
    """A step whose grant is refused repeats for ever, so that has to end the run."""
    if refused:
        raise RuntimeError(f"{refused} grants were refused that the loop had counted on")


def weight_of(model: ModelConfig) -> tuple[int, int]:
    """Bytes of a full and of an SWA page relative to each other."""
    return page_weight(model.full_bytes_per_token, model.swa_bytes_per_token)


def _sample(world: World, rejected: int) -> Sample:
    full, swa = held_pages(world.allocator)
    values = (
        world.tally.steps,
        world.tally.completed,
        jnp.sum(running(world.rows), dtype=jnp.int32),
        jnp.sum(world.waiting, dtype=jnp.int32),
        full,
        swa,
    )
    step, completed, busy, waiting, full_pages, swa_pages = map(int, jax.device_get(values))
    return Sample(step, completed, rejected, busy, waiting, full_pages, swa_pages)


def result_of(
    trace: Trace,
    model: ModelConfig,
    pool: PoolConfig,
    accepted: np.ndarray,
    reasons: dict[str, np.ndarray],
    world: World,
    carry: object,
) -> ReplayResult:
    """The figures of a loop's end, but for those of its course.

    Args:
      trace: the requests that the loop was given.
      model: gives the bytes of a token's KV.
      pool: the two pools.
      accepted: bool[N] not rejected.
      reasons: bool[N] by reason, as from `reject`.
      world: the end.
      carry: all that the loop carried.
    """
    tally = jax.device_get(world.tally)
    reuse = reuse_figures(carry)
    leaked_full, leaked_swa = leaked_pages(world, reuse)
    size = pool.page_size
    full_bytes, swa_bytes = model.full_bytes_per_token, model.swa_bytes_per_token
    peak_full, peak_swa = (int(pages) for pages in tally.peak_pair)
    if pool.pure_swa_pool:
        full_bytes = 0  # one pool, one set of layers
    prompt_tokens = int(np.asarray(trace.prompt_lens, np.int64)[accepted].sum())
    ids = trace.hash_ids or ()
    return ReplayResult(
        requests=len(trace.prompt_lens),
        completed=int(tally.completed),
        rejected=int((~accepted).sum()),
        rejected_reasons={name: int(marks.sum()) for name, marks in reasons.items() if marks.any()},
        retracted=int(tally.retracted),
        prompt_tokens=prompt_tokens,
        output_tokens=int(np.asarray(trace.output_lens, np.int64)[accepted].sum()),
        recomputed_tokens=int(tally.recomputed),
        peak_full_pages=int(tally.peak_full),
        peak_swa_pages=int(tally.peak_swa),
        leaked_full_pages=leaked_full,
        leaked_swa_pages=leaked_swa,
        faults=faults(world.allocator),
        kv_bytes_peak=size * (peak_full * full_bytes + peak_swa * swa_bytes),
        kv_bytes_peak_full_only=size * int(tally.peak_all_full) * model.full_only_bytes_per_token,
        kv_bytes_pool=(pool.full_tokens + size) * full_bytes + (pool.swa_tokens + size) * swa_bytes,
        wall_s=0.0,
        compile_s=0.0,
        steps=int(tally.steps),
        peak_running=int(tally.peak_running),
        prefix_cache=not isinstance(carry, World),
        prompt_blocks=sum(len(blocks) for blocks, ok in zip(ids, accepted, strict=False) if ok),
        hit_rate=reuse.hit_tokens / prompt_tokens if prompt_tokens else 0.0,
        reuse=reuse,
    )
