"""The oracle itself, against values worked out by hand."""

import pytest
from oracle import Oracle, Sizes, frontier, insert_frontier


def both(oracle):
    return oracle.full_available_size(), oracle.swa_available_size()


def grow(oracle, prefix, seq, last_loc=-1, capacity=64):
    return oracle.alloc_extend([prefix], [seq], [last_loc], capacity=capacity)


def slots_of(grant):
    assert grant.ok
    return grant.slots[: grant.count]


@pytest.fixture
def pages4():
    return Oracle(Sizes(16, 16, 4))


def test_grants_are_first_in_first_out(pages4):
    first = slots_of(pages4.alloc(8, capacity=16))
    assert first == [4, 5, 6, 7, 8, 9, 10, 11]
    pages4.free(first[:4])
    second = slots_of(pages4.alloc(12, capacity=16))
    assert [slot // 4 for slot in second[::4]] == [3, 4, 1]
    pages4.check()


def test_b01_one_token_frees_the_page_once():
    oracle = Oracle(Sizes(32, 16, 4))
    slots = slots_of(grow(oracle, 0, 8))
    assert both(oracle) == (24, 8)
    oracle.free_swa([4])
    assert both(oracle) == (24, 12)
    assert oracle.map == {2: 2}
    oracle.free_swa([5])
    assert both(oracle) == (24, 12)
    assert oracle.faults["unmapped"] == 1
    oracle.free(slots)
    assert both(oracle) == (32, 16)
    assert oracle.map == {}
    assert oracle.faults.total() == 1


@pytest.mark.parametrize("stale", [False, True])
def test_b02_tail_on_recycled_pages(stale):
    oracle = Oracle(Sizes(32, 32, 4))
    a = slots_of(grow(oracle, 0, 16))
    oracle.free(a)
    b = slots_of(grow(oracle, 0, 8))
    kept = dict(oracle.map)
    if stale:
        oracle.map |= {1: 1, 2: 2, 3: 1}
    grant = oracle.alloc_extend_swa_tail([0], [16], [-1], [4], capacity=16)
    c = slots_of(grant)
    assert both(oracle) == (8, 20)
    assert [oracle.map.get(slot // 4, 0) > 0 for slot in c[::4]] == [False, False, False, True]
    oracle.free(c)
    assert both(oracle) == (24, 24)
    assert {page: oracle.map[page] for page in kept} == kept
    assert {slot // 4 for slot in b} == set(kept)


def test_b03_ownership_is_settled_at_the_call(pages4):
    x = slots_of(pages4.alloc(4, capacity=16))
    pages4.free_group_begin()
    pages4.free_swa(x)
    y = slots_of(pages4.alloc(4, capacity=16))
    assert both(pages4) == (8, 8)
    pages4.set_full_to_swa_mapping(x, pages4.translate_full_to_swa(y))
    assert pages4.map == {1: 2}
    pages4.free_full(y)
    assert both(pages4) == (8, 8)
    pages4.free_group_end()
    assert both(pages4) == (12, 12)
    assert pages4.map == {1: 2}
    rest = slots_of(pages4.alloc(12, capacity=16))
    assert sorted(pages4.map[slot // 4] for slot in rest[::4]) == [1, 3, 4]
    pages4.check()


def test_b04_a_second_begin_loses_nothing():
    oracle = Oracle(Sizes(8, 8, 1))
    oracle.alloc(4, capacity=8)
    oracle.free_group_begin()
    oracle.free([1, 2])
    oracle.free_group_begin()
    oracle.free([3, 4])
    assert both(oracle) == (4, 4)
    oracle.free_group_end()
    assert both(oracle) == (8, 8)
    assert oracle.faults["nested_group"] == 1


def test_b05_unmapped_pages_free_nothing(pages4):
    grant = pages4.alloc_extend_swa_tail([0], [12], [-1], [4], capacity=16)
    assert both(pages4) == (4, 12)
    pages4.free_swa(slots_of(grant))
    assert both(pages4) == (4, 16)
    assert pages4.faults["unmapped"] == 2
    assert slots_of(pages4.alloc(4, capacity=16)) == [16, 17, 18, 19]
    assert both(pages4) == (0, 12)


def test_b06_a_refused_batch_takes_nothing():
    oracle = Oracle(Sizes(32, 8, 4))
    r1, r2 = slots_of(grow(oracle, 0, 4)), slots_of(grow(oracle, 0, 4))
    last = [r1[-1], r2[-1]]
    refused = oracle.alloc_decode([5, 5], last)
    assert (refused.ok, refused.full_short, refused.swa_short) == (False, 0, 2)
    oracle.free_swa(r1)
    refused = oracle.alloc_decode([5, 5], last)
    assert (refused.ok, refused.swa_short) == (False, 1)
    assert both(oracle) == (24, 4)
    granted = oracle.alloc_decode([5, 5], last, [True, False])
    assert granted.slots == [12, 0]
    assert both(oracle) == (20, 0)


def test_b08_full_side_alone(pages4):
    slots = slots_of(pages4.alloc(8, capacity=16))
    pages4.free_swa(slots[:4])
    assert both(pages4) == (8, 12)
    pages4.free_full(slots[:4])
    assert both(pages4) == (12, 12)
    pages4.free_full(slots[4:])
    assert both(pages4) == (12, 12)
    assert pages4.faults["still_mapped"] == 1
    pages4.free(slots[4:])
    assert both(pages4) == (16, 16)


def test_b25_frontier_table():
    lengths = (8, 12, 15, 16, 20, 23, 24, 28)
    tree = [min(frontier(n, 8, 4), frontier(n // 8 * 8, 8, 4)) for n in lengths]
    assert tree == [0, 0, 0, 8, 8, 8, 16, 16]
    assert [frontier(n, 8, 4) for n in lengths] == [0, 8, 8, 8, 16, 16, 16, 24]


def test_a_chunked_window_dies_a_chunk_at_a_time():
    assert [frontier(n, 2, 8, chunked=True) for n in (7, 8, 15, 16, 17)] == [0, 8, 8, 16, 16]
    into_tree = [insert_frontier(n, 2, 8, chunked=True) for n in (0, 8, 10, 16, 18)]
    assert into_tree == [0, 0, 8, 8, 16]


def test_set_moves_and_swaps():
    oracle = Oracle(Sizes(4, 4, 1))
    oracle.alloc(3, capacity=4)
    oracle.set_full_to_swa_mapping([1, 2], [2, 1])
    assert oracle.map == {1: 2, 2: 1, 3: 3}
    oracle.set_full_to_swa_mapping([1], [3])
    assert oracle.map == {1: 3, 2: 1}
    oracle.set_full_to_swa_mapping([1, 1, 0, 4, 2], [3, 2, 0, 1, 0])
    assert oracle.map == {1: 3, 2: 1}
    assert (oracle.faults["misaligned"], oracle.faults["out_of_range"]) == (1, 2)
    oracle.check()


def test_snapshot_names_the_swa_page_to_free():
    oracle = Oracle(Sizes(4, 4, 1))
    oracle.alloc(2, capacity=4)
    then = oracle.copy()
    oracle.set_full_to_swa_mapping([1], [2])
    oracle.clear_full_to_swa_mapping([2])
    oracle.free_swa([1], owner=then)
    assert oracle.map == {1: 2}
    assert 1 in oracle.swa.free
    oracle.free_swa([1], owner=then)
    assert oracle.faults["double_free"] == 1
    oracle.check()


def test_a_free_outside_a_group_jumps_the_queue():
    oracle = Oracle(Sizes(4, 4, 1))
    oracle.alloc(4, capacity=4)
    oracle.free_swa_grouped([1, 2, 3])
    assert both(oracle) == (0, 0)
    oracle.free([4])
    assert both(oracle) == (1, 1)
    assert list(oracle.swa.free) == [4]
    oracle.free_group_end()
    assert both(oracle) == (1, 4)


def test_one_pool_frees_at_once_and_remembers_the_holder():
    oracle = Oracle(Sizes(16, 16, 4, pure=True))
    slots = slots_of(oracle.alloc(8, capacity=16))
    assert both(oracle) == (8, 8)
    oracle.free_swa(slots[:4])
    assert both(oracle) == (12, 12)
    oracle.free(slots)
    assert both(oracle) == (16, 16)
    assert oracle.faults.total() == 0
    oracle.free(slots)
    assert oracle.faults["double_free"] == 2
    oracle.check()


def test_one_pool_keeps_nothing_before_the_tail():
    oracle = Oracle(Sizes(16, 16, 4, pure=True))
    grant = oracle.alloc_extend_swa_tail([0], [12], [-1], [4], capacity=12)
    assert grant.slots == [0] * 8 + [4, 5, 6, 7]
    assert both(oracle) == (12, 12)


def test_extend_repairs_a_lost_swa_side(pages4):
    slots = slots_of(grow(pages4, 0, 6))
    pages4.free_swa(slots)
    assert both(pages4) == (8, 16)
    grown = slots_of(grow(pages4, 6, 9, slots[-1]))
    assert grown == [10, 11, 12]
    assert pages4.map == {2: 3, 3: 4}
    assert both(pages4) == (4, 8)


def test_bad_arguments_are_refused_and_counted(pages4):
    slots = slots_of(grow(pages4, 0, 6))
    for prefix, seq, last, kind in [
        (7, 6, slots[-1], "bad_length"),
        (-1, 3, -1, "bad_length"),
        (0, 2**31 - 1, -1, "bad_length"),
        (6, 7, slots[-2], "misaligned"),
        (6, 7, -1, "out_of_range"),
        (6, 7, 13, "out_of_range"),
        (6, 7, 2**31 - 1, "out_of_range"),
    ]:
        before = pages4.faults[kind]
        grant = grow(pages4, prefix, seq, last)
        assert not grant.ok
        assert (grant.full_short, grant.swa_short) == (0, 0)
        assert pages4.faults[kind] == before + 1
    shared = pages4.alloc_extend([6, 6], [7, 7], [slots[-1]] * 2, capacity=16)
    assert not shared.ok
    assert both(pages4) == (8, 8)


def test_window_frees_whole_pages_and_says_how_far():
    oracle = Oracle(Sizes(32, 32, 4, window=4))
    row = slots_of(grow(oracle, 0, 20))
    assert oracle.free_out_of_window([row], [20], [0], max_pages=1) == [4]
    assert oracle.free_out_of_window([row], [20], [4]) == [16]
    assert both(oracle) == (12, 28)
    assert oracle.free_out_of_window([row[:8]], [20], [0]) == [0]
    assert oracle.free_out_of_window([row], [20], [-4]) == [-4]
    assert oracle.free_out_of_window([row], [20], [2]) == [2]
    assert (oracle.faults["bad_length"], oracle.faults["misaligned"]) == (2, 1)
