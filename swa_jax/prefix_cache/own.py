"""A running request and the tree: which of its pages are whose.

The first `owned_from` tokens of a row stand on pages of the tree, held there by the row's lock; the
pages after them are the row's own.
"""

import functools
from dataclasses import dataclass, replace
from typing import ClassVar, Protocol, TypeVar

import jax
import jax.numpy as jnp

from swa_jax.paging import look_up, pages_for
from swa_jax.prefix_cache.insert import insert
from swa_jax.prefix_cache.locks import lock, unlock
from swa_jax.prefix_cache.match import path_slots
from swa_jax.prefix_cache.receipts import Receipt, standing
from swa_jax.prefix_cache.tree import PrefixCache
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
    tokens: jax.Array,
    length: jax.Array,
    table: jax.Array,
    receipt: Receipt,
    namespace: jax.Array | int = 0,
) -> tuple[PrefixCache, AllocatorState, Holding]:
    """Inserts what a request holds, running or done, and moves its lock to the new end.

    Args:
      cache: the tree.
      allocator: beside it.
      tokens: int32[C * P] the request's tokens, padded.
      length: int32[] tokens of them whose KV is held.
      table: int32[C] first full slot of each of its pages.
      receipt: the lock it has so far.
      namespace: int32[] as for `insert`.

    Returns:
      The cache, the allocator, and what the request holds now: where its content was cached
      already, the tree's pages instead of its own.
    """
    size, room = cache.config.pool.page_size, tokens.shape[0]
    pages = jax.lax.div(table, jnp.int32(size))
    slots = path_slots(pages, pages_for(length, size), size, room)
    cache, allocator, inserted = insert(
        cache, allocator, tokens, length, slots, namespace=namespace
    )
    # Keys of pairs reach a page less far than what the request may stand on already: it keeps that.
    before = standing(cache, receipt)
    held = look_up(cache.depth, before, 0) * jnp.int32(size)
    keeps = inserted.length < held
    # The new lock first: what both hold never stands without one.
    cache, new = lock(cache, allocator, jnp.where(keeps, before, inserted.node))
    cache = unlock(cache, receipt)
    last = inserted.slots[jnp.maximum(length - 1, 0)]
    owned_from = jnp.where(keeps, held, inserted.length)
    return cache, allocator, Holding(inserted.slots[::size], last, owned_from, new)
