"""Requests that leave their row and keep what they have computed, in host memory.

Retraction inside the loop gives a request's KV up and computes it again. Between two calls of the
loop the host can do better: copy the KV out, let others have the pages, and bring it back later.
"""

import functools
import secrets
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np

from swa_jax.allocator import alloc_extend_swa_tail
from swa_jax.counts import free_pages
from swa_jax.cpu_copy import CpuCopy, get_cpu_copy, load_cpu_copy
from swa_jax.inputs import whole_number
from swa_jax.models.decoder import DecoderConfig
from swa_jax.paging import floor_to_page, look_up, page_of, pages_for
from swa_jax.prefix_cache import Match, Receipt, lock, match_prefix, no_receipt
from swa_jax.prefix_cache.evict_lacking import evict_lacking
from swa_jax.prefix_cache.own import with_receipt
from swa_jax.rebalance import rebalance
from swa_jax.serving.admit import promise_fits
from swa_jax.serving.config import ServingConfig
from swa_jax.serving.model import ServingModel
from swa_jax.serving.queue import HOSTED, RUNNING
from swa_jax.serving.requests import UNFINISHED
from swa_jax.serving.row_owners import request_owner
from swa_jax.serving.row_pages import vacate
from swa_jax.serving.trees import Tree
from swa_jax.serving.world import World, add_stats, check_world, running
from swa_jax.serving.world_pools import with_world_pools, world_pools
from swa_jax.state import PAD_SLOT, AllocatorState
from swa_jax.window import frontier


@dataclass(frozen=True)
class HostedRequest:
    """A request that waits with its KV on the host. Its place in the queue stays its own."""

    place: int  # in the queue
    ticket: int  # of the request: a later one at the place has another
    retraction: int  # drawn by lot: no other retraction, of this world or another, has the same
    copy: CpuCopy  # the model's layers, then those of the source of drafts
    text: Tree  # what the source of drafts keeps beside KV, on the host

    @property
    def nbytes(self) -> int:
        """Bytes of host memory."""
        return self.copy.nbytes + sum(part.nbytes for part in jax.tree.leaves(self.text))


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["ok", "row", "ticket", "length", "swa_from", "table", "last", "following"],
    meta_fields=[],
)
@dataclass(frozen=True)
class _Running:
    """A running request, for the host to read."""

    ok: jax.Array  # bool[] it runs and has not ended
    row: jax.Array  # int32[]
    ticket: jax.Array  # int32[]
    length: jax.Array  # int32[] tokens whose KV is held
    swa_from: jax.Array  # int32[] tokens: what comes before is out of every window
    table: jax.Array  # int32[C] first full slot of each page
    last: jax.Array  # int32[] full slot of the last token
    following: jax.Array  # int32[] the token after it


def retract_to_host(
    model: ServingModel | DecoderConfig, config: ServingConfig, world: World, place: int
) -> tuple[World, HostedRequest | None]:
    """Takes a running request out of its row, its KV with it. Between two calls of `run_steps`.

    Its pages and its lock are given back. It is neither admitted nor ended until
    `resume_from_host`, but it can be cancelled: what was copied is of no use then.

    Args:
      model: static.
      config: static.
      world: taken over: go on with what comes back.
      place: of the request in the queue, as `submit` gave it.

    Returns:
      The world, and the request. None, and the world as it was, where the request at that place
      does not run or has just ended.

    Raises:
      ValueError: a place that the queue has not.
    """
    check_world(config, world)
    at = jnp.int32(whole_number("place", place, 0, world.queue.status.shape[0] - 1))
    seen = _find(config, _without_kv(world), at)
    known = jax.device_get(seen)
    if not known.ok:
        return world, None
    copy = get_cpu_copy(
        world.allocator,
        world_pools(model, config, world),
        seen.table,
        int(known.length),
        swa_from=int(known.swa_from),
    )
    text = None
    if config.draft is not None:
        kept = config.draft.text_of(world.draft, seen.last, seen.length, seen.following)
        text = jax.tree.map(np.array, jax.device_get(kept))
    retraction = 1 + secrets.randbelow(2**31 - 1)
    rest = _send_away(config, _without_kv(world), seen.row, at, jnp.int32(retraction))
    hosted = HostedRequest(int(place), int(known.ticket), retraction, copy, text)
    return replace(rest, kv=world.kv, draft=world.draft), hosted


def resume_from_host(
    model: ServingModel | DecoderConfig, config: ServingConfig, world: World, hosted: HostedRequest
) -> tuple[World, bool]:
    """Puts a request into an idle row again, its KV in new pages. Between two calls of `run_steps`.

    What the prefix cache still has of it is shared again; pages for the rest are evicted from it
    where they are lacking, by the rules of admission.

    Args:
      model: static.
      config: static.
      world: taken over: go on with what comes back.
      hosted: of `retract_to_host`.

    Returns:
      The world, and True: the next step goes on where the request was. False, and the world as it
      was, where no row is idle, the memory does not suffice beside what others were promised, or
      this is not what the request waits for: it was cancelled, it was resumed before, even if it
      has left again since, or it is of another world.

    Raises:
      ValueError: KV of another model.
    """
    check_world(config, world)
    whole_number("hosted.place", hosted.place, 0, world.queue.status.shape[0] - 1)
    place = jnp.int32(hosted.place)
    names = jnp.int32(hosted.ticket), jnp.int32(hosted.retraction)
    length, swa_from = jnp.int32(hosted.copy.length), jnp.int32(hosted.copy.swa_start)
    rest, seat = _seat(config, _without_kv(world), place, names, length, swa_from)
    known = jax.device_get(seat)
    if not known.ok:
        return world, False
    pools = load_cpu_copy(
        rest.allocator,
        world_pools(model, config, world),
        seat.table,
        hosted.copy,
        start=int(known.shared),
    )
    world = with_world_pools(model, config, replace(rest, kv=world.kv, draft=world.draft), pools)
    if config.draft is not None:
        text = jax.tree.map(jnp.asarray, hosted.text)
        end = (seat.row, seat.last, length, seat.following)
        world = replace(world, draft=config.draft.enter_text(world.draft, *end, text))
    return world, True


def _without_kv(world: World) -> World:
    """All but what is large."""
    return replace(world, kv=None, draft=None)


@functools.partial(jax.jit, static_argnums=0)
def _find(config: ServingConfig, world: World, place: jax.Array) -> _Running:
    rows, queue = world.rows, world.queue
    row = jnp.argmax(rows.request == place).astype(jnp.int32)
    runs = (queue.status[place] == RUNNING) & (queue.reason[place] == UNFINISHED)
    length = rows.length[row]
    start = jnp.int32(0)
    if config.pool.sliding_window is not None:
        whole = floor_to_page(
            jnp.maximum(length - jnp.int32(config.key_lag), 0), config.pool.page_size
        )
        start = frontier(config.pool, length, whole)
    return _Running(
        ok=runs & (rows.request[row] == place),
        row=row,
        ticket=queue.ticket[place],
        length=length,
        swa_from=start,
        table=rows.table[row],
        last=rows.last_loc[row],
        following=_token(world, place, length),
    )


def _token(world: World, place: jax.Array, at: jax.Array) -> jax.Array:
    """int32[] token `at` of a request."""
    tokens = world.queue.tokens[place]
    return tokens[jnp.minimum(at, jnp.int32(tokens.shape[0] - 1))]


@functools.partial(jax.jit, static_argnums=0, donate_argnums=1)
def _send_away(
    config: ServingConfig, world: World, row: jax.Array, place: jax.Array, retraction: jax.Array
) -> World:
    world = vacate(config, world, row)
    queue = world.queue
    queue = replace(
        queue,
        status=queue.status.at[place].set(HOSTED, mode="drop"),
        retraction=queue.retraction.at[place].set(retraction, mode="drop"),
    )
    # What did not fit may fit now.
    world = replace(world, queue=queue, refused_at=jnp.full((), -1, jnp.int32))
    return add_stats(world, retracted=jnp.int32(1))


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["ok", "row", "shared", "table", "last", "following"],
    meta_fields=[],
)
@dataclass(frozen=True)
class _Seat:
    """Where a request goes on."""

    ok: jax.Array  # bool[]
    row: jax.Array  # int32[]
    shared: jax.Array  # int32[] tokens that stand on pages of the cache
    table: jax.Array  # int32[C] first full slot of each page
    last: jax.Array  # int32[] full slot of the last token
    following: jax.Array  # int32[] the token after it


@functools.partial(jax.jit, static_argnums=0)
def _seat(
    config: ServingConfig,
    world: World,
    place: jax.Array,
    names: tuple[jax.Array, jax.Array],
    length: jax.Array,
    swa_from: jax.Array,
) -> tuple[World, _Seat]:
    """The world with the request in a row and pages for its KV, or any world where `ok` is not."""
    queue = world.queue
    ticket, retraction = names
    waits = (queue.status[place] == HOSTED) & (queue.ticket[place] == ticket)
    waits = waits & (queue.retraction[place] == retraction) & (length < queue.known[place])
    idle = ~running(world.rows)
    row = jnp.argmax(idle).astype(jnp.int32)
    world, match, receipt = _share(config, world, place, length)
    fits = promise_fits(config, world, queue.known[place], match.length)
    world, granted, table = _take_pages(config, world, match, place, length, swa_from)
    at = jnp.maximum(length - 1, 0)
    size = config.pool.page_size
    offset = at - floor_to_page(at, size)
    last = jnp.where(length > 0, table[page_of(at, size)] + offset, -1)
    seat = _Seat(
        ok=waits & jnp.any(idle) & fits & granted,
        row=row,
        shared=match.length,
        table=table,
        last=last,
        following=_token(world, place, length),
    )
    world = _enter(world, place, seat, length, jnp.maximum(match.length, swa_from))
    return replace(world, rows=with_receipt(world.rows, row, receipt)), seat


def _share(
    config: ServingConfig, world: World, place: jax.Array, length: jax.Array
) -> tuple[World, Match, Receipt]:
    """Locks what the cache has of the request."""
    if world.cache is None:
        nothing = jnp.zeros(config.max_context, jnp.int32)
        return world, Match(jnp.int32(0), nothing, jnp.int32(0)), no_receipt()
    queue = world.queue
    cache, match = match_prefix(
        world.cache,
        world.allocator,
        queue.tokens[place],
        length + jnp.int32(config.key_lag),
        namespace=queue.namespace[place],
    )
    cache, receipt = lock(cache, world.allocator, match.node)
    return replace(world, cache=cache), match, receipt


def _take_pages(
    config: ServingConfig,
    world: World,
    match: Match,
    place: jax.Array,
    length: jax.Array,
    swa_from: jax.Array,
) -> tuple[World, jax.Array, jax.Array]:
    """Pages for what is not shared: also bool[] granted, and int32[C] the whole table."""
    size, allocator = config.pool.page_size, world.allocator
    start = jnp.maximum(match.length, swa_from)
    pages = pages_for(length, size)
    full, of_swa = pages - page_of(match.length, size), pages - page_of(start, size)
    allocator = _share_budget(allocator, full, of_swa)
    if world.cache is not None:
        full_free, swa_free = free_pages(allocator)
        cache, allocator, _ = evict_lacking(
            world.cache, allocator, full - full_free, of_swa - swa_free
        )
        allocator = _share_budget(allocator, full, of_swa)
        world = replace(world, cache=cache)
    last = jnp.where(match.length > 0, match.slots[jnp.maximum(match.length - 1, 0)], -1)
    allocator, grant = alloc_extend_swa_tail(
        allocator,
        match.length[None],
        length[None],
        last[None],
        (length - start)[None],
        capacity=config.table_pages * size,
        by=None if allocator.owner_tags is None else request_owner(world.queue, place),
    )
    first = jnp.arange(config.table_pages, dtype=jnp.int32) * jnp.int32(size)
    new = look_up(grant.slots, jnp.maximum(first - match.length, 0), PAD_SLOT)
    table = jnp.where(first < match.length, look_up(match.slots, first, PAD_SLOT), new)
    table = jnp.where(first < length, table, PAD_SLOT)
    return replace(world, allocator=allocator), grant.ok, table


def _share_budget(allocator: AllocatorState, full: jax.Array, of_swa: jax.Array) -> AllocatorState:
    """Where both pools draw from one budget: free blocks go to the pool that lacks pages."""
    if allocator.config.unified_layout is None:
        return allocator
    return rebalance(allocator, full, of_swa)


def _enter(
    world: World, place: jax.Array, seat: _Seat, length: jax.Array, swa_from: jax.Array
) -> World:
    rows, queue = world.rows, world.queue

    def put(values: jax.Array, value: jax.Array) -> jax.Array:
        return values.at[seat.row].set(value, mode="drop")

    rows = replace(
        rows,
        request=put(rows.request, place),
        length=put(rows.length, length),
        evicted=put(rows.evicted, swa_from),
        last_loc=put(rows.last_loc, seat.last),
        table=put(rows.table, seat.table),
        owned_from=put(rows.owned_from, seat.shared),
        fresh=put(rows.fresh, length > seat.shared),  # others can share it, as before
    )
    queue = replace(queue, status=queue.status.at[place].set(RUNNING, mode="drop"))
    return add_stats(replace(world, rows=rows, queue=queue), admitted=jnp.int32(1))
