"""Public reports on hybrid KV memory, reduced to small cases with hand-worked values.

A comment names the report of each case. `a/b` is full_available / swa_available in tokens.
Every call is also compared with the oracle, page by page (see `pair.py`).
"""

import jax
import pytest
from compare import assert_bitwise_equal, free_queue, ints
from oracle import Sizes
from pair import Ask, Pair, granted, pages_of

import swa_jax as swa


def free_window(pair, slots, done, n=None, insert=None):
    """Frees one request's dead SWA pages; the new evicted length."""
    n = len(slots) if n is None else n
    inserts = None if insert is None else [insert]
    return pair.free_out_of_window([slots], [n], [done], insert_lens=inserts)[0]


def grow(pair, slots, seq):
    """The request's slots after growing to `seq` tokens. Fails when refused."""
    last = slots[-1] if slots else -1
    return slots + pair.extend(len(slots), seq, last)


# ---- A. allocator and mapping ---------------------------------------------------------------


def test_b01_one_token_of_an_swa_page_frees_it_once():
    # sgl-project/sglang#27779
    pair = Pair(Sizes(32, 16, 4))
    slots = pair.extend(0, 8)
    assert slots == list(range(4, 12))
    assert pair.left == (24, 8)
    pair.free_swa([4])
    assert pair.left == (24, 12)
    assert pair.swa_of(slots) == [0] * 4 + list(range(8, 12))
    pair.free_swa([5])
    assert pair.left == (24, 12)
    assert pair.faults == {"unmapped": 1}
    pair.free(slots)
    assert pair.left == (32, 16)
    assert pair.map == {}


@pytest.mark.parametrize("stale", [False, True])
def test_b02_no_stale_mapping_before_the_tail(stale):
    # sgl-project/sglang#25805
    pair = Pair(Sizes(32, 32, 4))
    a = pair.extend(0, 16)
    pair.free(a)
    b = pair.extend(0, 8)
    of_b = pair.swa_of(b)
    if stale:
        to = [slot // 4 for slot in of_b[::4]]
        next_pages = free_queue(pair.state.full)[:3]
        pair.inject_mapping(dict(zip(next_pages, [to[0], to[1], to[0]], strict=True)))
    c = granted(pair.alloc_extend_swa_tail(Ask(0, 16, tail=4)))
    pair.lawful = True
    pair.verify()
    assert pair.left == (8, 20)
    of_c = pair.swa_of(c)
    assert of_c[:12] == [0] * 12
    assert all(of_c[12:])
    assert not set(of_c[12:]) & set(of_b)
    pair.free(c)
    assert pair.left == (24, 24)
    assert pair.swa_of(b) == of_b
    assert pair.no_faults()


def test_b03_a_grouped_free_takes_the_page_it_saw():
    # sgl-project/sglang#36135, fixes #36081
    pair = Pair(Sizes(16, 16, 4))
    x = granted(pair.alloc(4))
    of_x = pair.swa_of(x)
    pair.free_group_begin()
    pair.free_swa(x)
    y = granted(pair.alloc(4))
    of_y = pair.swa_of(y)
    pair.set_mapping(x, of_y)
    pair.clear_mapping(y)
    pair.free_full(y)
    assert pair.left == (8, 8)
    pair.free_group_end()
    assert pair.left == (12, 12)
    assert pair.swa_of(x) == of_y
    assert pair.swa_of(y) == [0] * 4
    drained = granted(pair.alloc(12))
    pages = {slot // 4 for slot in pair.swa_of(drained)}
    assert of_x[0] // 4 in pages
    assert of_y[0] // 4 not in pages
    assert pair.left == (0, 0)
    assert pair.no_faults()


def test_b04_a_nested_begin_loses_nothing():
    # sgl-project/sglang#36646
    pair = Pair(Sizes(8, 8, 1))
    assert granted(pair.alloc(4)) == [1, 2, 3, 4]
    pair.free_group_begin()
    pair.free([1, 2])
    pair.free_group_begin()
    pair.free([3, 4])
    assert pair.left == (4, 4)
    pair.free_group_end()
    assert pair.left == (8, 8)
    pair.free_group_end()
    assert pair.left == (8, 8)
    assert pair.faults == {"nested_group": 1}


@pytest.mark.parametrize(
    "path", ["free_swa", "free_swa_segment", "free_swa_grouped", "owner", "in_group"]
)
def test_b05_unmapped_tokens_free_nothing_on_any_path(path):
    # sgl-project/sglang#38519
    pair = Pair(Sizes(16, 16, 4))
    slots = granted(pair.alloc_extend_swa_tail(Ask(0, 12, tail=4)))
    assert pair.left == (4, 12)
    if path == "owner":
        pair.free_swa(slots, owner=pair.snapshot())
    elif path == "in_group":
        pair.free_group_begin()
        pair.free_swa(slots)
    else:
        getattr(pair, path)(slots)
    pair.free_group_end()
    assert pair.left == (4, 16)
    assert pair.faults == {"unmapped": 2}
    last = granted(pair.alloc(4))
    assert last == [16, 17, 18, 19]
    assert pair.left == (0, 12)
    pair.free(slots)
    drained = last + granted(pair.alloc(12))
    assert 0 not in {slot // 4 for slot in pair.swa_of(drained)}


def test_b06_a_refused_decode_keeps_both_pools():
    # sgl-project/sglang#35338
    pair = Pair(Sizes(32, 8, 4))
    r1, r2 = pair.extend(0, 4), pair.extend(0, 4)
    last = [r1[-1], r2[-1]]
    assert pair.left == (24, 0)
    refused = pair.alloc_decode([5, 5], last)
    assert (refused.ok, refused.full_short, refused.swa_short) == (False, 0, 2)
    assert pair.left == (24, 0)
    pair.free_swa(r1)
    assert pair.left == (24, 4)
    refused = pair.alloc_decode([5, 5], last)
    assert (refused.ok, refused.full_short, refused.swa_short) == (False, 0, 1)
    assert pair.left == (24, 4)
    alone = pair.alloc_decode([5], last[:1])
    assert alone.ok
    assert alone.slots[0] == 12
    assert alone.slots[1:] == [0, 0, 0]
    assert pair.swa_of([12]) != [0]
    assert pair.left == (20, 0)


def test_b08_free_full_is_for_pages_without_an_swa_side():
    # sgl-project/sglang#36637
    pair = Pair(Sizes(16, 16, 4))
    slots = granted(pair.alloc(8))
    assert pair.left == (8, 8)
    pair.free_swa(slots[:4])
    assert pair.left == (8, 12)
    pair.free_full(slots[:4])
    assert pair.left == (12, 12)
    pair.free_full(slots[4:])
    assert pair.left == (12, 12)
    assert pair.faults == {"still_mapped": 1}
    pair.free(slots[4:])
    assert pair.left == (16, 16)


def test_b09_the_last_page_is_mapped():
    # sgl-project/sglang-jax#921
    pair = Pair(Sizes(16, 16, 4))
    slots = granted(pair.alloc(16))
    assert slots == list(range(4, 20))
    assert pair.swa_of(slots) == list(range(4, 20))
    pair.free(slots)
    assert pair.left == (16, 16)
    fresh = Pair(Sizes(16, 16, 4))
    slots = fresh.extend(0, 15)
    decoded = fresh.alloc_decode([16], slots[-1:])
    assert decoded.slots[0] == 19
    assert fresh.swa_of([19]) == [19]
    assert fresh.left == (0, 0)


def test_b12_freed_pages_serve_every_kind_of_grant():
    # sgl-project/sglang#8133, #37146
    pair = Pair(Sizes(16, 16, 4))
    granted(pair.alloc(16))
    assert pair.left == (0, 0)
    pair.free(list(range(4, 12)))
    assert pair.left == (8, 8)
    slots = pair.extend(0, 8)
    assert slots == list(range(4, 12))
    assert pair.left == (0, 0)
    pair.free(list(range(12, 16)))
    assert pair.left == (4, 4)
    decoded = pair.alloc_decode([9], slots[-1:])
    assert decoded.slots[0] == 12
    assert pair.swa_of([12]) == [12]
    assert pair.left == (0, 0)


def test_b13_a_hole_is_as_good_as_a_range():
    # ggml-org/llama.cpp#13194
    pair = Pair(Sizes(12, 12, 1))
    granted(pair.alloc(8))
    pair.free([1, 2, 3, 4])
    assert set(granted(pair.alloc(8))) == {1, 2, 3, 4, 9, 10, 11, 12}
    assert pair.left == (0, 0)


# ---- B. speculative decode, retract, asynchronous execution ---------------------------------


def test_b14_reserve_and_commit_keeps_every_page_in_the_row():
    # sgl-project/sglang-jax#1098, the allocator's part
    pair = Pair(Sizes(32, 32, 4))
    slots, committed = pair.extend(0, 6), 6
    seen = []
    for _ in range(3):
        slots = grow(pair, slots, committed + 4)
        committed += 2
        seen.append((len(slots), pair.left))
    assert seen == [(10, (20, 20)), (12, (20, 20)), (14, (16, 16))]
    pair.free(slots)
    assert pair.left == (32, 32)
    assert pair.no_faults()


def test_b15_a_reserved_page_is_not_stranded():
    # sgl-project/sglang#31616, the allocator's part: [0, 4) goes to the tree, the rest is freed
    pair = Pair(Sizes(32, 32, 4))
    slots = grow(pair, pair.extend(0, 6), 10)
    assert pair.left == (20, 20)
    pair.free(slots[4:])
    assert pair.left == (28, 28)
    pair.free(slots[:4])
    assert pair.left == (32, 32)


def test_b17_resume_with_a_shorter_prefix():
    # sgl-project/sglang#22862
    pair = Pair(Sizes(32, 32, 4))
    slots = pair.extend(0, 14)
    assert pair.left == (16, 16)
    pair.free(slots[12:])
    assert pair.left == (20, 20)
    kept = slots[:9]
    longer = grow(pair, kept, 16)
    assert longer[8:12] == slots[8:12]
    assert pair.left == (16, 16)
    pair.free(longer)
    assert pair.left == (32, 32)
    assert pair.no_faults()


def test_b18_a_row_that_is_too_narrow_is_refused_up_front():
    # sgl-project/sglang#26972: `capacity` is the room left in the row
    row_width = 16
    pair = Pair(Sizes(32, 32, 4))
    slots = pair.extend(0, 12)
    assert pair.left == (20, 20)
    room = row_width - len(slots)
    refused_state, grant = jax.jit(swa.alloc_extend, static_argnames="capacity")(
        pair.state, ints([12]), ints([20]), ints(slots[-1:]), capacity=room
    )
    assert not bool(grant.ok)
    assert swa.faults(refused_state)["bad_length"] == 1
    assert int(swa.full_available_size(refused_state)) == 20
    slots = grow(pair, slots, 20)  # a row that is wide enough
    pair.free(slots)
    assert pair.left == (32, 32)


def test_b18_a_frontier_past_the_row_leaves_the_row_alone():
    pair = Pair(Sizes(32, 32, 4, window=4), width=16)
    slots = pair.extend(0, 12)
    assert pair.free_out_of_window([slots], [24], [0]) == [0]
    assert pair.faults == {"bad_length": 1}
    assert pair.left == (20, 20)
    assert pair.free_out_of_window([slots, slots], [24, 12], [0, 0]) == [0, 8]
    assert pair.left == (20, 28)


def test_b21_pages_of_a_finished_request_wait_for_the_step_in_flight():
    # vllm-project/vllm#45357: the fence is a free group
    pair = Pair(Sizes(8, 8, 4))
    a = granted(pair.alloc(4))
    pair.free_group_begin()
    pair.free(a)
    assert pair.map == {}
    b = granted(pair.alloc(4))
    refused = pair.alloc(4)
    assert (refused.ok, refused.full_short, refused.swa_short) == (False, 1, 1)
    assert pair.left == (0, 0)
    pair.free_group_end()
    assert pair.left == (4, 4)
    c = granted(pair.alloc(4))
    assert c == a
    assert set(pages_of(pair.swa_of(c), 4)).isdisjoint(pages_of(pair.swa_of(b), 4))


# ---- C. window frontier and insert boundary -------------------------------------------------


def test_b24_the_frontier_stops_one_window_before_the_insert_boundary():
    # sgl-project/sglang#22470
    pair = Pair(Sizes(64, 64, 8, window=4))
    slots = pair.extend(0, 20)
    assert pair.left == (40, 40)
    assert free_window(pair, slots, 0, insert=16) == 8
    assert pair.left == (40, 48)
    assert pair.swa_of(slots[:8]) == [0] * 8
    pair.free(slots[16:])  # the part that does not go into the tree
    assert pair.left == (48, 56)
    assert all(pair.swa_of(slots[8:16]))


def test_b24_a_finish_without_insert_gives_everything_back():
    pair = Pair(Sizes(64, 64, 8, window=4))
    slots = pair.extend(0, 20)
    assert free_window(pair, slots, 0) == 16
    assert pair.left == (40, 56)
    pair.free(slots)
    assert pair.left == (64, 64)
    assert pair.no_faults()


def test_b25_frontier_table():
    # sgl-project/sglang#29860
    start = Pair(Sizes(64, 64, 8, window=4))
    slots = start.extend(0, 28)
    with_tree = {8: 0, 12: 0, 15: 0, 16: 8, 20: 8, 23: 8, 24: 16, 28: 16}
    without = {8: 0, 12: 8, 15: 8, 16: 8, 20: 16, 23: 16, 24: 16, 28: 24}
    for n in with_tree:
        pair = start.snapshot()
        assert free_window(pair, slots, 0, n=n, insert=n // 8 * 8) == with_tree[n]
        assert pair.left == (32, 32 + with_tree[n])
        pair = start.snapshot()
        assert free_window(pair, slots, 0, n=n) == without[n]
        assert pair.left == (32, 32 + without[n])


def test_b29_eviction_by_window_and_not_by_chunk():
    # sgl-project/sglang#8649
    pair = Pair(Sizes(64, 32, 1, window=8))
    slots = grow(pair, pair.extend(0, 8), 16)
    done = free_window(pair, slots, 0)
    assert (done, pair.left) == (8, (48, 24))
    assert all(pair.swa_of(slots[8:]))
    slots += pair.alloc_decode([17], slots[-1:]).slots[:1]
    done = free_window(pair, slots, done)
    assert (done, pair.left) == (9, (47, 24))


def test_b30_the_boundary_is_the_start_of_the_chunk_in_flight():
    # kvcache-ai/sglang#75
    pair = Pair(Sizes(32, 16, 1, window=4))
    slots = grow(pair, pair.extend(0, 8), 11)
    assert free_window(pair, slots, 0, n=8) == 4
    assert pair.left[1] == 9
    slots = grow(pair, slots, 19)
    assert pair.left[1] == 1


def test_b33_a_window_of_four_holds_four():
    # huggingface/transformers#37574
    pair = Pair(Sizes(16, 16, 1, window=4))
    slots, done, ends, live = [], 0, [], []
    for n in range(1, 7):
        last = slots[-1] if slots else -1
        slots += pair.alloc_decode([n], [last]).slots[:1]
        done = free_window(pair, slots, done)
        ends.append(done)
        live.append(sum(slot > 0 for slot in pair.swa_of(slots)))
    assert ends == [0, 0, 0, 0, 1, 2]
    assert live[2:] == [3, 4, 4, 4]


def test_b34_eviction_keeps_up_with_four_tokens_a_call():
    # ml-explore/mlx-lm#1914
    pair = Pair(Sizes(48, 16, 1, window=8), width=48)
    slots, done, peak = [], 0, 0
    for step in range(10):
        done = free_window(pair, slots, done)
        slots = grow(pair, slots, 4 * step + 4)
        peak = max(peak, 16 - pair.left[1])
    free_window(pair, slots, done)
    assert peak == 12
    assert pair.left[1] == 8


@pytest.mark.parametrize(("swa_tokens", "fits"), [(12, 8), (11, 7), (8, 4)])
def test_b35_a_chunk_longer_than_the_window(swa_tokens, fits):
    # pytorch/executorch#20346
    pair = Pair(Sizes(48, swa_tokens, 1, window=4), width=48)
    slots, done, peak = pair.extend(0, 8), 0, 8
    short = 0
    while len(slots) < 40 and not short:
        done = free_window(pair, slots, done)
        grant = pair.alloc_extend(Ask(len(slots), len(slots) + 8, slots[-1]))
        slots += grant.slots[: grant.count]
        short = grant.swa_short
        peak = max(peak, swa_tokens - pair.left[1])
    if fits == 8:
        assert (len(slots), peak) == (40, 12)
        return
    assert len(slots) == 8
    assert all(pair.swa_of(slots[4:]))
    assert short == 8 - fits
    assert len(pair.extend(8, 8 + fits, slots[-1])) == fits


# ---- F. admission, as far as real calls can show it -----------------------------------------


def test_b46_the_shortfall_names_the_pool():
    # sgl-project/sglang#29662, #40309
    pair = Pair(Sizes(32, 12, 1, window=2))
    chain = pair.extend(0, 12)
    assert pair.left == (20, 0)
    refused = pair.alloc(4)
    assert (refused.full_short, refused.swa_short) == (0, 4)
    pair.free_swa(chain[:4])
    assert pair.left == (20, 4)
    granted(pair.alloc(4))
    assert pair.left == (16, 0)


def test_b47_a_budget_is_counted_in_pages():
    # sgl-project/sglang#23174
    pair = Pair(Sizes(32, 12, 4))
    batch = pair.alloc_extend(Ask(0, 5), Ask(0, 5))
    assert (batch.ok, batch.full_short, batch.swa_short) == (False, 0, 1)
    assert pair.left == (32, 12)
    pair.extend(0, 5)
    assert pair.left == (24, 4)

    exact = Pair(Sizes(32, 20, 4))
    slots = grow(exact, exact.extend(0, 7), 20)
    assert exact.left[1] == 0
    nothing_left = exact.alloc_decode([21], slots[-1:])
    assert (nothing_left.ok, nothing_left.swa_short) == (False, 1)


def test_b49_an_undersized_swa_pool_is_refused_at_construction():
    # sgl-project/sglang#37610
    with pytest.raises(ValueError, match=r"\d"):
        swa.PoolConfig(128, 8, page_size=8, sliding_window=4)
    pair = Pair(Sizes(128, 16, 8, window=4), width=128)
    slots, done, peak = [], 0, 0
    for n in range(1, 101):
        done = free_window(pair, slots, done)
        last = slots[-1] if slots else -1
        slots += granted(pair.alloc_decode([n], [last]))[:1]
        peak = max(peak, 16 - pair.left[1])
    assert peak == 16


def test_b50_a_prompt_longer_than_the_swa_pool():
    # sgl-project/sglang#31205, #22597
    pair = Pair(Sizes(64, 16, 4, window=4), width=48)
    slots, done, peak = [], 0, 0
    for end in range(8, 41, 8):
        done = free_window(pair, slots, done)
        slots = grow(pair, slots, end)
        peak = max(peak, 16 - pair.left[1])
    free_window(pair, slots, done)
    assert peak == 12
    assert pair.left == (24, 12)


@pytest.mark.parametrize(("evict_first", "expected_peak"), [(True, 16), (False, 24)])
def test_b51_the_order_of_evict_and_allocate_sets_the_peak(evict_first, expected_peak):
    # vllm-project/vllm#40946, #45856
    pair = Pair(Sizes(104, 24, 4, window=8), width=104)
    slots, done, peak = [], 0, 0
    for end in [*range(8, 97, 8), 100]:
        before = len(slots)
        if evict_first:
            done = free_window(pair, slots, done)
        slots = grow(pair, slots, end)
        peak = max(peak, 24 - pair.left[1])
        if not evict_first:
            done = free_window(pair, slots, done, n=before)
    free_window(pair, slots, done)
    assert peak == expected_peak
    assert 24 - pair.left[1] == 8


def test_b52_evict_before_anybody_is_retracted():
    # sgl-project/sglang#28246
    pair = Pair(Sizes(32, 16, 4, window=4))
    r1 = pair.extend(0, 12)
    pair.extend(0, 4)
    assert pair.left == (16, 0)
    assert not pair.alloc_decode([13], r1[-1:]).ok
    assert free_window(pair, r1, 0) == 8
    assert pair.left == (16, 8)
    assert pair.alloc_decode([13], r1[-1:]).ok
    assert pair.left == (12, 4)


@pytest.mark.parametrize("tail", [9, 6])
def test_b54_the_tail_starts_on_a_page(tail):
    # sgl-project/sglang#24036. A tail of 6 starts at token 15, in the page of token 12.
    pair = Pair(Sizes(64, 32, 4, window=6))
    slots = granted(pair.alloc_extend_swa_tail(Ask(0, 21, tail=tail)))
    assert pair.left == (40, 20)
    of_slots = pair.swa_of(slots)
    assert of_slots[:12] == [0] * 12
    assert all(of_slots[12:])


# ---- the table that the window reads --------------------------------------------------------


def test_a_table_of_page_starts_is_as_good_as_a_table_of_slots():
    pair = Pair(Sizes(64, 32, 4, window=4))
    rows = [pair.extend(0, n) for n in (12, 4, 9)]
    pages = pair.snapshot()
    active = [True, True, False]
    by_slot = pair.free_out_of_window(rows, [12, 4, 9], [0, 0, 0], active=active)
    assert by_slot == [8, 0, 0]
    starts = [row[::4] for row in rows]
    assert (
        pages.free_out_of_window(starts, [12, 4, 9], [0, 0, 0], active=active, stride=4) == by_slot
    )
    assert_bitwise_equal(pages.state, pair.state)
    assert pair.free_out_of_window(rows, [12, 4, 9], by_slot, active=active) == by_slot
    assert_bitwise_equal(pages.state, pair.state)


def test_a_table_with_wrong_slots_frees_nothing_of_others():
    pair = Pair(Sizes(64, 32, 4, window=4))
    slots, other = pair.extend(0, 12), pair.extend(0, 8)
    of_other = pair.swa_of(other)
    gone = pair.extend(0, 4)
    pair.free(gone)
    rows = [slots, slots, [*gone, *[-1] * 8], [-(2**31), 0, 0, 0, 2**31 - 1, *[0] * 7]]
    pair.free_out_of_window(rows, [12] * 4, [0] * 4)
    assert pair.left[1] == 32 - 12 - 8 + 8
    assert pair.swa_of(other) == of_other
    assert pair.faults == {"double_free": 1, "out_of_range": 3}


def test_one_pool_evicts_and_frees_without_a_fault():
    pair = Pair(Sizes(32, 32, 4, window=4, pure=True))
    slots, done = pair.extend(0, 12), 0
    assert free_window(pair, slots, done) == 8
    assert pair.left == (28, 28)
    pair.free(slots)
    assert pair.left == (32, 32)
    assert pair.no_faults()
    config, slot = pair.state.config, ints([4])
    with pytest.raises(ValueError, match="pure"):
        swa.set_full_to_swa_mapping(swa.init(config), slot, slot)
    with pytest.raises(ValueError, match="pure"):
        swa.clear_full_to_swa_mapping(swa.init(config), slot)
