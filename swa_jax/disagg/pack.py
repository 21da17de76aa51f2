"""A piece of KV on its way: what the prefill side reads and sends.

Pieces are by token, not by page, so the two sides may have pages of different sizes.
"""

import functools
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from swa_jax.disagg.ask import Ask, Ticket
from swa_jax.disagg.inbox import as_ticket
from swa_jax.inputs import Ints, as_int32, whole_number
from swa_jax.kv_rows import read_rows
from swa_jax.mapping import translate_full_to_swa
from swa_jax.models.decoder.kv_pool import KVPool
from swa_jax.paging import look_up, offset_of, page_of
from swa_jax.pool import is_held
from swa_jax.state import PAD_SLOT, AllocatorState


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["ok", "ticket", "full_from", "full_count", "swa_from", "swa_count", "rows"],
    meta_fields=[],
)
@dataclass(frozen=True)
class Piece:
    """Rows of KV for some tokens of one reservation."""

    ok: jax.Array  # bool[] all that was wanted is in it; rows are 0 and counts 0 otherwise
    ticket: Ticket  # of the reservation it is for
    full_from: jax.Array  # int32[] the first token whose full KV is in it
    full_count: jax.Array  # int32[] tokens
    swa_from: jax.Array  # int32[] the first token whose SWA KV is in it
    swa_count: jax.Array  # int32[] tokens
    rows: KVPool  # [capacity, ...] a layer, in token order; 0 past the count


def pack(
    state: AllocatorState,
    pools: KVPool,
    table: Ints,
    length: ArrayLike,
    ask: Ask,
    *,
    full_capacity: int,
    swa_capacity: int,
    full_from: ArrayLike,
    swa_from: ArrayLike,
) -> Piece:
    """Reads a piece of what a decode side asked for. Changes nothing.

    SWA slots are looked up here and now, in this side's own mapping. Nothing before the ask's
    starts is ever sent: those tokens are there already, or their SWA KV is of no use.

    Args:
      state: allocator of the prefill side.
      pools: its KV.
      table: int32[C] first full slot of each page of the request, as this side has it.
      length: int32[] tokens of it whose KV is computed.
      ask: what the decode side lacks.
      full_capacity: tokens of full layers in a piece, static.
      swa_capacity: tokens of SWA layers in a piece, static.
      full_from: int32[] the first token of this piece in full layers, of `pieces`.
      swa_from: int32[] likewise in SWA layers.

    Returns:
      The piece: tokens from `full_from` and `swa_from` on, as many as there is room for and as
      the ask wants.

    Refused (`ok` False, no counts, rows of zeros): a start before the ask's or past its length; a
    token wanted that is not computed, lies in a page that is not held, or has lost its SWA side.

    Raises:
      ValueError: a capacity below 1, arrays of a wrong kind, or something else than an
        AllocatorState, a KVPool and an Ask.

    Laws 5, 7 and 8; public reports B02 and B54.
    """
    full_room = whole_number("full_capacity", full_capacity, 1)
    swa_room = whole_number("swa_capacity", swa_capacity, 1)
    row = as_int32("table", table, 1)
    if row.shape[0] == 0:
        raise ValueError(f"table must have at least one page, got shape {row.shape}")
    ask = _checked(state, pools, ask)
    starts = as_int32("full_from", full_from, 0), as_int32("swa_from", swa_from, 0)
    return _pack(
        state, pools, row, as_int32("length", length, 0), ask, *starts, full_room, swa_room
    )


def _checked(state: AllocatorState, pools: KVPool, ask: Ask) -> Ask:
    """The ask in int32[] parts; ValueError for what is no ask, or beside a wrong state or pools."""
    wanted = {"state": (state, AllocatorState), "pools": (pools, KVPool), "ask": (ask, Ask)}
    for name, (value, kind) in wanted.items():
        if not isinstance(value, kind):
            raise ValueError(f"{name} must be of {kind.__name__}, got {type(value).__name__}")
    return Ask(
        as_int32("ask.full_start", ask.full_start, 0),
        as_int32("ask.swa_start", ask.swa_start, 0),
        as_int32("ask.length", ask.length, 0),
        as_ticket(ask.ticket),
    )


@functools.partial(jax.jit, static_argnums=(7, 8))
def _pack(
    state: AllocatorState,
    pools: KVPool,
    table: jax.Array,
    length: jax.Array,
    ask: Ask,
    full_from: jax.Array,
    swa_from: jax.Array,
    full_capacity: int,
    swa_capacity: int,
) -> Piece:
    size = state.config.page_size
    full, full_count, full_ok = _tokens(ask.full_start, ask.length, full_from, full_capacity)
    swa, swa_count, swa_ok = _tokens(ask.swa_start, ask.length, swa_from, swa_capacity)
    full_slots = _held_slots(state, slots_at(table, size, full))
    swa_slots = translate_full_to_swa(state, _held_slots(state, slots_at(table, size, swa)))
    known = jnp.minimum(length, jnp.int32(table.shape[0] * size))
    ok = full_ok & swa_ok
    ok = ok & ((full_count == 0) | (full_from + full_count <= known))
    ok = ok & ((swa_count == 0) | (swa_from + swa_count <= known))
    ok = ok & _all_there(full_slots, full_count) & _all_there(swa_slots, swa_count)
    full_count, swa_count = jnp.where(ok, full_count, 0), jnp.where(ok, swa_count, 0)
    rows = KVPool(
        full=read_rows(pools.full, first_of(full_slots, full_count)),
        swa=read_rows(pools.swa, first_of(swa_slots, swa_count)),
    )
    return Piece(ok, ask.ticket, full_from, full_count, swa_from, swa_count, rows)


def _tokens(
    start: jax.Array, length: jax.Array, at: jax.Array, capacity: int
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """int32[capacity] tokens from `at` on, int32[] how many are wanted, bool[] a right start."""
    good = (at >= start) & (at <= length) & (start >= 0)
    count = jnp.where(good, jnp.minimum(length - at, jnp.int32(capacity)), 0)
    return jnp.where(good, at, 0) + jnp.arange(capacity, dtype=jnp.int32), count, good


def slots_at(table: jax.Array, page_size: int, tokens: jax.Array) -> jax.Array:
    """int32[K] full slots of int32[K] tokens >= 0 of a row of pages; 0 past the row."""
    first = look_up(table, page_of(tokens, page_size), PAD_SLOT)
    return jnp.where(first > PAD_SLOT, first + offset_of(tokens, page_size), PAD_SLOT)


def first_of(slots: jax.Array, count: jax.Array) -> jax.Array:
    """int32[K] the first `count` slots, then 0."""
    place = jnp.arange(slots.shape[0], dtype=jnp.int32)
    return jnp.where(place < count, slots, PAD_SLOT)


def _held_slots(state: AllocatorState, slots: jax.Array) -> jax.Array:
    """int32[K] slots that lie in held pages, 0 in place of others."""
    config = state.config
    inside = (slots >= jnp.int32(config.page_size)) & (
        slots < jnp.int32(config.full_tokens + config.page_size)
    )
    page = page_of(jnp.where(inside, slots, PAD_SLOT), config.page_size)
    held = inside & is_held(state.full, page)
    return jnp.where(held, slots, PAD_SLOT)


def _all_there(slots: jax.Array, count: jax.Array) -> jax.Array:
    """bool[]: the first `count` slots are slots."""
    place = jnp.arange(slots.shape[0], dtype=jnp.int32)
    return jnp.all((place >= count) | (slots > PAD_SLOT))
