"""A decode worker: room for what will arrive, and a row for who has arrived.

Beside the world stand the reservations. They hold pages as rows do; the loop does not see them and
need not: what they hold is not free, so admission counts without it, and a row that does not fit
beside them waits until they are rows themselves or are aborted.
"""

import functools
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from swa_jax.disagg.abort import abort
from swa_jax.disagg.ask import Ticket
from swa_jax.disagg.commit import Committed, commit, has_arrived
from swa_jax.disagg.inbox import NO_RESERVATION, Inbox, new_inbox, standing
from swa_jax.disagg.preallocate import Reserved, preallocate
from swa_jax.disagg.prefill_side import Parcel
from swa_jax.disagg.receive import receive
from swa_jax.inputs import Ints
from swa_jax.models.decoder import DecoderConfig
from swa_jax.only_if import only_if
from swa_jax.owners import tag_pages
from swa_jax.paging import page_of
from swa_jax.prefix_cache.own import with_receipt
from swa_jax.prefix_cache.receipts import room_is_left
from swa_jax.serving import queue as queues
from swa_jax.serving.admit import promised
from swa_jax.serving.config import ServingConfig
from swa_jax.serving.model import ServingModel
from swa_jax.serving.queue import DONE, EMPTY, RUNNING, WAITING
from swa_jax.serving.requests import Requests
from swa_jax.serving.row_owners import request_owner
from swa_jax.serving.trees import Tree
from swa_jax.serving.world import World, add_stats, running
from swa_jax.serving.world_pools import with_world_pools, world_pools
from swa_jax.state import PAD_PAGE

NOT_YET = -1


@functools.partial(jax.tree_util.register_dataclass, data_fields=["inbox", "texts"], meta_fields=[])
@dataclass(frozen=True)
class Arrivals:
    """What is on its way to a world. M reservations."""

    inbox: Inbox
    texts: Tree  # [M, ...] what the source of drafts goes on from, of `Draft.text_of`


def new_arrivals(
    config: ServingConfig, world: World, places: int, *, first_serial: int = 1
) -> Arrivals:
    """Nothing is on its way.

    Args:
      config: of the world; static.
      world: that it stands beside.
      places: M, reservations at once, static.
      first_serial: as for `new_inbox`.
    """
    inbox = new_inbox(config.pool, places, config.max_context, first_serial=first_serial)
    if config.draft is None:
        return Arrivals(inbox, ())
    none = jnp.int32(0)
    text = jax.eval_shape(config.draft.text_of, world.draft, none, none, none)
    shapes = jax.tree.map(lambda leaf: jnp.zeros((places, *leaf.shape), leaf.dtype), text)
    return Arrivals(inbox, shapes)


def reserve(
    config: ServingConfig,
    world: World,
    arrivals: Arrivals,
    tokens: Ints,
    length: ArrayLike,
    *,
    namespace: ArrayLike = 0,
) -> tuple[World, Arrivals, Reserved]:
    """Room for the KV of a request that is prefilled elsewhere, beside those that run here.

    Args:
      config: static.
      world: before the call.
      arrivals: beside it.
      tokens: int32[L] the prompt, padded to `max_context`.
      length: int32[] tokens whose KV is to come: all of the prompt but its last.
      namespace: int32[] as for `match_prefix`.

    Returns:
      The world, the arrivals, and what is lacking. Refused as by `preallocate`; also where rows
      would lack what they were promised, or while some request waits here: it came earlier.
    """
    inbox, queue = arrivals.inbox, world.queue
    full, swa = promised(config, world)
    # Each row and each reservation has its next step.
    steps = jnp.sum(running(world.rows), dtype=jnp.int32)
    steps = steps + jnp.sum(inbox.serial != NO_RESERVATION, dtype=jnp.int32)
    waits = jnp.any(queue.status == WAITING)
    inbox, allocator, cache, reserved = preallocate(
        inbox,
        world.allocator,
        world.cache,
        tokens,
        length,
        namespace=namespace,
        full_spare=jnp.where(waits, jnp.int32(config.pool.full_pages), full + steps),
        swa_spare=jnp.where(waits, jnp.int32(config.pool.swa_pages), swa + steps),
    )
    world = replace(world, allocator=allocator, cache=cache)
    return world, replace(arrivals, inbox=inbox), reserved


def deliver(
    model: ServingModel | DecoderConfig,
    config: ServingConfig,
    world: World,
    arrivals: Arrivals,
    parcel: Parcel,
) -> tuple[World, Arrivals, jax.Array]:
    """Writes what has arrived to where it was promised a place.

    Args:
      model: static.
      config: static.
      world: before the call.
      arrivals: beside it.
      parcel: of `pack_request`, moved here.

    Returns:
      The world, the arrivals, and bool[] whether the piece was accepted; refused as by `receive`.
    """
    piece = parcel.piece
    inbox, pools, accepted = receive(
        arrivals.inbox, world.allocator, world_pools(model, config, world), piece
    )
    at = jnp.where(accepted, piece.ticket.place, inbox.serial.shape[0])
    texts = jax.tree.map(
        lambda old, new: old.at[at].set(new, mode="drop"), arrivals.texts, parcel.text
    )
    world = with_world_pools(model, config, world, pools)
    return world, Arrivals(inbox, texts), accepted


def seat(
    config: ServingConfig, world: World, arrivals: Arrivals, ticket: Ticket, request: Requests
) -> tuple[World, Arrivals, jax.Array]:
    """Gives a row to a request whose KV has all arrived; its last prompt token decodes next.

    Args:
      config: static.
      world: before the call.
      arrivals: beside it.
      ticket: of the reservation.
      request: one, [1]: what was prefilled, and how it goes on here.

    Returns:
      The world, the arrivals, and int32[] the request's place in the queue. NOT_YET, and nothing
      changed: pieces are missing, no row or no place in the queue is free, the ticket names
      nothing, no receipt is left in the cache, or the reservation is for another text. A request
      that cannot be served, or wants no tokens, is done at once, and its pages go back.
    """
    stands, at = standing(arrivals.inbox, ticket)
    rows, queue = world.rows, world.queue
    fits = stands & has_arrived(arrivals.inbox)[at] & _is_for(arrivals.inbox, at, request)
    fits = fits & jnp.any(~running(rows)) & jnp.any(queue.status == EMPTY)
    if world.cache is not None:
        fits = fits & room_is_left(world.cache)

    def enter(carry: _Carry) -> _Carry:
        queue, places = queues.enter(config, carry[0].queue, request)
        entered = _Entered(queue, places[0], ticket, at)
        is_done = queue.status[places[0]] == DONE
        carry = only_if(is_done, lambda carry: _turn_away(carry, entered), carry)
        return only_if(~is_done, lambda carry: _take_in(config, carry, entered), carry)

    return only_if(fits, enter, (world, arrivals, jnp.int32(NOT_YET)))


_Carry = tuple[World, Arrivals, jax.Array]


@dataclass(frozen=True)
class _Entered:
    """A request that may come in."""

    queue: queues.Queue  # with it
    place: jax.Array  # int32[] of it in the queue
    ticket: Ticket  # of its reservation
    at: jax.Array  # int32[] place of that


def _is_for(inbox: Inbox, at: jax.Array, request: Requests) -> jax.Array:
    """bool[] a reservation is for the prompt of this request, but its last token."""
    length, room = inbox.length[at], inbox.tokens.shape[1]
    tokens = request.tokens[0, :room]
    tokens = jnp.pad(tokens, (0, room - tokens.shape[0]))
    counts = jnp.arange(room, dtype=jnp.int32) < length
    same = jnp.all(~counts | (tokens == inbox.tokens[at]))
    same = same & (request.prompt_lens[0] == length + 1)
    return same & (request.namespace[0] == inbox.namespace[at])


def _turn_away(carry: _Carry, entered: _Entered) -> _Carry:
    world, arrivals = give_up(carry[0], carry[1], entered.ticket)
    return replace(world, queue=entered.queue), arrivals, entered.place


def _take_in(config: ServingConfig, carry: _Carry, entered: _Entered) -> _Carry:
    """The reservation becomes an idle row that is about to decode."""
    world, arrivals, place = carry
    size = config.pool.page_size
    prefix = arrivals.inbox.prefix_len[entered.at]
    text = jax.tree.map(lambda values: values[entered.at], arrivals.texts)
    inbox, allocator, cache, committed = commit(
        arrivals.inbox, world.allocator, world.cache, entered.ticket
    )
    world = replace(world, allocator=allocator, cache=cache)

    def sit(world: World) -> World:
        owner = request_owner(entered.queue, entered.place)
        allocator = tag_pages(world.allocator, _own_pages(committed, size), owner)
        world = replace(world, allocator=allocator, queue=entered.queue)
        world = _in_row(config, world, committed, entered.place, text)
        queue, at = world.queue, entered.place
        queue = replace(
            queue,
            status=queue.status.at[at].set(RUNNING, mode="drop"),
            cached=queue.cached.at[at].set(prefix, mode="drop"),
        )
        return add_stats(replace(world, queue=queue), admitted=jnp.int32(1), cached=prefix)

    world = only_if(committed.ok, sit, world)
    return world, replace(arrivals, inbox=inbox), jnp.where(committed.ok, entered.place, place)


def _own_pages(committed: Committed, size: int) -> jax.Array:
    """int32[C] full pages that the request holds by itself, PAD_PAGE in other places."""
    first = jnp.arange(committed.table.shape[0], dtype=jnp.int32) * jnp.int32(size)
    own = (first >= committed.owned_from) & (first < committed.length)
    return jnp.where(own, page_of(committed.table, size), PAD_PAGE)


def _in_row(
    config: ServingConfig, world: World, committed: Committed, place: jax.Array, text: Tree
) -> World:
    row = jnp.argmax(~running(world.rows)).astype(jnp.int32)
    rows, length = with_receipt(world.rows, row, committed.receipt), committed.length

    def put(values: jax.Array, value: jax.Array) -> jax.Array:
        return values.at[row].set(value, mode="drop")

    width = config.table_pages - committed.table.shape[0]
    rows = replace(
        rows,
        request=put(rows.request, place),
        length=put(rows.length, length),
        evicted=put(rows.evicted, committed.evicted),
        last_loc=put(rows.last_loc, committed.last_loc),
        table=put(rows.table, jnp.pad(committed.table, (0, width))),
        owned_from=put(rows.owned_from, committed.owned_from),
    )
    draft = world.draft
    if config.draft is not None:
        slot, following = jnp.maximum(committed.last_loc, 0), world.queue.tokens[place, length]
        draft = config.draft.enter_text(draft, row, slot, length, following, text)
    return replace(world, rows=rows, draft=draft)


def give_up(world: World, arrivals: Arrivals, ticket: Ticket) -> tuple[World, Arrivals]:
    """Ends a reservation, whatever has arrived of it: its pages and its lock go back."""
    inbox, allocator, cache = abort(arrivals.inbox, world.allocator, world.cache, ticket)
    return replace(world, allocator=allocator, cache=cache), replace(arrivals, inbox=inbox)
