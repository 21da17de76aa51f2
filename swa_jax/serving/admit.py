"""Admission: the oldest waiting request comes in when what it really needs is there.

"Really": full pages for what the cache lacks of it, SWA pages for what it holds at once while it
recycles its window, whatever its length (public reports B47, B48, B50, B51).
"""

from dataclasses import replace

import jax
import jax.numpy as jnp

from swa_jax.counts import free_pages
from swa_jax.only_if import only_if, while_any
from swa_jax.paging import page_of, pages_for
from swa_jax.prefix_cache import (
    Match,
    full_evictable_size,
    lock,
    match_prefix,
    no_receipt,
    swa_evictable_size,
    unlock,
)
from swa_jax.prefix_cache.own import with_receipt
from swa_jax.serving.budget import budget_fits
from swa_jax.serving.config import ServingConfig
from swa_jax.serving.queue import RUNNING, WAITING, oldest_waiting
from swa_jax.serving.world import World, add_stats, of_rows, running, to_compute


def admit(config: ServingConfig, world: World) -> World:
    """Takes in waiting requests, the oldest first, while the next one fits.

    Args:
      config: what is static.
      world: before the call.

    Returns:
      The world: admitted requests have a row that starts from what the cache has of them.
    """

    def may_try(carry: tuple[World, jax.Array]) -> jax.Array:
        world, fits = carry
        idle = jnp.any(~running(world.rows))
        # What did not fit fits no better before some request has left.
        changed = (world.stats.finished != world.refused_at) | ~jnp.any(running(world.rows))
        return fits & idle & changed & jnp.any(world.queue.status == WAITING)

    def attempt(carry: tuple[World, jax.Array]) -> tuple[World, jax.Array]:
        return _attempt(config, carry[0])

    return while_any(may_try, attempt, (world, jnp.ones((), bool)))[0]


def _attempt(config: ServingConfig, world: World) -> tuple[World, jax.Array]:
    place = oldest_waiting(world.queue)
    row = jnp.argmax(~running(world.rows)).astype(jnp.int32)
    known = world.queue.known[place]
    if world.cache is None:
        match = _no_match(config)
        fits = promise_fits(config, world, known, match.length)
        receipt = no_receipt()
    else:
        # The last known token is always computed: what it gives is the next one.
        cache, match = match_prefix(
            world.cache,
            world.allocator,
            world.queue.tokens[place],
            known - 1 + jnp.int32(config.key_lag),
            namespace=world.queue.namespace[place],
        )
        cache, receipt = lock(cache, world.allocator, match.node)
        fits = promise_fits(config, replace(world, cache=cache), known, match.length)
        cache = only_if(~fits, lambda cache: unlock(cache, receipt), cache)
        world = replace(world, cache=cache)
    entered = _seat(config, world, jnp.where(fits, row, config.max_running), place, match)
    entered = replace(
        entered,
        rows=with_receipt(entered.rows, jnp.where(fits, row, config.max_running), receipt),
        refused_at=jnp.where(fits, jnp.int32(-1), world.stats.finished),
    )
    return entered, fits


def _no_match(config: ServingConfig) -> Match:
    return Match(jnp.int32(0), jnp.zeros(config.max_context, jnp.int32), jnp.int32(0))


def _seat(
    config: ServingConfig, world: World, row: jax.Array, place: jax.Array, match: Match
) -> World:
    """Gives a row to a request, on top of its match; `row` past the end changes nothing."""
    rows, queue, size = world.rows, world.queue, config.pool.page_size
    seated = row < config.max_running

    def put(values: jax.Array, value: jax.Array) -> jax.Array:
        return values.at[row].set(value, mode="drop")

    last = match.slots[jnp.maximum(match.length - 1, 0)]
    pages = match.slots[::size][: config.table_pages]
    rows = replace(
        rows,
        request=put(rows.request, place),
        length=put(rows.length, match.length),
        evicted=put(rows.evicted, match.length),
        last_loc=put(rows.last_loc, jnp.where(match.length > 0, last, -1)),
        table=put(rows.table, jnp.pad(pages, (0, config.table_pages - pages.shape[0]))),
        owned_from=put(rows.owned_from, match.length),
    )
    at = jnp.where(seated, place, queue.status.shape[0])
    first = queue.cached[place] < 0
    hit = jnp.where(first, jnp.minimum(match.length, queue.prompt_lens[place]), queue.cached[place])
    queue = replace(
        queue,
        status=queue.status.at[at].set(RUNNING, mode="drop"),
        cached=queue.cached.at[at].set(hit, mode="drop"),
    )
    count = seated.astype(jnp.int32)
    return add_stats(
        replace(world, rows=rows, queue=queue), admitted=count, cached=count * match.length
    )


def promise_fits(
    config: ServingConfig, world: World, known: jax.Array, cached: jax.Array
) -> jax.Array:
    """bool[] what is free or may be evicted covers a request of `known` tokens, all promises kept.

    Others in prefill were promised what they still lack, and each row its next step.
    """
    size = config.pool.page_size
    full_promised, swa_promised = promised(config, world)
    full_need = pages_for(known, size) - page_of(cached, size)
    swa_need = jnp.minimum(_most_swa_pages(config, known), full_need)
    rows = jnp.sum(running(world.rows), dtype=jnp.int32)
    fits = pages_fit(world, full_need + full_promised + rows, swa_need + swa_promised + rows)
    return fits | (rows == 0)  # alone it always fits: others were rejected when they came


def pages_fit(world: World, full_pages: jax.Array, swa_pages: jax.Array) -> jax.Array:
    """bool[] what is free or may be evicted covers int32[] pages of both kinds at once."""
    if world.allocator.config.unified_layout is not None:
        return budget_fits(world, full_pages, swa_pages)
    size = world.allocator.config.page_size
    full_free, swa_free = free_pages(world.allocator)
    if world.cache is not None:
        full_free = full_free + page_of(full_evictable_size(world.cache, world.allocator), size)
        swa_free = swa_free + page_of(swa_evictable_size(world.cache, world.allocator), size)
    return (full_pages <= full_free) & (swa_pages <= swa_free)


def _most_swa_pages(config: ServingConfig, tokens: jax.Array) -> jax.Array:
    """SWA pages that requests of so many tokens hold at once when they recycle them."""
    pages = pages_for(tokens, config.pool.page_size)
    if config.pool.sliding_window is None:
        return pages
    return jnp.minimum(pages, jnp.int32(config.min_swa_pages))


def promised(config: ServingConfig, world: World) -> tuple[jax.Array, jax.Array]:
    """int32[] full and SWA pages that rows in prefill were admitted for and do not hold yet."""
    size, rows = config.pool.page_size, world.rows
    open_rows = to_compute(world) > 1
    known = of_rows(rows, world.queue.known)
    held = pages_for(rows.length, size)
    lacks = jnp.where(open_rows, pages_for(known, size) - held, 0)
    own_swa = held - page_of(rows.evicted, size)
    swa = jnp.minimum(lacks, _most_swa_pages(config, known) - own_swa)
    swa = jnp.where(open_rows, jnp.maximum(swa, 0), 0)
    return jnp.sum(lacks, dtype=jnp.int32), jnp.sum(swa, dtype=jnp.int32)
