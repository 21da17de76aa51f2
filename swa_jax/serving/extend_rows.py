"""Slots for new tokens of many rows, dealt back to the rows, and the batch that computes them."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from swa_jax.allocator import alloc_extend
from swa_jax.mapping import translate_full_to_swa
from swa_jax.models.decoder.batch import PagedBatch
from swa_jax.page_table import page_tables
from swa_jax.paging import look_up, offset_of, page_of
from swa_jax.rank import exclusive_sum
from swa_jax.state import PAD_SLOT, AllocatorState


@dataclass(frozen=True)
class Extension:
    """New slots of R rows, up to Q each."""

    ok: jax.Array  # bool[]
    counts: jax.Array  # int32[R] tokens granted
    slots: jax.Array  # int32[R, Q] full slots, 0 past a row's count
    table: jax.Array  # int32[R, C] first full slot of each page, the new ones entered


def extend_rows(
    allocator: AllocatorState,
    length: jax.Array,
    counts: jax.Array,
    last_loc: jax.Array,
    table: jax.Array,
    width: int,
    by: jax.Array | None = None,
) -> tuple[AllocatorState, Extension]:
    """Grants int32[R] `counts` new tokens, at most `width` a row, or none at all.

    Args:
      allocator: before the call.
      length: int32[R] tokens held.
      counts: int32[R] new tokens.
      last_loc: int32[R] full slot of the last token, -1 for none.
      table: int32[R, C] first full slot of each page.
      width: Q, static.
      by: int32[R] owner of each row, of `row_owners`.

    Returns:
      The allocator, and the new slots row by row.
    """
    rows, size = length.shape[0], allocator.config.page_size
    allocator, grant = alloc_extend(
        allocator, length, length + counts, last_loc, capacity=rows * width, by=by
    )
    granted = jnp.where(grant.ok, counts, 0)
    within = jnp.arange(width, dtype=jnp.int32)[None, :]
    is_new = within < granted[:, None]
    at = exclusive_sum(granted)[:, None] + within
    slots = jnp.where(is_new, look_up(grant.slots, at, PAD_SLOT), PAD_SLOT)
    place = length[:, None] + within
    opens = is_new & (offset_of(place, size) == 0)
    row = jnp.broadcast_to(jnp.arange(rows, dtype=jnp.int32)[:, None], place.shape)
    row = jnp.where(opens, row, rows)
    table = table.at[row, page_of(place, size)].set(slots, mode="drop")
    return allocator, Extension(grant.ok, granted, slots, table)


def batch_of(
    allocator: AllocatorState,
    extension: Extension,
    length: jax.Array,
    tokens: jax.Array,
    *,
    depths: jax.Array | None = None,
    tree_mask: jax.Array | None = None,
) -> PagedBatch:
    """The pass over int32[R, Q] new `tokens`.

    Args:
      allocator: after the extension.
      extension: where the tokens go.
      length: int32[R] tokens held before.
      tokens: int32[R, Q].
      depths: int32[Q] places after `length`, 0 .. Q - 1 by default.
      tree_mask: bool[Q, Q] which new token sees which; all before it by default.
    """
    rows, width = tokens.shape
    if depths is None:
        depths = jnp.arange(width, dtype=jnp.int32)
    kv_lens = length + extension.counts
    tables = page_tables(allocator, extension.table, kv_lens, extension.counts)
    mask = None if tree_mask is None else jnp.broadcast_to(tree_mask, (rows, width, width))
    return PagedBatch(
        tokens=tokens,
        positions=length[:, None] + depths[None, :],
        q_lens=extension.counts,
        kv_lens=kv_lens,
        full_slots=extension.slots,
        swa_slots=translate_full_to_swa(allocator, extension.slots),
        full_pages=tables.full_page_indices,
        swa_pages=tables.swa_page_indices,
        tree_mask=mask,
    )


def last_of(values: jax.Array, counts: jax.Array, otherwise: jax.Array) -> jax.Array:
    """int32[R] the last of each row's first `counts` values, `otherwise` where there is none."""
    last = jnp.maximum(counts - 1, 0)[:, None]
    return jnp.where(
        counts > 0, jnp.take_along_axis(values, last, axis=1, mode="clip")[:, 0], otherwise
    )
