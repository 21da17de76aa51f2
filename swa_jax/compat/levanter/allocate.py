"""Room for the tokens of a batch: which rows it has, how far they grow, where each token goes."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from swa_jax.allocator import alloc_extend
from swa_jax.compat.levanter.batch_info import PageBatchInfo
from swa_jax.compat.levanter.ids import INVALID, first_slots, is_valid, window_pages
from swa_jax.paging import offset_of, page_of
from swa_jax.rank import exclusive_sum, read_runs
from swa_jax.state import AllocatorState


class HeldRows(NamedTuple):
    """What of a page table grows."""

    state: AllocatorState
    page_indices: jax.Array  # int32[S, N]
    seq_lens: jax.Array  # int32[S]
    used_mask: jax.Array  # bool[S]


def allocate(
    held: HeldRows, slot_ids: jax.Array, pos_ids: jax.Array
) -> tuple[HeldRows, PageBatchInfo, jax.Array]:
    """Grants what int32[T] tokens need, for all rows of a batch or none; also bool[] which.

    Args:
      held: before the call.
      slot_ids: int32[T] row of each token, negative or INVALID for none.
      pos_ids: int32[T] its place in the sequence.
    """
    rows, columns = held.page_indices.shape
    size = held.state.config.page_size
    room = columns * size
    real = (slot_ids >= 0) & (slot_ids < rows)
    row_of = jnp.where(real, slot_ids, rows)
    placed = real & is_valid(pos_ids)
    place = jnp.where(placed, jnp.minimum(pos_ids, room), -1)  # past the room is told by one more

    order, absent, counts = _rows_in_order(row_of, rows)
    top = jnp.full(rows, -1, jnp.int32).at[row_of].max(place, mode="drop")
    grown = jnp.where(held.used_mask, jnp.maximum(held.seq_lens, top + 1), held.seq_lens)
    old = jnp.where(absent, 0, held.seq_lens[order])
    new = jnp.where(absent, 0, grown[order])
    new = jnp.where(new > room, -1, new)  # no length: the core refuses the batch and counts it
    state, grant = alloc_extend(
        held.state, old, new, _last_slots(held, order, old), capacity=slot_ids.shape[0]
    )

    runs = read_runs(jnp.where(grant.ok, new - old, 0), slot_ids.shape[0])
    at = old[runs.run] + runs.within
    begins = runs.real & (offset_of(jnp.maximum(at, 0), size) == 0)
    pages = held.page_indices.at[
        jnp.where(begins, order[runs.run], rows), page_of(jnp.maximum(at, 0), size)
    ].set(page_of(grant.slots, size) - 1, mode="drop")
    lens = jnp.where(grant.ok, grown, held.seq_lens)
    after = HeldRows(state, pages, lens, held.used_mask)

    none = jnp.int32(INVALID)
    has_room = placed & (place < lens.at[row_of].get(mode="fill", fill_value=0))
    known = jnp.where(has_room, place, 0)
    page = pages.at[row_of, page_of(known, size)].get(mode="fill", fill_value=INVALID)
    page = jnp.where(has_room, page, none)
    of_rows = jnp.where(absent[:, None], none, pages[order])
    info = PageBatchInfo(
        slot_ids=jnp.where(absent, none, order),
        page_indices=of_rows,
        seq_lens=jnp.where(absent, none, lens[order]),
        cu_q_lens=jnp.append(exclusive_sum(counts), jnp.sum(counts, dtype=jnp.int32)),
        num_seqs=jnp.sum(~absent, dtype=jnp.int32),
        new_token_dests=_dests(page, known, size),
        page_size=size,
        swa_page_indices=window_pages(state, of_rows),
        new_swa_token_dests=_dests(window_pages(state, page), known, size),
        ok=grant.ok,
    )
    return after, info, grant.ok


def _rows_in_order(row_of: jax.Array, rows: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Rows by their first token: int32[S] rows, bool[S] not in the batch, int32[S] tokens."""
    count = row_of.shape[0]
    first = jnp.full(rows, count, jnp.int32)
    first = first.at[row_of].min(jnp.arange(count, dtype=jnp.int32), mode="drop")
    order = jnp.argsort(first, stable=True).astype(jnp.int32)
    tokens = jnp.zeros(rows, jnp.int32).at[row_of].add(1, mode="drop")
    return order, first[order] == count, tokens[order]


def _last_slots(held: HeldRows, order: jax.Array, lens: jax.Array) -> jax.Array:
    """int32[S] the core's slot of each row's last token, -1 where it has none."""
    size = held.state.config.page_size
    last = jnp.maximum(lens - 1, 0)
    page = held.page_indices.at[order, page_of(last, size)].get(mode="fill", fill_value=INVALID)
    real = (lens > 0) & is_valid(page)
    return jnp.where(real, first_slots(page, size) + offset_of(last, size), -1)


def _dests(page: jax.Array, place: jax.Array, size: int) -> jax.Array:
    """int32[T] places in the pool, INVALID where there is no page."""
    dest = page * jnp.int32(size) + offset_of(place, size)
    return jnp.where(is_valid(page), dest, jnp.int32(INVALID))
