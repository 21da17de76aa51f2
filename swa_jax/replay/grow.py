"""One step of growth: a token for every decoding row, chunks for those in prefill."""

from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp

from swa_jax.allocator import alloc_decode, alloc_extend
from swa_jax.counts import free_pages
from swa_jax.only_if import while_any
from swa_jax.paging import look_up, offset_of, page_of, pages_for
from swa_jax.replay.world import LoopConfig, Rows, World, prefilling, running
from swa_jax.state import AllocatorState


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


def _share(config: LoopConfig, rows: Rows, pages: jax.Array) -> jax.Array:
    """int32[R] prefill tokens for each row, the oldest first, within a chunk and `pages` pages.

    A row that the pages do not reach takes what they hold: a chunk shrinks, it is not refused, and
    nobody behind it gets any. Row by row: a chunk is soon dealt.
    """
    size = config.pool.page_size

    def deal(carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        share, left, chunk, pages = carry
        row = jnp.argmin(jnp.where(left > 0, rows.request, jnp.int32(2**31 - 1)))
        length, want = rows.length[row], jnp.minimum(chunk, left[row])
        held = pages_for(length, size)
        need = pages_for(length + want, size) - held
        most = (held + jnp.minimum(pages, need)) * jnp.int32(size) - length
        chunk = jnp.where(most < want, 0, chunk - want)
        share = share.at[row].set(jnp.minimum(want, most), mode="drop")
        return share, left.at[row].set(0, mode="drop"), chunk, pages - need

    def go_on(carry: tuple[jax.Array, ...]) -> jax.Array:
        return (carry[2] > 0) & jnp.any(carry[1] > 0)

    left = jnp.where(prefilling(rows), rows.prefill - rows.length, 0)
    start = (jnp.zeros_like(left), left, jnp.int32(config.chunk_tokens), pages)
    return jax.lax.while_loop(go_on, deal, start)[0]


def plan_growth(config: LoopConfig, world: World, demand: Demand) -> jax.Array:
    """int32[R] tokens that each row adds in this step."""
    full_free, swa_free = free_pages(world.allocator)
    left = jnp.minimum(full_free, swa_free) - demand.pages
    share = _share(config, world.rows, jnp.maximum(left, 0))
    return jnp.where(demand.decoding, jnp.int32(1), share)


def grow(config: LoopConfig, world: World, tokens: jax.Array) -> World:
    """Extends every row by int32[R] `tokens` and writes the new pages into its table.

    The rows that decode all at once, then those in prefill one by one, so that a step in which
    nobody prefills costs no more than its few tokens.
    """
    decoding = (tokens > 0) & ~prefilling(world.rows)
    left = jnp.where(decoding, 0, tokens)

    def one(carry: tuple[World, jax.Array]) -> tuple[World, jax.Array]:
        world, left = carry
        row = jnp.argmax(left).astype(jnp.int32)
        return _grow_prompt(config, world, row, left[row]), left.at[row].set(0, mode="drop")

    carry = (_grow_decoding(config, world, decoding), left)
    return while_any(lambda carry: jnp.any(carry[1] > 0), one, carry)[0]


def _grow_decoding(config: LoopConfig, world: World, decoding: jax.Array) -> World:
    rows, size = world.rows, config.pool.page_size
    allocator, grant = alloc_decode(world.allocator, rows.length + 1, rows.last_loc, decoding)
    grown = decoding & grant.ok
    opens = grown & (offset_of(rows.length, size) == 0)
    places = jnp.arange(config.max_running, dtype=jnp.int32)
    row = jnp.where(opens, places, jnp.int32(config.max_running))
    rows = replace(
        rows,
        length=rows.length + grown.astype(jnp.int32),
        last_loc=jnp.where(grown, grant.slots, rows.last_loc),
        table=rows.table.at[row, page_of(rows.length, size)].set(grant.slots, mode="drop"),
    )
    return _with(world, allocator, rows, grant.ok)


def _grow_prompt(config: LoopConfig, world: World, row: jax.Array, tokens: jax.Array) -> World:
    rows, size = world.rows, config.pool.page_size
    length = rows.length[row]
    after = length + tokens
    allocator, grant = alloc_extend(
        world.allocator,
        length[None],
        after[None],
        rows.last_loc[row][None],
        capacity=config.chunk_tokens,
    )
    nth = jnp.arange(config.chunk_tokens // size + 1, dtype=jnp.int32)
    column = pages_for(length, size) + nth
    first = column * jnp.int32(size)
    opens = grant.ok & (first < after)
    slots = look_up(grant.slots, first - length, 0)
    end = jnp.where(grant.ok, after, length)
    last = jnp.where(grant.ok, look_up(grant.slots, tokens - 1, 0), rows.last_loc[row])
    at = jnp.where(opens, row, jnp.int32(config.max_running))
    rows = replace(
        rows,
        length=rows.length.at[row].set(end, mode="drop"),
        last_loc=rows.last_loc.at[row].set(last, mode="drop"),
        table=rows.table.at[at, column].set(slots, mode="drop"),
    )
    return _with(world, allocator, rows, grant.ok)


def _with(world: World, allocator: AllocatorState, rows: Rows, granted: jax.Array) -> World:
    refused = world.tally.refused + (~granted).astype(jnp.int32)
    tally = replace(world.tally, refused=refused)
    return replace(world, allocator=allocator, rows=rows, tally=tally)
