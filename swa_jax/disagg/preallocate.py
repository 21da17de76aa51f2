"""Reserving room for KV that will arrive: only for what the cache lacks, SWA only for its end.

Everything is known before anything changes: what is free and what may be evicted is counted first,
so a refusal leaves state and cache bit for bit as they were, and an eviction is never in vain.
"""

import functools
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from swa_jax.allocator import alloc_extend_swa_tail
from swa_jax.config import PoolConfig
from swa_jax.counts import free_pages
from swa_jax.disagg.ask import Ask, Ticket
from swa_jax.disagg.inbox import NO_RESERVATION, Inbox, after, check_sides, new_pages
from swa_jax.inputs import Ints, as_int32
from swa_jax.only_if import only_if
from swa_jax.paging import floor_to_page, look_up, page_of
from swa_jax.prefix_cache import (
    Match,
    PrefixCache,
    full_evictable_size,
    lock,
    match_prefix,
    no_receipt,
    release_swa_lock,
    swa_evictable_size,
)
from swa_jax.prefix_cache.evict_lacking import evict_lacking
from swa_jax.prefix_cache.leaving import may_leave, may_lose_swa
from swa_jax.prefix_cache.match import note_use, window_start
from swa_jax.prefix_cache.own import with_receipt
from swa_jax.prefix_cache.receipts import room_is_left
from swa_jax.prefix_cache.tree import ROOT
from swa_jax.rebalance import split_for
from swa_jax.state import AllocatorState
from swa_jax.window import frontier


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=[
        "ok",
        "ticket",
        "full_start",
        "swa_start",
        "length",
        "full_short",
        "swa_short",
        "never",
    ],
    meta_fields=[],
)
@dataclass(frozen=True)
class Reserved:
    """The answer of `preallocate`. A refusal is a normal answer: read `ok` first."""

    ok: jax.Array  # bool[]
    ticket: Ticket  # names nothing when refused
    full_start: jax.Array  # int32[] tokens that need not be sent: the cache has them
    swa_start: jax.Array  # int32[] tokens whose SWA KV need not be sent, at least as many
    length: jax.Array  # int32[] tokens that are to be here; 0 when refused, as the two above
    full_short: jax.Array  # int32[] full pages missing, cache included; 0 where granted
    swa_short: jax.Array  # int32[] SWA pages missing, likewise
    never: jax.Array  # bool[] refused and no waiting helps: a bad length, or more than the pools

    @property
    def ask(self) -> Ask:
        """What is lacking, for `pack` on the prefill side."""
        return Ask(self.full_start, self.swa_start, self.length, self.ticket)


@dataclass(frozen=True)
class _Need:
    """What one reservation takes, decided before anything is written."""

    length: jax.Array  # int32[] tokens
    edge: jax.Array  # int32[] tokens whose SWA KV the request never reads, nor its last insert
    swa_start: jax.Array  # int32[] tokens
    full: jax.Array  # int32[] pages
    swa: jax.Array  # int32[] pages
    never: jax.Array  # bool[]


def preallocate(
    inbox: Inbox,
    state: AllocatorState,
    cache: PrefixCache | None,
    tokens: Ints,
    length: ArrayLike,
    *,
    namespace: ArrayLike = 0,
    full_spare: ArrayLike = 0,
    swa_spare: ArrayLike = 0,
) -> tuple[Inbox, AllocatorState, PrefixCache | None, Reserved]:
    """Reserves pages for the KV of a request that is prefilled elsewhere.

    What the cache has of it is locked, its SWA side as far as the request needs it, and not asked
    for again. The rest gets full pages for all its tokens and SWA pages for those that its last
    window needs, or that of the last page that will go into the cache; what is lacking of either
    pool is evicted.

    Args:
      inbox: reservations so far.
      state: the allocator they hold pages of.
      cache: the tree beside it, None for none.
      tokens: int32[T] the prompt, padded to the inbox's T. With bigram keys the token after the
        last one that counts is read too, where there is room for it: have it there.
      length: int32[] tokens whose KV is to be here.
      namespace: int32[] as for `match_prefix`.
      full_spare: int32[] full pages, free or in the cache, that must be left for others after it;
        below 0 counts as 0.
      swa_spare: int32[] SWA pages likewise.

    Returns:
      The inbox, the allocator, the cache, and `Reserved`. Where nothing is lacking the
      reservation can be committed at once.

    Refused (`ok` False; inbox, allocator and cache bit for bit as they were):
      never: `length` below 0, above T, or more than the pools hold when they are empty.
      memory: `full_short` / `swa_short` say what is missing even if all that may leave the cache
        did. In an open free group nothing leaves it, since it would only be queued.
      no place in the inbox is free, or no receipt in the cache.

    Raises:
      ValueError: `tokens` of another length than T, or parts of different configurations.

    Laws 2, 3 and 7, rules R8 to R11; public reports B02, B46 and B54.
    """
    check_sides(inbox, state, cache)
    row = as_int32("tokens", tokens, 1)
    if row.shape[0] != inbox.tokens.shape[1]:
        raise ValueError(
            f"tokens must be padded to the inbox's {inbox.tokens.shape[1]}, got {row.shape[0]}"
        )
    count, space = as_int32("length", length, 0), as_int32("namespace", namespace, 0)
    spares = as_int32("full_spare", full_spare, 0), as_int32("swa_spare", swa_spare, 0)
    return _preallocate(inbox, state, cache, row, count, space, *spares)


@jax.jit
def _preallocate(
    inbox: Inbox,
    state: AllocatorState,
    cache: PrefixCache | None,
    tokens: jax.Array,
    length: jax.Array,
    namespace: jax.Array,
    full_spare: jax.Array,
    swa_spare: jax.Array,
) -> tuple[Inbox, AllocatorState, PrefixCache | None, Reserved]:
    good = (length >= 0) & (length <= jnp.int32(tokens.shape[0]))
    match = _match(state, cache, tokens, jnp.where(good, length, 0), namespace)
    need = _need(state.config, cache, match, length, good)
    full_spare = jnp.clip(full_spare, 0, jnp.int32(2**31 - 1) - need.full)
    swa_spare = jnp.clip(swa_spare, 0, jnp.int32(2**31 - 1) - need.swa)
    split = split_for(state, need.full, need.swa)
    full_can, swa_can, receipts = _within_reach(split, cache, match, need)
    full_short = jnp.where(need.never, 0, jnp.maximum(need.full + full_spare - full_can, 0))
    swa_short = jnp.where(need.never, 0, jnp.maximum(need.swa + swa_spare - swa_can, 0))
    spare = inbox.serial == NO_RESERVATION
    ok = ~need.never & (full_short == 0) & (swa_short == 0) & jnp.any(spare) & receipts
    place = jnp.argmax(spare).astype(jnp.int32)

    def reserve(
        sides: tuple[Inbox, AllocatorState, PrefixCache | None],
    ) -> tuple[Inbox, AllocatorState, PrefixCache | None]:
        inbox, state, cache = sides
        state = split_for(state, need.full, need.swa)
        return _reserve(inbox, state, cache, place, match, need, tokens, namespace)

    sides = only_if(ok, reserve, (inbox, state, cache))
    zero = jnp.int32(0)
    reserved = Reserved(
        ok=ok,
        ticket=Ticket(jnp.where(ok, place, -1), jnp.where(ok, inbox.next_serial, NO_RESERVATION)),
        full_start=jnp.where(ok, _full_start(state.config, match, need), zero),
        swa_start=jnp.where(ok, need.swa_start, zero),
        length=jnp.where(ok, need.length, zero),
        full_short=full_short,
        swa_short=swa_short,
        never=need.never,
    )
    return *sides, reserved


def key_lag(cache: PrefixCache | None) -> int:
    """Tokens at the end of a request that no cached page can hold yet."""
    return 1 if cache is not None and cache.config.is_bigram else 0


def insert_boundary(cache: PrefixCache, length: jax.Array) -> jax.Array:
    """int32[] tokens of a request of `length` that go into the tree: whole pages of whole keys."""
    whole = jnp.maximum(length - jnp.int32(key_lag(cache)), 0)
    return floor_to_page(whole, cache.config.pool.page_size)


def _full_start(pool: PoolConfig, match: Match, need: _Need) -> jax.Array:
    """int32[] a pure SWA pool has no full layers to send anything for."""
    return need.length if pool.pure_swa_pool else match.length


def _match(
    state: AllocatorState,
    cache: PrefixCache | None,
    tokens: jax.Array,
    length: jax.Array,
    namespace: jax.Array,
) -> Match:
    """What is cached; nothing is noted in the tree yet."""
    if cache is None:
        return Match(jnp.int32(0), jnp.zeros_like(tokens), jnp.int32(ROOT))
    most = jnp.minimum(length + jnp.int32(key_lag(cache)), jnp.int32(tokens.shape[0]))
    # The key of an empty prompt's successor is no prefix of it.
    most = jnp.where(length > 0, most, 0)
    return match_prefix(cache, state, tokens, most, namespace=namespace)[1]


def _need(
    pool: PoolConfig,
    cache: PrefixCache | None,
    match: Match,
    length: jax.Array,
    good: jax.Array,
) -> _Need:
    length = jnp.where(good, length, 0)
    edge = jnp.int32(0)
    if pool.sliding_window is not None:
        kept = None if cache is None else insert_boundary(cache, length)
        edge = frontier(pool, length, kept)
    swa_start = jnp.maximum(match.length, edge)
    full, swa = new_pages(pool, match.length, swa_start, length)
    full_in_all, swa_in_all = new_pages(pool, jnp.int32(0), edge, length)
    most_full = pool.swa_pages if pool.pure_swa_pool else pool.full_pages
    fits = (full_in_all <= jnp.int32(most_full)) & (swa_in_all <= jnp.int32(pool.swa_pages))
    return _Need(length, edge, swa_start, full, swa, ~(good & fits))


def _within_reach(
    state: AllocatorState, cache: PrefixCache | None, match: Match, need: _Need
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """int32[] full and SWA pages that are free or may leave the tree once the match is locked.

    Also bool[]: there is a receipt for that lock.
    """
    full, swa = free_pages(state)
    if cache is None:
        return full, swa, jnp.ones((), bool)
    size = cache.config.pool.page_size
    kept_full, kept_swa = _newly_locked(cache, state, match, need)
    of_full = page_of(full_evictable_size(cache, state), size) - kept_full
    of_swa = page_of(swa_evictable_size(cache, state), size) - kept_swa
    if state.config.pure_swa_pool:  # a page leaves whole or not at all
        of_swa = of_full
    stays = state.group_open  # what is evicted now would be queued
    full = full + jnp.where(stays, 0, of_full)
    swa = swa + jnp.where(stays, 0, of_swa)
    return full, swa, (match.node == jnp.int32(ROOT)) | room_is_left(cache)


def _newly_locked(
    cache: PrefixCache, state: AllocatorState, match: Match, need: _Need
) -> tuple[jax.Array, jax.Array]:
    """int32[] pages that a lock on the match takes from what may leave: full, and SWA.

    A match is live in all of its window, so that is what the lock holds of SWA, from `edge` on.
    """
    size = cache.config.pool.page_size
    nodes, pages = page_of(match.slots[::size], size), page_of(match.length, size)
    place = jnp.arange(nodes.shape[0], dtype=jnp.int32)
    on_path = place < pages
    full = on_path & look_up(may_leave(cache, state), nodes, False)
    start = jnp.maximum(window_start(cache.config, pages), page_of(need.edge, size))
    in_window = on_path & (place >= start)
    swa = in_window & look_up(may_lose_swa(cache, state), nodes, False)
    return jnp.sum(full, dtype=jnp.int32), jnp.sum(swa, dtype=jnp.int32)


def _reserve(
    inbox: Inbox,
    state: AllocatorState,
    cache: PrefixCache | None,
    place: jax.Array,
    match: Match,
    need: _Need,
    tokens: jax.Array,
    namespace: jax.Array,
) -> tuple[Inbox, AllocatorState, PrefixCache | None]:
    """Locks the match, makes room and takes the pages: all of it is known to succeed."""
    size = state.config.page_size
    receipt = no_receipt()
    if cache is not None:
        nodes = page_of(match.slots[::size], size)
        cache = note_use(cache, nodes, page_of(match.length, size), hit=True)
        cache, receipt = lock(cache, state, match.node)
        # With all of the match's window a request could need more SWA pages than without a match.
        cache, receipt = release_swa_lock(cache, receipt, need.edge)
        cache, state = _make_room(cache, state, need)
    width = inbox.table.shape[1]
    last = match.slots[jnp.maximum(match.length - 1, 0)]
    last = jnp.where(match.length > 0, last, -1)
    state, grant = alloc_extend_swa_tail(
        state,
        match.length[None],
        need.length[None],
        last[None],
        (need.length - need.swa_start)[None],
        capacity=width * size,
    )
    first = jnp.arange(width, dtype=jnp.int32) * jnp.int32(size)
    own = look_up(grant.slots, jnp.maximum(first - match.length, 0), 0)
    table = jnp.where(first < match.length, match.slots[::size], own)
    values = {
        "serial": inbox.next_serial,
        "namespace": namespace,
        "prefix_len": match.length,
        "swa_start": need.swa_start,
        "length": need.length,
        "got_full": _full_start(state.config, match, need),
        "got_swa": need.swa_start,
        "age": jnp.int32(0),
        "table": jnp.where(first < need.length, table, 0),
        "tokens": tokens,
    }
    rows = {name: _put(getattr(inbox, name), place, value) for name, value in values.items()}
    inbox = replace(inbox, **rows, next_serial=after(inbox.next_serial))
    return with_receipt(inbox, place, receipt), state, cache


def _put(values: jax.Array, place: jax.Array, value: jax.Array) -> jax.Array:
    return values.at[place].set(value, mode="drop")


def _make_room(
    cache: PrefixCache, state: AllocatorState, need: _Need
) -> tuple[PrefixCache, AllocatorState]:
    """Evicts what is lacking, of either pool (public report B46)."""
    full_free, swa_free = free_pages(state)
    full, swa = need.full - full_free, need.swa - swa_free

    def evict(
        sides: tuple[PrefixCache, AllocatorState],
    ) -> tuple[PrefixCache, AllocatorState]:
        return evict_lacking(*sides, full, swa)[:2]

    return only_if((full > 0) | (swa > 0), evict, (cache, state))
