"""What sglang 0.5.23 does otherwise: the shortest calls that show it, on both sides.

`docs/differences-sglang.md` has the same list in words, and a test here for each of its entries.
Pools are of four pages of four tokens where a test does not say otherwise, so the first page has
the slots 4 to 7. Where a test is of sglang alone, its expectations are what its code does today.
"""

from __future__ import annotations

import pytest

from benchmarks.sglang_classes import missing
from tests.peers.both import Both, Slots, both

pytestmark = [
    pytest.mark.peers,
    pytest.mark.skipif(bool(missing()), reason=missing() or "sglang is there"),
]
OURS, THEIRS = 0, 1


def free_swa_pages(pair: Both) -> list[int]:
    return pair.theirs.swa_attn_allocator.free_pages.tolist()


# ---- a correct caller meets these -----------------------------------------------------------


@pytest.mark.parametrize(
    ("full_pages", "swa_pages", "before", "after"),
    [(4, 2, (8, 0), (4, 0)), (2, 4, (0, 8), (0, 4))],
    ids=["SWA short", "full short"],
)
def test_d01_a_refused_decode_keeps_what_one_pool_gave(full_pages, swa_pages, before, after):
    pair = Both(full_pages, swa_pages)
    prompt = pair.extend(0, 8)
    assert pair.left == (before, before)
    assert pair.decode(9, prompt.last) == Slots(None, None)
    assert pair.left == (before, after)  # a page of theirs is nobody's now


def test_d02_writing_on_in_a_page_without_its_swa_side():
    pair = Both()
    prompt = pair.extend(0, 2)
    pair.do("free_swa", prompt)
    token = pair.decode(3, prompt.last)
    ours, theirs = pair.swa_of(token)
    assert ours == [2 * 4 + 2]  # a new SWA page, at the same place in it
    assert theirs == [1]  # in the padding page, and at another place
    pair.extend(0, 4)  # else their pool has more pages than it was made with, and asserts
    pair.do("free", token)
    assert 0 in free_swa_pages(pair)
    assert pair.swa_of(pair.extend(0, 4))[THEIRS] == [0, 1, 2, 3]  # padding is a request's now


def test_d03_a_tail_that_begins_inside_a_page():
    pair = Both()
    prompt = pair.extend(0, 6, tail=3)
    ours, theirs = pair.swa_of(prompt)
    assert ours == [4, 5, 6, 7, 8, 9]
    assert theirs == [0, 0, 0, 4, 5, 6]  # two full pages share an SWA page
    pair.do("free_swa", prompt[:4])
    assert pair.swa_of(prompt[4:]) == ([8, 9], [5, 6])
    assert pair.swa_of(pair.extend(0, 4)) == ([12, 13, 14, 15], [4, 5, 6, 7])  # 5, 6 again


def test_d04_a_tail_behind_a_prefix_that_ends_inside_a_page():
    pair = Both()
    prefix = pair.extend(0, 2)
    rest = pair.extend(2, 8, prefix.last, tail=4)
    assert pair.swa_of(prefix) == ([4, 5], [4, 5])
    assert pair.swa_of(rest) == ([6, 7, 8, 9, 10, 11], [0, 0, 8, 9, 10, 11])


def test_d04_a_tail_that_is_all_of_it_there():
    pair = Both()
    prefix = pair.extend(0, 2)
    rest = pair.extend(2, 4, prefix.last, tail=2)
    assert pair.swa_of(rest) == ([6, 7], [8, 9])  # their one full page has two SWA pages
    row = Slots([4, 5, 6, 7], [4, 5, 6, 7])
    pair.do("free_segment", row)
    assert pair.left == ((16, 16), (16, 12))  # and one of the two is nobody's now


def test_d05_padding_in_a_free():
    pair = Both()
    pair.extend(0, 4)
    pair.do("free", both(0))
    assert pair.left == ((12, 12), (16, 12))
    assert pair.extend(0, 4) == Slots([8, 9, 10, 11], [0, 1, 2, 3])


def test_d05_padding_in_a_free_of_the_swa_side_at_page_1():
    pair = Both(page=1)
    pair.alloc(2)
    pair.do("free_swa", both(0))
    assert free_swa_pages(pair) == [3, 4, 0]
    assert pair.left == ((2, 2), (2, 3))


# ---- a caller's mistake, not noticed --------------------------------------------------------


def test_d06_a_page_freed_twice():
    pair = Both()
    prompt = pair.extend(0, 8)
    pair.do("free", prompt[:4])
    pair.do("free", prompt[:4])
    assert pair.left == ((12, 12), (16, 12))
    one, other = pair.extend(0, 4), pair.extend(0, 4)
    assert one.theirs == other.theirs
    assert one.ours != other.ours
    assert pair.faults == {"double_free": 1}


@pytest.mark.parametrize("name", ["free_swa_segment", "free_segment"])
def test_d07_the_swa_side_freed_twice_by_a_segment(name):
    pair = Both()
    prompt = pair.extend(0, 8)
    pair.do("free_swa_segment", prompt[:4])
    pair.do(name, prompt[:4])
    assert free_swa_pages(pair) == [0, 1, 3, 4]
    full = 8 if name == "free_swa_segment" else 12
    assert pair.left == ((full, 12), (full, 16))


def test_d07_the_swa_side_freed_twice_at_page_1():
    pair = Both(page=1)
    tokens = pair.alloc(2)
    pair.do("free_swa", tokens[:1])
    pair.do("free", tokens[:1])
    assert free_swa_pages(pair) == [3, 4, 1, 0]
    assert pair.left == ((3, 3), (3, 4))


def test_d08_free_full_of_a_page_that_has_its_swa_side():
    pair = Both(full_pages=1)
    prompt = pair.extend(0, 4)
    pair.do("free_full", prompt)
    assert pair.left == ((0, 12), (4, 12))
    assert pair.faults == {"still_mapped": 1}
    pair.do_ours("free", prompt)  # theirs has no call that gives the SWA page back
    again = pair.extend(0, 4, tail=0)
    assert pair.swa_of(again) == ([0, 0, 0, 0], [4, 5, 6, 7])  # the last owner's


def test_d09_two_full_pages_of_one_swa_page():
    pair = Both()
    one, other = pair.extend(0, 4), pair.extend(0, 4)
    pair.do("set_full_to_swa_mapping", other, Slots(*pair.swa_of(one)))
    assert pair.swa_of(one) == ([0, 0, 0, 0], [4, 5, 6, 7])
    assert pair.swa_of(other) == ([4, 5, 6, 7], [4, 5, 6, 7])
    pair.do("free", one)
    pair.do("free", other)
    assert free_swa_pages(pair) == [1, 1, 3, 4]  # page 2 is lost, page 1 will be granted twice


def test_d10_part_of_a_page_unmapped():
    pair = Both()
    prompt = pair.extend(0, 4)
    pair.do("clear_full_to_swa_mapping", prompt[:1])
    assert pair.swa_of(prompt) == ([0, 0, 0, 0], [0, 5, 6, 7])


def test_d10_part_of_a_page_mapped():
    pair = Both()
    one, other = pair.extend(0, 4), pair.extend(0, 4)
    ours, theirs = pair.swa_of(other)
    pair.do("clear_full_to_swa_mapping", other)
    pair.do("set_full_to_swa_mapping", one[:1], Slots(ours[:1], theirs[:1]))
    assert pair.swa_of(one) == ([8, 9, 10, 11], [8, 5, 6, 7])


def test_d11_a_mapping_for_a_page_that_nobody_holds():
    pair = Both()
    pair.extend(0, 4)
    pair.do("set_full_to_swa_mapping", both(8, 9, 10, 11), both(4, 5, 6, 7))
    assert pair.swa_of(both(8, 9)) == ([0, 0], [4, 5])
    assert pair.faults == {"out_of_range": 4}


def test_d12_a_negative_slot_in_a_free():
    pair = Both()
    prompt = pair.extend(0, 16)
    pair.do("free_swa", both(-1))
    ours, theirs = pair.swa_of(prompt[12:])
    assert ours == [16, 17, 18, 19]
    assert theirs == [16, 0, 0, 0]  # somebody else's page, from the end of their table
    assert pair.swa_of(both(-1)) == ([-1], [0])  # and the mark for "no slot" is gone
    assert pair.left == ((0, 0), (0, 4))
    assert pair.faults == {"out_of_range": 1}


def test_d13_a_segment_that_begins_inside_a_page():
    pair = Both()
    prompt = pair.extend(0, 8)
    pair.do("free_segment", prompt[1:])
    assert pair.left == ((8, 8), (16, 16))
    assert pair.faults == {"misaligned": 2}


def test_d14_a_last_slot_at_another_place_than_the_prefix_ends():
    pair = Both()
    prompt = pair.extend(0, 2)
    assert pair.decode(3, prompt[:1]) == Slots(None, [5])  # the place of the second token
    assert pair.faults == {"misaligned": 1}


def test_d14_a_last_slot_in_a_page_that_nobody_holds():
    pair = Both()
    assert pair.decode(3, both(9)) == Slots(None, [10])
    assert pair.faults == {"out_of_range": 1}


# ---- a caller's mistake, which raises there and is counted here -----------------------------


def test_d15_nested_groups():
    pair = Both()
    prompt = pair.extend(0, 4)
    pair.do("free_group_begin")
    pair.do("free", prompt)
    pair.do_ours("free_group_begin")
    with pytest.raises(AssertionError):
        pair.do_theirs("free_group_begin")
    assert pair.left == ((12, 12), (12, 12))
    pair.do("free_group_end")
    assert pair.left == ((16, 16), (16, 16))
    assert pair.faults == {"nested_group": 1}


def test_d16_a_slot_beyond_the_pool():
    pair = Both()
    pair.extend(0, 16)
    pair.do_ours("free_swa", both(40))
    with pytest.raises(IndexError):
        pair.do_theirs("free_swa", both(40))
    pair.do("free_full", both(20))  # the first slot after the last: theirs takes it for a page
    assert pair.left == ((0, 0), (4, 0))
    assert pair.extend(0, 4, tail=0) == Slots(None, [20, 21, 22, 23])


def test_d17_a_row_that_shrinks():
    pair = Both()
    prompt = pair.extend(0, 8)
    with pytest.raises(RuntimeError):
        pair.extend(8, 4, prompt.last)
    assert pair.left == ((8, 8), (8, 8))
    assert pair.faults == {"bad_length": 1}


def test_d18_alloc_at_a_larger_page():
    pair = Both()
    with pytest.raises(AssertionError):
        pair.alloc(4)
    assert pair.left == ((12, 12), (16, 16))
