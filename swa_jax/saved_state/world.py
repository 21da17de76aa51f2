"""Saving what a server has cached, and a world that starts with it."""

import functools
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp

from swa_jax.describe import Plain, describe
from swa_jax.free import free
from swa_jax.models.decoder import DecoderConfig
from swa_jax.only_if import only_if
from swa_jax.owners import whoever
from swa_jax.prefix_cache import PrefixCache, reset
from swa_jax.saved_state.directory import require_orbax
from swa_jax.saved_state.state import restore_state, save_state
from swa_jax.serving.config import ServingConfig
from swa_jax.serving.finish import lift_fence
from swa_jax.serving.model import ServingModel, as_model
from swa_jax.serving.row_pages import give_row, vacate
from swa_jax.serving.world import World, check_world, new_world, running
from swa_jax.serving.world_pools import with_world_pools, world_pools
from swa_jax.state import PAD_SLOT, AllocatorState


def save_world(
    path: str | Path,
    model: ServingModel | DecoderConfig,
    config: ServingConfig,
    world: World,
    *,
    weights: str = "",
) -> None:
    """Saves what a server has computed: its prefix cache with the KV of every cached page.

    Requests under way are not saved, but what was computed for them is cached, as when they are
    cancelled. Locks of pins and pages of anybody else are not saved either. The world itself goes
    on unchanged. Waits for the device.

    Args:
      path: a directory, made where it is missing. What it holds counts until this save is finished,
        also if the process is killed.
      model: static.
      config: static.
      world: as it is between two calls of the loop.
      weights: what tells the model's weights from others, such as the checkpoint's name and
        revision. KV of other weights looks the same and means nothing.

    Raises:
      ImportError: Orbax is not installed (the extra `checkpoint`).
      OSError: the disk is full, or fails; what was saved before is as it was.
      ValueError: a loop without a prefix cache, which has nothing to keep, or a model that
        `swa_jax.describe` cannot describe.
    """
    require_orbax()
    check_world(config, world)
    made = _made(model, config, weights)
    allocator, cache = _settle(config, replace(world, kv=None, draft=None))
    save_state(path, allocator, cache, world_pools(model, config, world), made=made)


def restore_world(
    path: str | Path,
    model: ServingModel | DecoderConfig,
    config: ServingConfig,
    places: int,
    *,
    weights: str = "",
) -> World:
    """A new world that has cached what `save_world` saved.

    Args:
      path: as for `save_world`.
      model: as it was saved with.
      config: the pools, the context, the policy and the source of drafts as they were; rows and
        chunks may be others.
      places: N, requests that can be known at once, static.
      weights: as it was saved with.

    Raises:
      FileNotFoundError: there is no finished save.
      ImportError: Orbax is not installed (the extra `checkpoint`).
      ValueError: it was saved under another configuration, with each thing that differs; or what is
        there is damaged, or no saved state.
    """
    require_orbax()
    made = _made(model, config, weights)
    world = new_world(model, config, places)
    pools = world_pools(model, config, world)
    allocator, cache, pools = restore_state(path, world.allocator, world.cache, pools, made=made)
    assert pools is not None
    world = replace(world, allocator=allocator, cache=cache)
    return with_world_pools(model, config, world, pools)


def _made(model: ServingModel | DecoderConfig, config: ServingConfig, weights: str) -> Plain:
    if not config.prefix_cache:
        raise ValueError(
            "a loop with prefix_cache=False keeps nothing when its requests end: there is nothing "
            "to save"
        )
    return {
        "model": describe(as_model(model)),
        "draft": describe(config.draft),
        "weights": weights,
    }


@functools.partial(jax.jit, static_argnums=0)
def _settle(config: ServingConfig, world: World) -> tuple[AllocatorState, PrefixCache]:
    """Allocator and cache as if every request had been cancelled: what is held is cached."""

    def leave(row: jax.Array, world: World) -> World:
        return vacate(config, give_row(config, world, row), row)

    def one(row: jax.Array, world: World) -> World:
        return only_if(running(world.rows)[row], lambda w: leave(row, w), world)

    world = jax.lax.fori_loop(0, config.max_running, one, lift_fence(world))
    assert world.cache is not None
    cache, allocator = _without_locks(world.cache), world.allocator
    page = jnp.arange(cache.in_tree.shape[0], dtype=jnp.int32)
    strange = ~allocator.full.free & ~cache.in_tree
    slots = jnp.where(strange, page * jnp.int32(config.pool.page_size), PAD_SLOT)
    return free(allocator, slots, by=whoever(allocator, slots)), cache


def _without_locks(cache: PrefixCache) -> PrefixCache:
    """The tree as it is; receipts from before hold nothing any more."""
    fresh = reset(cache)
    return replace(
        cache,
        full_locks=fresh.full_locks,
        swa_locks=fresh.swa_locks,
        receipt_serial=fresh.receipt_serial,
        receipt_node=fresh.receipt_node,
        receipt_boundary=fresh.receipt_boundary,
        spare_receipts=fresh.spare_receipts,
        num_receipts=fresh.num_receipts,
        serial=fresh.serial,
    )
