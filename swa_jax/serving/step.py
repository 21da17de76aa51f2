"""One step of serving: all that a scheduler does around one pass of the model.

finish -> leave windows -> admit -> make room -> decode -> prefill
"""

from dataclasses import replace

import jax.numpy as jnp

from swa_jax.counts import held_pages
from swa_jax.leave_windows import leave_windows
from swa_jax.models.decoder import DecoderConfig
from swa_jax.paging import floor_to_page
from swa_jax.serving.admit import admit
from swa_jax.serving.config import ServingConfig
from swa_jax.serving.decode import decode_step
from swa_jax.serving.finish import finish
from swa_jax.serving.model import ServingModel, as_model
from swa_jax.serving.prefill import prefill_step
from swa_jax.serving.room import make_room
from swa_jax.serving.row_owners import row_owners
from swa_jax.serving.trees import Tree
from swa_jax.serving.world import World, add_stats, check_world, running


def leave(config: ServingConfig, world: World) -> World:
    """Gives back the SWA pages that every row has left behind.

    What the last page going into the cache needs of its window stays (rule R8).
    """
    rows, kept = world.rows, None
    if world.cache is not None:
        whole = jnp.maximum(rows.length - jnp.int32(config.key_lag), 0)
        kept = floor_to_page(whole, config.pool.page_size)
    allocator, evicted = leave_windows(
        world.allocator,
        rows.table,
        rows.length,
        rows.evicted,
        running(rows),
        step_pages=config.step_pages,
        insert_lens=kept,
        by=row_owners(world),
    )
    return replace(world, allocator=allocator, rows=replace(rows, evicted=evicted))


def step(
    model: ServingModel | DecoderConfig,
    config: ServingConfig,
    params: Tree,
    draft_params: Tree,
    world: World,
) -> World:
    """One step, whoever may take part in it.

    Args:
      model: static.
      config: static.
      params: of the model.
      draft_params: of the source of drafts, None where it has none.
      world: before the step.
    """
    check_world(config, world)
    model = as_model(model)
    world = finish(config, world)
    world = leave(config, world)
    world = admit(config, world)
    world = make_room(config, world)
    if not config.only_prefills:
        world = decode_step(model, config, params, draft_params, world)
    world = prefill_step(model, config, params, draft_params, world)
    return _count(world)


def _count(world: World) -> World:
    stats, (full, swa) = world.stats, held_pages(world.allocator)
    rows = jnp.sum(running(world.rows), dtype=jnp.int32)
    peaks = replace(
        stats,
        peak_full=jnp.maximum(stats.peak_full, full),
        peak_swa=jnp.maximum(stats.peak_swa, swa),
        peak_running=jnp.maximum(stats.peak_running, rows),
    )
    return add_stats(replace(world, stats=peaks), steps=jnp.int32(1))
