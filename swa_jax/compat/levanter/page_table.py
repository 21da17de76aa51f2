"""Sequences in numbered rows, each with its pages; clones share them under the core's count."""

import functools
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from swa_jax.compat.levanter.allocate import HeldRows, allocate
from swa_jax.compat.levanter.batch_info import PageBatchInfo
from swa_jax.compat.levanter.ids import (
    INVALID,
    Ids,
    NamedInts,
    at_row,
    first_slots,
    is_valid,
    plain,
    unnamed,
    window_pages,
)
from swa_jax.config import PoolConfig
from swa_jax.counts import free_pages
from swa_jax.free import free
from swa_jax.inputs import MAX_ROWS, whole_number
from swa_jax.paging import look_up, offset_of, pages_for
from swa_jax.share import copy_on_write, share
from swa_jax.state import PAD_SLOT, AllocatorState, faults, init
from swa_jax.window import free_out_of_window


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["state", "page_indices", "seq_lens", "used_mask", "evicted_lens", "refused"],
    meta_fields=[],
)
@dataclass(frozen=True)
class PageTable:
    """Which pages belong to which sequence. A pytree; methods return a new table.

    Unlike Levanter's own, a call for which memory is short changes nothing and is counted in
    `refused`, where that one stops the program; and tokens without a sequence are no row of a
    batch. With `init(..., sliding_window=W)` there is a second pool for layers with a window.
    """

    state: AllocatorState  # the core's: who holds which page
    page_indices: jax.Array  # int32[S, N] from 0, INVALID in unused places
    seq_lens: jax.Array  # int32[S] tokens
    used_mask: jax.Array  # bool[S]
    evicted_lens: jax.Array  # int32[S] tokens whose window pages have been given up
    refused: jax.Array  # int32[] calls that had to be refused

    @staticmethod
    def init(
        max_pages: int,
        max_seqs: int,
        page_size: int,
        max_pages_per_seq: int,
        *,
        sliding_window: int | None = None,
        max_swa_pages: int | None = None,
    ) -> "PageTable":
        """An empty table.

        Args:
          max_pages: pages of full-attention layers.
          max_seqs: rows S.
          page_size: tokens in a page.
          max_pages_per_seq: pages N that a row has room for.
          sliding_window: past tokens that layers with a window see; None: there are none.
          max_swa_pages: pages of those layers, as many as `max_pages` by default.

        Raises:
          ValueError: a size below 1, ids or places past `INVALID`, or pages for a window that
            is not there.
        """
        pages = whole_number("max_pages", max_pages, 1, INVALID)
        rows = whole_number("max_seqs", max_seqs, 1, MAX_ROWS)
        size = whole_number("page_size", page_size, 1, INVALID)
        columns = whole_number("max_pages_per_seq", max_pages_per_seq, 1, INVALID // size)
        if sliding_window is None:
            if max_swa_pages is not None:
                raise ValueError(
                    "max_swa_pages is for layers with a window: give sliding_window, too, got "
                    f"max_swa_pages={max_swa_pages!r} alone"
                )
            config = PoolConfig.pure_swa(pages * size, size)  # one pool that nothing leaves
        else:
            of_swa = pages if max_swa_pages is None else max_swa_pages
            of_swa = whole_number("max_swa_pages", of_swa, 1)
            config = PoolConfig(pages * size, of_swa * size, size, sliding_window)
        return PageTable(
            state=init(config),
            page_indices=jnp.full((rows, columns), INVALID, jnp.int32),
            seq_lens=jnp.zeros(rows, jnp.int32),
            used_mask=jnp.zeros(rows, bool),
            evicted_lens=jnp.zeros(rows, jnp.int32),
            refused=jnp.int32(0),
        )

    # ---- sizes --------------------------------------------------------------------------

    @property
    def page_size(self) -> int:
        """Tokens in a page."""
        return self.state.config.page_size

    @property
    def num_pages(self) -> int:
        """Pages of full-attention layers."""
        return self.state.config.full_pages

    @property
    def pages_per_seq(self) -> int:
        """Pages that a row has room for."""
        return self.page_indices.shape[1]

    @property
    def max_seqs(self) -> int:
        """Rows."""
        return self.page_indices.shape[0]

    @property
    def max_len_per_seq(self) -> int:
        """Tokens that a row has room for."""
        return self.page_size * self.pages_per_seq

    @property
    def current_num_seqs(self) -> jax.Array:
        """int32[] rows in use."""
        return jnp.sum(self.used_mask, dtype=jnp.int32)

    @property
    def page_ref_counts(self) -> jax.Array:
        """int32[max_pages] sequences that hold each page."""
        return self.state.full.holders[1:]

    @property
    def num_free_pages(self) -> jax.Array:
        """int32[] pages that the next call can have."""
        return free_pages(self.state)[0]

    @property
    def swa_page_indices(self) -> jax.Array:
        """int32[S, N] pages of the window layers, INVALID where the window has left them."""
        return window_pages(self.state, self.page_indices)

    def faults(self) -> dict[str, int]:
        """Misuse that the core has counted, by kind. Waits for the device."""
        return faults(self.state)

    # ---- rows ---------------------------------------------------------------------------

    def assign_seq_id_to_seq(self, seq_id: Ids | None = None) -> tuple["PageTable", jax.Array]:
        """Takes a row into use.

        Args:
          seq_id: int32[] the row wanted; None, or one that does not exist: the first unused one.

        Returns:
          The table, and int32[] the row; `INVALID`, and the table as it was, where the wanted row
          is in use or none is left.
        """
        wanted = jnp.int32(INVALID) if seq_id is None else plain("seq_id", seq_id, 0)
        return _assign(self, wanted)

    def free_pages(self, seq_id: Ids) -> "PageTable":
        """Gives up the pages of one row and the row itself; no such row: nothing happens."""
        row = plain("seq_id", seq_id, 0)
        return _free_rows(self, jnp.arange(self.max_seqs, dtype=jnp.int32) == row)

    def free_pages_for_finished(self, finished_mask: ArrayLike | NamedInts) -> "PageTable":
        """Gives up all rows of bool[S] `finished_mask`, one after the other in one program."""
        mask = self._rows("finished_mask", finished_mask)
        return _free_rows(self, mask)

    def bump_seq_len_to_next_page(self, seq_id: Ids) -> "PageTable":
        """Lets a row's next token begin a page. Takes no page and gives none up."""
        return _bump(self, plain("seq_id", seq_id, 0))

    # ---- pages --------------------------------------------------------------------------

    def allocate_for_seq(
        self, token_slot_ids: Ids, token_pos_ids: Ids
    ) -> tuple["PageTable", PageBatchInfo]:
        """Makes room for the tokens of a batch, for all of them or for none.

        Args:
          token_slot_ids: int32[T] row of each token, those of a row side by side; negative or
            `INVALID` in unused places.
          token_pos_ids: int32[T] place of each token in its sequence. A row grows up to its
            furthest token, and by no more than T tokens.

        Returns:
          The table and the batch. Where memory is short, a row grows past its room or stands in a
          page that a clone shares, nothing is granted (`ok` False) and tokens past the old
          lengths have no place. Tokens of rows that are not in use have none either.
        """
        slots = plain("token_slot_ids", token_slot_ids, 1)
        places = plain("token_pos_ids", token_pos_ids, 1)
        if slots.shape != places.shape or not slots.shape[0]:
            raise ValueError(
                "token_slot_ids and token_pos_ids must agree in length and hold a token at least, "
                f"got {slots.shape[0]} and {places.shape[0]}"
            )
        return _allocate(self, slots, places)

    def clone_pages_from(self, src_seq_id: Ids, dst_seq_id: Ids) -> "PageTable":
        """Gives a row the text of another: whole pages are shared, a partly filled one is new.

        The caller copies the KV of the last page where the length ends inside it, from the one
        row's page to the other's. What the row held before is given up first. Where no page is
        left for the copy, the row stays empty and the call counts as refused.

        Args:
          src_seq_id: int32[] the row to clone.
          dst_seq_id: int32[] the row that becomes its equal; it need not be in use.

        Returns:
          The table; as it was where a row does not exist or both are one.
        """
        src, dst = plain("src_seq_id", src_seq_id, 0), plain("dst_seq_id", dst_seq_id, 0)
        return _clone(self, src, dst)

    def increment_ref_counts_for_pages(self, pages: Ids, count: Ids = 1) -> "PageTable":
        """Adds holders to pages, int32[K] with `INVALID` in unused places; held ones only."""
        named = plain("pages", pages, 1)
        return _hold(self, named, plain("count", count, 0))

    def free_out_of_window(self, active: ArrayLike | NamedInts | None = None) -> "PageTable":
        """Gives up the window layers' pages that rows in use have left behind.

        Args:
          active: bool[S] rows that take part, all that are in use by default.

        Raises:
          ValueError: a table without a window.
        """
        rows = self.used_mask if active is None else self._rows("active", active)
        return _leave(self, rows & self.used_mask)

    def _rows(self, name: str, marks: ArrayLike | NamedInts) -> jax.Array:
        mask = jnp.asarray(unnamed(marks))
        if mask.dtype != bool or mask.shape != (self.max_seqs,):
            raise ValueError(
                f"{name} must be bool[{self.max_seqs}], one place a row, got "
                f"{mask.dtype}{list(mask.shape)}"
            )
        return mask


@jax.jit
def _assign(table: PageTable, wanted: jax.Array) -> tuple[PageTable, jax.Array]:
    rows = table.max_seqs
    named = (wanted >= 0) & (wanted < rows)
    row = jnp.where(named, wanted, jnp.argmin(table.used_mask).astype(jnp.int32))
    row = jnp.where(look_up(table.used_mask, row, True), jnp.int32(rows), row)
    taken = replace(
        table,
        seq_lens=table.seq_lens.at[row].set(0, mode="drop"),
        used_mask=table.used_mask.at[row].set(True, mode="drop"),
        evicted_lens=table.evicted_lens.at[row].set(0, mode="drop"),
    )
    return taken, jnp.where(row < rows, row, jnp.int32(INVALID))


@jax.jit
def _free_rows(table: PageTable, gone: jax.Array) -> PageTable:
    """A page counts once a call, so each row is a call of its own."""
    slots = first_slots(table.page_indices, table.page_size)

    def one(state: AllocatorState, row: jax.Array) -> tuple[AllocatorState, None]:
        return free(state, row), None

    named = jnp.where(gone[:, None], slots, PAD_SLOT)
    state, _ = jax.lax.scan(one, table.state, named)
    return replace(
        table,
        state=state,
        page_indices=jnp.where(gone[:, None], jnp.int32(INVALID), table.page_indices),
        seq_lens=jnp.where(gone, 0, table.seq_lens),
        used_mask=table.used_mask & ~gone,
        evicted_lens=jnp.where(gone, 0, table.evicted_lens),
    )


@jax.jit
def _bump(table: PageTable, row: jax.Array) -> PageTable:
    size = jnp.int32(table.page_size)
    here = jnp.arange(table.max_seqs, dtype=jnp.int32) == row
    up = pages_for(table.seq_lens, table.page_size) * size
    return replace(table, seq_lens=jnp.where(here, up, table.seq_lens))


@jax.jit
def _allocate(
    table: PageTable, slots: jax.Array, places: jax.Array
) -> tuple[PageTable, PageBatchInfo]:
    held = HeldRows(table.state, table.page_indices, table.seq_lens, table.used_mask)
    held, info, ok = allocate(held, slots, places)
    return replace(
        table,
        state=held.state,
        page_indices=held.page_indices,
        seq_lens=held.seq_lens,
        refused=table.refused + (~ok).astype(jnp.int32),
    ), info


@jax.jit
def _clone(table: PageTable, src: jax.Array, dst: jax.Array) -> PageTable:
    size, rows = table.page_size, table.max_seqs
    real = (src >= 0) & (src < rows) & (dst >= 0) & (dst < rows) & (src != dst)
    table = _free_rows(table, real & (jnp.arange(rows, dtype=jnp.int32) == dst))
    pages = at_row(table.page_indices, src)
    length = look_up(table.seq_lens, jnp.where(real, src, rows), 0)
    given_up = look_up(table.evicted_lens, jnp.where(real, src, rows), 0)
    filled, used = offset_of(length, size), pages_for(length, size)
    end = jnp.maximum(used - 1, 0)
    at_end = look_up(pages, end, INVALID)
    last = first_slots(at_end, size) + filled - 1

    left, of_swa = free_pages(table.state)
    has_swa = is_valid(window_pages(table.state, at_end))
    fits = (filled == 0) | ((left > 0) & ((of_swa > 0) | ~has_swa))
    ok = real & fits
    column = jnp.arange(pages.shape[0], dtype=jnp.int32)
    shared = jnp.where(ok & (column < used), first_slots(pages, size), PAD_SLOT)
    live = column * jnp.int32(size) >= given_up
    state = share(table.state, shared, live)
    state, copies = copy_on_write(state, length[None], last[None], ok[None])
    copied = jnp.where(filled > 0, jax.lax.div(copies.last_loc[0], jnp.int32(size)) - 1, at_end)
    pages = (
        jnp.where(column < used, pages, jnp.int32(INVALID))
        .at[end]
        .set(jnp.where(used > 0, copied, jnp.int32(INVALID)), mode="drop")
    )
    to = jnp.where(ok, dst, rows)
    return replace(
        table,
        state=state,
        page_indices=table.page_indices.at[to].set(pages, mode="drop"),
        seq_lens=table.seq_lens.at[to].set(length, mode="drop"),
        used_mask=table.used_mask.at[to].set(True, mode="drop"),
        evicted_lens=table.evicted_lens.at[to].set(given_up, mode="drop"),
        refused=table.refused + (real & ~fits).astype(jnp.int32),
    )


@jax.jit
def _hold(table: PageTable, pages: jax.Array, count: jax.Array) -> PageTable:
    slots = first_slots(pages, table.page_size)
    state = jax.lax.fori_loop(0, count, lambda _, state: share(state, slots), table.state)
    return replace(table, state=state)


@jax.jit
def _leave(table: PageTable, rows: jax.Array) -> PageTable:
    state, evicted = free_out_of_window(
        table.state,
        first_slots(table.page_indices, table.page_size),
        table.seq_lens,
        table.evicted_lens,
        active=rows,
        stride=table.page_size,
    )
    return replace(table, state=state, evicted_lens=evicted)
