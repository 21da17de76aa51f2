"""The cache's calls for several requests at once: one after the other, in one program."""

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from swa_jax.inputs import Ints, as_int32, check_lengths, check_rows
from swa_jax.owners import as_owner
from swa_jax.prefix_cache.arguments import check_pair
from swa_jax.prefix_cache.insert import Inserted, insert
from swa_jax.prefix_cache.locks import as_receipts, lock, unlock
from swa_jax.prefix_cache.match import Match, match_prefix
from swa_jax.prefix_cache.receipts import Receipt
from swa_jax.prefix_cache.tree import PrefixCache
from swa_jax.state import AllocatorState


def _per_row(name: str, value: Ints | ArrayLike, rows: int) -> jax.Array:
    """int32[B]: one value for all rows, or one for each."""
    values = as_int32(name, value, None)
    return values if values.ndim else jnp.full(rows, values)


def match_prefix_batch(
    cache: PrefixCache,
    state: AllocatorState,
    tokens: Ints,
    lengths: Ints,
    *,
    namespace: Ints | ArrayLike = 0,
) -> tuple[PrefixCache, Match]:
    """`match_prefix` for int32[B, T] prompts of int32[B] lengths; `Match` gains [B]."""
    rows = as_int32("tokens", tokens, 2)
    counts = as_int32("lengths", lengths, 1)
    spaces = _per_row("namespace", namespace, rows.shape[0])
    check_rows(tokens=rows, lengths=counts, namespace=spaces)

    def one(cache: PrefixCache, row: tuple[jax.Array, ...]) -> tuple[PrefixCache, Match]:
        return match_prefix(cache, state, row[0], row[1], namespace=row[2])

    return jax.lax.scan(one, cache, (rows, counts, spaces))


def insert_batch(
    cache: PrefixCache,
    state: AllocatorState,
    tokens: Ints,
    lengths: Ints,
    slots: Ints,
    *,
    namespace: Ints | ArrayLike = 0,
    priority: Ints | ArrayLike = 0,
    by: Ints | None = None,
) -> tuple[PrefixCache, AllocatorState, Inserted]:
    """`insert` for int32[B, T] tokens and slots of int32[B] lengths; `Inserted` gains [B].

    `by`: int32[B] owner of each row, or one for all.
    """
    check_pair(cache, state)
    rows, own = as_int32("tokens", tokens, 2), as_int32("slots", slots, 2)
    counts = as_int32("lengths", lengths, 1)
    spaces = _per_row("namespace", namespace, rows.shape[0])
    ranks = _per_row("priority", priority, rows.shape[0])
    check_rows(tokens=rows, slots=own, lengths=counts, namespace=spaces, priority=ranks)

    def one(
        carry: tuple[PrefixCache, AllocatorState], row: tuple
    ) -> tuple[tuple[PrefixCache, AllocatorState], Inserted]:
        tokens, length, slots, space, rank, owner = row
        cache, state, inserted = insert(
            *carry, tokens, length, slots, namespace=space, priority=rank, by=owner
        )
        return (cache, state), inserted

    columns = (rows, counts, own, spaces, ranks, as_owner(state, by, lengths=counts))
    (cache, state), inserted = jax.lax.scan(one, (cache, state), columns)
    return cache, state, inserted


def lock_batch(
    cache: PrefixCache, state: AllocatorState, nodes: Ints
) -> tuple[PrefixCache, Receipt]:
    """`lock` for int32[B] nodes; the fields of `Receipt` gain [B]."""

    def one(cache: PrefixCache, node: jax.Array) -> tuple[PrefixCache, Receipt]:
        return lock(cache, state, node)

    return jax.lax.scan(one, cache, as_int32("nodes", nodes, 1))


def unlock_batch(cache: PrefixCache, receipts: Receipt) -> PrefixCache:
    """`unlock` for the receipts of a batch."""
    receipts = as_receipts(receipts, 1)
    check_lengths(**{f"receipt.{name}": part for name, part in vars(receipts).items()})

    def one(cache: PrefixCache, receipt: Receipt) -> tuple[PrefixCache, None]:
        return unlock(cache, receipt), None

    return jax.lax.scan(one, cache, receipts)[0]
