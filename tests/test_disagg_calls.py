"""Reserving, packing, receiving, committing and aborting, call by call."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compare import ints
from disagg_pair import WIDTH, DecodeSide, PrefillSide, Row, compiled, new_pools, rows_of
from hypothesis import given, settings
from hypothesis import strategies as st
from prefix_pair import QUICKLY

import swa_jax as swa
from swa_jax import disagg
from swa_jax import prefix_cache as pc
from swa_jax.disagg.inbox import own_pages
from swa_jax.kv_rows import read_rows, write_rows
from swa_jax.models.decoder.kv_pool import KVPool

POOL = swa.PoolConfig(64, 32, 4, 6)
PAIRS_POOL = swa.PoolConfig(40, 22, 2, 3)  # of a side with bigram keys
PREFILL_POOL = swa.PoolConfig(96, 72, 2, 9)
ROOM = (WIDTH, WIDTH)
WORDS = [5, 3, 8, 1] * (WIDTH // 4)


def same(before: Any, after: Any) -> bool:
    """Bit for bit."""
    pairs = zip(jax.tree.leaves(before), jax.tree.leaves(after), strict=True)
    return all(np.array_equal(np.asarray(a), np.asarray(b)) for a, b in pairs)


def computed(side: PrefillSide, ns: int, tokens: list[int]) -> Row:
    row = side.prefill(ns, tokens)
    assert row is not None
    return row


def transfer(prefill: PrefillSide, decode: DecodeSide, row: Row) -> disagg.Committed:
    """A request from the ask to the commit."""
    reserved = decode.preallocate(row.tokens, row.length, row.ns)
    assert reserved.ok
    for start in disagg.pieces(reserved.ask, *ROOM):
        piece = prefill.pack(row, reserved.ask, start, ROOM)
        assert piece.ok
        assert decode.receive(piece)
    committed = decode.commit(reserved.ticket)
    assert committed.ok
    return committed


def test_parts_of_a_wrong_kind_are_refused():
    state, pools = swa.init(POOL), new_pools(POOL, draft=False)
    inbox = disagg.new_inbox(POOL, 2, WIDTH)
    zero = jnp.int32(0)
    ask = disagg.Ask(zero, zero, zero, disagg.Ticket(zero, zero))
    sizes = {"full_capacity": 4, "swa_capacity": 4, "full_from": 0, "swa_from": 0}
    for name, parts in {
        "pools": (state, None, [4], 4, ask),
        "ask": (state, pools, [4], 4, (0, 1, 0, 0, 4)),
        "state": (None, pools, [4], 4, ask),
    }.items():
        with pytest.raises(ValueError, match=f"{name} must be of"):
            disagg.pack(*parts, **sizes)
    for parts in ((pools, None), (None, ask)):
        with pytest.raises(ValueError, match="expected a KVPool and a Piece"):
            disagg.receive(inbox, state, *parts)  # type: ignore[arg-type]


# ---- reserving ----------------------------------------------------------------------------


def test_b54_the_tail_begins_at_the_page_of_the_window():
    side = DecodeSide(POOL, cached=False)
    got = side.preallocate(WORDS, 21)
    assert got.ok
    assert (int(got.full_start), int(got.swa_start), int(got.length)) == (0, 12, 21)
    assert side.left() == (40, 20)
    slots = np.asarray(side.inbox.table[int(got.ticket.place)])
    of_swa = np.asarray(swa.translate_full_to_swa(side.state, ints(slots)))
    assert (of_swa[:3] == 0).all()
    assert (of_swa[3:] > 0).all()
    side.check_all()


def test_what_was_committed_can_be_matched():
    """The tail is sized by what goes into the cache: 20 of 22 tokens, whose window begins at 12."""
    prefill, decode = PrefillSide(PREFILL_POOL), DecodeSide(POOL)
    for side in (prefill, decode):  # from here on no page has the number of its SWA page
        side.state, _ = swa.alloc_extend_swa_tail(side.state, [0], [8], [-1], [1], capacity=8)
    row = computed(prefill, 0, WORDS[:22])
    first = transfer(prefill, decode, row)
    assert int(first.evicted) == int(first.owned_from) == 20
    decode.let_go(first)
    again = decode.preallocate(WORDS, 22)
    assert (int(again.full_start), int(again.swa_start)) == (20, 20)
    decode.abort(again.ticket)
    decode.check_all((2, 1))
    decode.check_kv(0, WORDS[:22], 20, first.table, 12)


@pytest.mark.parametrize("stale", [False, True])
def test_b02_a_recycled_page_before_the_tail_maps_to_nothing(stale):
    side = DecodeSide(swa.PoolConfig(32, 32, 4, 4), cached=False)
    first = side.preallocate(WORDS, 16)
    side.abort(first.ticket)
    side.state, other = swa.alloc_extend(side.state, [0], [8], [-1], capacity=8)
    kept = np.asarray(side.state.full_to_swa)[other.slots[::4] // 4]
    if stale:
        taken = [page for page in range(1, 9) if page not in np.asarray(other.slots) // 4]
        mapping = side.state.full_to_swa.at[np.asarray(taken)].set(int(kept[0]), mode="drop")
        side.state = dataclasses.replace(side.state, full_to_swa=mapping)
    got = side.preallocate(WORDS, 16)
    assert side.left() == (8, 20)
    pages = np.asarray(side.inbox.table[int(got.ticket.place)]) // 4
    mapping = np.asarray(side.state.full_to_swa)[pages[:4]]
    assert (mapping[:3] == 0).all()
    assert mapping[3] > 0
    side.abort(got.ticket)
    assert side.left() == (24, 24)
    assert (np.asarray(side.state.full_to_swa)[other.slots[::4] // 4] == kept).all()


def test_b46_swa_that_is_lacking_is_evicted_though_full_pages_are_free():
    side = DecodeSide(swa.PoolConfig(32, 12, 1, 4))
    side.state, grant = swa.alloc_extend(side.state, [0], [12], [-1], capacity=WIDTH)
    side.cache, side.state, _ = compiled("insert")(
        side.cache, side.state, ints(WORDS[:12], WIDTH), jnp.int32(12), grant.slots
    )
    assert side.left() == (20, 0)
    got = side.preallocate([9, 9, 9, 9], 4)
    assert got.ok
    assert side.left() == (16, 0)
    assert int(pc.match_prefix(side.cache, side.state, ints(WORDS, WIDTH), 12)[1].length) == 12
    side.check_all()


def test_a_refusal_says_what_is_missing_and_changes_nothing():
    side = DecodeSide(POOL, cached=False)
    assert side.preallocate(WORDS, 24).ok  # 6 of 16 full pages, 2 of 8 SWA pages
    side.state, _ = swa.alloc_extend(side.state, [0], [24], [-1], capacity=WIDTH)
    before = side.sides
    got = side.preallocate(WORDS, 24)
    assert not got.ok
    assert not got.never
    assert (int(got.full_short), int(got.swa_short)) == (2, 2)
    assert (int(got.ticket.place), int(got.ticket.serial), int(got.length)) == (-1, 0, 0)
    assert disagg.pieces(got.ask, 4, 4) == []
    assert same(before, side.sides)


def test_a_reservation_does_not_evict_for_nothing():
    """What the cache could give is not enough: it keeps it, and its order of use."""
    prefill, side = PrefillSide(PREFILL_POOL), DecodeSide(POOL)
    side.let_go(transfer(prefill, side, computed(prefill, 0, WORDS[:8])))
    for word in (1, 2):
        assert side.preallocate([word] * WIDTH, 24).ok
    before = side.sides
    got = side.preallocate([3] * WIDTH, 24)
    assert (int(got.full_short), int(got.swa_short)) == (2, 0)
    assert same(before, side.sides)
    assert int(pc.full_evictable_size(side.cache)) == 8


@pytest.mark.parametrize("length", [-1, 25, 2**31 - 1])
def test_a_length_that_cannot_be_is_refused_for_ever(length):
    side = DecodeSide(POOL, cached=False)
    before = side.sides
    got = side.preallocate(WORDS, length)
    assert got.never
    assert not got.ok
    assert (int(got.full_short), int(got.swa_short)) == (0, 0)
    assert same(before, side.sides)


def test_more_than_the_pools_hold_is_refused_for_ever():
    side = DecodeSide(swa.PoolConfig(16, 12, 4, 4), cached=False)
    assert side.preallocate(WORDS, 17).never
    assert side.preallocate(WORDS, 16).ok


def test_in_an_open_free_group_nothing_leaves_the_cache():
    prefill, side = PrefillSide(PREFILL_POOL), DecodeSide(POOL)
    side.let_go(transfer(prefill, side, computed(prefill, 0, [2] * 24)))
    assert side.preallocate(WORDS, 24).ok
    side.state = swa.free_group_begin(side.state)
    before = side.sides
    got = side.preallocate([4] * WIDTH, 24)
    assert (int(got.full_short), int(got.swa_short)) == (2, 0)
    assert same(before, side.sides)
    side.state = swa.free_group_end(side.state)
    assert side.preallocate([4] * WIDTH, 24).ok
    side.check_all()


def test_a_match_takes_no_more_swa_than_no_match():
    """3 SWA pages would do without the match: with it, the first page of its window may leave."""
    prefill, side = PrefillSide(PREFILL_POOL), DecodeSide(POOL)
    side.let_go(transfer(prefill, side, computed(prefill, 0, WORDS[:8])))
    side.state, _ = swa.alloc_extend(side.state, [0], [20], [-1], capacity=WIDTH)
    assert side.left()[1] == 4
    got = side.preallocate(WORDS, 13)
    assert (int(got.full_start), int(got.swa_start)) == (8, 8)
    assert got.ok
    assert side.left()[1] == 0
    side.check_all((5, 5))


def test_no_place_is_no_loss():
    side = DecodeSide(POOL, cached=False)
    first, *_ = (side.preallocate(WORDS, 4) for _ in range(3))
    before = side.sides
    refused = side.preallocate(WORDS, 4)
    assert not refused.ok
    assert not refused.never
    assert same(before, side.sides)
    side.abort(first.ticket)
    assert side.preallocate(WORDS, 4).ok


def test_nothing_to_send_can_be_committed_at_once():
    side = DecodeSide(POOL, cached=False)
    got = side.preallocate(WORDS, 0)
    assert disagg.pieces(got.ask, 4, 4) == []
    done = side.commit(got.ticket)
    assert done.ok
    assert (int(done.length), int(done.last_loc), int(done.owned_from)) == (0, -1, 0)
    side.check_all()


# ---- bigram keys --------------------------------------------------------------------------


def test_a_page_that_is_matched_by_its_successor_stays_the_trees():
    """8 of 8 tokens are cached, but an insert of 8 takes only 4: the lock must stay where it is."""
    pool = PAIRS_POOL
    window = disagg.prefill_window(swa.PoolConfig(8, 8, 4), pool, 1)
    prefill = PrefillSide(swa.PoolConfig(96, 72, 4, window), is_bigram=True)
    side = DecodeSide(pool, is_bigram=True)
    side.let_go(transfer(prefill, side, computed(prefill, 0, WORDS[:10])))
    got = side.preallocate(WORDS[:9], 8)
    assert (int(got.full_start), int(got.length)) == (8, 8)
    done = side.commit(got.ticket)
    assert done.ok
    assert int(done.owned_from) == 8
    side.check_kv(0, WORDS[:9], 8, done.table, 5)
    side.check_all()
    side.let_go(done)
    side.evict(40, 0)
    side.check_all()
    assert side.left() == (40, 22)


# ---- tickets and pieces -------------------------------------------------------------------


def two_sides() -> tuple[PrefillSide, DecodeSide, Row, disagg.Reserved]:
    prefill, side = PrefillSide(PREFILL_POOL), DecodeSide(POOL, cached=False)
    row = computed(prefill, 1, WORDS[:21])
    return prefill, side, row, side.preallocate(row.tokens, row.length, row.ns)


def refuses(side: DecodeSide, call: Any) -> Any:
    """What `call` answers; all it may do is count."""
    before, pools, count = side.sides, side.pools, int(side.inbox.refused)
    answer = call()
    assert int(side.inbox.refused) == count + 1
    inbox = dataclasses.replace(side.inbox, refused=before[0].refused)
    assert same((before, pools), ((inbox, side.state, side.cache), side.pools))
    return answer


def test_a_spent_ticket_does_nothing():
    prefill, side, row, got = two_sides()
    piece = prefill.pack(row, got.ask, (0, 12), ROOM)
    assert side.receive(piece)
    done = side.commit(got.ticket)
    again = side.preallocate([1] * WIDTH, 21)  # it has the place now
    assert int(again.ticket.place) == int(got.ticket.place)
    refuses(side, lambda: side.abort(got.ticket))
    assert not refuses(side, lambda: side.receive(piece))
    side.abort(again.ticket)
    refuses(side, lambda: side.abort(again.ticket))
    third = side.preallocate(WORDS, 0)  # so has this one, and all of it is here
    assert not refuses(side, lambda: side.commit(got.ticket)).ok
    assert side.commit(third.ticket).ok
    assert not refuses(side, lambda: side.commit(third.ticket)).ok
    side.let_go(done)
    side.check_all()


@pytest.mark.parametrize("place", [-1, 3, 2**31 - 1, -(2**31)])
def test_a_ticket_that_was_made_up_does_nothing(place):
    _, side, _, _ = two_sides()
    for serial in (0, 1, -1):
        ticket = disagg.Ticket(jnp.int32(place), jnp.int32(serial))
        refuses(side, lambda ticket=ticket: side.abort(ticket))
        assert not refuses(side, lambda ticket=ticket: side.commit(ticket)).ok


def test_a_commit_waits_for_every_piece():
    prefill, side, row, got = two_sides()
    room = (12, 6)
    starts = disagg.pieces(got.ask, *room)
    assert starts == [(0, 12), (12, 18)]
    for start in starts:
        done = refuses(side, lambda: side.commit(got.ticket))
        assert not done.ok
        assert not np.asarray(done.table).any()
        assert side.receive(prefill.pack(row, got.ask, start, room))
    assert side.commit(got.ticket).ok


def test_a_piece_before_its_turn_is_refused():
    prefill, side, row, got = two_sides()
    late = prefill.pack(row, got.ask, (12, 18), (12, 6))
    assert not refuses(side, lambda: side.receive(late))


@pytest.mark.parametrize(
    "wrong",
    [
        {"full_count": 22},
        {"full_count": -1},
        {"full_count": 2**31 - 1},
        {"full_from": -1},
        {"full_from": -(2**31)},
        {"full_from": 2**31 - 1},
        {"swa_from": 11},
        {"swa_from": 8, "swa_count": 13},
        {"swa_count": 10},
    ],
)
def test_a_piece_with_a_made_up_range_is_refused(wrong):
    prefill, side, row, got = two_sides()
    piece = prefill.pack(row, got.ask, (0, 12), ROOM)
    values = {name: jnp.int32(value) for name, value in wrong.items()}
    made_up = dataclasses.replace(piece, **values)
    assert not refuses(side, lambda: side.receive(made_up))
    assert side.receive(piece)


def test_a_piece_that_came_before_is_not_written_again():
    prefill, side, row, got = two_sides()
    piece = prefill.pack(row, got.ask, (0, 12), ROOM)
    assert side.receive(piece)
    before = side.pools
    garbage = dataclasses.replace(piece, rows=jax.tree.map(lambda rows: rows + 1, piece.rows))
    assert side.receive(garbage)
    assert same(before, side.pools)


# ---- packing ------------------------------------------------------------------------------


def test_a_row_that_is_gone_cannot_be_packed():
    prefill, _, row, got = two_sides()
    assert prefill.pack(row, got.ask, (0, 12), ROOM).ok
    prefill.cancel(row)
    piece = prefill.pack(row, got.ask, (0, 12), ROOM)
    assert not piece.ok
    assert (int(piece.full_count), int(piece.swa_count)) == (0, 0)
    assert not any(np.asarray(leaf).any() for leaf in jax.tree.leaves(piece.rows))
    assert not prefill.pack(row, got.ask, (0, 21), ROOM).ok  # full KV alone


def test_a_token_without_its_swa_side_cannot_be_packed():
    prefill, _, row, got = two_sides()
    prefill.state = swa.free_swa(prefill.state, row.table[7:8])
    assert not prefill.pack(row, got.ask, (0, 12), ROOM).ok
    assert prefill.pack(row, got.ask, (0, 16), ROOM).ok


def test_a_token_that_is_not_computed_cannot_be_packed():
    prefill, _, row, got = two_sides()
    row.length = 20
    assert not prefill.pack(row, got.ask, (0, 12), ROOM).ok
    piece = prefill.pack(row, got.ask, (0, 12), (20, 8))
    assert piece.ok
    assert (int(piece.full_count), int(piece.swa_count)) == (20, 8)


@pytest.mark.parametrize("start", [(0, 11), (-1, 12), (22, 12), (0, 22), (0, -(2**31))])
def test_nothing_is_packed_that_was_not_asked_for(start):
    prefill, _, row, got = two_sides()
    assert not prefill.pack(row, got.ask, start, ROOM).ok


def test_bytes_are_those_of_the_tokens_wanted():
    prefill, side, row, got = two_sides()
    piece = prefill.pack(row, got.ask, (0, 12), ROOM)
    full, of_swa = disagg.token_bytes(side.pools)
    assert (full, of_swa) == (4, 4)
    assert disagg.piece_bytes(piece) == 21 * full + 9 * of_swa
    assert disagg.everything_bytes(side.pools, 21) == 21 * (full + of_swa)


# ---- what leaves ---------------------------------------------------------------------------


def test_old_reservations_end_and_young_ones_stay():
    side = DecodeSide(POOL, cached=False)
    old = side.preallocate(WORDS, 9)
    side.inbox = disagg.tick(disagg.tick(side.inbox))
    young = side.preallocate(WORDS, 9)
    side.inbox = disagg.tick(side.inbox)
    side.abort_older(3)
    refuses(side, lambda: side.abort(old.ticket))
    side.check_all()
    assert side.left() == (52, 20)
    side.abort(young.ticket)
    assert side.left() == (64, 32)


def test_an_abort_leaves_the_prefix_to_the_tree():
    prefill, side = PrefillSide(PREFILL_POOL), DecodeSide(POOL)
    side.let_go(transfer(prefill, side, computed(prefill, 0, WORDS[:8])))
    for end in (side.abort, lambda _: side.abort_older(0)):
        before = side.left()
        got = side.preallocate(WORDS, 21)
        assert int(got.full_start) == 8
        assert int(pc.full_protected_size(side.cache)) == 8
        end(got.ticket)
        assert side.left() == before
        assert int(pc.full_protected_size(side.cache)) == int(side.cache.num_receipts) == 0
        side.check_all()


# ---- the window of the prefill side -------------------------------------------------------


def decode_start(n: int, page: int, window: int, lag: int) -> int:
    boundary = max(0, n - lag) // page * page
    return max(0, min(n, boundary) - window) // page * page


def prefill_has(n: int, page: int, window: int, lag: int, *, cache: bool) -> int:
    """From where on SWA is there, at worst: after a hit of all whole pages, where keys allow it."""
    boundary = max(0, n - lag) // page * page if cache else n
    if cache:
        boundary = max(boundary, n // page * page)
    return max(0, min(n, boundary) - window) // page * page


@pytest.mark.parametrize("cache", [True, False])
@pytest.mark.parametrize("lag", [0, 1])
@settings(max_examples=25)
@given(page=st.integers(1, 8), own=st.integers(1, 8), window=st.integers(1, 20))
def test_the_prefill_side_keeps_what_can_be_asked_for_and_no_more(page, own, window, lag, cache):
    decode = swa.PoolConfig(400 * page, 400 * page, page, window)
    prefill = swa.PoolConfig(own, own, own)
    kept = disagg.prefill_window(prefill, decode, lag, keeps_boundary=cache)
    assert kept is not None

    def enough(kept: int) -> bool:
        return all(
            prefill_has(n, own, kept, lag, cache=cache) <= decode_start(n, page, window, lag)
            for n in range(200)
        )

    assert enough(kept)
    assert kept == window or not enough(kept - 1)
    if page == own and not lag and cache:
        assert kept == window


def test_windows_that_cannot_agree_are_refused():
    chunks = swa.PoolConfig(64, 64, 4, 8, chunked=True)
    assert disagg.prefill_window(swa.PoolConfig(64, 64, 8, 8, chunked=True), chunks, 0) == 8
    assert disagg.prefill_window(POOL, swa.PoolConfig(64, 64, 4), 0) is None
    with pytest.raises(ValueError, match="one shape"):
        disagg.prefill_window(POOL, chunks, 0)
    for pool, lag in ((swa.PoolConfig(64, 64, 2), 0), (swa.PoolConfig(64, 64, 4), 1)):
        with pytest.raises(ValueError, match="multiple of the decode side's 4"):
            disagg.prefill_window(pool, chunks, lag)
    with pytest.raises(ValueError, match="key_lag must be an integer from 0 to 1"):
        disagg.prefill_window(POOL, POOL, 2)


# ---- transformations, types, arguments ----------------------------------------------------


def test_one_pool_for_swa_alone():
    """Every layer is SWA: only the window is sent, and a page is its own SWA side."""
    pool = swa.PoolConfig.pure_swa(32, 4, 6)
    side, prefill = DecodeSide(pool, cached=False), DecodeSide(pool, cached=False)
    empty = KVPool((), side.pools.swa)
    rows = rows_of(0, WORDS[:21], draft=False)
    prefill.state, grant = swa.alloc_extend(prefill.state, [0], [21], [-1], capacity=WIDTH)
    source = KVPool((), write_rows(empty.swa, grant.slots, rows.swa))
    got = side.preallocate(WORDS, 21)
    assert (int(got.full_start), int(got.swa_start)) == (21, 12)
    assert side.left()[1] == 20
    piece = compiled("pack")(
        prefill.state, source, grant.slots[::4], jnp.int32(21), got.ask,
        full_capacity=1, swa_capacity=WIDTH, full_from=jnp.int32(21), swa_from=jnp.int32(12),
    )  # fmt: skip
    assert piece.ok
    side.pools = empty
    assert side.receive(piece)
    side.check_all()
    done = side.commit(got.ticket)
    assert done.ok
    own = swa.translate_full_to_swa(side.state, done.table[3:6])
    assert (np.asarray(own) == np.asarray(done.table[3:6])).all()
    slots = np.concatenate([np.asarray(done.table[3:6, None] + jnp.arange(4)[None]).reshape(-1)])
    seen = read_rows(side.pools.swa, ints(slots[:9]))[0]
    np.testing.assert_array_equal(seen, rows.swa[0][12:21])


def test_many_sides_at_once_and_many_requests_in_a_scan():
    """Under vmap and in a scan a call gives what it gives alone."""
    lengths = [5, 24, 25, 9]
    alone = DecodeSide(POOL, cached=False)
    for length in lengths:
        alone.preallocate(WORDS, length)

    def one(sides: Any, length: jax.Array) -> tuple[Any, jax.Array]:
        inbox, state, cache = sides
        *after, got = disagg.preallocate(inbox, state, cache, ints(WORDS), length)
        return tuple(after), got.ok

    start = DecodeSide(POOL, cached=False).sides
    scan = jax.jit(functools.partial(jax.lax.scan, one), compiler_options=QUICKLY)
    scanned, oks = scan(start, ints(lengths))
    assert same(scanned, alone.sides)
    assert np.asarray(oks).tolist() == [True, True, False, True]
    two = jax.tree.map(lambda leaf: jnp.stack([leaf, leaf]), start)
    both, _ = jax.jit(jax.vmap(one), compiler_options=QUICKLY)(two, ints(lengths[:2]))
    single = DecodeSide(POOL, cached=False)
    single.preallocate(WORDS, 24)
    assert same(jax.tree.map(lambda leaf: leaf[1], both), single.sides)


def test_everything_is_int32_whatever_the_width_of_integers():
    """Traced only: a program for each would be compiled again."""
    side = DecodeSide(POOL)
    with jax.enable_x64(True):
        *sides, got = jax.eval_shape(disagg.preallocate, *side.sides, ints(WORDS), jnp.int32(9))
        pools = jax.eval_shape(lambda: new_pools(POOL, draft=False))
        pack = functools.partial(
            disagg.pack, full_capacity=4, swa_capacity=4, full_from=0, swa_from=0
        )
        piece = jax.eval_shape(pack, sides[1], pools, ints([4, 8]), jnp.int32(9), got.ask)
        inbox, _, _ = jax.eval_shape(disagg.receive, *sides[:2], pools, piece)
        *sides, done = jax.eval_shape(disagg.commit, inbox, *sides[1:], got.ticket)
        sides = jax.eval_shape(disagg.abort, *sides, got.ticket)
        sides = jax.eval_shape(disagg.abort_older, *sides, jnp.int32(1))
        laws = jax.eval_shape(disagg.invariants, *sides)
    for leaf in jax.tree.leaves((sides, got, done, laws)):
        assert leaf.dtype in (jnp.int32, jnp.bool_)


def test_serials_go_round():
    side = DecodeSide(POOL, cached=False)
    side.inbox = disagg.new_inbox(POOL, 3, WIDTH, first_serial=2**31 - 1)
    first, second = side.preallocate(WORDS, 4), side.preallocate(WORDS, 4)
    assert (int(first.ticket.serial), int(second.ticket.serial)) == (2**31 - 1, 1)
    side.check_all()


def test_a_check_says_what_is_broken():
    side = DecodeSide(POOL, cached=False)
    got = side.preallocate(WORDS, 9)
    side.state = swa.free(side.state, side.inbox.table[int(got.ticket.place)])
    with pytest.raises(swa.InvariantError, match=r"reserved_is_held.*1 reservations with 3 full"):
        disagg.check(*side.sides)
    assert int(own_pages(side.inbox)[0].sum()) == 3


def test_wrong_arguments_are_refused():
    side, other = DecodeSide(POOL), DecodeSide(PAIRS_POOL)
    good = ints(WORDS)
    with pytest.raises(ValueError, match="pool must be a PoolConfig"):
        disagg.new_inbox("pool", 1, 1)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="places must be an integer from 1"):
        disagg.new_inbox(POOL, 0, 1)
    with pytest.raises(ValueError, match="padded to the inbox's 24, got 3"):
        disagg.preallocate(side.inbox, side.state, side.cache, [1, 2, 3], 3)
    with pytest.raises(ValueError, match="one configuration"):
        disagg.preallocate(other.inbox, side.state, side.cache, good, 3)
    with pytest.raises(ValueError, match="an Inbox and an AllocatorState"):
        disagg.preallocate(side.state, side.inbox, side.cache, good, 3)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="one configuration"):
        disagg.commit(side.inbox, side.state, other.cache, disagg.Ticket(*ints([0, 0])))
    with pytest.raises(ValueError, match="ticket must be a Ticket, got tuple"):
        disagg.abort(side.inbox, side.state, side.cache, (0, 1))  # type: ignore[arg-type]
    none, end = jnp.int32(0), jnp.int32(3)
    ask = disagg.Ask(none, none, end, disagg.Ticket(none, none))
    starts = {"full_from": 0, "swa_from": 0}
    with pytest.raises(ValueError, match="full_capacity must be an integer from 1"):
        disagg.pack(side.state, side.pools, [4], 3, ask, full_capacity=0, swa_capacity=1, **starts)
    with pytest.raises(ValueError, match="at least one page"):
        disagg.pack(side.state, side.pools, [], 3, ask, full_capacity=1, swa_capacity=1, **starts)
    with pytest.raises(ValueError, match="swa_capacity must be"):
        disagg.pieces(ask, 1, 0)
