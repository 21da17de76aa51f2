"""`SWARadixCache` in sglang-jax's interface: what the tree does, seen through its methods."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace

import numpy as np
import pytest

from swa_jax.compat.common.errors import MisuseError
from swa_jax.compat.sgl_jax.keys import Names, RadixKey, get_child_key
from swa_jax.compat.sgl_jax.params import (
    DecLockRefParams,
    EvictParams,
    EvictResult,
    InsertParams,
    MatchPrefixParams,
    MatchResult,
)
from swa_jax.compat.sgl_jax.radix_cache import SWARadixCache
from swa_jax.compat.sgl_jax.swa import SWATokenToKVPoolAllocator
from swa_jax.compat.sgl_jax.tree_node import TreeNode

FULL, SWA, WINDOW = 32, 28, 4
Key = RadixKey | Sequence[int]


class Rows:
    """Slots of requests, as an engine keeps them."""

    def __init__(self):
        self.req_to_token = np.zeros((4, 32), np.int32)

    def write(self, indices, values):
        self.req_to_token[indices] = values


class Engine:
    """An allocator and a cache, and what scenarios do with them."""

    def __init__(self, page_size: int = 1, tree_page: int | None = None, ranks: int = 1):
        self.rows = Rows()
        self.pool = SWATokenToKVPoolAllocator(FULL * ranks, SWA * ranks, None, page_size, ranks)
        self.cache = SWARadixCache(self.rows, self.pool, WINDOW, tree_page or page_size)

    def grant(self, count: int, rank: int = 0) -> np.ndarray:
        slots = self.pool.alloc(count, rank)
        assert slots is not None
        return slots

    def insert(self, key: Key, slots: np.ndarray, previous: int = 0, evicted: int = 0) -> int:
        return self.cache.insert(InsertParams(key, slots, previous, evicted))

    def cached(self, key: Key, evicted: int = 0) -> np.ndarray:
        """Inserts new slots for all of a key."""
        slots = self.grant(len(key))
        self.insert(key, slots, evicted=evicted)
        return slots

    def match(self, key: Key) -> MatchResult:
        return self.cache.match_prefix(MatchPrefixParams(key))

    def hit(self, key: Key) -> int:
        return len(self.match(key).device_indices)

    def evict(self, full: int = 0, of_swa: int = 0) -> EvictResult:
        return self.cache.evict(EvictParams(full, of_swa))

    @property
    def available(self) -> tuple[int, int]:
        return self.pool.full_available_size(), self.pool.swa_available_size()

    def check(self) -> None:
        self.cache.sanity_check()
        assert not any(self.pool.faults().values())


@dataclass(eq=False)
class Request:
    """What an engine keeps of a request."""

    origin_input_ids: list[int]
    req_pool_idx: int
    output_ids: list[int] = field(default_factory=list)
    fill_ids: list[int] = field(default_factory=list)
    extra_key: str | None = None
    dp_rank: int | None = None
    last_node: TreeNode | None = None
    swa_uuid_for_lock: int | None = None
    prefix_indices: np.ndarray = field(default_factory=lambda: np.empty(0, np.int32))
    last_matched_prefix_len: int = 0
    cache_protected_len: int = 0
    swa_evicted_seqlen: int = 0
    committed: int = 0

    def pop_committed_kv_cache(self) -> int:
        return self.committed


def span(*bounds: tuple[int, int]) -> list[int]:
    return [token for start, end in bounds for token in range(start, end)]


@pytest.fixture
def engine() -> Engine:
    return Engine()


def test_b36_a_window_is_counted_from_the_last_tombstone(engine):
    key = list(range(9))
    slots = engine.cached(key)
    engine.pool.free_swa(slots[[3, 4, 7]])  # 3 live, 2 not, 2 live, 1 not, 1 live
    assert engine.hit(key) == 3
    longer = [*key, 9, 10, 11]
    engine.insert(longer, np.concatenate([slots, engine.grant(3)]), previous=9)
    assert engine.hit(longer) == 12
    engine.check()


def test_b38_a_shorter_hit_needs_a_window_of_its_own():
    for evicted, hit in ((12, 0), (8, 12)):
        engine = Engine(tree_page=4)
        engine.cached(list(range(16)), evicted)
        assert engine.hit(span((0, 14), (90, 92))) == hit
        engine.check()


def test_b39_a_branchs_last_window_leaves_last(engine):
    engine.cached(list(range(12)))
    gone = engine.evict(of_swa=4)
    assert (gone.num_tokens_evicted, gone.swa_num_tokens_evicted) == (0, 4)
    assert engine.hit(list(range(12))) == 12


def test_b41_a_release_undoes_its_lock_across_a_split(engine):
    engine.cached(list(range(6)))
    for live in (10, 4):
        engine.insert(list(range(10)), np.concatenate([_six(engine), engine.grant(4)]), 6)
        node = engine.match(list(range(10))).last_device_node
        locked = engine.cache.inc_lock_ref(node)
        assert (node.full_lock_ref, node.swa_lock_ref) == (1, 1)
        engine.cached(span((0, 8), (50 + live, 52 + live)))  # parts inside of the locked window
        if live == 4:
            engine.evict(of_swa=6)
        engine.cache.dec_lock_ref(node, locked.to_dec_params())
        assert (node.full_lock_ref, node.swa_lock_ref) == (0, 0)
        assert engine.cache.full_protected_size() == engine.cache.swa_protected_size() == 0
        engine.check()


def _six(engine: Engine) -> np.ndarray:
    return engine.match(list(range(6))).device_indices


def test_b45_a_lock_taken_again_is_released_once(engine):
    """Two requests on one node: the one's hand-over and end leave the other's lock alone."""
    key = list(range(10))
    engine.cached(key[:4])
    engine.insert(key, np.concatenate([engine.match(key[:4]).device_indices, engine.grant(6)]), 4)
    node = engine.match(key).last_device_node
    first, second = (_admit(engine, key, row) for row in (0, 1))
    assert (node.full_lock_ref, node.swa_lock_ref) == (2, 2)
    engine.cache.cache_unfinished_req(first)
    assert first.last_node is node
    assert (node.full_lock_ref, node.swa_lock_ref) == (2, 2)
    for left, one in ((1, first), (0, second)):
        one.committed = len(one.fill_ids)
        engine.cache.cache_finished_req(one)
        assert (node.full_lock_ref, node.swa_lock_ref) == (left, left)
    with pytest.raises(AssertionError, match="no such lock"):
        engine.cache.cache_finished_req(second)
    engine.check()


def _admit(engine: Engine, key: list[int], row: int) -> Request:
    """Matches, locks and writes the row of a request whose prompt is cached but for its end."""
    found = engine.match(key)
    request = Request(key, row, fill_ids=list(key))
    request.last_node = found.last_device_node
    lock = engine.cache.inc_lock_ref(found.last_device_node)
    request.swa_uuid_for_lock = lock.swa_uuid_for_lock
    request.prefix_indices = found.device_indices
    request.cache_protected_len = len(found.device_indices)
    engine.rows.write((row, slice(0, len(found.device_indices))), found.device_indices)
    return request


def test_b46_inner_pages_give_their_swa_side(engine):
    engine.cached(list(range(12)))
    before = engine.available
    assert engine.evict(of_swa=4) == EvictResult(0, 4)
    assert engine.available == (before[0], before[1] + 4)
    assert engine.hit(list(range(12))) == 12


def test_copies_are_freed_and_tombstones_recover(engine):
    key = list(range(8))
    slots = engine.cached(key, evicted=4)
    assert engine.available == (FULL - 8, SWA - 4)
    again = engine.grant(8)
    assert engine.insert(key, again) == 8
    assert engine.available == (FULL - 8, SWA - 8)
    assert engine.match(key).device_indices.tolist() == slots.tolist()
    assert not engine.match(key).last_device_node.swa_tombstone
    engine.check()


def test_what_the_tree_has_is_not_looked_at(engine):
    """`prev_prefix_len` tokens are neither freed nor taken, whatever stands there."""
    slots = engine.cached([1, 2, 3])
    others = engine.grant(2)
    value = np.concatenate([others, slots[:1], engine.grant(2)])
    assert engine.insert([1, 2, 3, 4, 5], value, previous=3) == 3
    assert engine.available == (FULL - 7, SWA - 7)
    assert engine.hit([1, 2, 3, 4, 5]) == 5
    engine.pool.free(others)
    engine.check()


def test_what_the_tree_has_lost_is_taken_from_the_request(engine):
    """A caller that believes in more than there is gives all of what it holds."""
    slots = engine.grant(5)
    assert engine.insert([1, 2, 3, 4, 5], slots, previous=3) == 0
    assert engine.match([1, 2, 3, 4, 5]).device_indices.tolist() == slots.tolist()
    engine.check()


def test_a_node_is_not_the_next_one_on_its_page(engine):
    engine.cached([1, 2, 3])
    node = engine.match([1, 2, 3]).last_device_node
    slots = np.empty(0, np.int32)
    while node.page not in slots:
        engine.evict(full=FULL)
        slots = engine.cached(list(range(SWA)))
    assert node.evicted
    with pytest.raises(AssertionError, match="has left the tree"):
        engine.cache.inc_lock_ref(node)
    engine.check()


def test_an_end_without_an_swa_side_is_freed(engine):
    assert engine.insert([1, 2, 3], engine.grant(3), evicted=3) == 0
    assert engine.available == (FULL, SWA)
    assert engine.cache.total_size() == (0, 0)
    engine.cached([1, 2])
    assert engine.insert([1, 2, 3, 4], engine.grant(4), evicted=4) == 2
    assert engine.available == (FULL - 2, SWA - 2)
    engine.check()


def test_misuse_raises_and_changes_nothing():
    engine = Engine(tree_page=2)
    slots = engine.grant(4)
    with pytest.raises(AssertionError, match="multiple of page_size=2, got 1"):
        engine.insert([1, 2, 3, 4], slots, evicted=1)
    with pytest.raises(MisuseError, match="4 tokens need as many slots, got 2"):
        engine.insert([1, 2, 3, 4], slots[:2])
    assert engine.cache.total_size() == (0, 0)
    engine.insert([1, 2, 3, 4], slots)
    node = engine.match([1, 2, 3, 4]).last_device_node
    lock = engine.cache.inc_lock_ref(node)
    engine.cache.dec_lock_ref(node, lock.to_dec_params())
    for params in (lock.to_dec_params(), None, DecLockRefParams(77)):
        with pytest.raises(AssertionError, match="no such lock stands"):
            engine.cache.dec_lock_ref(node, params)
    engine.evict(full=4)
    assert node.evicted
    assert node.value is None
    assert node.key is None
    assert node.parent is None
    assert node.children == {}
    assert not node.swa_tombstone
    assert node.full_lock_ref == 0
    with pytest.raises(AssertionError, match="has left the tree"):
        engine.cache.inc_lock_ref(node)
    engine.insert([1, 2, 3, 4], engine.grant(4))
    assert node.evicted
    engine.cache.reset()
    with pytest.raises(AssertionError, match="from before a reset"):
        engine.cache.inc_lock_ref(node)
    with pytest.raises(MisuseError, match="must be one of swa_jax"):
        SWARadixCache(engine.rows, SimpleNamespace(), WINDOW, 2)  # type: ignore[arg-type]
    paged = SWATokenToKVPoolAllocator(FULL, SWA, None, 2)
    with pytest.raises(MisuseError, match="multiple of the allocator's"):
        SWARadixCache(engine.rows, paged, WINDOW, 3)


def test_a_window_that_went_is_not_locked(engine):
    """Between a match and its lock nothing may evict: the lock says so."""
    slots = engine.cached(list(range(6)))
    node = engine.match(list(range(6))).last_device_node
    engine.pool.free_swa(slots[4:5])
    with pytest.raises(AssertionError, match="has lost SWA pages"):
        engine.cache.inc_lock_ref(node)
    assert (node.full_lock_ref, node.swa_lock_ref) == (0, 0)
    engine.check()


def test_nodes_are_runs_of_pages(engine):
    """A run ends where prompts part, where tombstones and locks do, and at every held node."""
    first, second = span((0, 10)), span((0, 6), (20, 24))
    slots = engine.cached(first, evicted=2)
    engine.cached(second)  # heals the two
    engine.pool.free_swa(slots[:2])
    root = engine.cache.root_node
    assert (root.value, len(root.key), root.parent, root.full_lock_ref) == ([], 0, None, 1)
    (top,) = root.children.values()
    assert top.swa_tombstone
    assert top.key.token_ids == [0, 1]
    assert top.parent is root
    (middle,) = top.children.values()
    assert middle.value.tolist() == slots[2:6].tolist()
    assert middle.parent is top
    assert sorted(middle.children) == [6, 20]
    assert engine.cache.get_child_key_fn(RadixKey([20], None)) in middle.children

    node = engine.match(first[:8]).last_device_node
    assert node.value.tolist() == slots[6:8].tolist()
    assert middle.children[6] is node  # met on the way down, as long as it is held
    assert node.children[8].key.token_ids == [8, 9]
    names = {node.id, top.id, middle.id, root.id}
    assert len(names) == 4
    assert len({node, top, middle, root}) == 4
    assert node == engine.match(first[:8]).best_match_node
    assert top.last_access_time <= node.last_access_time
    del node
    assert middle.children[6].key.token_ids == [6, 7, 8, 9]
    assert sorted(engine.cache.all_values_flatten()) == sorted(
        {*slots.tolist(), *engine.match(second).device_indices.tolist()}
    )


def test_pretty_print_shows_every_node(engine, capsys):
    engine.cached(list(range(4)), evicted=2)
    engine.cache.pretty_print()
    out = capsys.readouterr().out
    assert out.count("2 tokens") == 2
    assert "4 full and 2 SWA tokens" in out


def test_an_old_branch_is_as_recent_as_what_parts_from_it(engine):
    """So SWA pages of the shared beginning leave before those of the older end."""
    engine.cached(span((0, 8), (10, 16)))
    engine.cached(span((0, 8), (20, 26)))
    engine.evict(of_swa=8)
    (shared,) = engine.cache.root_node.children.values()
    assert shared.swa_tombstone
    assert len(shared.value) == 8
    engine.cached([40, 41, 42])
    before = engine.cache.full_evictable_size()
    engine.evict(full=1)  # a branch, not the newest prompt
    assert engine.hit([40, 41, 42]) == 3
    assert engine.cache.full_evictable_size() < before
    engine.check()


def test_namespaces_and_ranks_are_apart():
    engine = Engine(ranks=2)
    spaces = [(None, None), ("a", None), (None, 0), (None, 1), ("a", 1), (None, 7)]
    for extra, rank in spaces:
        slots = engine.grant(3, 0 if rank in (None, 0) else 1)
        assert engine.insert(RadixKey([1, 2, 3], extra, rank), slots) == 0
        assert engine.match(RadixKey([1, 2, 3], extra, rank)).device_indices.tolist() == [*slots]
    assert len(engine.cache.root_node.children) == 6
    sizes = engine.cache.full_evictable_size_
    assert sizes == {0: 9, 1: 9} == engine.cache.swa_evictable_size_
    assert engine.cache.full_evictable_size(1) == 9
    assert engine.cache.full_evictable_size(7) == 0  # counted with the last rank
    assert engine.hit(RadixKey([1, 2, 3], "b", 0)) == 0
    engine.cache.evict(EvictParams(100, 0, dp_rank=1))
    assert engine.cache.full_evictable_size_ == {0: 9, 1: 0}
    assert engine.evict(full=100) == EvictResult(9, 9)
    assert engine.pool.full_available_size(0) == engine.pool.full_available_size(1) == FULL
    engine.check()


def test_keys_of_other_kinds_are_read_by_their_fields(engine):
    key = SimpleNamespace(token_ids=(1, 2, 3), extra_key="x", dp_rank=None)
    slots = engine.grant(3)
    params = SimpleNamespace(key=key, value=slots, prev_prefix_len=0, swa_evicted_seqlen=0)
    assert engine.cache.insert(params) == 0
    assert engine.hit(RadixKey([1, 2, 3], "x")) == 3
    part = RadixKey([1, 2, 3, 4], "x", 2)[1:3]
    assert (part.token_ids, part.extra_key, part.dp_rank) == ([2, 3], "x", 2)
    assert RadixKey([5, 6], "x")[1].token_ids == [6]
    assert list(part) == [2, 3]
    assert get_child_key(part) == ("x", 2, 2)
    assert get_child_key(RadixKey([1, 2]), 2) == (1, 2)
    assert "RadixKey(2 tokens" in repr(part)


def test_names_that_are_in_use_no_more_are_forgotten():
    names: Names[str] = Names()
    assert [names.number(one) for one in "aba"] == [1, 2, 1]
    names.keep([2])
    assert names.find("a") is None
    assert names.thing(2) == "b"
    assert [names.number(one) for one in "cd"] == [1, 3]
    assert len(names) == 3


def test_namespaces_do_not_pile_up(engine, monkeypatch):
    monkeypatch.setattr("swa_jax.compat.sgl_jax.rank_tree._NAMES_BESIDE", -FULL)
    engine.cached(RadixKey([7, 8], "kept"))
    for salt in range(4):
        engine.cached(RadixKey([1, 2], f"salt {salt}"))
        engine.cache.match_prefix(MatchPrefixParams(RadixKey([7, 8], "kept")))
        engine.evict(full=2)
    assert engine.hit(RadixKey([7, 8], "kept")) == 2
    assert engine.hit(RadixKey([1, 2], "salt 1")) == 0
    engine.check()


def test_a_tree_of_larger_pages_parts_at_these_only():
    engine = Engine(tree_page=4)
    slots = engine.cached(list(range(8)))
    assert engine.match(list(range(6))).device_indices.tolist() == slots[:4].tolist()
    other = engine.grant(8)
    assert engine.insert([0, 1, 2, 3, 4, 5, 90, 91], other) == 4
    assert engine.cache.total_size() == (12, 12)
    (shared,) = engine.cache.root_node.children.values()
    assert set(shared.children) == {(4, 5, 6, 7), (4, 5, 90, 91)}
    assert np.array_equal(shared.children[4, 5, 90, 91].value, other[4:])  # type: ignore[arg-type]
    assert engine.insert([1, 2, 3], engine.grant(3)) == 0  # no whole page: given back
    assert engine.available == (FULL - 12, SWA - 12)
    assert engine.evict(full=1) == EvictResult(4, 4)
    engine.check()


def test_in_a_free_group_what_leaves_is_queued(engine):
    engine.cached([1, 2, 3])
    engine.pool.free_group_begin()
    engine.insert([1, 2, 3], engine.grant(3))
    engine.evict(full=3)
    assert engine.available == (FULL - 6, SWA - 6)
    engine.pool.free_group_end()
    assert engine.available == (FULL, SWA)
    engine.check()


def test_a_disabled_cache_keeps_nothing():
    engine = Engine()
    cache = SWARadixCache(engine.rows, engine.pool, WINDOW, 1, disable=True)
    slots = engine.grant(4)
    assert cache.insert(InsertParams([1, 2, 3, 4], slots)) == 0
    found = cache.match_prefix(MatchPrefixParams([1, 2, 3, 4]))
    assert len(found.device_indices) == 0
    assert found.best_match_node is cache.root_node
    assert cache.inc_lock_ref(cache.root_node).swa_uuid_for_lock is None
    cache.dec_lock_ref(cache.root_node)
    assert cache.evict(EvictParams(4)) == EvictResult()
    assert cache.total_size() == (0, 0)
    assert cache.full_evictable_size_ == {0: 0}
    assert cache.root_node.children == {}
    request = Request([1, 2], 0, output_ids=[3, 4], fill_ids=[1, 2, 3, 4], committed=4)
    engine.rows.write((0, slice(0, 4)), slots)
    cache.cache_unfinished_req(request)
    assert request.prefix_indices.tolist() == slots.tolist()
    cache.cache_finished_req(request)
    assert engine.available == (FULL, SWA)


def test_after_a_reset_the_tree_is_empty(engine):
    slots = engine.cached([1, 2, 3])
    engine.cache.inc_lock_ref(engine.match([1, 2, 3]).last_device_node)
    engine.cache.reset()
    assert engine.cache.total_size() == (0, 0)
    assert engine.hit([1, 2, 3]) == 0
    engine.pool.free(slots)
    engine.check()
    engine.cached([1, 2, 3])
    engine.pool.clear()  # without a reset the tree stands on pages that nobody holds
    with pytest.raises(MisuseError, match="reset"):
        engine.cache.sanity_check()
    engine.cache.reset()
    engine.check()


def test_what_this_cache_cannot_do_says_so(engine):
    assert not engine.cache.supports_recurrent()
    assert not engine.cache.recurrent_extra_buffer_active()
    assert engine.cache.take_events() == []
    for call in (
        lambda: engine.cache.protected_size(),
        lambda: engine.cache.init_load_back(engine.cache.root_node, 1),
        lambda: engine.cache.ready_to_load_host_cache(),
        lambda: engine.cache.check_hicache_events(),
    ):
        with pytest.raises(NotImplementedError, match=r"host tier|full_protected_size"):
            call()
