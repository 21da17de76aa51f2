"""Who gets which page when a batch of rows grows by any number of tokens.

A row fills its last page first and goes on in new ones, so the batch asks for a list of pages: the
new ones of all rows in order, then the last page of each row. Slots are consecutive inside a page;
what is found for a page is laid down where its tokens stand.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from swa_jax.faults import fault_counts
from swa_jax.grant import GrantPlan, Revived, judge, make_plan
from swa_jax.last_page import LastPage, look_at_last_page
from swa_jax.once import once
from swa_jax.paging import fetch, look_up, offset_of, page_of, pages_for, sum_exceeds
from swa_jax.pool import peek
from swa_jax.rank import exclusive_sum, read_runs
from swa_jax.state import PAD_PAGE, PAD_SLOT, AllocatorState

_NO_PAGE = 2**31 - 1  # a page number that no tail reaches
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
class Starts:
    """Where each row begins in lists of the whole batch, and how long those are."""

    token: jax.Array  # int32[B] among the new tokens
    new: jax.Array  # int32[B] among the new pages
    swa: jax.Array  # int32[B] among the SWA pages
    num_new: jax.Array  # int32[]
    num_swa: jax.Array  # int32[]


@dataclass(frozen=True)
class NewPages:
    """One entry a new page, row by row in token order; N of them at most (static)."""

    real: jax.Array  # bool[N]
    takes_swa: jax.Array  # bool[N]
    swa_rank: jax.Array  # int32[N] which of the granted SWA pages
    whole: jax.Array  # bool[N] filled by this batch
    start: jax.Array  # int32[N] place of its first token among the batch's new tokens


@dataclass(frozen=True)
class Parts:
    """Up to two pages a row that the batch fills in part: [2B], what rows go on in, and their last.

    Tokens of theirs that get no slot are not counted.
    """

    first: jax.Array  # int32[2B] slot of the first token
    start: jax.Array  # int32[2B] its place among the batch's new tokens
    length: jax.Array  # int32[2B] tokens


def most_new_pages(rows: int, capacity: int, page_size: int) -> int:
    """Static bound: each holds a token, and all but one of a row's a whole page."""
    return min(capacity, capacity // page_size + rows)


def read_rows(
    state: AllocatorState,
    prefix_lens: jax.Array,
    seq_lens: jax.Array,
    last_loc: jax.Array,
    tail_lens: jax.Array | None,
    by: jax.Array | None = None,
) -> tuple[Rows, jax.Array]:
    """What each row needs, and bool[B] which rows are ill-formed."""
    size = state.config.page_size
    bad = (prefix_lens < 0) | (seq_lens < prefix_lens)
    if tail_lens is not None:
        grow = jnp.where(bad, 0, seq_lens - prefix_lens)
        bad = bad | (tail_lens < 0) | (tail_lens > grow)
    prefix, seq = jnp.where(bad, 0, prefix_lens), jnp.where(bad, 0, seq_lens)
    grow = seq - prefix
    last = look_at_last_page(state, prefix, last_loc, grow > 0, by)
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


def add_up(rows: Rows) -> Starts:
    """Sums over the rows before each."""
    counts = jnp.stack([rows.grow, rows.new, swa_pages_of(rows)])
    before = once(exclusive_sum(counts), 16)
    ends = before[:, -1] + counts[:, -1]
    return Starts(before[0], before[1], before[2], ends[1], ends[2])


def new_pages_of(
    rows: Rows, starts: Starts, count: int, page_size: int, *, all_swa: bool
) -> NewPages:
    """Deals `count` places (static) for new pages to the rows.

    Args:
      rows: of the batch.
      starts: likewise.
      count: room.
      page_size: tokens in a page.
      all_swa: every new page gets an SWA side (static).
    """
    size = jnp.int32(page_size)
    runs = read_runs(rows.new, count, starts.new)
    in_tail, skipped = runs.real, jnp.int32(0)
    if not all_swa:
        skipped = jnp.maximum(rows.swa_from - rows.held, 0)
        in_tail = runs.real & (runs.within >= fetch(skipped, runs.run))
    # Ranks and places are those of the row's first page and so many on.
    ranks = fetch(starts.swa + rows.revive.astype(jnp.int32) - skipped, runs.run)
    start = fetch(starts.token + rows.fill, runs.run)
    whole = fetch(page_of(rows.grow - rows.fill, page_size), runs.run)
    return NewPages(
        real=runs.real,
        takes_swa=in_tail,
        swa_rank=jnp.where(in_tail, ranks + runs.within, 0),
        whole=runs.real & (runs.within < whole),
        start=start + runs.within * size,
    )


def parts_of(
    rows: Rows, starts: Starts, last_first: jax.Array, new_pages: jax.Array, page_size: int
) -> Parts:
    """The pages that each row fills in part.

    Args:
      rows: of the batch.
      starts: likewise.
      last_first: int32[B] slot of the first token in the page that a row goes on in; below 0 where
        those tokens get none.
      new_pages: int32[N] pages of the new ones, PAD_PAGE where tokens get no slot.
      page_size: tokens in a page.
    """
    size = jnp.int32(page_size)
    rest = offset_of(rows.grow - rows.fill, page_size)
    last = look_up(new_pages, jnp.maximum(starts.new + rows.new - 1, 0), PAD_PAGE)
    begun = jnp.where(last_first < 0, 0, rows.fill)
    ended = jnp.where(last == PAD_PAGE, 0, rest)
    return Parts(
        first=jnp.concatenate([last_first, last * size]),
        start=jnp.concatenate([starts.token, starts.token + rows.grow - rest]),
        length=jnp.concatenate([begun, ended]),
    )


def slots_by_page(
    new: NewPages, parts: Parts, new_pages: jax.Array, page_size: int, capacity: int
) -> jax.Array:
    """int32[capacity] slots of the batch's new tokens: a page's worth is laid down for each page.

    Whole pages do not touch each other. Where a page is filled in part, the rest of its worth is 0
    and the largest wins. One that would stand over the end is moved in by what it is over.
    """
    size = jnp.int32(page_size)
    outside = jnp.int32(capacity)
    at = jnp.where(new.whole & (new_pages != PAD_PAGE), new.start, outside)
    offset = jnp.arange(page_size, dtype=jnp.int32)[None, :]
    slots = (new_pages * size)[:, None] + offset
    slots = once(slots.reshape(-1)).reshape(slots.shape)  # twice as fast in one dimension
    laid = jax.lax.scatter(
        jnp.zeros(capacity, jnp.int32),
        at[:, None],
        slots,
        _WINDOWS,
        mode="drop",
    )
    at = jnp.clip(parts.start, 0, outside - size)
    over = parts.start - at
    first, begin, length = (
        once(values, page_size)[:, None]
        for values in (parts.first - over, over.astype(jnp.uint32), parts.length.astype(jnp.uint32))
    )
    used = offset.astype(jnp.uint32) - begin < length  # below 0 is past every length, unsigned
    slots = jnp.where(used, first + offset, PAD_SLOT)
    return jax.lax.scatter_max(laid, at[:, None], slots, _WINDOWS, mode="drop")


def slots_by_token(
    rows: Rows,
    starts: Starts,
    last_first: jax.Array,
    new_pages: jax.Array,
    size: int,
    capacity: int,
) -> jax.Array:
    """The same token by token, where pages are long and rows add little of one."""
    runs = read_runs(rows.grow, capacity, starts.token)
    past = runs.within - look_up(rows.fill, runs.run, 0)  # the last page
    fresh = jnp.maximum(past, 0)
    pages = look_up(new_pages, look_up(starts.new, runs.run, 0) + page_of(fresh, size), PAD_PAGE)
    in_new = jnp.where(
        pages == PAD_PAGE, PAD_SLOT, pages * jnp.int32(size) + offset_of(fresh, size)
    )
    first = look_up(last_first, runs.run, 0)
    in_last = jnp.where(first < 0, PAD_SLOT, first + runs.within)
    return jnp.where(runs.real, jnp.where(past < 0, in_last, in_new), PAD_SLOT)


def slots_of(
    rows: Rows,
    starts: Starts,
    new: NewPages,
    last_first: jax.Array,
    new_pages: jax.Array,
    ok: jax.Array,
    page_size: int,
    capacity: int,
) -> jax.Array:
    """int32[capacity] slots of the batch's new tokens, 0 past them and where it is not `ok`."""
    if page_size == 1:  # every token is a page
        return jnp.where(new.real & ok, new_pages, PAD_SLOT)
    wide = (new_pages.shape[0] + 2 * last_first.shape[0]) * page_size
    if capacity < page_size or wide > 4 * capacity + 64 * page_size:
        slots = slots_by_token(rows, starts, last_first, new_pages, page_size, capacity)
        return jnp.where(ok, slots, PAD_SLOT)
    pages = jnp.where(ok, new_pages, PAD_PAGE)
    last_first = jnp.where(ok, last_first, -1)
    parts = parts_of(rows, starts, last_first, pages, page_size)
    return slots_by_page(new, parts, pages, page_size, capacity)


def plan_extend(
    state: AllocatorState,
    prefix_lens: jax.Array,
    seq_lens: jax.Array,
    last_loc: jax.Array,
    tail_lens: jax.Array | None,
    capacity: int,
    by: jax.Array | None = None,
) -> GrantPlan:
    """The plan of `alloc_extend` (tail_lens None) and `alloc_extend_swa_tail`."""
    config = state.config
    size = config.page_size
    rows, bad = read_rows(state, prefix_lens, seq_lens, last_loc, tail_lens, by)
    too_many = sum_exceeds(rows.grow, capacity)
    starts = add_up(rows)
    places = most_new_pages(rows.grow.shape[0], capacity, size)
    new = new_pages_of(rows, starts, places, size, all_swa=tail_lens is None)
    last = rows.last
    faults = fault_counts(
        bad_length=bad, out_of_range=last.lost, misaligned=last.crooked, still_mapped=last.shared
    )
    faults = faults + fault_counts(bad_length=too_many)
    well_formed = ~jnp.any(faults > 0)
    verdict = judge(state, well_formed, starts.num_new, starts.num_swa, last.foreign)

    most_swa = places + (rows.grow.shape[0] if size > 1 else 0)
    swa_pages = once(peek(state.swa, new.swa_rank, most_swa))
    last_first, revived = last_loc + 1, None
    if config.pure_swa_pool:  # one id for both sides; tokens before the tail have none
        takes_full, new_pages = new.takes_swa, jnp.where(new.takes_swa, swa_pages, PAD_PAGE)
    else:
        takes_full, new_pages = (
            new.real,
            once(peek(state.full, jnp.arange(places, dtype=jnp.int32))),
        )
    if size > 1:
        sides = peek(state.swa, starts.swa, most_swa)
        if config.pure_swa_pool:
            kept = jnp.where(rows.revive, sides * jnp.int32(size) + last.filled, -1)
            last_first = jnp.where(last.absent, kept, last_first)
        revived = Revived(rows.revive, sides if config.pure_swa_pool else last.page, sides)
    slots = slots_of(rows, starts, new, last_first, new_pages, verdict.ok, size, capacity)
    return make_plan(
        state,
        verdict,
        slots=slots,
        slots_are_gated=True,
        count=jnp.sum(rows.grow, dtype=jnp.int32),
        new_pages=new_pages,
        takes_full=takes_full,
        swa_pages=swa_pages,
        takes_swa=new.takes_swa,
        map_pages=new_pages,
        revived=revived,
        num_full=starts.num_new,
        num_swa=starts.num_swa,
        faults=faults,
        foreign=last.foreign,
        scratch=last.scratch,
    )
