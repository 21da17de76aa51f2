"""The two compiled loops behind one face: with a prefix cache, and without."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from swa_jax import prefix_cache
from swa_jax.counts import held_pages
from swa_jax.host_cache.config import HostConfig
from swa_jax.replay.content import Content
from swa_jax.replay.host_tier import HostFigures, HostTier
from swa_jax.replay.shared_step import end_rows, run_shared_steps, shared_unfinished
from swa_jax.replay.shared_world import SharedWorld, new_shared_world
from swa_jax.replay.step import run_steps, unfinished
from swa_jax.replay.world import Load, LoopConfig, World, new_world
from swa_jax.state import UNMAPPED
from swa_jax.wide import wide_value

Carry = Any  # World or SharedWorld: the loop's own business


@dataclass(frozen=True)
class Engine:
    """A replay that is ready to run."""

    start: Carry
    advance: Callable[[Carry], Carry]  # runs a slice; takes its argument's buffers
    go_on: Callable[[Carry], jax.Array]  # bool[] something waits or runs
    world: Callable[[Carry], World]
    host_figures: Callable[[], HostFigures] = HostFigures


@dataclass(frozen=True)
class ReuseFigures:
    """What a prefix cache did; all zero without one."""

    hit_tokens: int = 0
    hit_blocks: int = 0
    evicted_full_pages: int = 0
    evicted_swa_pages: int = 0
    tombstones: int = 0  # cached pages without their SWA side, at the end
    cached_full_pages: int = 0  # at the end
    cached_swa_pages: int = 0  # at the end


def plain_engine(
    config: LoopConfig, load: Load, accepted: jax.Array, weight: jax.Array, steps: int
) -> Engine:
    """Requests share nothing. Compiles."""
    start = new_world(config, load, accepted)
    program = run_steps.lower(config, load, weight, start, steps).compile()
    return Engine(start, lambda w: program(load, weight, w), unfinished, lambda w: w)


def shared_engine(
    config: LoopConfig,
    load: Load,
    content: Content,
    accepted: jax.Array,
    weight: jax.Array,
    steps: int,
    policy: str,
    host: HostConfig | None = None,
) -> Engine:
    """Requests start from what earlier ones left in a prefix cache. Compiles.

    With a host tier the loop stops after every step, for what leaves and what comes back.
    """
    start = new_shared_world(config, load, accepted, policy)
    each = steps if host is None else 1
    program = run_shared_steps.lower(config, load, content, weight, start, each).compile()

    def advance(shared: SharedWorld) -> SharedWorld:
        return program(load, content, weight, shared)

    if host is None:
        return Engine(start, advance, shared_unfinished, lambda s: s.world)
    tier = HostTier(host, start.cache.config, config, content)

    def advance_with_host(shared: SharedWorld) -> SharedWorld:
        for _ in range(steps):
            shared = tier.bring_back(end_rows(config, load, content, shared))
            shared = advance(shared)
            tier.note_left(shared)
        return shared

    return Engine(start, advance_with_host, shared_unfinished, lambda s: s.world, tier.figures)


def reuse_figures(carry: Carry) -> ReuseFigures:
    """The figures of a loop's end, checked against the tree's laws."""
    if not isinstance(carry, SharedWorld):
        return ReuseFigures()
    allocator, cache, reuse = carry.world.allocator, carry.cache, carry.reuse
    prefix_cache.check(cache, allocator)
    live = cache.in_tree & (allocator.full_to_swa != UNMAPPED)
    cached, cached_swa = (int(jnp.sum(marks, dtype=jnp.int32)) for marks in (cache.in_tree, live))
    return ReuseFigures(
        hit_tokens=int(wide_value(jax.device_get(reuse.hit_tokens))),
        hit_blocks=int(reuse.hit_blocks),
        evicted_full_pages=int(reuse.evicted_full),
        evicted_swa_pages=int(reuse.evicted_swa),
        tombstones=cached - cached_swa,
        cached_full_pages=cached,
        cached_swa_pages=cached_swa,
    )


def leaked_pages(world: World, figures: ReuseFigures) -> tuple[int, int]:
    """Pages of each kind that neither a pool nor the cache accounts for at the end."""
    full, swa = (int(pages) for pages in jax.device_get(held_pages(world.allocator)))
    return full - figures.cached_full_pages, swa - figures.cached_swa_pages
