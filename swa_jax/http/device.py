"""What the engine calls on the device: compiled once, few shapes, small answers.

Legend: N places of the queue, B most tokens that a place can gain between two looks.
"""

import functools
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp

from swa_jax.counts import free_pages, held_pages
from swa_jax.serving import Requests, ServingConfig, Stats, World, cancel, release, submit

_SMALLEST = 16  # columns of the smallest prompt


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=[
        "status",
        "reason",
        "known",
        "cached",
        "tokens",
        "stats",
        "held",
        "free",
        "faults",
    ],
    meta_fields=[],
)
@dataclass(frozen=True)
class View:
    """What the host wants to know after some steps."""

    status: jax.Array  # int32[N] of `swa_jax.serving.queue`
    reason: jax.Array  # int32[N] of `swa_jax.serving.requests`
    known: jax.Array  # int32[N] tokens, prompt and output
    cached: jax.Array  # int32[N] prompt tokens that the cache had, -1 before admission
    tokens: jax.Array  # int32[N, B] tokens from `seen` on, past `known` meaningless
    stats: Stats
    held: tuple[jax.Array, jax.Array]  # int32[] full and SWA pages
    free: tuple[jax.Array, jax.Array]  # int32[] full and SWA pages
    faults: jax.Array  # int32[] that the allocator counted


def prompt_columns(config: ServingConfig) -> tuple[int, ...]:
    """The widths of prompts that are compiled: powers of two, and the longest prompt."""
    columns = [_SMALLEST]
    while columns[-1] < config.max_context:
        columns.append(columns[-1] * 2)
    return (*columns[:-1], config.max_context)


@functools.partial(jax.jit, static_argnums=0, donate_argnums=1)
def enter(config: ServingConfig, world: World, requests: Requests) -> tuple[World, jax.Array]:
    """`swa_jax.serving.submit`, compiled for each width of prompts."""
    return submit(config, world, requests)


@functools.partial(jax.jit, donate_argnums=0)
def strike(world: World, cancelled: jax.Array, released: jax.Array) -> World:
    """Cancels and releases int32[N] places, -1 for none."""
    return release(cancel(world, cancelled), released)


@functools.partial(jax.jit, static_argnums=0)
def look(width: int, world: World, seen: jax.Array) -> View:
    """What has happened since int32[N] tokens of each place were seen. `width` is B."""
    queue = world.queue
    column = seen[:, None] + jnp.arange(width, dtype=jnp.int32)[None, :]
    return View(
        status=queue.status,
        reason=queue.reason,
        known=queue.known,
        cached=queue.cached,
        tokens=jnp.take_along_axis(queue.tokens, column, axis=1, mode="clip"),
        stats=world.stats,
        held=held_pages(world.allocator),
        free=free_pages(world.allocator),
        faults=jnp.sum(world.allocator.faults, dtype=jnp.int32),
    )


def without_stats(world: World) -> World:
    """Figures from nothing again, long before an int32 runs over."""
    stats = jax.tree.map(jnp.zeros_like, world.stats)
    return replace(world, stats=stats, refused_at=jnp.full((), -1, jnp.int32))
