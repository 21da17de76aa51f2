"""Pages under a count: one sequence becomes several without copying what they have in common.

Beam search, parallel samples and forks of a session start from one text. Its pages are held by
each of them (law 3 with counts): every holder frees them as if they were its own, and the last one
to do so releases them.
"""

import functools
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from swa_jax.faults import add_faults, fault_counts
from swa_jax.grant import commit_grant, judge, make_plan
from swa_jax.inputs import Ints, as_active, as_bool, as_int32, as_rows, check_lengths
from swa_jax.owners import as_owner, is_foreign, keep_own, open_to_all, tag_pages
from swa_jax.paging import look_up, not_alone, offset_of
from swa_jax.plan_free import NamedPages, holders_here, name_pages, swa_side
from swa_jax.pool import count_holders, holders_of, nowhere, peek
from swa_jax.rank import rank
from swa_jax.state import PAD_PAGE, PAD_SLOT, UNMAPPED, AllocatorState, must_be_state

_MOST = 2**31 - 1


def share(
    state: AllocatorState,
    slots: Ints,
    live: ArrayLike | list[bool] | None = None,
    *,
    by: Ints | None = None,
) -> AllocatorState:
    """Adds one holder to the page of every slot, and to its SWA page where it has one.

    Call it once for each new holder, with the slots of the text that it takes over. From then on
    `free`, `free_swa` and `free_full` give up one share at a time: a page is released, and its
    mapping cleared, when nobody holds it any more. A page counts once in a call, so one call is
    one holder: for several, use one call each (`lax.scan` over rows is one program). A partly
    filled last page can be read by all and written by none until `copy_on_write` has given the
    writer its own.

    Whole pages that a request stands on in a prefix cache are held there by its lock and need no
    share. One that goes on inside such a page shares it, and copies it before it writes. The tree
    is a holder like any other: what it takes over with `insert` is the share of that request.

    A page behind the window of the one that is forked may still have its SWA side, for a third
    who needs it longer. A new holder that begins with the other's `evicted_lens` takes no share in
    it: say with `live` which places lie past that. In the end what was ever shared is given up
    with `free`: `free_full` refuses a page whose SWA side was kept longer than needed.

    Args:
      state: allocator before the call.
      slots: int32[T] full slots; 0 (any slot of the padding page) in unused places.
      live: bool[T] places whose SWA side is shared as well, where there is one; the first place
        that names a page speaks for it. All by default. In a pure SWA pool the others are not
        shared at all.
      by: int32[] or int32[T] owner of the pages, 0 by default; only with owner tags, where all that
        share a page go by one id.

    Returns:
      The allocator after the call. Available sizes are as before.

    Refused, counted, and nothing else changed:
      double_free: a page that is not held, once a page.
      out_of_range: a slot below 0 or past the pool, once a place.
      bad_length: a page with 2^31 - 1 holders, once a page.
      foreign: a page of another owner, once a page. A page of a prefix cache's tree is anybody's to
        share.

    Law 3; reference counts as in vLLM's block pool (`ref_cnt`) and Levanter's page table.
    """
    must_be_state(state)
    places = as_int32("slots", slots, 1)
    owner = as_owner(state, by, slots=places)
    if live is None or not places.shape[0]:
        return _share(state, places, None, owner)
    marks = as_bool("live", live)
    check_lengths(slots=places, live=marks)
    return _share(state, places, marks, owner)


@jax.jit
def _share(
    state: AllocatorState, slots: jax.Array, live: jax.Array | None, by: jax.Array | None
) -> AllocatorState:
    state, slots = keep_own(state, slots, by, shares=True)
    by = None if by is None else not_alone(by)
    live = None if live is None else not_alone(live)
    named = name_pages(state, not_alone(slots))
    holders = holders_here(state, named)
    swa_pages, swa_holders = swa_side(state, named)
    most = jnp.int32(_MOST)
    shares = (holders > 0) & (holders < most)
    both = shares if live is None else shares & live
    if state.config.pure_swa_pool:  # a page is its SWA side: who is past it holds nothing of it
        shares = both
    full = jnp.where(shares, named.pages, jnp.int32(nowhere(state.full)))
    swa = jnp.where(both & (swa_holders > 0), swa_pages, jnp.int32(nowhere(state.swa)))
    faults = fault_counts(
        double_free=named.first & (holders == 0),
        out_of_range=named.out_of_range,
        bad_length=holders == most,
    )
    shared = replace(
        state,
        full=count_holders(state.full, full, jnp.minimum(holders, most - 1) + 1),
        swa=count_holders(state.swa, swa, jnp.minimum(swa_holders, most - 1) + 1),
        faults=add_faults(state.faults, faults),
        scratch=named.scratch,
    )
    return open_to_all(shared, full, by)


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["source", "target", "last_loc", "ok", "full_short", "swa_short"],
    meta_fields=[],
)
@dataclass(frozen=True)
class PageCopies:
    """KV that a `copy_on_write` leaves to its caller to copy, and where each row goes on."""

    source: jax.Array  # int32[B, P] full slots to read, 0 where nothing is copied
    target: jax.Array  # int32[B, P] full slots to write, 0 likewise
    last_loc: jax.Array  # int32[B] full slot of each row's last token: its own page's from now on
    ok: jax.Array  # bool[]
    full_short: jax.Array  # int32[] full pages missing, 0 where granted
    swa_short: jax.Array  # int32[] SWA pages missing, likewise


def copy_on_write(
    state: AllocatorState,
    seq_lens: Ints,
    last_loc: Ints,
    active: ArrayLike | list[bool] | None = None,
    *,
    by: Ints | None = None,
) -> tuple[AllocatorState, PageCopies]:
    """Gives every row that would write into a shared page a page of its own, or none of them.

    A row's last page is copied where it is partly filled and others hold it too; the row's share
    in the old page goes over to the new one. Of rows of this call that are the only holders of a
    page the last one keeps it. To be called before `alloc_decode` or `alloc_extend`, which refuse
    rows that stand in a shared page. The caller copies the KV, layer by layer, from `source` to
    `target` (SWA layers: the same slots through `translate_full_to_swa`, before and after being
    the same for `source`, whose page lives on), and puts the new page into its table.

    Args:
      state: allocator before the call.
      seq_lens: int32[B] tokens that each row holds.
      last_loc: int32[B] full slot of token `seq_lens - 1`, -1 where there is none.
      active: bool[B] rows that take part, all by default.
      by: int32[] owner of all rows or int32[B] of each, 0 by default; only with owner tags.

    Returns:
      The allocator after the call, and `PageCopies`. Where no page is shared nothing changes and
      `last_loc` comes back as it was.

    Refused (`ok` False, the state bit for bit as it was but for the counters):
      too few free pages in a pool: `full_short` / `swa_short` say how many are missing.
      bad_length: a length below 0, once a row.
      out_of_range: a `last_loc` that names no held page, where the last page is partly filled.
      misaligned: a `last_loc` at another place of its page than the length says, once a row.
      foreign: a `last_loc` in a partly filled page of another owner, once a row.

    Laws 2, 3 and 7.
    """
    must_be_state(state)
    lens, last = as_rows(seq_lens=seq_lens, last_loc=last_loc)
    rows = as_active(active, seq_lens=lens)
    owners = as_owner(state, by, seq_lens=lens)
    owners = None if owners is None else not_alone(owners)
    state, copies = _copy_on_write(state, not_alone(lens), not_alone(last), not_alone(rows), owners)
    if lens.shape[0] > 1:
        return state, copies
    return state, replace(
        copies, source=copies.source[:1], target=copies.target[:1], last_loc=copies.last_loc[:1]
    )


@dataclass(frozen=True)
class _Stands:
    """The partly filled page in which each row stands."""

    named: NamedPages
    filled: jax.Array  # int32[B] tokens in it
    asks: jax.Array  # bool[B] there is one, and it is as the row says
    faults: jax.Array  # int32[7]
    foreign: jax.Array | None  # bool[B] it is another owner's; None without owner tags


def _look(
    state: AllocatorState,
    seq_lens: jax.Array,
    last_loc: jax.Array,
    active: jax.Array,
    by: jax.Array | None,
) -> _Stands:
    size = state.config.page_size
    bad = active & (seq_lens < 0)
    filled = offset_of(jnp.where(active & ~bad, seq_lens, 0), size)
    part = filled > 0
    slots = jnp.where(part, last_loc, PAD_SLOT)
    named = name_pages(state, slots)
    held = part & (holders_of(state.full, named.pages) > 0)
    absent, foreign, tags = jnp.zeros_like(held), None, state.owner_tags
    if state.config.pure_swa_pool:  # as in `look_at_last_page`
        held = held & (look_up(state.full_to_swa, named.pages, UNMAPPED) != UNMAPPED)
        absent = part & (slots >= 0) & (slots < jnp.int32(size))
    lost = part & ~held & ~absent
    if by is not None and tags is not None:
        foreign = held & is_foreign(tags, named.pages, holders_of(state.full, named.pages), by)
        held = held & ~foreign
    odd = held & (offset_of(jnp.maximum(slots, 0), size) != filled - 1)
    faults = fault_counts(bad_length=bad, out_of_range=lost, misaligned=odd)
    return _Stands(named, filled, held & ~odd, faults, foreign)


@jax.jit
def _copy_on_write(
    state: AllocatorState,
    seq_lens: jax.Array,
    last_loc: jax.Array,
    active: jax.Array,
    by: jax.Array | None,
) -> tuple[AllocatorState, PageCopies]:
    size = state.config.page_size
    stands = _look(state, seq_lens, last_loc, active, by)
    named, filled = stands.named, stands.filled

    # Of n rows in a page with n holders n - 1 copy: nobody else reads what the last one writes to.
    before = _rows_before(named.pages, stands.asks)
    copies = stands.asks & (holders_of(state.full, named.pages) - before > 1)
    takes_swa = copies
    if not state.config.pure_swa_pool:
        takes_swa = copies & (look_up(state.full_to_swa, named.pages, UNMAPPED) != UNMAPPED)
    full_rank, num_full = rank(copies)
    swa_rank, num_swa = rank(takes_swa)
    verdict = judge(state, ~jnp.any(stands.faults > 0), num_full, num_swa, stands.foreign)
    swa_pages = peek(state.swa, swa_rank)
    pages = swa_pages if state.config.pure_swa_pool else peek(state.full, full_rank)
    plan = make_plan(
        state,
        verdict,
        slots=jnp.zeros_like(last_loc),
        count=num_full,
        new_pages=pages,
        takes_full=copies,
        swa_pages=swa_pages,
        takes_swa=takes_swa,
        map_pages=pages,
        num_full=num_full,
        num_swa=num_swa,
        faults=stands.faults,
        foreign=stands.foreign,
        scratch=named.scratch,
    )
    moved = copies & verdict.ok
    state, grant = commit_grant(_leave(state, named, moved), plan)
    copied = PageCopies(
        source=_tokens(named.pages, filled, moved, size),
        target=_tokens(pages, filled, moved, size),
        last_loc=jnp.where(moved, pages * jnp.int32(size) + filled - 1, last_loc),
        ok=grant.ok,
        full_short=grant.full_short,
        swa_short=grant.swa_short,
    )
    return tag_pages(state, jnp.where(moved, pages, PAD_PAGE), by), copied


def _rows_before(page: jax.Array, marks: jax.Array) -> jax.Array:
    """int32[B] marked rows above each row that stand in its page.

    Counted by comparing pairs: batches are small, and a sort would take longer.
    """
    row = jnp.arange(page.shape[0], dtype=jnp.int32)
    above = (row[None, :] < row[:, None]) & (page[:, None] == page[None, :]) & marks[None, :]
    return jnp.sum(above, axis=1, dtype=jnp.int32)


def _leave(state: AllocatorState, named: NamedPages, moved: jax.Array) -> AllocatorState:
    """Takes the shares of rows that moved off their old pages, all of which others hold still.

    As in `free`, the SWA side is lowered only as far as the full side goes.
    """
    leave = jnp.zeros_like(named.pages).at[named.speaker].add(moved.astype(jnp.int32), mode="drop")
    full_left = holders_here(state, named) - leave
    swa_pages, swa_holders = swa_side(state, named)
    lowers = named.first & (leave > 0)
    full = jnp.where(lowers, named.pages, jnp.int32(nowhere(state.full)))
    swa = jnp.where(lowers & (swa_holders > full_left), swa_pages, jnp.int32(nowhere(state.swa)))
    return replace(
        state,
        full=count_holders(state.full, full, full_left),
        swa=count_holders(state.swa, swa, full_left),
    )


def _tokens(pages: jax.Array, filled: jax.Array, moved: jax.Array, size: int) -> jax.Array:
    """int32[B, P] slots of the filled part of each page, 0 elsewhere."""
    offset = jnp.arange(size, dtype=jnp.int32)
    used = moved[:, None] & (offset[None, :] < filled[:, None])
    return jnp.where(used, pages[:, None] * jnp.int32(size) + offset[None, :], PAD_SLOT)
