"""Who gets which page when a batch of rows grows by any number of tokens.

The batch is cut into *pieces*: a piece is the run of one row's new tokens that lie in one page,
so slots inside a piece are consecutive. Rows make pieces, pieces take pages, tokens look up their
piece; each step is arithmetic on arrays as long as what it speaks of.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from swa_jax.config import PoolConfig
from swa_jax.faults import fault_counts
from swa_jax.grant import GrantPlan, judge, make_plan
from swa_jax.last_page import LastPage, look_at_last_page
from swa_jax.paging import look_up, offset_of, page_of, pages_for, sum_exceeds
from swa_jax.pool import peek
from swa_jax.rank import exclusive_sum, latest_mark, read_runs
from swa_jax.state import PAD_PAGE, PAD_SLOT, AllocatorState

_NO_PAGE = 2**31 - 1  # a page number that no tail reaches
_NO_SLOT = -(2**31)  # shift of a piece whose tokens get no slot
_WINDOWS = jax.lax.ScatterDimensionNumbers(  # a row of updates lies in a row of places
    update_window_dims=(1,), inserted_window_dims=(), scatter_dims_to_operand_dims=(0,)
)


@dataclass(frozen=True)
class Rows:
    """One entry a row; page numbers count from the start of the row's sequence."""

    grow: jax.Array  # int32[B] new tokens, 0 in an ill-formed row
    fill: jax.Array  # int32[B] new tokens that go into the page of last_loc
    held: jax.Array  # int32[B] pages before the call
    new: jax.Array  # int32[B] pages that the row needs
    swa_from: jax.Array  # int32[B] page number from which pages get an SWA side
    revive: jax.Array  # bool[B] the page of last_loc gets an SWA side it had not
    last: LastPage


@dataclass(frozen=True)
class Pieces:
    """One entry a piece, row by row in token order; K of them at most (static)."""

    real: jax.Array  # bool[K]
    start: jax.Array  # int32[K] place of the first token among the batch's new tokens
    row_page: jax.Array  # int32[K] the page of last_loc, for a piece that goes on in it
    base: jax.Array  # int32[K] slot of the first token in `row_page`
    lead: jax.Array  # int32[K] place of the first token in a page that this grant hands out
    from_page: jax.Array  # bool[K] slots are those of such a page, if it gets one
    takes_full: jax.Array  # bool[K]
    full_rank: jax.Array  # int32[K] which of the granted full pages
    takes_swa: jax.Array  # bool[K]
    swa_rank: jax.Array  # int32[K] which of the granted SWA pages


def most_pieces(config: PoolConfig, rows: int, capacity: int) -> int:
    """Static bound: each piece holds a token, and all but two of a row's hold a whole page."""
    return min(capacity, capacity // config.page_size + 2 * rows)


def read_rows(
    state: AllocatorState,
    prefix_lens: jax.Array,
    seq_lens: jax.Array,
    last_loc: jax.Array,
    tail_lens: jax.Array | None,
) -> tuple[Rows, jax.Array]:
    """What each row needs, and bool[B] which rows are ill-formed."""
    size = state.config.page_size
    bad = (prefix_lens < 0) | (seq_lens < prefix_lens)
    if tail_lens is not None:
        grow = jnp.where(bad, 0, seq_lens - prefix_lens)
        bad = bad | (tail_lens < 0) | (tail_lens > grow)
    prefix, seq = jnp.where(bad, 0, prefix_lens), jnp.where(bad, 0, seq_lens)
    grow = seq - prefix
    last = look_at_last_page(state, prefix, last_loc, grow > 0)
    room = jnp.int32(size) - offset_of(prefix, size)
    fill = jnp.where(last.goes_on, jnp.minimum(grow, room), 0)
    if tail_lens is None:
        swa_from = jnp.zeros_like(prefix)
    else:
        tail = jnp.where(bad, 0, tail_lens)
        swa_from = jnp.where(tail > 0, page_of(seq - tail, size), jnp.int32(_NO_PAGE))
    held = pages_for(prefix, size)
    new = pages_for(seq, size) - held
    revive = last.goes_on & ~last.has_swa & (swa_from < held)
    return Rows(grow, fill, held, new, swa_from, revive, last), bad


def swa_pages_of(rows: Rows) -> jax.Array:
    """int32[B] SWA pages that each row needs."""
    skipped = jnp.clip(rows.swa_from - rows.held, 0, rows.new)
    return rows.new - skipped + rows.revive.astype(jnp.int32)


def cut_pieces(
    config: PoolConfig, rows: Rows, last_loc: jax.Array, count: int
) -> tuple[Pieces, jax.Array, jax.Array]:
    """Cuts the batch into `count` places for pieces; also the full and SWA pages of all rows."""
    size = jnp.int32(config.page_size)
    goes_on = rows.last.goes_on.astype(jnp.int32)
    pieces = rows.new + goes_on
    swa = swa_pages_of(rows)
    starts = exclusive_sum(jnp.stack([rows.grow, pieces, rows.new, swa]))
    totals = starts[:, -1] + jnp.stack([rows.grow[-1], pieces[-1], rows.new[-1], swa[-1]])

    runs = read_runs(pieces, count, starts[1])

    def of_row(values: jax.Array) -> jax.Array:
        return look_up(values, runs.run, 0)

    real = runs.real
    number = runs.within - of_row(goes_on)  # which of the row's new pages; -1 where it goes on
    is_new = real & (number >= 0)
    skipped = jnp.maximum(of_row(rows.swa_from) - of_row(rows.held), 0)
    revives = of_row(rows.revive.astype(jnp.int32))
    in_tail = is_new & (number >= skipped)
    in_page = real & (number < 0)
    swa_rank = of_row(starts[3]) + jnp.where(in_page, 0, revives + number - skipped)
    return (
        Pieces(
            real=real,
            start=of_row(starts[0]) + jnp.where(is_new, of_row(rows.fill) + number * size, 0),
            row_page=of_row(rows.last.page),
            base=of_row(last_loc) + 1,
            lead=jnp.where(in_page, of_row(rows.last.filled), 0),
            from_page=is_new | (in_page & (of_row(rows.last.absent.astype(jnp.int32)) > 0)),
            takes_full=is_new,
            full_rank=jnp.where(is_new, of_row(starts[2]) + number, 0),
            takes_swa=in_tail | (in_page & (revives > 0)),
            swa_rank=jnp.maximum(swa_rank, 0),
        ),
        totals[2],
        totals[3],
    )


def slots_of(
    pieces: Pieces, pages: jax.Array, count: jax.Array, page_size: int, capacity: int
) -> jax.Array:
    """int32[capacity] slots of the batch's new tokens, from the full page of each piece.

    Each piece lays its page's worth of slots down where its tokens begin. What a part of a page
    lacks is 0 there, and the largest wins, so pieces may lie over the end of those before them.
    """
    if page_size == 1:  # every piece is a token
        return jnp.where(pieces.real, pages, PAD_SLOT)[:capacity]
    granted = pages * jnp.int32(page_size) + pieces.lead
    first = jnp.where(pieces.from_page, granted, pieces.base)
    has_slot = pieces.real & (~pieces.from_page | (pages != PAD_PAGE))
    start = jnp.where(pieces.real, pieces.start, count)
    length = jnp.concatenate([start[1:], count[None]]) - start
    if start.shape[0] * page_size > 4 * capacity + 64 * page_size:
        return _slots_by_token(has_slot, first - start, pieces, capacity)
    offset = jnp.arange(page_size, dtype=jnp.int32)[None, :]
    used = has_slot[:, None] & (offset < length[:, None])
    slots = jnp.where(used, first[:, None] + offset, PAD_SLOT)
    return jax.lax.scatter_max(
        jnp.zeros(capacity + page_size, jnp.int32),
        start[:, None],
        slots,
        _WINDOWS,
        mode="drop",
    )[:capacity]


def _slots_by_token(
    has_slot: jax.Array, shift: jax.Array, pieces: Pieces, capacity: int
) -> jax.Array:
    """The same token by token, where pages are long and rows add little of one."""
    shift = jnp.where(has_slot, shift, jnp.int32(_NO_SLOT))
    marks = jnp.zeros(capacity, bool)
    marks = marks.at[jnp.where(pieces.real, pieces.start, capacity)].set(True, mode="drop")
    of_token = look_up(shift, latest_mark(marks), _NO_SLOT)
    token = jnp.arange(capacity, dtype=jnp.int32)
    return jnp.where(of_token == jnp.int32(_NO_SLOT), PAD_SLOT, of_token + token)


def plan_extend(
    state: AllocatorState,
    prefix_lens: jax.Array,
    seq_lens: jax.Array,
    last_loc: jax.Array,
    tail_lens: jax.Array | None,
    capacity: int,
) -> GrantPlan:
    """The plan of `alloc_extend` (tail_lens None) and `alloc_extend_swa_tail`."""
    config = state.config
    rows, bad = read_rows(state, prefix_lens, seq_lens, last_loc, tail_lens)
    too_many = sum_exceeds(rows.grow, capacity)
    count = jnp.sum(rows.grow, dtype=jnp.int32)
    places = most_pieces(config, rows.grow.shape[0], capacity)
    pieces, num_full, num_swa = cut_pieces(config, rows, last_loc, places)
    last = rows.last
    faults = fault_counts(
        bad_length=bad, out_of_range=last.lost, misaligned=last.crooked, still_mapped=last.shared
    )
    faults = faults + fault_counts(bad_length=too_many)
    verdict = judge(state, ~jnp.any(faults > 0), num_full, num_swa)

    swa_pages = peek(state.swa, pieces.swa_rank)
    if config.pure_swa_pool:  # one id for both sides; tokens before the tail have none
        takes_full = pieces.takes_swa
        new_pages = jnp.where(takes_full, swa_pages, PAD_PAGE)
    else:
        takes_full = pieces.takes_full
        new_pages = peek(state.full, pieces.full_rank)
    slots = slots_of(pieces, new_pages, count, config.page_size, capacity)
    used = jnp.arange(capacity, dtype=jnp.int32) < count
    return make_plan(
        state,
        verdict,
        slots=jnp.where(used, slots, PAD_SLOT),
        count=count,
        new_pages=new_pages,
        takes_full=takes_full,
        swa_pages=swa_pages,
        takes_swa=pieces.takes_swa,
        map_pages=jnp.where(pieces.from_page, new_pages, pieces.row_page),
        num_full=num_full,
        num_swa=num_swa,
        faults=faults,
        scratch=rows.last.scratch,
    )
