"""One step of the replay with prefix reuse.

As `step`, with a tree that takes over every prompt page as soon as it is computed: matched before a
request is admitted, locked while it runs, evicted when a pool is short. One request prefills at a
time, so that each finds all that came before it.
"""

import functools
from dataclasses import replace

import jax
import jax.numpy as jnp

from swa_jax.counts import free_pages
from swa_jax.only_if import only_if, while_any
from swa_jax.paging import floor_to_page, pages_for
from swa_jax.prefix_cache import (
    full_evictable_size,
    no_receipt,
    release_swa_lock,
    swa_evictable_size,
)
from swa_jax.prefix_cache.evict_lacking import evict_lacking
from swa_jax.prefix_cache.locks import move_lock
from swa_jax.prefix_cache.match import match_path
from swa_jax.prefix_cache.own import receipt_of, with_receipt
from swa_jax.replay.content import Content, reader_of
from swa_jax.replay.grow import decode_demand, grow, plan_growth
from swa_jax.replay.release import is_done, newest_row, retract, vacate
from swa_jax.replay.shared_world import (
    SharedWorld,
    give_to_tree,
    leave_tree,
)
from swa_jax.replay.step import count, is_stuck, more_than_one, unfinished
from swa_jax.replay.step import evict as leave_window
from swa_jax.replay.world import Load, LoopConfig, World, prefilling, running
from swa_jax.wide import wide_add
from swa_jax.window import frontier, most_swa_pages


def _finish(config: LoopConfig, load: Load, content: Content, shared: SharedWorld) -> SharedWorld:
    """Gives every finished row to the tree, one after the other, and makes it idle."""

    def one(shared: SharedWorld) -> SharedWorld:
        row = jnp.argmax(is_done(load, shared.world.rows)).astype(jnp.int32)
        shared = give_to_tree(config, content, shared, row)
        world = vacate(config, shared.world, row, shared.owned_from[row])
        tally = replace(world.tally, completed=world.tally.completed + 1)
        return leave_tree(replace(shared, world=replace(world, tally=tally)), row)

    return while_any(lambda s: jnp.any(is_done(load, s.world.rows)), one, shared)


def _admit(config: LoopConfig, content: Content, shared: SharedWorld) -> SharedWorld:
    """Takes in the oldest waiting request, on top of what the tree has of it, if it fits."""
    world = shared.world
    busy = running(world.rows)
    idle = jnp.any(~busy) & ~jnp.any(prefilling(world.rows))
    # What did not fit fits no better before some request is done.
    changed = (world.tally.completed != shared.refused_at) | ~jnp.any(busy)
    may_try = idle & changed & jnp.any(world.waiting)
    return only_if(may_try, lambda shared: _attempt(config, content, shared), shared)


def _attempt(config: LoopConfig, content: Content, shared: SharedWorld) -> SharedWorld:
    size, room = config.pool.page_size, config.table_pages * config.pool.page_size
    world, rows = shared.world, shared.world.rows
    request = jnp.argmax(world.waiting).astype(jnp.int32)
    row = jnp.argmax(~running(rows)).astype(jnp.int32)
    target = world.progress[request]
    tokens = reader_of(content, request)
    # The last token is always computed: its output is the first one generated.
    cache, path, pages = match_path(
        shared.cache, world.allocator, tokens, room, target - 1, jnp.int32(0)
    )
    length = pages * jnp.int32(size)
    cache, receipt = move_lock(cache, world.allocator, no_receipt(), path, pages)
    fits = _fits(config, replace(shared, cache=cache), target, length)
    cache, receipt = move_lock(cache, world.allocator, receipt, path, jnp.where(fits, pages, 0))
    at = jnp.where(fits, row, config.max_running)

    def put(values: jax.Array, value: jax.Array) -> jax.Array:
        return values.at[at].set(value, mode="drop")

    columns = jnp.arange(config.table_pages, dtype=jnp.int32)
    table = jnp.where(columns < pages, path * jnp.int32(size), 0)
    last = table[jnp.maximum(pages - 1, 0)] + jnp.int32(size - 1)
    rows = replace(
        rows,
        request=put(rows.request, request),
        length=put(rows.length, length),
        prefill=put(rows.prefill, target),
        evicted=put(rows.evicted, length),
        last_loc=put(rows.last_loc, jnp.where(length > 0, last, -1)),
        table=put(rows.table, table),
    )
    gone = jnp.where(fits, request, world.waiting.shape[0])
    world = replace(world, rows=rows, waiting=world.waiting.at[gone].set(False, mode="drop"))
    shared = replace(shared, world=world, cache=cache, owned_from=put(shared.owned_from, length))
    done = jnp.where(fits, jnp.int32(-1), world.tally.completed)
    shared = replace(shared, refused_at=done)
    shared = _note_hit(content, shared, request, length, fits, size)
    return with_receipt(shared, at, receipt)


def _fits(
    config: LoopConfig, shared: SharedWorld, target: jax.Array, cached: jax.Array
) -> jax.Array:
    """bool[] what is free or may be evicted covers the request, and a page for each row."""
    size = jnp.int32(config.pool.page_size)
    world, cache = shared.world, shared.cache
    full_free, swa_free = free_pages(world.allocator)
    full_free = full_free + jax.lax.div(full_evictable_size(cache, world.allocator), size)
    swa_free = swa_free + jax.lax.div(swa_evictable_size(cache, world.allocator), size)
    rows = jnp.sum(running(world.rows), dtype=jnp.int32)
    full_need = pages_for(target, config.pool.page_size) - jax.lax.div(cached, size)
    swa_need = jnp.minimum(most_swa_pages(config.pool, target), full_need)
    fits = (full_need <= full_free - rows) & (swa_need <= swa_free - rows)
    return fits | (rows == 0)


def _note_hit(
    content: Content,
    shared: SharedWorld,
    request: jax.Array,
    cached: jax.Array,
    fits: jax.Array,
    size: int,
) -> SharedWorld:
    """Counts what the first admission of a request found.

    A block is hit when all of it that whole pages and the last token allow was found.
    """
    first = fits & ~shared.seen[request]
    length = content.prompt_lens[request]
    cached = jnp.minimum(cached, length)
    step = jnp.int32(content.block_tokens)
    end = (jnp.arange(content.blocks.shape[1], dtype=jnp.int32) + 1) * step
    usable = floor_to_page(jnp.minimum(end, length - 1), size)
    hit = (end - step < length) & (usable <= cached) & (usable > end - step)
    tokens = jnp.where(first, cached, 0)
    total = wide_add(shared.reuse.hit_tokens, tokens)
    blocks = jnp.where(first, jnp.sum(hit, dtype=jnp.int32), 0)
    reuse = replace(shared.reuse, hit_tokens=total, hit_blocks=shared.reuse.hit_blocks + blocks)
    at = jnp.where(fits, request, shared.seen.shape[0])
    return replace(shared, reuse=reuse, seen=shared.seen.at[at].set(True, mode="drop"))


def _wanted(config: LoopConfig, world: World) -> jax.Array:
    """int32[] pages of each kind that this step takes if it can have them."""
    size = config.pool.page_size
    rows = world.rows
    left = jnp.where(prefilling(rows), rows.prefill - rows.length, 0)
    chunk = jnp.minimum(left, jnp.int32(config.chunk_tokens))
    need = pages_for(rows.length + chunk, size) - pages_for(rows.length, size)
    return decode_demand(config, world).pages + jnp.sum(need, dtype=jnp.int32)


def _evict_short(config: LoopConfig, shared: SharedWorld) -> SharedWorld:
    """Evicts what the step lacks, if it lacks anything."""
    size = config.pool.page_size

    wanted = _wanted(config, shared.world)
    full_free, swa_free = free_pages(shared.world.allocator)
    full, swa = wanted - full_free, wanted - swa_free

    def make_room(shared: SharedWorld) -> SharedWorld:
        cache, allocator, gone = evict_lacking(shared.cache, shared.world.allocator, full, swa)
        reuse = shared.reuse
        reuse = replace(
            reuse,
            evicted_full=reuse.evicted_full + jax.lax.div(gone.full_tokens, jnp.int32(size)),
            evicted_swa=reuse.evicted_swa + jax.lax.div(gone.swa_tokens, jnp.int32(size)),
        )
        world = replace(shared.world, allocator=allocator)
        return replace(shared, world=world, cache=cache, reuse=reuse)

    return only_if((full > 0) | (swa > 0), make_room, shared)


def _stuck(config: LoopConfig, world: World) -> jax.Array:
    """bool[] rows run and are stuck: with none there is nothing to make room for."""
    return jnp.any(running(world.rows)) & is_stuck(config, world)


def _release_passed(config: LoopConfig, shared: SharedWorld) -> SharedWorld:
    """Gives up the SWA locks of every row as far as the row has left that window."""
    if config.pool.sliding_window is None:
        return shared

    def one(row: jax.Array, shared: SharedWorld) -> SharedWorld:
        passed = frontier(config.pool, shared.world.rows.length[row])
        cache, receipt = release_swa_lock(shared.cache, receipt_of(shared, row), passed)
        return with_receipt(replace(shared, cache=cache), row, receipt)

    return jax.lax.fori_loop(0, config.max_running, one, shared)


@functools.partial(jax.jit, static_argnums=0, donate_argnums=3)
def end_rows(config: LoopConfig, load: Load, content: Content, shared: SharedWorld) -> SharedWorld:
    """The first part of a step, for a caller that has something to do before admission."""
    shared = replace(shared, world=leave_window(config, shared.world))
    return _finish(config, load, content, shared)


def _make_room(config: LoopConfig, shared: SharedWorld) -> SharedWorld:
    """Evicts; then gives up locks that are not needed any more; then retracts the newest."""
    shared = _evict_short(config, shared)

    def some_left(shared: SharedWorld) -> jax.Array:
        return _stuck(config, shared.world)

    def release(shared: SharedWorld) -> SharedWorld:
        return _evict_short(config, _release_passed(config, shared))

    shared = only_if(some_left(shared), release, shared)

    def must_retract(shared: SharedWorld) -> jax.Array:
        return some_left(shared) & more_than_one(shared.world.rows)

    def back(shared: SharedWorld) -> SharedWorld:
        row = newest_row(shared.world.rows)
        world = retract(config, shared.world, row, shared.owned_from[row])
        shared = leave_tree(replace(shared, world=world), row)
        return _evict_short(config, shared)

    return while_any(must_retract, back, shared)


def _take_over(
    config: LoopConfig, content: Content, shared: SharedWorld, tokens: jax.Array
) -> SharedWorld:
    """Gives the chunk that a row has just computed to the tree."""

    def took(tokens: jax.Array) -> jax.Array:
        rows = shared.world.rows
        return (tokens > 0) & (rows.length - tokens < rows.prefill)

    def one(carry: tuple[SharedWorld, jax.Array]) -> tuple[SharedWorld, jax.Array]:
        shared, left = carry
        row = jnp.argmax(left).astype(jnp.int32)
        return give_to_tree(config, content, shared, row), left.at[row].set(False, mode="drop")

    return while_any(lambda carry: jnp.any(carry[1]), one, (shared, took(tokens)))[0]


def shared_step(
    config: LoopConfig, load: Load, content: Content, weight: jax.Array, shared: SharedWorld
) -> SharedWorld:
    """Evict from windows -> finish -> match and admit -> evict, retract -> grow -> insert."""
    shared = replace(shared, world=leave_window(config, shared.world))
    shared = _finish(config, load, content, shared)
    shared = _admit(config, content, shared)
    shared = _make_room(config, shared)
    world = shared.world
    tokens = plan_growth(config, world, decode_demand(config, world))
    shared = replace(shared, world=count(config, grow(config, world, tokens), weight))
    return _take_over(config, content, shared, tokens)


def shared_unfinished(shared: SharedWorld) -> jax.Array:
    """bool[] something waits or runs."""
    return unfinished(shared.world)


@functools.partial(jax.jit, static_argnums=(0, 5), donate_argnums=4)
def run_shared_steps(
    config: LoopConfig,
    load: Load,
    content: Content,
    weight: jax.Array,
    shared: SharedWorld,
    most: int,
) -> SharedWorld:
    """Runs up to `most` steps (static), or until nothing is left to do."""
    end = shared.world.tally.steps + jnp.int32(most)

    def go_on(shared: SharedWorld) -> jax.Array:
        return shared_unfinished(shared) & (shared.world.tally.steps < end)

    body = functools.partial(shared_step, config, load, content, weight)
    return jax.lax.while_loop(go_on, body, shared)
