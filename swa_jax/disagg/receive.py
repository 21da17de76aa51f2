"""Writing what arrives to where it was promised a place."""

from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp

from swa_jax.disagg.inbox import Inbox, as_ticket, check_sides, count_refused, standing
from swa_jax.disagg.pack import Piece, slots_at
from swa_jax.kv_rows import write_rows
from swa_jax.mapping import translate_full_to_swa
from swa_jax.models.decoder.kv_pool import KVPool
from swa_jax.state import PAD_SLOT, AllocatorState


def receive(
    inbox: Inbox, state: AllocatorState, pools: KVPool, piece: Piece
) -> tuple[Inbox, KVPool, jax.Array]:
    """Writes a piece into the pages of its reservation.

    Pieces come in the order of their tokens, full and SWA each. One that came before, all or in
    part, does no harm: only tokens that are new are written.

    Args:
      inbox: reservations.
      state: the allocator beside it; only its mapping is read.
      pools: the KV of this side.
      piece: of `pack` on the other side, moved here.

    Returns:
      The inbox, the KV, and bool[] whether the piece was accepted.

    Refused, counted in `Inbox.refused`, and nothing else changed: a piece that is not `ok`, whose
    ticket names no reservation, that leaves tokens out (its start is past what has arrived), or
    that lies outside what was asked for.

    Raises:
      ValueError: something else than a KVPool and a Piece, or rows that do not fit this side's
        layers: their number, dtype or shape.

    Laws 7 and 8.
    """
    check_sides(inbox, state, None)
    if not isinstance(pools, KVPool) or not isinstance(piece, Piece):
        raise ValueError(
            "expected a KVPool and a Piece, in this order, got "
            f"{type(pools).__name__} and {type(piece).__name__}"
        )
    as_ticket(piece.ticket)
    return _receive(inbox, state, pools, piece)


@jax.jit
def _receive(
    inbox: Inbox, state: AllocatorState, pools: KVPool, piece: Piece
) -> tuple[Inbox, KVPool, jax.Array]:
    stands, place = standing(inbox, piece.ticket)
    length, table, size = inbox.length[place], inbox.table[place], inbox.pool.page_size
    full_start = length if inbox.pool.pure_swa_pool else inbox.prefix_len[place]
    swa_start, rows = inbox.swa_start[place], piece.rows
    full = _Part(piece.full_from, piece.full_count, full_start, inbox.got_full[place], rows.full)
    swa = _Part(piece.swa_from, piece.swa_count, swa_start, inbox.got_swa[place], rows.swa)
    full_slots = slots_at(table, size, full.new_tokens(length))
    swa_slots = translate_full_to_swa(state, slots_at(table, size, swa.new_tokens(length)))
    good = stands & piece.ok & full.fits(length) & swa.fits(length)
    good = good & full.all_placed(full_slots, length) & swa.all_placed(swa_slots, length)

    pools = KVPool(
        full=write_rows(pools.full, jnp.where(good, full_slots, PAD_SLOT), full.rows),
        swa=write_rows(pools.swa, jnp.where(good, swa_slots, PAD_SLOT), swa.rows),
    )
    at = jnp.where(good, place, inbox.serial.shape[0])
    inbox = replace(
        inbox,
        got_full=inbox.got_full.at[at].set(full.arrived, mode="drop"),
        got_swa=inbox.got_swa.at[at].set(swa.arrived, mode="drop"),
    )
    return count_refused(inbox, ~good), pools, good


@dataclass(frozen=True)
class _Part:
    """The full or the SWA half of a piece."""

    begin: jax.Array  # int32[] its first token
    count: jax.Array  # int32[] tokens
    start: jax.Array  # int32[] the first token that was asked for
    got: jax.Array  # int32[] tokens that have arrived up to now
    rows: tuple[jax.Array, ...]

    def fits(self, length: jax.Array) -> jax.Array:
        """bool[]: nothing is left out before it and nothing of it was not asked for."""
        # Compared so that no sum of made-up numbers can pass int32.
        begins = (self.begin >= self.start) & (self.begin <= self.got)
        ends = (self.count <= length - jnp.clip(self.begin, 0, length)) & (self.count <= self._room)
        return (self.count == 0) | (begins & (self.count > 0) & ends)

    @property
    def _room(self) -> jax.Array:
        return jnp.int32(self.rows[0].shape[0] if self.rows else 2**31 - 1)

    @property
    def arrived(self) -> jax.Array:
        """int32[] tokens that have arrived up to with it, if it fits."""
        return jnp.where(self.count > 0, jnp.maximum(self.got, self.begin + self.count), self.got)

    def _is_new(self, length: jax.Array) -> tuple[jax.Array, jax.Array]:
        places = jnp.arange(self.rows[0].shape[0] if self.rows else 1, dtype=jnp.int32)
        token = jnp.clip(self.begin, 0, length) + places
        return token, (places < self.count) & (token >= self.got)

    def new_tokens(self, length: jax.Array) -> jax.Array:
        """int32[capacity] token of each row, past every table where it is not new."""
        token, new = self._is_new(length)
        return jnp.where(new, token, 2**31 - 1)

    def all_placed(self, slots: jax.Array, length: jax.Array) -> jax.Array:
        """bool[]: every new token has a slot."""
        return jnp.all(~self._is_new(length)[1] | (slots > PAD_SLOT))
