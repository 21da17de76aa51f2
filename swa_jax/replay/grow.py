"""One step of growth: a token for every decoding row, chunks for those in prefill."""

from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp

from swa_jax.allocator import alloc_extend
from swa_jax.counts import free_pages
from swa_jax.paging import look_up, offset_of, page_of
from swa_jax.rank import read_runs
from swa_jax.replay.world import LoopConfig, Rows, World, prefilling, running
from swa_jax.share_pages import share_pages


@dataclass(frozen=True)
class Demand:
    """What the rows want of this step, and whether the decoding rows can have it."""

    decoding: jax.Array  # bool[R]
    pages: jax.Array  # int32[] pages that the decoding rows take, of each kind
    fits: jax.Array  # bool[]


def decode_demand(config: LoopConfig, world: World) -> Demand:
    """Decoding rows come first: they hold the most memory and give it back soonest."""
    rows = world.rows
    decoding = running(rows) & (rows.length >= rows.prefill)
    new_page = decoding & (offset_of(rows.length, config.pool.page_size) == 0)
    pages = jnp.sum(new_page, dtype=jnp.int32)
    full_free, swa_free = free_pages(world.allocator)
    return Demand(decoding, pages, pages <= jnp.minimum(full_free, swa_free))


def _sum_before(values: jax.Array, most: jax.Array) -> jax.Array:
    """int32[R] sum of the places before each, or `most` where that is less: it cannot overflow."""
    total = jnp.minimum(values, most)
    step = 1
    while step < values.shape[0]:
        earlier = jnp.concatenate([jnp.zeros(step, jnp.int32), total[:-step]])
        total = earlier + jnp.minimum(total, most - earlier)
        step *= 2
    return jnp.concatenate([jnp.zeros(1, jnp.int32), total[:-1]])


def _share(config: LoopConfig, rows: Rows, pages: jax.Array) -> jax.Array:
    """int32[R] prefill tokens for each row, the oldest first, within a chunk and `pages` pages.

    A row that the pages do not reach takes what they hold: a chunk shrinks, it is not refused.
    """
    size, chunk = config.pool.page_size, jnp.int32(config.chunk_tokens)
    unfinished = prefilling(rows)
    order = jnp.argsort(jnp.where(unfinished, rows.request, jnp.int32(2**31 - 1)))
    length = rows.length[order]
    left = jnp.where(unfinished, rows.prefill - rows.length, 0)[order]
    want = jnp.minimum(chunk - _sum_before(left, chunk), left)
    share = share_pages(length, want, pages, size)
    return jnp.zeros_like(share).at[order].set(share, mode="drop")


def plan_growth(config: LoopConfig, world: World, demand: Demand) -> jax.Array:
    """int32[R] tokens that each row adds in this step."""
    full_free, swa_free = free_pages(world.allocator)
    left = jnp.minimum(full_free, swa_free) - demand.pages
    share = _share(config, world.rows, jnp.maximum(left, 0))
    return jnp.where(demand.decoding, jnp.int32(1), share)


def grow(config: LoopConfig, world: World, tokens: jax.Array) -> World:
    """Extends every row by int32[R] `tokens` and writes the new pages into its table."""
    rows, size = world.rows, config.pool.page_size
    after = rows.length + tokens
    allocator, grant = alloc_extend(
        world.allocator, rows.length, after, rows.last_loc, capacity=config.step_tokens
    )
    granted = jnp.where(grant.ok, tokens, 0)
    runs = read_runs(granted, config.step_tokens)
    place = look_up(rows.length, runs.run, 0) + runs.within
    opens = runs.real & (offset_of(place, size) == 0)
    row = jnp.where(opens, runs.run, jnp.int32(config.max_running))
    table = rows.table.at[row, page_of(place, size)].set(grant.slots, mode="drop")
    last = look_up(grant.slots, jnp.maximum(runs.start + granted - 1, 0), 0)
    return replace(
        world,
        allocator=allocator,
        rows=replace(
            rows,
            length=rows.length + granted,
            last_loc=jnp.where(granted > 0, last, rows.last_loc),
            table=table,
        ),
        tally=replace(world.tally, refused=world.tally.refused + (~grant.ok).astype(jnp.int32)),
    )
