"""The laws of reservations: on the device, and loud on the host."""

from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from swa_jax.check import InvariantError
from swa_jax.counts import held_pages
from swa_jax.disagg.inbox import (
    NO_RESERVATION,
    Inbox,
    check_sides,
    own_pages,
    reserved_pages,
)
from swa_jax.inputs import as_int32
from swa_jax.paging import look_up, page_of
from swa_jax.pool import is_held, nowhere
from swa_jax.prefix_cache import PrefixCache
from swa_jax.prefix_cache.receipts import standing
from swa_jax.state import UNMAPPED, AllocatorState


@dataclass(frozen=True)
class _Sides:
    """What a law looks at."""

    inbox: Inbox
    state: AllocatorState
    cache: PrefixCache | None
    pages: jax.Array  # int32[M, C] full page of each place of the tables
    full: jax.Array  # bool[M, C] it is the reservation's own
    swa: jax.Array  # bool[M, C] and has an SWA side
    others: tuple[jax.Array, jax.Array] | None  # int32[] full and SWA pages held by others


def invariants(
    inbox: Inbox,
    state: AllocatorState,
    cache: PrefixCache | None,
    *,
    others: tuple[ArrayLike, ArrayLike] | None = None,
) -> dict[str, jax.Array]:
    """Checks reservations against allocator and tree. Pure; works under jit.

    Args:
      inbox: any inbox.
      state: the allocator beside it.
      cache: the tree, or None.
      others: int32[] full and SWA pages that are held by neither tree nor reservations, by
        running requests say; with them what is held must add up (rule R11), without them it
        must not be more than is held.

    Returns:
      bool[] by name, True where the law holds.
    """
    check_sides(inbox, state, cache)
    held = None
    if others is not None:
        held = (as_int32("others", others[0], 0), as_int32("others", others[1], 0))
    return _invariants(inbox, state, cache, held)


@jax.jit
def _invariants(
    inbox: Inbox,
    state: AllocatorState,
    cache: PrefixCache | None,
    others: tuple[jax.Array, jax.Array] | None,
) -> dict[str, jax.Array]:
    full, swa = own_pages(inbox)
    pages = page_of(jnp.maximum(inbox.table, 0), inbox.pool.page_size)
    sides = _Sides(inbox, state, cache, pages, full, swa, others)
    return {name: law(sides) for name, law in LAWS.items()}


def _reserved_is_held(sides: _Sides) -> jax.Array:
    """A reservation's own pages are held, with their SWA side where and only where it is due."""
    held = is_held(sides.state.full, sides.pages)
    swa = look_up(sides.state.full_to_swa, sides.pages, UNMAPPED)
    live = (swa != UNMAPPED) & is_held(sides.state.swa, swa)
    return jnp.all(~sides.full | (held & (sides.pages > 0) & (live == sides.swa)))


def _one_reservation(sides: _Sides) -> jax.Array:
    """No page is the own of two reservations, or of one and of the tree."""
    outside = nowhere(sides.state.full)
    page = jnp.where(sides.full, sides.pages, outside).reshape(-1)
    named = jnp.zeros(outside, jnp.int32).at[page].add(1, mode="drop")
    if sides.cache is not None:
        named = named + (sides.cache.in_tree & (named > 0)).astype(jnp.int32)
    return jnp.all(named <= 1)


def _prefix_is_locked(sides: _Sides) -> jax.Array:
    """A reservation's prefix is in the tree, under a lock of the reservation that stands."""
    inbox, cache = sides.inbox, sides.cache
    if cache is None:
        return jnp.all(inbox.prefix_len == 0)
    first = jnp.arange(sides.pages.shape[1], dtype=jnp.int32) * jnp.int32(inbox.pool.page_size)
    prefix = first[None, :] < inbox.prefix_len[:, None]
    locked = look_up(cache.in_tree, sides.pages, False)
    locked = locked & (look_up(cache.full_locks, sides.pages, 0) > 0)
    node = jax.vmap(lambda receipt: standing(cache, receipt))(inbox.receipts)
    last = page_of(jnp.maximum(inbox.prefix_len - 1, 0), inbox.pool.page_size)
    bottom = jnp.take_along_axis(sides.pages, last[:, None], axis=1, mode="clip")[:, 0]
    stands = node == jnp.where(inbox.prefix_len > 0, bottom, 0)
    return jnp.all(~prefix | locked) & jnp.all(stands)


def _lengths(sides: _Sides) -> jax.Array:
    """Every length lies where it can, and a free place has none."""
    inbox, size = sides.inbox, jnp.int32(sides.inbox.pool.page_size)
    begin = inbox.length if inbox.pool.pure_swa_pool else inbox.prefix_len
    good = (inbox.prefix_len >= 0) & (inbox.prefix_len <= inbox.swa_start)
    good = good & (inbox.swa_start <= inbox.length)
    good = good & (jax.lax.rem(inbox.prefix_len, size) == 0)
    good = good & (jax.lax.rem(inbox.swa_start, size) == 0)
    good = good & (begin <= inbox.got_full) & (inbox.got_full <= inbox.length)
    good = good & (inbox.swa_start <= inbox.got_swa) & (inbox.got_swa <= inbox.length)
    free = inbox.serial == NO_RESERVATION
    return jnp.all(good & (~free | (inbox.length == 0)))


def _serials(sides: _Sides) -> jax.Array:
    """No two reservations have one serial, and the next one is nobody's."""
    serial = sides.inbox.serial
    same = (serial[:, None] == serial[None, :]) & (serial != NO_RESERVATION)[:, None]
    once = jnp.sum(same, dtype=jnp.int32) == jnp.sum(serial != NO_RESERVATION, dtype=jnp.int32)
    return once & jnp.all(serial != sides.inbox.next_serial)


def _adds_up(sides: _Sides) -> jax.Array:
    """Rule R11: held = in the tree + reserved + held by others, in each pool."""
    full, swa = reserved_pages(sides.inbox)
    if sides.cache is not None:
        live = sides.cache.in_tree & (sides.state.full_to_swa != UNMAPPED)
        full = full + jnp.sum(sides.cache.in_tree, dtype=jnp.int32)
        swa = swa + jnp.sum(live, dtype=jnp.int32)
    held_full, held_swa = held_pages(sides.state)
    if sides.others is None:
        return (full <= held_full) & (swa <= held_swa)
    return (full + sides.others[0] == held_full) & (swa + sides.others[1] == held_swa)


LAWS: dict[str, Callable[[_Sides], jax.Array]] = {
    "reserved_is_held": _reserved_is_held,
    "one_reservation": _one_reservation,
    "prefix_is_locked": _prefix_is_locked,
    "lengths": _lengths,
    "serials": _serials,
    "adds_up": _adds_up,
}


def check(
    inbox: Inbox,
    state: AllocatorState,
    cache: PrefixCache | None,
    *,
    others: tuple[ArrayLike, ArrayLike] | None = None,
) -> None:
    """Raises if reservations break a law. On the host: waits for the device.

    Args:
      inbox: any inbox.
      state: the allocator beside it.
      cache: the tree, or None.
      others: as for `invariants`.

    Raises:
      InvariantError: names each broken law and what is reserved.
    """
    holds = jax.device_get(invariants(inbox, state, cache, others=others))
    broken = [name for name in holds if not holds[name]]
    if broken:
        laws = "; ".join(f"{name} ({(LAWS[name].__doc__ or '').strip()})" for name in broken)
        full, swa = (int(pages) for pages in reserved_pages(inbox))
        places = int((inbox.serial != NO_RESERVATION).sum())
        raise InvariantError(
            f"broken: {laws}. {places} reservations with {full} full and {swa} SWA pages of "
            "their own"
        )
