"""Giving up reservations: every page and every lock goes back, whatever had arrived."""

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from swa_jax.disagg.ask import Ticket
from swa_jax.disagg.inbox import (
    NO_RESERVATION,
    Inbox,
    as_ticket,
    check_sides,
    clear_places,
    count_refused,
    own_pages,
    standing,
)
from swa_jax.free import free
from swa_jax.inputs import as_int32
from swa_jax.only_if import only_if
from swa_jax.prefix_cache import PrefixCache, unlock
from swa_jax.prefix_cache.batch import unlock_batch
from swa_jax.prefix_cache.own import receipt_of
from swa_jax.state import PAD_SLOT, AllocatorState

_Sides = tuple[Inbox, AllocatorState, PrefixCache | None]


def abort(
    inbox: Inbox, state: AllocatorState, cache: PrefixCache | None, ticket: Ticket
) -> tuple[Inbox, AllocatorState, PrefixCache | None]:
    """Ends a reservation at any point before its commit.

    Its own pages go back in both pools, the lock on its prefix is released; the prefix itself is
    the tree's and stays. In an open free group the pages are queued. Pieces still on their way
    find no reservation.

    Args:
      inbox: reservations.
      state: the allocator beside it.
      cache: the tree, or None.
      ticket: of `preallocate`.

    Returns:
      The inbox, the allocator and the cache.

    Refused, counted in `Inbox.refused`, and nothing else changed: a ticket that names no
    reservation, one that was committed or aborted before included.

    Laws 3 and 4, rule R11.
    """
    check_sides(inbox, state, cache)
    return _abort(inbox, state, cache, as_ticket(ticket))


@jax.jit
def _abort(
    inbox: Inbox, state: AllocatorState, cache: PrefixCache | None, ticket: Ticket
) -> _Sides:
    stands, place = standing(inbox, ticket)

    def end(sides: _Sides) -> _Sides:
        inbox, state, cache = sides
        own = own_pages(inbox)[0][place]
        state = free(state, jnp.where(own, inbox.table[place], PAD_SLOT))
        if cache is not None:
            cache = unlock(cache, receipt_of(inbox, place))
        return clear_places(inbox, place[None]), state, cache

    return only_if(stands, end, (count_refused(inbox, ~stands), state, cache))


def abort_older(
    inbox: Inbox, state: AllocatorState, cache: PrefixCache | None, age: ArrayLike
) -> tuple[Inbox, AllocatorState, PrefixCache | None]:
    """Ends every reservation that is at least so many ticks old: a timeout.

    Args:
      inbox: reservations.
      state: the allocator beside it.
      cache: the tree, or None.
      age: int32[] ticks; see `tick`.

    Returns:
      As for `abort`. Nothing is refused.
    """
    check_sides(inbox, state, cache)
    return _abort_older(inbox, state, cache, as_int32("age", age, 0))


def abort_all(
    inbox: Inbox, state: AllocatorState, cache: PrefixCache | None
) -> tuple[Inbox, AllocatorState, PrefixCache | None]:
    """Ends every reservation, when the other side is gone say."""
    return abort_older(inbox, state, cache, 0)


@jax.jit
def _abort_older(
    inbox: Inbox, state: AllocatorState, cache: PrefixCache | None, age: jax.Array
) -> _Sides:
    ends = (inbox.serial != NO_RESERVATION) & (inbox.age >= age)

    def end(sides: _Sides) -> _Sides:
        inbox, state, cache = sides
        own = own_pages(inbox)[0] & ends[:, None]
        state = free(state, jnp.where(own, inbox.table, PAD_SLOT).reshape(-1))
        if cache is not None:
            spent = jax.tree.map(lambda part: jnp.where(ends, part, 0), inbox.receipts)
            cache = unlock_batch(cache, spent)
        places = jnp.arange(ends.shape[0], dtype=jnp.int32)
        return clear_places(inbox, jnp.where(ends, places, ends.shape[0])), state, cache

    return only_if(jnp.any(ends), end, (inbox, state, cache))
