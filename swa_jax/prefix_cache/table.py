"""The hash table: naming nodes in it, striking them out, and laying it out anew."""

from dataclasses import replace

import jax
import jax.numpy as jnp

from swa_jax.only_if import only_if
from swa_jax.paging import look_up
from swa_jax.prefix_cache.find import table_place
from swa_jax.prefix_cache.tree import DELETED, EMPTY, PrefixCache


def name_nodes(cache: PrefixCache, nodes: jax.Array) -> PrefixCache:
    """Enters int32[K] nodes, whose hashes are set, into the table; one past the end for none.

    All seek a place at once; where several want one, the highest id has it and the others try
    on. A place is never left empty in front of a node, so searches end rightly.
    """
    outside = cache.in_tree.shape[0]
    hashes = look_up(cache.hash, nodes, 0)

    def seek(carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        table, tries, spot, reused = carry
        open_nodes = (spot < 0) & (nodes < outside)
        wanted = table_place(cache, hashes, tries)
        there = look_up(table, wanted, 1)
        bids = open_nodes & (there <= EMPTY)
        at = jnp.where(bids, wanted, table.shape[0])
        table = table.at[at].max(nodes, mode="drop")
        won = bids & (look_up(table, wanted, 0) == nodes)
        reused = reused + jnp.sum(won & (there == DELETED), dtype=jnp.int32)
        return (
            table,
            tries + (open_nodes & ~won).astype(jnp.int32),
            jnp.where(won, wanted, spot),
            reused,
        )

    def go_on(carry: tuple[jax.Array, ...]) -> jax.Array:
        _, tries, spot, _ = carry
        return jnp.any((spot < 0) & (nodes < outside) & (tries < cache.table.shape[0]))

    start = (
        cache.table,
        jnp.zeros(nodes.shape, jnp.int32),
        jnp.full(nodes.shape, -1, jnp.int32),
        jnp.int32(0),
    )
    table, _, spot, reused = jax.lax.while_loop(go_on, seek, start)
    return replace(
        cache,
        table=table,
        place=cache.place.at[nodes].set(spot, mode="drop"),
        num_deleted=cache.num_deleted - reused,
    )


def strike_out(cache: PrefixCache, table: jax.Array, nodes: jax.Array) -> jax.Array:
    """The table without int32[K] nodes; one past the end for none."""
    at = look_up(cache.place, nodes, table.shape[0])
    return table.at[at].set(DELETED, mode="drop")


def lay_out_when_worn(cache: PrefixCache) -> PrefixCache:
    """The same tree; its table is laid out anew once an eighth of the places are struck out."""

    def lay_out(cache: PrefixCache) -> PrefixCache:
        bare = replace(cache, table=jnp.zeros_like(cache.table), num_deleted=jnp.int32(0))
        ids = jnp.arange(cache.in_tree.shape[0], dtype=jnp.int32)
        return name_nodes(bare, jnp.where(cache.in_tree, ids, cache.in_tree.shape[0]))

    return only_if(cache.num_deleted > jnp.int32(cache.table.shape[0] // 8), lay_out, cache)
