"""The allocators of `swa_jax.compat.sgl_jax` and `swa_jax.compat.sglang`, as callers see them."""

import abc
import types
from random import Random
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest

import swa_jax as swa
from swa_jax.compat import sgl_jax, sglang
from swa_jax.compat.common.registering import register_classes

PAGE = 4
FULL, OF_SWA = 64, 32
MISUSES = (ValueError, AssertionError)


def new_swa(page=PAGE, dp_size=1, kvcache=None) -> Any:
    return sgl_jax.SWATokenToKVPoolAllocator(
        FULL * dp_size, OF_SWA * dp_size, kvcache or SimpleNamespace(), page, dp_size
    )


def new_sglang(page=PAGE, kvcache=None) -> Any:
    kvcache = kvcache or SimpleNamespace()
    return sglang.SWATokenToKVPoolAllocator(FULL, OF_SWA, page, None, "cpu", kvcache, False)


def extend(allocator, prefix, length, last, **options):
    return allocator.alloc_extend([prefix], [length], [last], length - prefix, **options)


def extend_both(allocator, prefix, length, last) -> Any:
    lengths = [prefix], [prefix], [length], [length]
    return allocator.alloc_extend(*lengths, [last], length - prefix)


def sizes(allocator, rank=0):
    return allocator.full_available_size(rank), allocator.swa_available_size(rank)


def no_faults(allocator):
    return not any(allocator.faults().values())


def test_one_request_from_prefill_to_the_end():
    allocator = new_swa()
    first = extend(allocator, 0, 6, -1)
    assert first.dtype == np.int32
    assert first.tolist() == [4, 5, 6, 7, 8, 9]
    more = allocator.alloc_decode([7], first[-1:])
    mapping = allocator.full_to_swa_index_mapping
    assert (mapping[first] % PAGE == first % PAGE).all()
    assert allocator.count_swa_mapped(np.append(first, more)) == 7
    allocator.free_swa(first[:PAGE])
    assert mapping[first].tolist() == [0, 0, 0, 0, mapping[8], mapping[9]]
    assert sizes(allocator) == (FULL - 2 * PAGE, OF_SWA - PAGE)
    allocator.free(np.append(first, more))
    assert sizes(allocator) == (FULL, OF_SWA)
    assert no_faults(allocator)


@pytest.mark.parametrize("side", ["full", "swa"])
def test_short_on_either_side_gives_none_and_takes_nothing(side):
    allocator = new_swa()
    row = extend(allocator, 0, PAGE, -1)
    view = getattr(allocator, f"{side}_attn_allocator")
    view.alloc(view.available_size())
    before = sizes(allocator)
    assert allocator.alloc(PAGE) is None
    assert extend(allocator, PAGE, 2 * PAGE, row[-1]) is None
    assert allocator.alloc_decode([PAGE + 1], row[-1:]) is None
    assert sizes(allocator) == before
    assert allocator.available_size() == 0
    assert not allocator.new_pages_available(1, 1)
    assert no_faults(allocator)
    swa.check(allocator.pools.state())


def test_more_than_a_pool_can_ever_hold_gives_none():
    allocator = new_swa()
    assert allocator.alloc(4 * FULL) is None
    assert extend(allocator, 0, 4 * FULL, -1) is None
    assert allocator.full_attn_allocator.alloc(2 * FULL) is None


def test_sides_are_views_of_one_state():
    allocator = new_swa()
    full, of_swa = allocator.full_attn_allocator, allocator.swa_attn_allocator
    slots, swa_slots = full.alloc(2 * PAGE), of_swa.alloc(2 * PAGE)
    mapping = allocator.full_to_swa_index_mapping
    assert mapping[slots].tolist() == [0] * 2 * PAGE
    allocator.set_full_to_swa_mapping(slots, swa_slots)
    assert mapping[slots].tolist() == swa_slots.tolist()
    of_swa.free(swa_slots[:1])  # the full page stays, without its SWA side
    assert mapping[slots].tolist() == [0] * PAGE + swa_slots[PAGE:].tolist()
    full.free(slots[PAGE:])  # the SWA page stays, and nothing maps to it
    assert sizes(allocator) == (FULL - PAGE, OF_SWA - PAGE)
    assert mapping[slots].tolist() == [0] * 2 * PAGE
    full.free_page_ids(slots[:1] // PAGE)
    of_swa.free_segment(swa_slots[PAGE:], start_pos=PAGE)
    assert sizes(allocator) == (FULL, OF_SWA)
    assert no_faults(allocator)
    swa.check(allocator.pools.state())
    extended = full.alloc_extend([0], [PAGE + 1], [-1], PAGE + 1)
    assert full.alloc_decode([PAGE + 2], extended[-1:]).tolist() == [extended[-1] + 1]
    assert allocator.swa_available_size() == OF_SWA
    with pytest.raises(NotImplementedError):
        of_swa.alloc_decode([1], [-1])


def test_ranks_are_apart():
    cache = SimpleNamespace()
    allocator = new_swa(dp_size=2, kvcache=cache)
    assert cache.full_to_swa_index_mapping is allocator.full_to_swa_index_mapping
    one, two = (allocator.alloc(2 * PAGE, dp_rank=rank) for rank in (0, 1))
    assert one.tolist() == two.tolist()
    allocator.free(one, dp_rank=0)
    assert sizes(allocator, 0) == (FULL, OF_SWA)
    assert sizes(allocator, 1) == (FULL - 2 * PAGE, OF_SWA - 2 * PAGE)
    assert cache.full_to_swa_index_mapping[0][one].tolist() == [0] * 2 * PAGE
    assert cache.full_to_swa_index_mapping[1][two].min() > 0
    allocator.clear(dp_rank=1)
    assert sizes(allocator, 1) == (FULL, OF_SWA)
    with pytest.raises(MISUSES, match="dp_rank"):
        allocator.alloc(PAGE, dp_rank=2)


@pytest.mark.parametrize("make", [new_swa, new_sglang])
def test_a_group_settles_pages_at_the_call_and_releases_them_at_its_end(make):
    allocator = make()
    old, new = allocator.alloc(PAGE), allocator.alloc(PAGE)
    mapping = allocator.full_to_swa_index_mapping
    old_swa, new_swa_slots = mapping[old], mapping[new]
    before = sizes(allocator)
    allocator.free_group_begin()
    row = old.copy()
    allocator.free_swa(row)
    row[:] = 0  # what the caller does with its array afterwards is its own business
    allocator.set_full_to_swa_mapping(old, new_swa_slots)
    assert sizes(allocator) == before
    allocator.free_group_end()
    assert mapping[old].tolist() == new_swa_slots.tolist()
    assert mapping[new].tolist() == [0] * PAGE
    assert sizes(allocator) == (before[0], before[1] + PAGE)
    free_pages = np.concatenate([np.ravel(allocator.swa_attn_allocator.free_pages)])
    assert old_swa[0] // PAGE in free_pages
    assert new_swa_slots[0] // PAGE not in free_pages


def test_the_queue_of_a_group_can_be_looked_at():
    allocator = new_swa(dp_size=2)
    slots = allocator.alloc(2 * PAGE, dp_rank=1)
    assert allocator.is_not_in_free_group
    allocator.free_group_begin()
    assert allocator.free_group == [[], []]
    allocator.free(slots, dp_rank=1)
    allocator.free_group[1].clear()  # a copy
    assert [len(queued) for queued in allocator.free_group] == [0, 1]
    allocator.clear(dp_rank=0)  # one rank anew: the group goes on
    assert not allocator.is_not_in_free_group
    allocator.free_group_end()
    assert allocator.free_group == [[], []]
    assert sizes(allocator, 1) == (FULL, OF_SWA)
    assert no_faults(allocator)


def test_a_backup_is_good_for_ever_and_as_often_as_wanted():
    allocator = new_swa()
    held = allocator.alloc(PAGE)
    backup = allocator.backup_state()
    mapped = allocator.full_to_swa_index_mapping[held]
    for _ in range(2):
        allocator.free_group_begin()
        allocator.free(held)
        assert allocator.alloc(PAGE) is not None
        allocator.restore_state(backup)
        assert allocator.is_not_in_free_group
        assert sizes(allocator) == (FULL - PAGE, OF_SWA - PAGE)
        assert allocator.full_to_swa_index_mapping[held].tolist() == mapped.tolist()
    with pytest.raises(MISUSES, match="backup"):
        allocator.restore_state((None, None))
    with pytest.raises(MISUSES, match="other pools"):
        new_swa(page=1).restore_state(backup)


def test_the_mapping_reads_like_an_array_of_now():
    cache = SimpleNamespace()
    allocator = new_swa(kvcache=cache)
    mapping = cache.full_to_swa_index_mapping
    slots = allocator.alloc(2 * PAGE)
    plain = np.zeros(FULL + PAGE, np.int32)
    plain[slots] = slots
    assert len(mapping) == mapping.size == FULL + PAGE
    assert mapping.shape == (FULL + PAGE,)
    assert np.array_equal(mapping, plain)
    assert ((mapping > 0) == (plain > 0)).all()
    assert (mapping + 1).sum() == (plain + 1).sum()
    assert mapping[4] == plain[4]
    for key in (slice(2, 9), slice(None, None, 3), plain > 0, [5, 6], np.array([[4], [8]]), -1, []):
        assert np.array_equal(mapping[key], plain[key])
    assert mapping.tolist() == plain.tolist()
    assert jax.tree.leaves(mapping)[0].tolist() == plain.tolist()
    assert jax.jit(lambda m: m[5])(mapping) == plain[5]
    with pytest.raises(IndexError):
        mapping[FULL + PAGE]
    with pytest.raises(MISUSES, match="clear"):
        mapping.fill(0)
    with pytest.raises(MISUSES):
        np.add(plain, 1, out=mapping)
    mapping[slots[:PAGE]] = 0
    assert mapping[slots[:PAGE]].tolist() == [0] * PAGE
    mapping[slots[:PAGE]] = slots[:PAGE]
    assert np.array_equal(mapping, plain)
    assert no_faults(allocator)


def test_swa_tails_in_batches():
    allocator = new_swa()
    row = allocator.alloc_extend_swa_tail([0, 0], [9, 4], [-1, -1], 13, [3, 0])
    mapped = allocator.translate_loc_from_full_to_swa(row)
    assert (mapped[:4] == 0).all()
    assert (mapped[4:9] % PAGE == row[4:9] % PAGE).all()
    assert (mapped[9:] == 0).all()
    allocator.free_full(row[:4])
    allocator.free(row[4:])
    assert sizes(allocator) == (FULL, OF_SWA)
    assert no_faults(allocator)


@pytest.mark.parametrize("make", [new_swa, new_sglang])
def test_segments(make):
    allocator = make()
    row = allocator.alloc(4 * PAGE)
    allocator.free_swa_segment(row[: PAGE + 1], start_pos=0)
    assert sizes(allocator) == (FULL - 4 * PAGE, OF_SWA - 2 * PAGE)
    allocator.free_full_segments([(row[: PAGE + 1], 0)])
    allocator.free_segments([(row[2 * PAGE : 2 * PAGE + 1], 2 * PAGE), (row[3 * PAGE :], 3 * PAGE)])
    assert sizes(allocator) == (FULL, OF_SWA)
    assert no_faults(allocator)
    with pytest.raises(MISUSES, match="boundary"):
        allocator.free_segment(row[1:], start_pos=1)
    with pytest.raises(MISUSES, match="share no page"):
        allocator.free_segments([(row[:5], 0), (row[4:], PAGE)])
    allocator.free_segments([(row[:0], 3)])  # nothing in it: nothing to object to


def test_misuse_is_counted_and_in_debug_mode_raised():
    allocator = new_swa()
    slots = allocator.alloc(PAGE)
    for _ in range(2):
        allocator.free(slots)
    assert sizes(allocator) == (FULL, OF_SWA)
    assert allocator.faults()["double_free"] == 1
    allocator.debug_mode = True
    with pytest.raises(MISUSES, match="double_free"):
        allocator.free(slots)
    allocator.free_group_begin()
    allocator.free(slots)
    with pytest.raises(MISUSES, match="group"):
        allocator.free_group_end()
    assert sizes(allocator) == (FULL, OF_SWA)


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda a: a.alloc(PAGE + 1), "multiple of page_size=4"),
        (lambda a: a.alloc(-PAGE), "multiple"),
        (lambda a: a.alloc_extend([0], [5], [-1], 4), "5 tokens, got 4"),
        (lambda a: a.alloc_extend([0, 0], [5], [-1], 5), "agree"),
        (lambda a: a.alloc_extend([5], [4], [-1], -1), "evicting would not help"),
        (lambda a: a.alloc_decode([6], [30]), "last_loc"),
        (lambda a: a.alloc_decode([0], [-1]), "at least 1"),
        (lambda a: a.free([1.5]), "integers"),
        (lambda a: a.free(np.array([2**40])), "int32"),
        (lambda a: a.set_full_to_swa_mapping([4], []), "1 full slots"),
    ],
)
def test_what_cannot_be_right_is_refused_with_reasons(call, says):
    allocator = new_swa()
    with pytest.raises(MISUSES, match=says):
        call(allocator)
    assert sizes(allocator) == (FULL, OF_SWA)


def test_one_pool_by_pages_and_by_tokens():
    paged: Any = sgl_jax.PagedTokenToKVPoolAllocator(2 * OF_SWA + 3, PAGE, "kv", dp_size=2)
    assert (paged.num_pages, paged.pages_per_rank) == (16, 8)
    slots = paged.alloc(2 * PAGE, dp_rank=1)
    more = paged.alloc_extend([8], [9], slots[-1:], 1, dp_rank=1)
    assert paged.available_size(1) == OF_SWA - 3 * PAGE
    assert [len(pages) for pages in paged.free_pages] == [8, 5]
    paged.free(np.append(slots, more), dp_rank=1)
    paged.merge_and_sort_free(dp_rank=1)
    assert sorted(paged.free_pages[1]) == list(range(1, 9))
    assert [len(pages) for pages in paged.release_pages] == [0, 0]
    assert paged.get_kvcache() == "kv"
    tokens: Any = sgl_jax.TokenToKVPoolAllocator(OF_SWA, SimpleNamespace(get_cpu_copy=len))
    assert tokens.alloc(3).tolist() == [1, 2, 3]
    tokens.free([2])
    assert tokens.free_slots[0].tolist() == [*range(4, OF_SWA + 1), 2]
    assert tokens.alloc(OF_SWA) is None
    assert tokens.get_cpu_copy([1, 2]) == 2
    assert no_faults(paged)
    assert no_faults(tokens)


@pytest.mark.parametrize(
    "allocator",
    [
        sgl_jax.PureSWATokenToKVPoolAllocator(OF_SWA, SimpleNamespace(), PAGE),
        sglang.PureSWATokenToKVPoolAllocator(OF_SWA, PAGE, None, "cpu", SimpleNamespace(), False),
    ],
    ids=["sgl_jax", "sglang"],
)
def test_one_pool_that_is_all_windows(allocator):
    slots = allocator.alloc(3 * PAGE)
    assert allocator.full_attn_allocator is allocator.swa_attn_allocator
    assert allocator.full_to_swa_index_mapping[slots].tolist() == slots.tolist()
    allocator.free_swa_segment(slots[:PAGE], start_pos=0)
    allocator.free_full(slots[:PAGE])  # nothing more to give
    assert sizes(allocator) == (OF_SWA - 2 * PAGE,) * 2
    allocator.free(slots[PAGE:])
    assert sizes(allocator) == (OF_SWA, OF_SWA)
    assert allocator.swa_attn_allocator.alloc(OF_SWA) is not None
    allocator.clear()
    with pytest.raises(NotImplementedError):
        allocator.clear_full_to_swa_mapping(slots)
    with pytest.raises(NotImplementedError):
        allocator.set_full_to_swa_mapping(slots, slots)
    assert no_faults(allocator)


def test_sglang_signatures_and_types():
    heard = []
    cache = SimpleNamespace(register_mapping=heard.append, full_kv_pool="full", swa_kv_pool="swa")
    allocator = new_sglang(kvcache=cache)
    assert allocator.size == OF_SWA
    assert (allocator.size_full, allocator.size_swa) == (FULL, OF_SWA)
    assert allocator.swa_attn_allocator.get_kvcache() == "swa"
    mapping = allocator.full_to_swa_index_mapping
    assert heard == [mapping] or heard[0] is mapping
    assert mapping[-1] == -1
    assert len(mapping) == FULL + PAGE + 1
    slots = allocator.alloc_extend([0], [0], [5], [5], [-1], 5, num_new_pages=2)
    more = allocator.alloc_decode([6], [6], slots[-1:])
    tail = allocator.alloc_extend_swa_tail([0], [0], [8], [8], [-1], 8, 2)
    assert {slots.dtype, more.dtype, tail.dtype, mapping[slots].dtype} == {np.dtype(np.int64)}
    assert mapping[tail].tolist() == [0, 0, 0, 0, *mapping[tail][4:]]
    assert allocator.free_group is None
    allocator.free_group_begin()
    with pytest.raises(MISUSES, match="nest"):
        allocator.free_group_begin()
    allocator.free(np.concatenate([slots, more, tail]))
    assert len(allocator.free_group or []) == 1
    allocator.free_group_end()
    assert allocator.swa_capacity_and_available(full_capacity=1, swa_capacity=2) == (
        (1, FULL),
        (2, OF_SWA),
    )
    assert len(allocator.full_attn_allocator.get_all_free_pages()) == FULL // PAGE
    allocator.resize(
        SimpleNamespace(full_max_total_num_tokens=2 * OF_SWA, swa_max_total_num_tokens=OF_SWA)
    )
    assert heard[0][slots].tolist() == [0] * 5
    assert not sglang.is_swa_req_ring(allocator)


def test_sglang_one_pool_resizes():
    allocator: Any = sglang.TokenToKVPoolAllocator(OF_SWA * 2, None, "cpu", None, True)
    allocator.resize(SimpleNamespace(max_total_num_tokens=OF_SWA))
    assert allocator.free_pages.tolist() == list(range(1, OF_SWA + 1))
    assert allocator.release_pages.size == 0
    assert allocator.alloc(OF_SWA + 1) is None


def test_a_ring_for_each_request_leaves_full_pages_alone_to_grant():
    slots = SimpleNamespace(available_size=lambda: 3)
    cache = SimpleNamespace(swa_req_ring_size=6)
    allocator = sglang.SWATokenToKVPoolAllocator(FULL, 8, PAGE, None, "cpu", cache, False, slots)
    assert sglang.is_swa_req_ring(allocator)
    assert (allocator.swa_ring_cost_tokens, allocator.size_swa) == (8, 24)
    assert (allocator.available_size(), allocator.swa_available_size()) == (FULL, 24)
    row = extend_both(allocator, 0, FULL - PAGE, -1)
    assert allocator.new_pages_available(1, 100)
    assert not allocator.new_pages_available(2, 0)
    assert allocator.full_to_swa_index_mapping[row].tolist() == [0] * len(row)
    allocator.free_swa(row)
    allocator.free_swa_segment(row, start_pos=0)
    allocator.clear_full_to_swa_mapping(row)
    assert (allocator.available_size(), allocator.swa_available_size()) == (PAGE, 24)
    assert extend_both(allocator, len(row), FULL + 1, row[-1]) is None
    allocator.free_segment(row, start_pos=0)
    assert allocator.available_size() == FULL
    with pytest.raises(MISUSES, match="no SWA pages"):
        allocator.swa_attn_allocator.alloc(PAGE)
    with pytest.raises(MISUSES, match="how many"):
        sglang.SWATokenToKVPoolAllocator(FULL, 8, PAGE, None, "cpu", cache, False)
    assert no_faults(allocator)


def test_isinstance_checks_of_an_engine_can_be_taught():
    class Theirs(abc.ABC):  # noqa: B024
        pass

    engine = types.ModuleType("engine")
    engine.SWATokenToKVPoolAllocator = Theirs  # type: ignore[attr-defined]
    done = register_classes(engine, *(getattr(sgl_jax, name) for name in sgl_jax.__all__[:1]))
    assert done == []
    assert register_classes(engine, sgl_jax.SWATokenToKVPoolAllocator) == [
        "SWATokenToKVPoolAllocator"
    ]
    assert isinstance(new_swa(), Theirs)


class Ledger:
    """Who holds what, in plain dictionaries: full page -> whether it has an SWA side."""

    def __init__(self):
        self.pages = {}

    def sizes(self):
        return FULL - PAGE * len(self.pages), OF_SWA - PAGE * sum(self.pages.values())

    def check(self, allocator):
        assert sizes(allocator) == self.sizes()
        mapping = np.asarray(allocator.full_to_swa_index_mapping)[: FULL + PAGE]
        mapped = {page: bool(mapping[page * PAGE]) for page in range(1, FULL // PAGE + 1)}
        assert {page for page, has in mapped.items() if has} == {
            page for page, has in self.pages.items() if has
        }
        targets = mapping[mapping > 0]
        assert len(set(targets)) == len(targets)


@pytest.mark.parametrize("make", [new_swa, new_sglang])
def test_random_calls_agree_with_a_ledger(make):
    random, allocator, ledger = Random(5), make(), Ledger()
    rows: list[list[int]] = []

    def grow(row, count):
        lengths = [len(row)], [len(row) + count]
        doubled = [part for part in lengths for _ in (0, 1)] if make is new_sglang else lengths
        return allocator.alloc_extend(*doubled, [row[-1] if row else -1], count)

    for step in range(250):
        action = random.choice(["new", "grow", "decode", "free", "free_swa", "free_swa"])
        if action == "new" or not rows:
            rows.append([])
        row = rows[-1] if action == "new" else random.choice(rows)
        if action in ("new", "grow", "decode"):
            count = 1 if action == "decode" else random.randint(1, 2 * PAGE)
            room = -len(row) % PAGE
            old = {row[-1] // PAGE} if row and room else set()
            pages = -(-max(0, count - room) // PAGE)
            lost = sum(not ledger.pages[page] for page in old)  # gets its SWA side again
            short = PAGE * pages > ledger.sizes()[0] or PAGE * (pages + lost) > ledger.sizes()[1]
            slots = grow(row, count)
            assert (slots is None) == short
            if slots is not None:
                row.extend(map(int, slots))
                ledger.pages |= dict.fromkeys({int(s) // PAGE for s in slots} | old, True)
        elif action == "free":
            allocator.free(np.array(row, np.int64))
            for page in {slot // PAGE for slot in row}:
                del ledger.pages[page]
            rows.remove(row)
        elif row:
            page = random.choice(row) // PAGE
            allocator.free_swa([page * PAGE])
            ledger.pages[page] = False
        rows = [row for row in rows if row]
        if step % 5 == 0:
            ledger.check(allocator)
    for row in rows:
        allocator.free(row)
    assert sizes(allocator) == (FULL, OF_SWA)
    assert {name for name, count in allocator.faults().items() if count} <= {"unmapped"}
    swa.check(allocator.pools.state())
