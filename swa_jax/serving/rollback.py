"""Giving back what refused drafts had reserved, and bringing the accepted KV into order."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from swa_jax.free import free
from swa_jax.mapping import translate_full_to_swa
from swa_jax.paging import pages_for
from swa_jax.serving.extend_rows import Extension, extend_rows
from swa_jax.serving.moved_slots import MovedSlots
from swa_jax.state import PAD_SLOT, AllocatorState


@dataclass(frozen=True)
class Kept:
    """What stays of an extension. R rows, 1 + D tokens of a path."""

    slots: jax.Array  # int32[R, 1 + D] full slots of the kept tokens in order
    table: jax.Array  # int32[R, C]
    old: MovedSlots  # [R * (1 + D)] where their KV was written, 0 where it stays
    new: MovedSlots  # where it belongs


def roll_back(
    allocator: AllocatorState,
    extension: Extension,
    length: jax.Array,
    path: jax.Array,
    kept: jax.Array,
    by: jax.Array | None = None,
) -> tuple[AllocatorState, Kept]:
    """By page: frees the pages wholly past the new length; the rest stays where it is.

    Args:
      allocator: after the extension.
      extension: of 1 + K tokens a row.
      length: int32[R] tokens held before it.
      path: int32[R, 1 + D] which of them are kept, in order.
      kept: int32[R] how many of the path.
      by: int32[R] owner of each row, of `row_owners`.

    Returns:
      The allocator, and what stays: token j of the path belongs at place j.
    """
    size = allocator.config.page_size
    most = extension.slots.shape[1] // size + 2
    first = pages_for(length + kept, size)
    end = pages_for(length + extension.counts, size)
    column = first[:, None] + jnp.arange(most, dtype=jnp.int32)[None, :]
    row = jnp.arange(length.shape[0], dtype=jnp.int32)[:, None]
    found = extension.table.at[row, column].get(mode="fill", fill_value=PAD_SLOT)
    surplus = jnp.where(column < end[:, None], found, PAD_SLOT)
    width = path.shape[1]
    new = jnp.where(_counted(kept, width), extension.slots[:, :width], PAD_SLOT)
    old = jnp.take_along_axis(extension.slots, path, axis=1, mode="clip")
    moves = _moves(allocator, jnp.where(new > 0, old, PAD_SLOT), allocator, new)
    owners = None if by is None else jnp.repeat(by, most)
    freed = free(allocator, surplus.reshape(-1), by=owners)
    return freed, Kept(new, extension.table, *moves)


def roll_back_to_snapshot(
    before: AllocatorState,
    allocator: AllocatorState,
    extension: Extension,
    length: jax.Array,
    last_loc: jax.Array,
    table: jax.Array,
    path: jax.Array,
    kept: jax.Array,
    by: jax.Array | None = None,
) -> tuple[AllocatorState, Kept]:
    """By snapshot: the state before the drafts, and a grant of what was accepted.

    Nothing is undone: the earlier state is still there, since states never change. The grant may
    deal the pages otherwise than the reservation did, so kept KV is copied to its new slots.

    Args:
      before: the allocator before the extension.
      allocator: after it.
      extension: of 1 + K tokens a row.
      length: int32[R] tokens held before it.
      last_loc: int32[R] full slot of the last token before it.
      table: int32[R, C] before it.
      path: int32[R, 1 + D] which of the tokens are kept, in order.
      kept: int32[R] how many of the path.
      by: int32[R] owner of each row, of `row_owners`.
    """
    width = path.shape[1]
    after, again = extend_rows(before, length, kept, last_loc, table, width, by)
    old = jnp.take_along_axis(extension.slots, path, axis=1, mode="clip")
    old = jnp.where(_counted(again.counts, width), old, PAD_SLOT)
    return after, Kept(again.slots, again.table, *_moves(allocator, old, after, again.slots))


def _counted(counts: jax.Array, width: int) -> jax.Array:
    return jnp.arange(width, dtype=jnp.int32)[None, :] < counts[:, None]


def _moves(
    was: AllocatorState, old: jax.Array, now: AllocatorState, new: jax.Array
) -> tuple[MovedSlots, MovedSlots]:
    """Old and new places in both pools; 0 for what stays in its slot of that pool."""
    old, new = old.reshape(-1), new.reshape(-1)
    old_swa, new_swa = translate_full_to_swa(was, old), translate_full_to_swa(now, new)
    full, swa = old != new, old_swa != new_swa
    return (
        MovedSlots(jnp.where(full, old, PAD_SLOT), jnp.where(swa, old_swa, PAD_SLOT)),
        MovedSlots(jnp.where(full, new, PAD_SLOT), jnp.where(swa, new_swa, PAD_SLOT)),
    )
