"""The pages of one row: giving them to the cache, giving them back."""

from dataclasses import replace

import jax
import jax.numpy as jnp

from swa_jax.free import free
from swa_jax.prefix_cache import no_receipt, unlock
from swa_jax.prefix_cache.own import give_to_tree, receipt_of, with_receipt
from swa_jax.serving.config import ServingConfig
from swa_jax.serving.row_owners import row_owners
from swa_jax.serving.world import NO_REQUEST, World
from swa_jax.state import PAD_SLOT


def give_row(config: ServingConfig, world: World, row: jax.Array) -> World:
    """Gives the whole pages of a row to the cache, if there is one; the row goes on with them."""
    if world.cache is None:
        return world
    rows, queue = world.rows, world.queue
    place = rows.request[row]
    room = config.table_pages * config.pool.page_size
    tokens = queue.tokens[place]
    cache, allocator, holding = give_to_tree(
        world.cache,
        world.allocator,
        jnp.pad(tokens, (0, max(0, room - tokens.shape[0]))),
        rows.length[row],
        rows.table[row],
        receipt_of(rows, row),
        queue.namespace[place],
        by=_owner(world, row),
    )
    rows = replace(
        with_receipt(rows, row, holding.receipt),
        table=rows.table.at[row].set(holding.table, mode="drop"),
        last_loc=rows.last_loc.at[row].set(holding.last_loc, mode="drop"),
        evicted=rows.evicted.at[row].max(holding.owned_from, mode="drop"),
        owned_from=rows.owned_from.at[row].set(holding.owned_from, mode="drop"),
    )
    return replace(world, allocator=allocator, cache=cache, rows=rows)


def _owner(world: World, row: jax.Array) -> jax.Array | None:
    owners = row_owners(world)
    return None if owners is None else owners[row]


def vacate(config: ServingConfig, world: World, row: jax.Array) -> World:
    """Gives back every page that a row holds by itself, and its lock; it is idle then."""
    rows, size = world.rows, config.pool.page_size
    start = jnp.arange(config.table_pages, dtype=jnp.int32) * jnp.int32(size)
    own = (start < rows.length[row]) & (start >= rows.owned_from[row])
    allocator = free(
        world.allocator, jnp.where(own, rows.table[row], PAD_SLOT), by=_owner(world, row)
    )
    cache = world.cache
    if cache is not None:
        cache = unlock(cache, receipt_of(rows, row))

    def put(values: jax.Array, value: int) -> jax.Array:
        return values.at[row].set(value, mode="drop")

    idle = replace(
        with_receipt(rows, row, no_receipt()),
        request=put(rows.request, NO_REQUEST),
        length=put(rows.length, 0),
        evicted=put(rows.evicted, 0),
        last_loc=put(rows.last_loc, -1),
        owned_from=put(rows.owned_from, 0),
        fresh=put(rows.fresh, False),
    )
    return replace(world, allocator=allocator, cache=cache, rows=idle)
