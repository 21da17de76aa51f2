"""Calls of the class interfaces that cannot be right: refused in words, and nothing has changed."""

import copy
import pickle

import numpy as np
import pytest

from swa_jax.compat import sgl_jax
from swa_jax.compat.sgl_jax import DecLockRefParams, EvictParams, EvictResult, MisuseError
from tests.test_compat_allocators import FULL, OF_SWA, PAGE, new_sglang, new_swa, no_faults, sizes
from tests.test_compat_radix_cache import FULL as TREE_FULL
from tests.test_compat_radix_cache import SWA as TREE_SWA
from tests.test_compat_radix_cache import Engine, Request, Rows

# Numbers.


@pytest.mark.parametrize("bad", [4.9, "4", True, None], ids=str)
@pytest.mark.parametrize(
    "call",
    [
        lambda a, bad: a.alloc(bad),
        lambda a, bad: a.alloc_extend([0], [4], [-1], bad),
        lambda a, bad: a.alloc_extend_swa_tail([0], [4], [-1], 4, bad),
        lambda a, bad: a.free_page_ids([bad]),
        lambda a, bad: a.free_segment([4, 5], start_pos=bad),
        lambda a, bad: a.free_segments([([4, 5], bad)]),
        lambda a, bad: a.available_size(dp_rank=bad),
    ],
    ids=["need", "extend", "tail", "pages", "segment", "segments", "rank"],
)
def test_what_is_no_integer_is_not_read_as_one(call, bad):
    allocator = new_swa()
    allocator.alloc(PAGE)
    before = sizes(allocator)
    with pytest.raises(MisuseError, match="integer"):
        call(allocator, bad)
    assert sizes(allocator) == before
    assert no_faults(allocator)


def test_slots_to_look_up_are_integers_or_a_mask():
    allocator = new_swa()
    slots = allocator.alloc(2 * PAGE)
    mask = np.zeros(FULL + PAGE, bool)
    mask[slots[1:]] = True
    assert allocator.count_swa_mapped(mask) == 2 * PAGE - 1
    mapping = allocator.full_to_swa_index_mapping
    assert allocator.translate_loc_from_full_to_swa(mask).tolist() == mapping[slots[1:]].tolist()
    for bad in ([4.7], ["4"], None):
        with pytest.raises(MisuseError, match="bool mask"):
            allocator.count_swa_mapped(bad)
    with pytest.raises(IndexError):
        allocator.count_swa_mapped([2**32 + 4])
    with pytest.raises(MisuseError, match="dp_rank"):
        allocator.count_swa_mapped([4], dp_rank=1)
    assert allocator.count_swa_mapped([]) == 0


def test_page_ids_that_would_wrap_are_refused():
    allocator = new_swa()
    allocator.alloc(PAGE)
    for ids in (np.array([2**30], np.int32), [-(2**30)], [2**40]):
        with pytest.raises(MisuseError, match="page_ids"):
            allocator.free_page_ids(ids)
    assert no_faults(allocator)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"page_size": 0}, "page_size must be 1 or more"),
        ({"dp_size": 0}, "dp_size must be 1 or more"),
        ({"page_size": 4.0}, "page_size must be an integer"),
        ({"page_size": 128}, "must hold a page of 128 tokens for each of 1"),
        ({"dp_size": 65}, "each of 65"),
    ],
)
def test_pools_that_cannot_be_say_why(options, says):
    for make in (
        lambda **rest: sgl_jax.SWATokenToKVPoolAllocator(64, 64, None, **rest),
        lambda **rest: sgl_jax.PureSWATokenToKVPoolAllocator(64, None, **rest),
        lambda page_size=1, **rest: sgl_jax.PagedTokenToKVPoolAllocator(
            64, page_size, None, **rest
        ),
    ):
        with pytest.raises(MisuseError, match=says):
            make(**options)
    if "page_size" in options and options["page_size"] != 128:
        with pytest.raises(MisuseError, match=says):
            new_sglang(page=options["page_size"])


@pytest.mark.parametrize("tail", [-1, 6, [1, 2, 3]])
def test_a_tail_is_of_the_tokens_that_its_row_adds(tail):
    allocator = new_swa()
    with pytest.raises(MisuseError, match=r"tokens that its row adds|agree"):
        allocator.alloc_extend_swa_tail([0, 0], [5, 4], [-1, -1], 9, tail)
    assert sizes(allocator) == (FULL, OF_SWA)
    assert no_faults(allocator)


def test_one_tail_does_for_all_rows():
    row = new_swa().alloc_extend_swa_tail([0, 0], [5, 4], [-1, -1], 9, 4)
    assert len(row) == 9


# Segments, groups.


def test_a_bad_segment_keeps_those_before_it():
    allocator = new_swa()
    row = allocator.alloc(2 * PAGE)
    for bad in ((row[PAGE:].astype(float), PAGE), (row[PAGE:], 5), (row[PAGE:], None)):
        for frees in (allocator.free_segments, allocator.free_full_segments):
            with pytest.raises(MisuseError):
                frees([(row[:PAGE], 0), bad])
    assert sizes(allocator) == (FULL - 2 * PAGE, OF_SWA - 2 * PAGE)
    allocator.free_segments((row[start : start + PAGE], start) for start in (0, PAGE))
    assert sizes(allocator) == (FULL, OF_SWA)


def test_faults_from_before_a_clear_or_restore_are_not_a_groups():
    allocator = new_swa(dp_size=2)
    allocator.debug_mode = True
    backup = allocator.backup_state()
    slots = allocator.alloc(PAGE, dp_rank=1)
    for anew in (allocator.clear, lambda: allocator.restore_state(backup)):
        with pytest.raises(MisuseError, match="double_free"):
            allocator.free([4], dp_rank=0)  # counted
        allocator.free_group_begin()
        anew()
        allocator.free_group_end()
    with pytest.raises(MisuseError, match="double_free"):
        allocator.free([4], dp_rank=0)
    allocator.free_group_begin()
    allocator.clear(dp_rank=0)
    allocator.free(slots, dp_rank=1)
    with pytest.raises(MisuseError, match="'double_free': 1"):  # the other rank's are
        allocator.free_group_end()


# Writes of the mapping.


@pytest.mark.parametrize("make", [new_swa, new_sglang])
def test_the_mapping_is_written_by_any_key(make):
    allocator = make()
    slots = allocator.alloc(2 * PAGE)
    mapping = allocator.full_to_swa_index_mapping
    of_swa = mapping[slots]
    mask = np.zeros(len(mapping), bool)
    mask[slots] = True
    for key in (slice(PAGE, 3 * PAGE), mask, slots.tolist()):
        mapping[key] = 0
        assert allocator.count_swa_mapped(slots) == 0
        mapping[key] = of_swa
        assert mapping[slots].tolist() == of_swa.tolist()
    if make is new_swa:
        mapping[...] = 0
    else:
        with pytest.raises(MisuseError, match="holds -1 for ever"):
            mapping[...] = 0
        mapping[-1] = -1  # what is there
        mapping[:-1] = 0
    assert allocator.count_swa_mapped(slots) == 0
    assert no_faults(allocator)


@pytest.mark.parametrize(
    ("key", "value", "says"),
    [
        ([4, 8], [0, 4.5], "integers"),
        (slice(4, 12), [0] * 4 + [-3] * 4, "must be 0"),
        (slice(4, 12), [0] * 4 + [99] * 4, "must be 0"),
        (slice(4, 12), [0] * 3, "8 places"),
        (slice(4, 12), [0] * 4 + [9, 8, 11, 10], "one place in their pages"),
        (slice(4, 8), [0, 0, 10, 11], "in part"),
        (-1, 7, "for ever"),
        ([4, -1], [0, 0], "for ever"),
    ],
)
def test_a_refused_write_of_the_mapping_changes_nothing(key, value, says):
    allocator = new_sglang()
    allocator.alloc(2 * PAGE)
    mapping = allocator.full_to_swa_index_mapping
    before = mapping.tolist()
    with pytest.raises(MisuseError, match=says):
        mapping[key] = value
    assert mapping.tolist() == before
    assert no_faults(allocator)


# Pools and a tree over them.


def test_a_tree_knows_the_states_that_it_is_of():
    engine = Engine()
    pool, cache = engine.pool, engine.cache
    empty = pool.backup_state()
    key = [1, 2, 3]
    slots = engine.cached(key)
    filled = pool.backup_state()
    engine.grant(4)
    pool.restore_state(filled)  # the tree has not changed since
    assert engine.match(key).device_indices.tolist() == slots.tolist()
    request = Request(key, 0, committed=3)
    for anew in (pool.clear, lambda: pool.restore_state(empty)):
        anew()
        for call in (
            lambda: engine.match(key),
            lambda: engine.match([9]),
            lambda: engine.insert(key, slots),
            lambda: engine.evict(full=1),
            lambda: cache.full_evictable_size(),
            lambda: cache.cache_finished_req(request),
        ):
            with pytest.raises(MisuseError, match="reset"):
                call()
        pool.restore_state(filled)
        assert engine.hit(key) == 3  # back in the state that the tree is of
    engine.evict(full=1)
    pool.restore_state(filled)
    with pytest.raises(MisuseError, match="reset"):
        engine.match(key)
    cache.reset()
    pool.clear()  # an empty tree is of any state
    assert engine.hit(key) == 0
    engine.cached(key)
    engine.check()


def test_ranks_are_cleared_apart():
    engine = Engine(ranks=2)
    keys = [sgl_jax.RadixKey([1, 2, 3], None, rank) for rank in (0, 1)]
    for rank in (0, 1):
        engine.insert(keys[rank], engine.grant(3, rank))
    engine.pool.clear(dp_rank=1)
    assert engine.hit(keys[0]) == 3
    with pytest.raises(MisuseError, match="reset"):
        engine.match(keys[1])


@pytest.mark.parametrize("huge", [2**31 - 1, 2**31, 2**70])
def test_no_more_is_evicted_than_there_is(huge):
    engine = Engine()
    engine.cached([1, 2, 3])
    assert engine.evict(huge, huge) == EvictResult(3, 3)
    assert engine.available == (TREE_FULL, TREE_SWA)


@pytest.mark.parametrize("bad", [0.5, float("inf"), None, "4"])
def test_evicting_what_is_no_number_of_tokens_is_refused(bad):
    engine = Engine()
    engine.cached([1, 2, 3])
    for params in (EvictParams(bad, 0), EvictParams(0, bad)):
        with pytest.raises(MisuseError, match="num_tokens must be an integer"):
            engine.cache.evict(params)
    assert engine.hit([1, 2, 3]) == 3


def test_keys_and_ranks_of_no_kind_are_refused():
    engine = Engine()
    with pytest.raises(MisuseError, match="token_ids"):
        engine.match(None)  # type: ignore[arg-type]
    with pytest.raises(MisuseError, match="dp_rank"):
        engine.match(sgl_jax.RadixKey([1], None, 0.5))  # type: ignore[arg-type]
    with pytest.raises(MisuseError, match="0 or more"):
        engine.insert([1], engine.grant(1), previous=-1)
    assert engine.insert([1], engine.grant(1), previous=2**40, evicted=2**40) == 0


def test_a_request_whose_lock_does_not_stand_hands_nothing_over():
    engine = Engine()
    engine.cached([1, 2])
    node = engine.match([1, 2]).last_device_node
    asked = []
    request = Request([1, 2, 3, 4], 0, fill_ids=[1, 2, 3, 4], last_node=node)
    request.pop_committed_kv_cache = lambda: asked.append(1) or 4  # type: ignore[method-assign]
    slots = np.append(engine.match([1, 2]).device_indices, engine.grant(2))
    engine.rows.write((0, slice(0, 4)), slots)
    request.cache_protected_len = 2
    before = engine.available, engine.cache.total_size()
    for call in (engine.cache.cache_finished_req, engine.cache.cache_unfinished_req):
        with pytest.raises(MisuseError, match="no such lock"):
            call(request)
    request.last_node = None  # nor one that is shorter than what is said to be locked
    with pytest.raises(MisuseError, match="not locked"):
        engine.cache.cache_unfinished_req(request)
    assert (engine.available, engine.cache.total_size()) == before
    assert not asked
    assert request.swa_uuid_for_lock is None


@pytest.mark.parametrize("twin", [copy.deepcopy, lambda one: pickle.loads(pickle.dumps(one))])
def test_a_copied_cache_lives_on_its_own(twin):
    engine = Engine()
    key = [1, 2, 3, 4, 5]
    engine.cached(key)
    node = engine.match(key).last_device_node
    lock = engine.cache.inc_lock_ref(node).swa_uuid_for_lock
    assert node.key is not None  # something has been read
    cache, same = twin((engine.cache, node))
    assert same.tree is cache
    assert cache.token_to_kv_pool_allocator.pools is cache._pools
    assert cache.match_prefix(sgl_jax.MatchPrefixParams(key)).last_device_node is same
    assert np.array_equal(same.value, node.value)  # type: ignore[arg-type]
    assert (same.full_lock_ref, twin(node).full_lock_ref) == (1, 1)
    cache.dec_lock_ref(same, DecLockRefParams(lock))
    assert cache.evict(EvictParams(5, 5)) == EvictResult(5, 5)
    cache.sanity_check()
    assert cache.token_to_kv_pool_allocator.full_available_size() == TREE_FULL
    assert node.full_lock_ref == 1
    assert engine.hit(key) == 5
    engine.check()


def test_a_tree_in_a_group_queues_beside_what_is_shown():
    engine = Engine()
    engine.cached([1, 2, 3])
    engine.pool.free_group_begin()
    engine.evict(full=3)
    assert engine.pool.free_group == [[]]
    engine.pool.free_group_end()
    assert engine.available == (TREE_FULL, TREE_SWA)


@pytest.mark.parametrize("shift", [1, -1])
def test_slots_that_are_not_a_row_are_not_inserted(shift):
    """Frees are whole pages: pages that only touch the given slots would have gone with them."""
    allocator = sgl_jax.SWATokenToKVPoolAllocator(64, 64, None, 4)
    cache = sgl_jax.SWARadixCache(Rows(), allocator, 8, 4)
    slots = allocator.alloc(12)
    before = allocator.available_size()
    value = slots[1:9] if shift > 0 else slots[::-1][:8]
    with pytest.raises(MisuseError, match="in token order"):
        cache.insert(sgl_jax.InsertParams(key=sgl_jax.RadixKey(list(range(8))), value=value))
    with pytest.raises(MisuseError, match="key must be"):
        cache.insert(sgl_jax.InsertParams(value=slots))
    assert allocator.available_size() == before
    assert (
        cache.insert(sgl_jax.InsertParams(key=sgl_jax.RadixKey(list(range(8))), value=slots[:8]))
        == 0
    )
