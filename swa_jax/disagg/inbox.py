"""Reservations on the decode side: whose KV is on its way, and where it will go.

A reservation stands on a prefix of the tree, held by its lock, and on pages of its own after it. It
is named by a ticket: a place and a serial number that no earlier reservation at any place had. A
ticket that is spent, stale or made up finds another serial there, so it does nothing but count.

Legend: M reservations, T tokens of the longest one, P page_size, C = ceil(T / P) pages of it.
"""

import functools
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp

from swa_jax.config import PoolConfig
from swa_jax.disagg.ask import Ticket
from swa_jax.inputs import as_int32, whole_number
from swa_jax.paging import look_up, page_of, pages_for
from swa_jax.prefix_cache.arguments import check_pair
from swa_jax.prefix_cache.receipts import Receipt, no_receipt
from swa_jax.prefix_cache.tree import PrefixCache, serial_after
from swa_jax.state import AllocatorState

NO_RESERVATION = 0  # serial of a place that is free
_MOST = 2**31 - 1


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=[
        "serial",
        "namespace",
        "prefix_len",
        "swa_start",
        "length",
        "got_full",
        "got_swa",
        "age",
        "table",
        "tokens",
        "receipts",
        "next_serial",
        "refused",
    ],
    meta_fields=["pool"],
)
@dataclass(frozen=True)
class Inbox:
    """Every reservation. Make one with `new_inbox`. int32; zeros where a place is free."""

    serial: jax.Array  # [M] NO_RESERVATION where free
    namespace: jax.Array  # [M]
    prefix_len: jax.Array  # [M] tokens that stand on the tree's pages
    swa_start: jax.Array  # [M] tokens before it have no SWA side of the reservation's
    length: jax.Array  # [M] tokens that are to be here
    got_full: jax.Array  # [M] tokens up to which full KV is here
    got_swa: jax.Array  # [M] tokens up to which SWA KV is here
    age: jax.Array  # [M] ticks
    table: jax.Array  # [M, C] first full slot of each page
    tokens: jax.Array  # [M, T]
    receipts: Receipt  # [M] the lock on the prefix
    next_serial: jax.Array  # []
    refused: jax.Array  # [] tickets and pieces that were turned away
    pool: PoolConfig  # static


def new_inbox(pool: PoolConfig, places: int, max_tokens: int, *, first_serial: int = 1) -> Inbox:
    """An inbox in which nothing is reserved.

    Args:
      pool: of the allocator that it stands beside.
      places: M, reservations at once, static.
      max_tokens: T, tokens of the longest row of tokens that `preallocate` is given, static.
      first_serial: where serial numbers begin. A process that starts again and can still be
        sent pieces for its former life should begin elsewhere, at random say.

    Raises:
      ValueError: something else than a PoolConfig, or sizes below 1.
    """
    if not isinstance(pool, PoolConfig):
        raise ValueError(f"pool must be a PoolConfig, got {pool!r}")
    pool.needs_mapping("a reservation")
    rows = whole_number("places", places, 1)
    width = whole_number("max_tokens", max_tokens, 1)
    first = whole_number("first_serial", first_serial, 1)

    def zeros(*shape: int) -> jax.Array:
        return jnp.zeros(shape, jnp.int32)

    return Inbox(
        serial=zeros(rows),
        namespace=zeros(rows),
        prefix_len=zeros(rows),
        swa_start=zeros(rows),
        length=zeros(rows),
        got_full=zeros(rows),
        got_swa=zeros(rows),
        age=zeros(rows),
        table=zeros(rows, -(-width // pool.page_size)),
        tokens=zeros(rows, width),
        receipts=no_receipt(rows),
        next_serial=jnp.int32(first),
        refused=zeros(),
        pool=pool,
    )


def check_sides(inbox: Inbox, state: AllocatorState, cache: PrefixCache | None) -> None:
    """An inbox, an allocator and a cache that stand beside each other have one configuration.

    Raises:
      ValueError: says what differs, or what is no such thing.
    """
    if not isinstance(inbox, Inbox) or not isinstance(state, AllocatorState):
        raise ValueError(
            "expected an Inbox and an AllocatorState, in this order, got "
            f"{type(inbox).__name__} and {type(state).__name__}"
        )
    if inbox.pool != state.config:
        raise ValueError(
            "inbox and state must have one configuration, got an inbox of "
            f"{inbox.pool} and a state of {state.config}"
        )
    if cache is not None:
        check_pair(cache, state)


def as_ticket(ticket: Ticket) -> Ticket:
    """A ticket of int32[] parts; ValueError for anything else."""
    if not isinstance(ticket, Ticket):
        raise ValueError(f"ticket must be a Ticket, got {type(ticket).__name__}")
    return Ticket(
        as_int32("ticket.place", ticket.place, 0), as_int32("ticket.serial", ticket.serial, 0)
    )


def standing(inbox: Inbox, ticket: Ticket) -> tuple[jax.Array, jax.Array]:
    """bool[] whether a ticket names a reservation, and int32[] its place (0 if it does not)."""
    inside = (ticket.place >= 0) & (ticket.place < inbox.serial.shape[0])
    place = jnp.where(inside, ticket.place, 0)
    same = look_up(inbox.serial, place, NO_RESERVATION) == ticket.serial
    stands = inside & same & (ticket.serial != NO_RESERVATION)
    return stands, jnp.where(stands, place, 0)


def count_refused(inbox: Inbox, refused: jax.Array) -> Inbox:
    """The same inbox with one refusal more where bool[] `refused`; it stays at the maximum."""
    more = (refused & (inbox.refused < _MOST)).astype(jnp.int32)
    return replace(inbox, refused=inbox.refused + more)


def clear_places(inbox: Inbox, places: jax.Array) -> Inbox:
    """Frees int32[K] places, one past the end where none is meant; counters stay."""
    kept = {"next_serial", "refused", "pool"}

    def put(values: jax.Array) -> jax.Array:
        return values.at[places].set(0, mode="drop")

    parts = {name: value for name, value in vars(inbox).items() if name not in kept}
    return replace(inbox, **jax.tree.map(put, parts))


def after(serial: jax.Array) -> jax.Array:
    """int32[] the serial that follows: 1 .. 2^31 - 1, and round again."""
    return serial_after(serial, 1)


def tick(inbox: Inbox) -> Inbox:
    """Every reservation is one tick older; `abort_older` ends those that got too old.

    Args:
      inbox: before the call.

    Returns:
      The inbox. Ages stay at the int32 maximum.
    """
    counts = (inbox.serial != NO_RESERVATION) & (inbox.age < _MOST)
    return replace(inbox, age=inbox.age + counts.astype(jnp.int32))


def own_pages(inbox: Inbox) -> tuple[jax.Array, jax.Array]:
    """Pages that are a reservation's own.

    Args:
      inbox: any inbox.

    Returns:
      bool[M, C] full pages, and bool[M, C] those of them that have an SWA side. In a pure SWA pool
      a page without its SWA side is none, so both are the same there.
    """
    size = inbox.pool.page_size
    first = jnp.arange(inbox.table.shape[1], dtype=jnp.int32)[None, :] * jnp.int32(size)
    some = first < inbox.length[:, None]
    swa = some & (first >= inbox.swa_start[:, None])
    full = swa if inbox.pool.pure_swa_pool else some & (first >= inbox.prefix_len[:, None])
    return full, swa


def reserved_pages(inbox: Inbox) -> tuple[jax.Array, jax.Array]:
    """Pages that reservations hold by themselves, the tree's not counted.

    Args:
      inbox: any inbox.

    Returns:
      int32[] full pages and int32[] SWA pages.
    """
    full, swa = own_pages(inbox)
    return jnp.sum(full, dtype=jnp.int32), jnp.sum(swa, dtype=jnp.int32)


def new_pages(
    pool: PoolConfig, start: jax.Array, swa_start: jax.Array, length: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """int32[] full and SWA pages for tokens [start, length) with SWA from `swa_start` on.

    Both starts are on page boundaries and at most `length`.
    """
    size = pool.page_size
    pages = pages_for(length, size)
    swa = pages - page_of(swa_start, size)
    return (swa if pool.pure_swa_pool else pages - page_of(start, size)), swa
