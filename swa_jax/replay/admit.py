"""Admission: the oldest waiting request comes in when what it really needs is there.

"Really": full pages for all it must prefill, SWA pages for what it can hold at once. A long
prompt gives its SWA pages back as it goes, so it needs a window and a page, not its length
(public reports B48, B50, B51).
"""

from dataclasses import replace

import jax
import jax.numpy as jnp

from swa_jax.counts import free_pages
from swa_jax.only_if import while_any
from swa_jax.paging import pages_for
from swa_jax.replay.world import LoopConfig, Rows, World, prefilling, running
from swa_jax.window import most_swa_pages


def promised_pages(config: LoopConfig, rows: Rows) -> tuple[jax.Array, jax.Array]:
    """int32[] full and SWA pages that rows in prefill were admitted for and do not hold yet."""
    size = config.pool.page_size
    open_rows = prefilling(rows)
    held = pages_for(rows.length, size)
    full = jnp.where(open_rows, pages_for(rows.prefill, size) - held, 0)
    held_swa = held - pages_for(rows.evicted, size)
    swa = jnp.where(open_rows, most_swa_pages(config.pool, rows.prefill) - held_swa, 0)
    return jnp.sum(full, dtype=jnp.int32), jnp.sum(jnp.maximum(swa, 0), dtype=jnp.int32)


def _fits(config: LoopConfig, world: World, request: jax.Array) -> jax.Array:
    """bool[] the request's own need, after what others were promised and a page for each row."""
    rows = world.rows
    tokens = world.progress[request]
    full_free, swa_free = free_pages(world.allocator)
    full_promised, swa_promised = promised_pages(config, rows)
    count = jnp.sum(running(rows), dtype=jnp.int32)
    swa_need = most_swa_pages(config.pool, tokens)
    full_need = pages_for(tokens, config.pool.page_size)
    if config.pool.pure_swa_pool:
        full_need, full_promised = swa_need, swa_promised
    room = (full_need <= full_free - full_promised - count) & (
        swa_need <= swa_free - swa_promised - count
    )
    return room | (count == 0)  # alone it always fits: longer requests were rejected


def _may_admit(config: LoopConfig, world: World) -> jax.Array:
    request = jnp.argmax(world.waiting).astype(jnp.int32)
    idle = jnp.any(~running(world.rows))
    return world.waiting[request] & idle & _fits(config, world, request)


def admit(config: LoopConfig, world: World) -> World:
    """Takes in waiting requests, the oldest first, while the next one fits."""

    def one(world: World) -> World:
        rows = world.rows
        request = jnp.argmax(world.waiting).astype(jnp.int32)
        row = jnp.argmax(~running(rows)).astype(jnp.int32)
        prefill = world.progress[request]
        return replace(
            world,
            rows=replace(
                rows,
                request=rows.request.at[row].set(request, mode="drop"),
                prefill=rows.prefill.at[row].set(prefill, mode="drop"),
            ),
            waiting=world.waiting.at[request].set(False, mode="drop"),
        )

    return while_any(lambda world: _may_admit(config, world), one, world)
