"""The end of a reservation that has everything: a request that is ready to decode."""

import functools
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp

from swa_jax.disagg.ask import Ticket
from swa_jax.disagg.inbox import (
    Inbox,
    as_ticket,
    check_sides,
    clear_places,
    count_refused,
    standing,
)
from swa_jax.only_if import only_if
from swa_jax.paging import look_up, offset_of, page_of
from swa_jax.prefix_cache import PrefixCache, Receipt, no_receipt
from swa_jax.prefix_cache.own import Holding, give_to_tree, receipt_of
from swa_jax.prefix_cache.receipts import room_is_left
from swa_jax.state import PAD_SLOT, AllocatorState


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["ok", "length", "table", "last_loc", "owned_from", "receipt", "evicted"],
    meta_fields=[],
)
@dataclass(frozen=True)
class Committed:
    """What a running request needs to go on. When refused: no tokens, no pages, no lock."""

    ok: jax.Array  # bool[]
    length: jax.Array  # int32[] tokens whose KV is here
    table: jax.Array  # int32[C] first full slot of each page
    last_loc: jax.Array  # int32[] full slot of the last token, -1 for none
    owned_from: jax.Array  # int32[] tokens that stand on the tree's pages; later ones are its own
    receipt: Receipt  # the lock on them: the request's from here on
    evicted: jax.Array  # int32[] tokens below which no SWA page is its own, for free_out_of_window


_Sides = tuple[Inbox, AllocatorState, PrefixCache | None, Committed]


def commit(
    inbox: Inbox, state: AllocatorState, cache: PrefixCache | None, ticket: Ticket
) -> tuple[Inbox, AllocatorState, PrefixCache | None, Committed]:
    """Makes a running request of a reservation whose KV is all here; its place is free again.

    With a cache, what is whole goes into the tree: there others can share it from now on, copies
    of what came in meanwhile are freed, and the lock moves to the new end.

    Args:
      inbox: reservations.
      state: the allocator beside it.
      cache: the tree, or None.
      ticket: of `preallocate`.

    Returns:
      The inbox, the allocator, the cache and `Committed`. Pages and lock are the caller's.

    Refused (`ok` False), counted in `Inbox.refused`, and nothing else changed: a ticket that names
    no reservation, KV that has not all arrived, or no receipt left for the new lock.

    Rules R8 to R11; public reports B02 and B07.
    """
    check_sides(inbox, state, cache)
    return _commit(inbox, state, cache, as_ticket(ticket))


@jax.jit
def _commit(
    inbox: Inbox, state: AllocatorState, cache: PrefixCache | None, ticket: Ticket
) -> tuple[Inbox, AllocatorState, PrefixCache | None, Committed]:
    stands, place = standing(inbox, ticket)
    ok = stands & has_arrived(inbox)[place]
    if cache is not None:  # the new lock is taken before the old one is given back
        ok = ok & room_is_left(cache)

    def end(sides: _Sides) -> _Sides:
        inbox, state, cache, _ = sides
        if cache is None:
            holding = _holding(inbox, place)
        else:
            cache, state, holding = _give(inbox, state, cache, place)
        committed = Committed(
            ok=jnp.ones((), bool),
            length=inbox.length[place],
            table=holding.table,
            last_loc=holding.last_loc,
            owned_from=holding.owned_from,
            receipt=holding.receipt,
            evicted=jnp.maximum(inbox.swa_start[place], holding.owned_from),
        )
        return clear_places(inbox, place[None]), state, cache, committed

    sides = (count_refused(inbox, ~ok), state, cache, _nothing(inbox))
    return only_if(ok, end, sides)


def has_arrived(inbox: Inbox) -> jax.Array:
    """bool[M] places with a reservation whose KV is all here."""
    whole = (inbox.got_full >= inbox.length) & (inbox.got_swa >= inbox.length)
    return (inbox.serial != 0) & whole


def _nothing(inbox: Inbox) -> Committed:
    zero, none = jnp.int32(0), jnp.int32(-1)
    table = jnp.zeros_like(inbox.table[0])
    return Committed(jnp.zeros((), bool), zero, table, none, zero, no_receipt(), zero)


def _holding(inbox: Inbox, place: jax.Array) -> Holding:
    """A reservation as it stands without a tree: all of it is its own."""
    size, length, table = inbox.pool.page_size, inbox.length[place], inbox.table[place]
    last = jnp.maximum(length - 1, 0)
    first = look_up(table, page_of(last, size), PAD_SLOT)
    slot = jnp.where(first > PAD_SLOT, first + offset_of(last, size), PAD_SLOT)
    last_loc = jnp.where(length > 0, slot, -1)
    return Holding(table, last_loc, inbox.prefix_len[place], receipt_of(inbox, place))


def _give(
    inbox: Inbox, state: AllocatorState, cache: PrefixCache, place: jax.Array
) -> tuple[PrefixCache, AllocatorState, Holding]:
    """Gives the tree what it may have of a reservation."""
    room = inbox.table.shape[1] * inbox.pool.page_size
    cache, state, holding = give_to_tree(
        cache,
        state,
        jnp.pad(inbox.tokens[place], (0, room - inbox.tokens.shape[1])),
        inbox.length[place],
        inbox.table[place],
        receipt_of(inbox, place),
        inbox.namespace[place],
    )
    none = inbox.length[place] == 0
    return cache, state, replace(holding, last_loc=jnp.where(none, -1, holding.last_loc))
