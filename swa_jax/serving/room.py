"""Making room for a step: the cache gives way first, then the newest requests."""

from dataclasses import replace

import jax
import jax.numpy as jnp

from swa_jax.counts import free_pages
from swa_jax.only_if import only_if, while_any
from swa_jax.paging import floor_to_page, offset_of, page_of, pages_for
from swa_jax.prefix_cache import release_swa_lock
from swa_jax.prefix_cache.evict_lacking import evict_lacking
from swa_jax.prefix_cache.own import receipt_of, with_receipt
from swa_jax.rank import exclusive_sum
from swa_jax.serving.budget import is_alone, share_budget, start_over
from swa_jax.serving.chunk import plan_chunk
from swa_jax.serving.config import ServingConfig
from swa_jax.serving.queue import WAITING
from swa_jax.serving.ready import ready_rows
from swa_jax.serving.row_pages import vacate
from swa_jax.serving.world import World, add_stats, of_rows, running, to_compute
from swa_jax.window import frontier


def decoding_rows(config: ServingConfig, world: World) -> jax.Array:
    """bool[R] rows that decode; on a prefill worker nobody does."""
    return (to_compute(world) == 1) & (not config.only_prefills)


def draft_rows(config: ServingConfig, world: World) -> jax.Array:
    """bool[R] decoding rows that may speculate: two tokens at least may still come."""
    room = of_rows(world.rows, world.queue.limit) - world.rows.length
    return decoding_rows(config, world) & (room > 2) & (config.num_drafts > 0)


def decode_tokens(config: ServingConfig, world: World, drafts: jax.Array) -> jax.Array:
    """int32[R] tokens that each row wants slots for: the next one, and K drafts after it.

    Args:
      config: what is static.
      world: as it is.
      drafts: bool[] whether anybody speculates.
    """
    extra = jnp.where(draft_rows(config, world) & drafts, jnp.int32(config.num_drafts), 0)
    return jnp.where(decoding_rows(config, world), 1 + extra, 0)


def decode_pages(config: ServingConfig, world: World, drafts: jax.Array) -> jax.Array:
    """int32[] pages of each kind that the decoding rows take."""
    length, size = world.rows.length, config.pool.page_size
    after = length + decode_tokens(config, world, drafts)
    return jnp.sum(pages_for(after, size) - pages_for(length, size), dtype=jnp.int32)


def oldest_pages(config: ServingConfig, world: World) -> jax.Array:
    """int32[] pages of each kind that the oldest request needs to go on with its prefill: 0 or 1.

    Decoding rows must leave them: else a newer request could live on the pages that its own
    window gives back while the oldest stands still.
    """
    rows, size = world.rows, config.pool.page_size
    ticket = of_rows(rows, world.queue.ticket)
    row = jnp.argmin(jnp.where(running(rows), ticket, jnp.int32(2**31 - 1)))
    is_full = offset_of(rows.length[row], size) == 0
    return ((to_compute(world)[row] > 1) & is_full).astype(jnp.int32)


def fitting_rows(world: World, counts: jax.Array) -> jax.Array:
    """int32[R] `counts` of the oldest rows that the free pages reach, 0 for the others.

    All of them, after `make_room`; not behind a fence.
    """
    rows, size = world.rows, world.allocator.config.page_size
    need = pages_for(rows.length + counts, size) - pages_for(rows.length, size)
    ticket = of_rows(rows, world.queue.ticket)
    order = jnp.argsort(jnp.where(counts > 0, ticket, jnp.int32(2**31 - 1)))
    taken = exclusive_sum(need[order]) + need[order]
    fits = taken <= jnp.minimum(*free_pages(world.allocator))
    return jnp.where(jnp.zeros_like(fits).at[order].set(fits, mode="drop"), counts, 0)


def drafts_fit(config: ServingConfig, world: World) -> jax.Array:
    """bool[] there is room for every row's drafts beside what the oldest needs."""
    pages = decode_pages(config, world, jnp.ones((), bool)) + oldest_pages(config, world)
    return pages <= jnp.minimum(*free_pages(world.allocator))


def _wanted(config: ServingConfig, world: World) -> jax.Array:
    """int32[] pages of each kind that this step takes, if all that may step does."""
    size, length = config.pool.page_size, world.rows.length
    chunk = jnp.minimum(to_compute(world) - 1, jnp.int32(config.chunk_tokens))
    chunk = jnp.maximum(chunk, 0)
    prefill = jnp.sum(pages_for(length + chunk, size) - pages_for(length, size), dtype=jnp.int32)
    return prefill + decode_pages(config, world, jnp.ones((), bool))


def _short(config: ServingConfig, world: World) -> tuple[jax.Array, jax.Array]:
    """int32[] full and SWA pages that this step lacks."""
    wanted = _wanted(config, world)
    full_free, swa_free = free_pages(world.allocator)
    # What a fence has queued will be free: evicting more would not help this step either.
    full, of_swa = world.allocator.full, world.allocator.swa
    return wanted - full_free - full.num_pending, wanted - swa_free - of_swa.num_pending


def _evict_short(config: ServingConfig, world: World) -> World:
    """Evicts what the step lacks, if it lacks anything."""
    if config.pool.unified_layout is not None:
        return share_budget(world, _wanted(config, world))
    if world.cache is None:
        return world
    size = config.pool.page_size
    full, swa = _short(config, world)

    def make_room(world: World) -> World:
        assert world.cache is not None
        cache, allocator, gone = evict_lacking(world.cache, world.allocator, full, swa)
        return add_stats(
            replace(world, cache=cache, allocator=allocator),
            evicted_full=page_of(gone.full_tokens, size),
            evicted_swa=page_of(gone.swa_tokens, size),
        )

    return only_if((full > 0) | (swa > 0), make_room, world)


def _release_passed(config: ServingConfig, world: World) -> World:
    """Gives up the SWA locks of every row as far as the row has left that window."""
    if world.cache is None or config.pool.sliding_window is None:
        return world
    length, kept = world.rows.length, None
    if config.only_prefills:  # the window of the last whole page is sent too
        whole = jnp.maximum(length - jnp.int32(config.key_lag), 0)
        kept = floor_to_page(whole, config.pool.page_size)
    passed = frontier(config.pool, length, kept)

    def one(row: jax.Array, world: World) -> World:
        assert world.cache is not None
        rows = world.rows
        # An idle row has an empty receipt.
        cache, receipt = release_swa_lock(world.cache, receipt_of(rows, row), passed[row])
        return replace(world, cache=cache, rows=with_receipt(rows, row, receipt))

    return jax.lax.fori_loop(0, config.max_running, one, world)


def is_stuck(config: ServingConfig, world: World) -> jax.Array:
    """bool[] the decoding rows and the oldest cannot all go on, even without drafts.

    Not while some row is ready to be sent: its pages will come back.
    """
    pages = decode_pages(config, world, jnp.zeros((), bool)) + oldest_pages(config, world)
    free = jnp.minimum(*free_pages(world.allocator))
    nobody_prefills = ~jnp.any(plan_chunk(config, world, free).counts > 0)
    idle = ~jnp.any(decoding_rows(config, world)) & nobody_prefills
    waits = jnp.any(ready_rows(config, world))
    return jnp.any(running(world.rows)) & ((pages > free) | idle) & ~waits


def newest_row(world: World) -> jax.Array:
    """int32[] the running row whose request came last."""
    ticket = of_rows(world.rows, world.queue.ticket)
    return jnp.argmax(jnp.where(running(world.rows), ticket, -1)).astype(jnp.int32)


def retract(config: ServingConfig, world: World, row: jax.Array) -> World:
    """Sends a row's request back to the queue, with its place in it and what it has generated."""
    place, length = world.rows.request[row], world.rows.length[row]
    world = vacate(config, world, row)
    queue = world.queue
    queue = replace(queue, status=queue.status.at[place].set(WAITING, mode="drop"))
    return add_stats(replace(world, queue=queue), retracted=jnp.int32(1), recomputed=length)


def _retract_newest(config: ServingConfig, world: World) -> World:
    world = retract(config, world, newest_row(world))
    if config.pool.unified_layout is None:
        return world
    return only_if(~jnp.any(running(world.rows)), start_over, world)


def _may_retract(config: ServingConfig, world: World) -> jax.Array:
    """bool[] somebody else runs, or the last one would fit if it began again (`start_over`)."""
    many = jnp.sum(running(world.rows), dtype=jnp.int32) > 1
    if config.pool.unified_layout is not None:
        many = many | is_alone(world)
    return many & ~world.allocator.group_open


def make_room(config: ServingConfig, world: World) -> World:
    """Frees what this step needs, so that at least the oldest request makes progress.

    In this order: the cache gives up pages nobody uses; rows give up locks on windows they have
    left; the newest requests are retracted, one by one, never the last but where it would fit if
    it began again. Behind a fence nobody is retracted, since nothing that is freed can be granted:
    who does not fit waits.

    Public reports B46, B52.
    """

    def go_on(carry: tuple[World, jax.Array]) -> jax.Array:
        world, turn = carry
        helps = (turn == 1) | _may_retract(config, world)
        return (turn == 0) | (is_stuck(config, world) & helps)

    def turn_of(carry: tuple[World, jax.Array]) -> tuple[World, jax.Array]:
        world, turn = carry
        world = only_if(turn == 1, lambda w: _release_passed(config, w), world)
        world = only_if(turn > 1, lambda w: _retract_newest(config, w), world)
        return _evict_short(config, world), turn + 1

    return while_any(go_on, turn_of, (world, jnp.int32(0)))[0]
