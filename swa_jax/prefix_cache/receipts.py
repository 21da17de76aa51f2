"""The outstanding receipts: which locks stand, so that each is undone once and by its own receipt.

A lock takes an entry of a table and a serial number that no lock had before. A receipt acts only
while the entry holds what the receipt says, field by field. One that was spent, replaced or made
up, or is from before a reset, finds something else there and so changes nothing.
"""

import functools
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp

from swa_jax.paging import look_up
from swa_jax.prefix_cache.tree import ROOT, PrefixCache, serial_after

_NONE = 0  # serial of an entry that is free, and of an empty receipt


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["node", "boundary", "entry", "serial"],
    meta_fields=[],
)
@dataclass(frozen=True)
class Receipt:
    """What a lock locked: its release undoes just that, once."""

    node: jax.Array  # int32[] the bottom of the path, 0 if nothing is locked
    boundary: jax.Array  # int32[] pages from the root that carry no SWA lock of this receipt
    entry: jax.Array  # int32[] where the table has it
    serial: jax.Array  # int32[] of this receipt alone


def no_receipt(*shape: int) -> Receipt:
    """Receipts that hold nothing."""
    return Receipt(*(jnp.zeros(shape, jnp.int32) for _ in range(4)))


def room_is_left(cache: PrefixCache) -> jax.Array:
    """bool[]: one more receipt can be given out."""
    return cache.num_receipts < jnp.int32(cache.spare_receipts.shape[0])


def take(cache: PrefixCache, node: jax.Array, boundary: jax.Array) -> tuple[PrefixCache, Receipt]:
    """A receipt for a lock on a node; an empty one, and nothing written, for ROOT."""
    real = node > ROOT
    entry = look_up(cache.spare_receipts, cache.num_receipts, 0)
    serial = serial_after(cache.serial, 1)
    receipt = Receipt(*(jnp.where(real, part, 0) for part in (node, boundary, entry, serial)))
    cache = replace(
        _write(cache, jnp.where(real, entry, _nowhere(cache)), receipt),
        num_receipts=cache.num_receipts + real.astype(jnp.int32),
        serial=jnp.where(real, serial, cache.serial),
    )
    return cache, receipt


def standing(cache: PrefixCache, receipt: Receipt) -> jax.Array:
    """int32[] the node that a receipt still holds, ROOT if it holds nothing."""
    inside = (receipt.entry >= 0) & (receipt.entry < _nowhere(cache))
    entry = jnp.where(inside, receipt.entry, 0)
    same = inside & (receipt.serial != _NONE)
    same = same & (look_up(cache.receipt_serial, entry, _NONE) == receipt.serial)
    same = same & (look_up(cache.receipt_node, entry, ROOT) == receipt.node)
    same = same & (look_up(cache.receipt_boundary, entry, 0) == receipt.boundary)
    return jnp.where(same, receipt.node, ROOT)


def give_back(cache: PrefixCache, receipt: Receipt, node: jax.Array) -> PrefixCache:
    """Ends a receipt whose `standing` is `node`; nothing is written for ROOT."""
    real = node > ROOT
    left = cache.num_receipts - real.astype(jnp.int32)
    spare = cache.spare_receipts.at[jnp.where(real, left, _nowhere(cache))]
    cache = replace(cache, spare_receipts=spare.set(receipt.entry, mode="drop"), num_receipts=left)
    return _write(cache, jnp.where(real, receipt.entry, _nowhere(cache)), no_receipt())


def renew(
    cache: PrefixCache, receipt: Receipt, node: jax.Array, boundary: jax.Array
) -> tuple[PrefixCache, Receipt]:
    """Another receipt in the place of one whose `standing` is `node`; an empty one for ROOT."""
    real = node > ROOT
    serial = serial_after(cache.serial, 1)
    parts = (node, boundary, receipt.entry, serial)
    new = Receipt(*(jnp.where(real, part, 0) for part in parts))
    cache = replace(cache, serial=jnp.where(real, serial, cache.serial))
    return _write(cache, jnp.where(real, receipt.entry, _nowhere(cache)), new), new


def _nowhere(cache: PrefixCache) -> jax.Array:
    return jnp.int32(cache.receipt_serial.shape[0])


def _write(cache: PrefixCache, entry: jax.Array, receipt: Receipt) -> PrefixCache:
    return replace(
        cache,
        receipt_serial=cache.receipt_serial.at[entry].set(receipt.serial, mode="drop"),
        receipt_node=cache.receipt_node.at[entry].set(receipt.node, mode="drop"),
        receipt_boundary=cache.receipt_boundary.at[entry].set(receipt.boundary, mode="drop"),
    )
