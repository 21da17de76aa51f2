"""A running request and the tree: which of its pages are whose.

The first `owned_from` tokens of a row stand on pages of the tree, held there by the row's lock; the
pages after them are the row's own.
"""

import functools
from dataclasses import dataclass, replace
from typing import ClassVar, Protocol, TypeVar

import jax
import jax.numpy as jnp

from swa_jax.owners import as_owner
from swa_jax.paging import look_up, offset_of, page_of
from swa_jax.prefix_cache.arrival import note_arrival
from swa_jax.prefix_cache.insert import enter
from swa_jax.prefix_cache.keys import ReadTokens, cut_pages_below, reader
from swa_jax.prefix_cache.locks import move_lock
from swa_jax.prefix_cache.match import note_use
from swa_jax.prefix_cache.receipts import Receipt, standing
from swa_jax.prefix_cache.tree import ROOT, PrefixCache
from swa_jax.state import AllocatorState


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["table", "last_loc", "owned_from", "receipt"],
    meta_fields=[],
)
@dataclass(frozen=True)
class Holding:
    """What a request holds after it gave its whole pages to the tree."""

    table: jax.Array  # int32[C] first full slot of each page
    last_loc: jax.Array  # int32[] full slot of its last token
    owned_from: jax.Array  # int32[] tokens that stand on the tree's pages
    receipt: Receipt  # the lock on them


class HasReceipts(Protocol):
    """A dataclass of many rows, each with its lock."""

    __dataclass_fields__: ClassVar[dict]

    @property
    def receipts(self) -> Receipt:
        """The locks, [R]."""
        ...


H = TypeVar("H", bound=HasReceipts)


def receipt_of(rows: HasReceipts, row: jax.Array) -> Receipt:
    """The lock of one row."""
    return jax.tree.map(lambda values: values[row], rows.receipts)


def with_receipt(rows: H, row: jax.Array, receipt: Receipt) -> H:
    """The same rows with another lock for one; `row` past the end changes nothing."""

    def put(values: jax.Array, value: jax.Array) -> jax.Array:
        return values.at[row].set(value, mode="drop")

    return replace(rows, receipts=jax.tree.map(put, rows.receipts, receipt))


def give_to_tree(
    cache: PrefixCache,
    allocator: AllocatorState,
    tokens: jax.Array | ReadTokens,
    length: jax.Array,
    table: jax.Array,
    receipt: Receipt,
    namespace: jax.Array | int = 0,
    *,
    most_pages: int | None = None,
    by: jax.Array | None = None,
) -> tuple[PrefixCache, AllocatorState, Holding]:
    """Inserts what a request holds, running or done, and moves its lock to the new end.

    What it stands on is the tree's already, so only what comes after is looked for: the cost
    follows what is new.

    Args:
      cache: the tree.
      allocator: beside it.
      tokens: int32[T] the request's tokens, padded, or what reads them.
      length: int32[] tokens of them whose KV is held.
      table: int32[C] first full slot of each of its pages.
      receipt: the lock it has so far.
      namespace: int32[] as for `insert`.
      most_pages: pages that one call can give, static; C by default. Pages beyond it stay the
        request's own until the next call.
      by: int32[] owner of the request's pages, as for `insert`.

    Returns:
      The cache, the allocator, and what the request holds now: where its content was cached
      already, the tree's pages instead of its own.
    """
    size, room = cache.config.pool.page_size, table.shape[0]
    most = room if most_pages is None else min(most_pages, room)
    extra = cache.config.key_tokens - size
    top = standing(cache, receipt)
    held = cache.depth[top]
    read = tokens if callable(tokens) else reader(tokens)
    start = held * jnp.int32(size)
    rest = jnp.minimum(length - start, jnp.int32(most * size + extra))
    keys = cut_pages_below(cache, top, read(start, most * size + extra), rest, jnp.int32(namespace))
    column = jnp.arange(room, dtype=jnp.int32)
    place = held + jnp.arange(keys.hash.shape[0], dtype=jnp.int32)
    cache, allocator, entered = enter(
        cache, allocator, keys, look_up(table, place, 0), by=as_owner(allocator, by)
    )
    pages = held + entered.pages
    # Where the tree had the content already, its pages take the place of the request's.
    at = jnp.where(place < pages, place, room)
    table = table.at[at].set(entered.nodes * jnp.int32(size), mode="drop")
    path = jnp.where(column < pages, page_of(table, size), ROOT)
    cache = note_use(cache, path, pages, hit=False)
    cache = note_arrival(cache, path, held + entered.already, pages, jnp.int32(0))
    cache, new = move_lock(cache, allocator, receipt, path, pages)
    last = jnp.maximum(length - 1, 0)
    last_loc = look_up(table, page_of(last, size), 0) + offset_of(last, size)
    return cache, allocator, Holding(table, last_loc, pages * jnp.int32(size), new)
