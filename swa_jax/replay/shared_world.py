"""The replay's world with a prefix cache beside it, and the moves of one row through the tree."""

import functools
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp

from swa_jax.paging import page_of
from swa_jax.prefix_cache import PrefixCache, Receipt, init, no_receipt, own
from swa_jax.prefix_cache.locks import move_lock
from swa_jax.prefix_cache.own import receipt_of, with_receipt
from swa_jax.replay.content import Content, reader_of
from swa_jax.replay.world import Load, LoopConfig, World, new_world


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["hit_tokens", "hit_blocks", "evicted_full", "evicted_swa"],
    meta_fields=[],
)
@dataclass(frozen=True)
class Reuse:
    """Figures of the cache so far, int32; tokens are summed in two parts to pass int32."""

    hit_tokens: jax.Array  # int32[2] of first admissions: multiples of 2^20, and the rest
    hit_blocks: jax.Array  # the trace's blocks
    evicted_full: jax.Array  # pages
    evicted_swa: jax.Array  # pages


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["world", "cache", "receipts", "owned_from", "seen", "refused_at", "reuse"],
    meta_fields=[],
)
@dataclass(frozen=True)
class SharedWorld:
    """The loop carry of a replay with reuse."""

    world: World
    cache: PrefixCache
    receipts: Receipt  # [R] the lock of each row
    owned_from: jax.Array  # int32[R] tokens of the row whose pages are the tree's
    seen: jax.Array  # bool[N] requests that were admitted once
    refused_at: jax.Array  # int32[] requests done when one last did not fit, -1 for never
    reuse: Reuse


def new_shared_world(
    config: LoopConfig, load: Load, accepted: jax.Array, policy: str
) -> SharedWorld:
    """Nothing runs and nothing is cached; the accepted requests (bool[N]) wait."""
    rows = config.max_running

    def zeros(*shape: int) -> jax.Array:
        return jnp.zeros(shape, jnp.int32)

    longest = config.table_pages * config.pool.page_size
    return SharedWorld(
        world=new_world(config, load, accepted),
        cache=init(config.pool, max_prefix_tokens=longest, policy=policy),
        receipts=no_receipt(rows),
        owned_from=zeros(rows),
        seen=jnp.zeros(accepted.shape, bool),
        refused_at=jnp.full((), -1, jnp.int32),
        reuse=Reuse(zeros(2), zeros(), zeros(), zeros()),
    )


def give_to_tree(
    config: LoopConfig, content: Content, shared: SharedWorld, row: jax.Array
) -> SharedWorld:
    """Inserts what a row holds, running or done, and moves its lock to the new end."""
    world, rows = shared.world, shared.world.rows
    cache, allocator, holding = own.give_to_tree(
        shared.cache,
        world.allocator,
        reader_of(content, rows.request[row]),
        rows.length[row],
        rows.table[row],
        receipt_of(shared, row),
        most_pages=config.given_pages,
    )
    rows = replace(
        rows,
        table=rows.table.at[row].set(holding.table, mode="drop"),
        last_loc=rows.last_loc.at[row].set(holding.last_loc, mode="drop"),
        evicted=rows.evicted.at[row].max(holding.owned_from, mode="drop"),
    )
    shared = replace(
        shared,
        world=replace(world, allocator=allocator, rows=rows),
        cache=cache,
        owned_from=shared.owned_from.at[row].set(holding.owned_from, mode="drop"),
    )
    return with_receipt(shared, row, holding.receipt)


def leave_tree(shared: SharedWorld, row: jax.Array) -> SharedWorld:
    """Gives up a row's lock; its prefix may be evicted from here on."""
    world = shared.world
    size = world.allocator.config.page_size
    path = page_of(world.rows.table[row], size)
    receipt = receipt_of(shared, row)
    cache, _ = move_lock(shared.cache, world.allocator, receipt, path, jnp.int32(0))
    shared = with_receipt(replace(shared, cache=cache), row, no_receipt())
    return replace(shared, owned_from=shared.owned_from.at[row].set(0, mode="drop"))
