"""vLLM's interfaces: block tables, what of a prompt is cached, and whose a block is."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

import swa_jax as swa
from swa_jax import prefix_cache
from swa_jax.compat.common.errors import MisuseError
from swa_jax.compat.vllm import (
    BlockPool,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheManager,
    SlidingWindowSpec,
    calls,
)
from swa_jax.prefix_cache.events import AllBlocksCleared, BlockRemoved, BlockStored, prefix_hashes

P = 2
MOST = 64  # tokens of a request


@dataclass
class Request:
    """What the manager reads of a request."""

    request_id: str
    all_token_ids: list[int]
    num_computed_tokens: int = 0
    cache_salt: str | None = None
    lora_request: object = None
    mm_features: list = field(default_factory=list)
    skip_reading_prefix_cache: bool = False

    @property
    def num_tokens(self) -> int:
        """Prompt and output so far."""
        return len(self.all_token_ids)


def config(blocks, *kinds, swa_blocks=None):
    specs = {"full": FullAttentionSpec(P), "window": SlidingWindowSpec(P, 5)}
    groups = [KVCacheGroupSpec([kind], specs[kind]) for kind in kinds]
    return KVCacheConfig(blocks, groups, num_swa_blocks=swa_blocks)


HYBRID = ("full", "window")


def manager(*kinds, **options):
    """Of few sizes, each of which compiles once: 16 full and 8 SWA blocks, or 10 of one group."""
    two = not kinds
    made = config(17 if two else 11, *(kinds or HYBRID), swa_blocks=9 if two else None)
    return KVCacheManager(made, MOST, **options)


def check(kv):
    """The laws hold in both worlds, nothing was misused, and every block is in one count."""
    store = kv._store
    prefix_cache.check(store.cache, store.state)
    assert not any(swa.faults(store.state).values())
    for pool in kv.block_pools:
        count_blocks(pool)


def count_blocks(pool):
    """A block is used or free: never both, never neither."""
    used = [block.block_id for block in pool.blocks if block.ref_cnt]
    free = pool.free_ids()
    assert sorted(used + free) == list(range(1, pool.num_gpu_blocks))
    assert pool.get_num_free_blocks() == len(free)


def start(kv, name, tokens, new=None, **more) -> Any:
    """Looks a request up and allocates for its prompt, or the first `new` tokens of the rest."""
    request = Request(name, list(tokens), **more)
    blocks, hit = kv.get_computed_blocks(request)
    new = request.num_tokens - hit if new is None else new
    out = kv.allocate_slots(request, new, hit, blocks)
    if out is not None:
        request.num_computed_tokens = hit + new
    return request, hit, out


def decode(kv, request, token) -> Any:
    """One more token; its block, if it took one."""
    request.all_token_ids.append(token)
    out = kv.allocate_slots(request, 1)
    if out is not None:
        request.num_computed_tokens += 1
    return out


def nothing_is_left(kv):
    check(kv)
    assert kv.usage == 0.0
    assert kv.reset_prefix_cache()
    check(kv)
    full = kv._store.pool.full_tokens
    assert int(swa.full_available_size(kv._store.state)) == full
    assert int(swa.swa_available_size(kv._store.state)) == kv._store.pool.swa_tokens


# ---- one group -------------------------------------------------------------------------------


class TestOneGroup:
    def test_a_prompt_is_cached_while_it_runs_and_after(self):
        kv = manager("full")
        a, hit, blocks = start(kv, "a", [1, 2, 3, 4, 5, 6, 7])
        assert hit == 0
        assert blocks.get_block_ids() == ([1, 2, 3, 4],)
        hashes = prefix_hashes([1, 2, 3, 4, 5, 6, 7], P)
        assert [block.block_hash for block in blocks.blocks[0]] == [*hashes, None]
        assert [block.ref_cnt for block in blocks.blocks[0]] == [1, 1, 1, 1]
        assert blocks.get_unhashed_block_ids() == [4]
        b = Request("b", [1, 2, 3, 4, 5, 6, 9])
        cached, hit = kv.get_computed_blocks(b)
        assert (cached.get_block_ids(), hit) == (([1, 2, 3],), 6)
        new = kv.allocate_slots(b, 1, hit, cached)
        assert new is not None
        assert new.get_block_ids() == ([5],)
        assert [block.ref_cnt for block in cached.blocks[0]] == [2, 2, 2]
        assert kv.get_block_ids("b") == ([1, 2, 3, 5],)
        assert kv.get_num_common_prefix_blocks("a") == [3]
        assert kv.block_pool.get_num_free_blocks() == 5
        assert kv.usage == 0.5
        assert not kv.reset_prefix_cache()
        kv.free(a)
        kv.free(b)
        queue = kv.block_pool.free_block_queue
        assert queue.num_free_blocks == 10
        ids = [block.block_id for block in queue.get_all_free_blocks()]
        assert ids == [6, 7, 8, 9, 10, 4, 5, 3, 2, 1]  # not cached first; a text from its end
        c, hit, blocks = start(kv, "c", range(50, 70))
        assert hit == 0
        assert blocks.get_block_ids()[0][:7] == ids[:7]
        assert sorted(blocks.get_block_ids()[0]) == list(range(1, 11))
        assert kv.get_computed_blocks(Request("d", [1, 2, 3, 4, 5])) == (
            kv.empty_kv_cache_blocks,
            0,
        )
        kv.free(c)
        nothing_is_left(kv)

    def test_the_last_token_is_always_computed(self):
        kv = manager("full")
        a, _, _ = start(kv, "a", [1, 2, 3, 4])
        assert kv.get_computed_blocks(Request("b", [1, 2, 3, 4]))[1] == 2
        assert kv.get_computed_blocks(Request("b", [1, 2, 3, 4, 5]))[1] == 4
        assert kv.get_computed_blocks(Request("b", [1, 2, 3, 4, 5], cache_salt="x"))[1] == 0
        assert kv.get_computed_blocks(Request("b", [1, 2, 3, 4, 5], lora_request="x"))[1] == 0
        skips = Request("b", [1, 2, 3, 4, 5], skip_reading_prefix_cache=True)
        assert kv.get_computed_blocks(skips) == (kv.empty_kv_cache_blocks, 0)
        kv.free(a)
        nothing_is_left(kv)

    def test_two_that_compute_the_same_keep_their_tables(self):
        """Both began before either was cached: a table never changes, the copy goes at the end."""
        kv = manager("full")
        a, _, _ = start(kv, "a", [1])
        b, _, _ = start(kv, "b", [1])
        for token in (2, 3, 4, 5):
            decode(kv, a, token)
            decode(kv, b, token)
        assert kv.get_block_ids("a") == ([1, 3, 5],)
        assert kv.get_block_ids("b") == ([2, 4, 6],)
        decode(kv, b, 6)  # the first to fill its third block, which hangs from its own two
        text = Request("c", [1, 2, 3, 4, 5, 6, 7])
        assert kv.get_computed_blocks(text)[0].get_block_ids() == ([1, 3],)
        kv.free(a)
        check(kv)
        assert kv.block_pool.get_num_free_blocks() == 7  # what b has not is free
        kv.free(b)
        assert kv.get_computed_blocks(text)[0].get_block_ids() == ([1, 3, 6],)
        assert kv.block_pool.get_num_free_blocks() == 10
        nothing_is_left(kv)

    @pytest.mark.parametrize(("kinds", "most"), [(("full",), 20), ((), 32)])
    def test_a_request_that_fits_is_not_refused_for_a_copy_of_its_own_block(self, kinds, most):
        """A prompt that ends with a block: its last token, so that block, is computed again."""
        kv = manager(*kinds)
        a, _, _ = start(kv, "a", range(8))
        kv.free(a)
        b, hit, _ = start(kv, "b", range(8))
        assert hit == 6
        for token in range(8, most):
            assert decode(kv, b, token) is not None
            if token in (8, 12, most - 1):
                check(kv)
        assert len(kv.get_block_ids("b")[0]) * P == most
        # Once the copy had gone everything was cached after all.
        assert None not in [block.block_hash for block in kv.get_blocks("b").blocks[0]]
        kv.free(b)
        nothing_is_left(kv)

    def test_blocks_stay_cached_under_the_text_they_were_computed_for(self):
        """A request's record changes in place, or is lost: its blocks are free all the same."""
        kv = manager("full")
        a, _, _ = start(kv, "a", [1] * 8)
        b, hit, _ = start(kv, "b", [1] * 8, skip_reading_prefix_cache=True)
        assert hit == 0
        b.all_token_ids = [2] * 8
        kv.free(b)
        a.all_token_ids = []
        kv.free(a)
        check(kv)
        assert kv.block_pool.get_num_free_blocks() == 10
        assert kv.get_computed_blocks(Request("c", [2] * 9))[1] == 0
        assert kv.get_computed_blocks(Request("c", [1] * 9))[1] == 8
        nothing_is_left(kv)

    def test_a_namespace_is_known_while_something_is_cached_in_it(self):
        kv = manager("full")
        tokens = list(range(5))
        for salt in range(20):
            assert kv.get_computed_blocks(Request("a", tokens, cache_salt=str(salt)))[1] == 0
        assert len(kv._store.spaces) == 1
        kv._store._most_spaces = 8
        numbers = set()
        for salt in range(20):
            a, hit, blocks = start(kv, "a", tokens, cache_salt=str(salt))
            assert hit == 0
            numbers.add(blocks.blocks[0][0].block_hash)
            assert kv.get_computed_blocks(Request("b", tokens, cache_salt=str(salt)))[1] == 4
            kv.free(a)
        assert len(numbers) == 20  # no hash came to mean another's text
        assert len(kv._store.spaces) <= 9
        nothing_is_left(kv)

    def test_no_room_is_none_and_nothing_changes(self):
        kv = manager("full")
        a, _, blocks = start(kv, "a", [1, 2, 3, 4, 5])
        other, _, _ = start(kv, "other", range(20, 32))
        _, _, none = start(kv, "b", [1, 2, 3, 4, 9, 9, 9, 9])
        assert none is None
        assert kv.get_block_ids("b") == ([],)
        assert [block.ref_cnt for block in blocks.blocks[0]] == [1, 1, 1]
        assert kv.block_pool.get_num_free_blocks() == 1
        b, hit, more = start(kv, "b", [1, 2, 3, 4, 9, 9])
        assert (hit, more.get_block_ids()) == (4, ([10],))
        assert decode(kv, a, 6) is not None  # there is a place left in its block
        assert decode(kv, a, 7) is None
        for request in (a, b, other, Request("unknown", [])):
            kv.free(request)
        nothing_is_left(kv)

    def test_without_caching(self):
        kv = manager("full", enable_caching=False)
        a, _, _ = start(kv, "a", range(13))
        assert start(kv, "b", range(13))[1:] == (0, None)
        kv.free(a)
        assert start(kv, "b", range(13))[1] == 0
        kv.free(Request("b", []))
        nothing_is_left(kv)


# ---- two groups ------------------------------------------------------------------------------


class TestHybrid:
    """P=2, and a window of 5 tokens with the one that attends: two blocks of past tokens."""

    def test_blocks_behind_the_window_are_the_null_block(self):
        kv = manager()
        a, _, blocks = start(kv, "a", range(8))
        assert blocks.get_block_ids() == ([1, 2, 3, 4], [1, 2, 3, 4])
        b, hit, _ = start(kv, "b", [*range(8), 9])
        assert hit == 8
        assert kv.get_block_ids("b") == ([1, 2, 3, 4, 5], [0, 0, 3, 4, 5])
        assert kv.get_blocks("b").blocks[1][0].is_null
        assert [block.ref_cnt for block in kv.get_blocks("b").blocks[1]] == [0, 0, 2, 2, 1]
        decode(kv, a, 8)
        assert kv.get_block_ids("a") == ([1, 2, 3, 4, 6], [0, 0, 3, 4, 6])
        assert kv.get_num_common_prefix_blocks("a") == [4, 0]
        assert kv.get_blocks("a").get_unhashed_block_ids_all_groups() == [[6], [6]]
        assert kv.block_pools[1].get_num_free_blocks() == 4  # the first two may be evicted
        check(kv)
        kv.free(a)
        kv.free(b)
        nothing_is_left(kv)

    def test_blocks_in_flight_are_not_evicted(self):
        """A chunk is longer than the window: until it is computed all of it is read."""
        kv = manager()
        a, _, _ = start(kv, "a", range(14))
        table = kv.get_block_ids("a")
        assert start(kv, "b", range(20, 24))[2] is None  # one SWA block is free
        assert kv.get_block_ids("a") == table
        decode(kv, a, 14)  # that chunk was computed; its start may go
        assert kv.get_block_ids("a")[1][:6] == [0, 0, 0, 0, 0, table[1][5]]
        b, _, more = start(kv, "b", range(20, 24))
        assert more is not None
        check(kv)
        kv.free(a)
        kv.free(b)
        assert kv.get_computed_blocks(Request("c", list(range(16))))[1] == 14
        nothing_is_left(kv)

    def test_a_long_request_runs_in_a_small_pool(self):
        kv = manager()
        a, _, _ = start(kv, "a", range(4))
        for token in range(4, 32):
            assert decode(kv, a, token) is not None
        full, window = kv.get_block_ids("a")
        assert len(set(full)) == 16
        assert window[:-3] == [0] * 13
        assert 0 not in window[-3:]
        check(kv)
        kv.free(a)
        assert kv.get_computed_blocks(Request("b", list(range(33))))[1] == 32
        assert kv.get_computed_blocks(Request("b", list(range(18))))[1] == 16  # a kept window
        assert kv.get_computed_blocks(Request("b", list(range(16))))[1] == 0  # its window is gone
        nothing_is_left(kv)

    @pytest.mark.parametrize(("behind", "hit", "dropped"), [(2, 8, 0), (1, 8, 6), (0, 8, 6)])
    def test_b37_a_block_less_needs_a_window_of_its_own(self, behind, hit, dropped):
        """The scenario's W=4 past tokens; `behind` blocks are tombstones."""
        for eagle, right in ((False, hit), (True, dropped)):
            kv = manager(use_eagle=eagle)
            a, _, _ = start(kv, "a", range(8))
            kv.free(a)
            evict_swa(kv, behind)
            request = Request("b", [*range(8), 9])
            blocks, length = kv.get_computed_blocks(request)
            assert length == right
            full, window = blocks.get_block_ids() if right else ([], [])
            assert len(full) == len(window) == right // P
            assert window[-2:] == full[-2:]
            nothing_is_left(kv)

    def test_b38_a_shorter_hit_has_a_window_or_is_none(self):
        for tombstones, right in ((2, 0), (1, 6)):  # of four cached blocks; the prompts share 7
            kv = manager()
            a, _, _ = start(kv, "a", range(8))
            kv.free(a)
            evict_swa(kv, tombstones)
            assert kv.get_computed_blocks(Request("b", [*range(7), 70, 71]))[1] == right
            nothing_is_left(kv)

    def test_b51_admission_counts_a_window_once_it_is_recycled(self):
        kv = manager()
        request = Request("a", list(range(30)))  # 15 blocks, of which a window keeps 3
        assert kv.allocate_slots(request, 4, full_sequence_must_fit=True) is not None
        other = Request("b", list(range(50, 80)))
        assert kv.allocate_slots(other, 4, full_sequence_must_fit=True) is None
        assert kv.allocate_slots(other, 4, reserved_blocks=13) is None
        assert kv.allocate_slots(other, 4, reserved_blocks=12) is not None
        kv.free(request)
        kv.free(other)
        nothing_is_left(kv)

    def test_kv_from_elsewhere_needs_a_window_alone(self):
        kv = manager()
        a = Request("a", list(range(14)))
        blocks = kv.allocate_slots(a, 1, 0, None, 1, 13, delay_cache_blocks=True)
        assert blocks is not None
        full, window = blocks.get_block_ids()
        assert len(full) == 8
        assert window[:4] == [0, 0, 0, 0]
        assert 0 not in window[4:]
        assert kv.get_computed_blocks(Request("b", list(range(14))))[1] == 0
        kv.cache_blocks(a, 14)
        assert kv.get_computed_blocks(Request("b", list(range(15))))[1] == 14
        a.num_computed_tokens = 14
        for token in range(14, 20):
            assert decode(kv, a, token) is not None
        check(kv)
        kv.free(a)
        nothing_is_left(kv)

    def test_blocks_cached_late_lock_nothing_behind_the_window(self):
        kv = manager()
        a, _, _ = start(kv, "a", range(8))
        kv.free(a)
        b = Request("b", list(range(14)))
        blocks, hit = kv.get_computed_blocks(b)
        for new, cached, found in ((4, hit, blocks), (1, 0, None)):
            assert kv.allocate_slots(b, new, cached, found, delay_cache_blocks=True) is not None
            b.num_computed_tokens += cached + new
        kv.cache_blocks(b, 10)
        assert kv.get_block_ids("b")[1][:4] == [0] * 4
        check(kv)
        kv.free(b)
        nothing_is_left(kv)

    def test_a_tombstone_gets_its_window_back_from_who_computed_it_again(self):
        kv = manager()
        a, _, _ = start(kv, "a", range(8))
        kv.free(a)
        evict_swa(kv, 3)
        b, hit, _ = start(kv, "b", range(9))
        assert hit == 0
        kv.free(b)
        assert kv.get_computed_blocks(Request("c", list(range(9))))[1] == 8
        nothing_is_left(kv)

    def test_events(self):
        kv = manager(enable_kv_cache_events=True)
        a, _, _ = start(kv, "a", range(5))
        (stored,) = kv.take_events()
        assert isinstance(stored, BlockStored)
        assert stored.block_hashes == tuple(prefix_hashes(range(5), P))
        kv.free(a)
        assert kv.take_events() == []
        b, _, _ = start(kv, "b", range(20, 36))
        removed, stored = kv.take_events()
        assert isinstance(removed, BlockRemoved)
        assert isinstance(stored, BlockStored)
        assert len(stored.block_hashes) == 8
        kv.free(b)
        assert kv.reset_prefix_cache()
        assert isinstance(kv.take_events()[-1], AllBlocksCleared)


def evict_swa(kv, blocks):
    """Takes the SWA sides of so many cached blocks from the start of a text."""
    before = kv.block_pools[1].free_block_queue.get_all_free_blocks()
    kv._store.run(calls.evict, np.array([0, blocks], np.int32))
    assert kv._store.room().swa == len(before) - 4 + blocks


class TestWindowAlone:
    def test_a_window_is_all_there_is(self):
        kv = manager("window")
        a, _, blocks = start(kv, "a", range(6))
        assert blocks.get_block_ids() == ([1, 2, 3],)
        for token in range(6, 30):
            assert decode(kv, a, token) is not None
        (table,) = kv.get_block_ids("a")
        assert table[:-3] == [0] * 12
        kv.free(a)
        cached, hit = kv.get_computed_blocks(Request("b", list(range(31))))
        assert hit == 30
        assert cached.get_block_ids()[0][:13] == [0] * 13
        assert kv.block_pool.get_num_free_blocks() == 10
        nothing_is_left(kv)


# ---- the pool alone --------------------------------------------------------------------------


class TestBlockPool:
    def test_blocks_are_used_freed_and_taken_again_in_order(self):
        pool = BlockPool(11, enable_caching=True, hash_block_size=P)
        assert pool.null_block.is_null
        blocks = pool.get_new_blocks(4)
        assert [block.block_id for block in blocks] == [1, 2, 3, 4]
        request = Request("a", list(range(6)))
        pool.cache_full_blocks(request, blocks, 0, 2, P, 0)
        pool.cache_full_blocks(request, blocks, 2, 3, P, 0)
        hashes = prefix_hashes(range(6), P)
        assert [block.block_hash for block in blocks] == [*hashes, None]
        assert pool.get_cached_block(hashes[1], [0]) == [blocks[1]]
        assert pool.get_cached_block(hashes[1] ^ 1, [0]) is None
        pool.free_blocks(reversed(blocks))
        assert pool.get_num_free_blocks() == 10
        ids = [block.block_id for block in pool.free_block_queue.get_all_free_blocks()]
        assert ids == [5, 6, 7, 8, 9, 10, 4, 3, 2, 1]
        pool.touch([blocks[0], blocks[1], pool.null_block])
        pool.touch([blocks[0]])
        assert [block.ref_cnt for block in blocks] == [2, 1, 0, 0]
        assert pool.get_num_free_blocks() == 8
        assert sorted(block.block_id for block in pool.get_new_blocks(8)) == sorted(ids[:8])
        with pytest.raises(MisuseError, match="cannot take 1 blocks, 0 are free"):
            pool.get_new_blocks(1)
        assert pool.get_cached_block(hashes[2], [0]) is None
        assert not pool.reset_prefix_cache()
        with pytest.raises(MisuseError, match=r"blocks \[2\] are freed more often"):
            pool.free_blocks([blocks[1], blocks[1]])
        pool.free_blocks([blocks[1], blocks[0], blocks[0]])
        pool.free_blocks([block for block in pool.blocks if block.block_id >= 3])
        assert pool.get_usage() == 0.0
        assert pool.reset_prefix_cache()
        with pytest.raises(MisuseError, match="neither in use nor cached"):
            pool.touch([blocks[0]])

    def test_two_blocks_of_one_text(self):
        pool = BlockPool(11, enable_caching=True, hash_block_size=P)
        request = Request("a", list(range(4)))
        ours, theirs = pool.get_new_blocks(2), pool.get_new_blocks(2)
        pool.cache_full_blocks(request, ours, 0, 2)
        pool.cache_full_blocks(request, theirs, 0, 2)
        assert [block.ref_cnt for block in ours + theirs] == [1, 1, 1, 1]
        theirs += pool.get_new_blocks(1)
        pool.cache_full_blocks(Request("a", list(range(6))), theirs, 2, 3)
        count_blocks(pool)
        pool.free_blocks(ours)
        count_blocks(pool)
        assert pool.get_num_free_blocks() == 7
        pool.free_blocks(theirs)
        hashes = prefix_hashes(range(4), P)
        assert [pool.get_cached_block(h) for h in hashes] == [[block] for block in ours]
        assert pool.get_num_free_blocks() == 10


# ---- misuse ----------------------------------------------------------------------------------


def three_groups():
    spec = KVCacheGroupSpec(["w"], SlidingWindowSpec(P, 5))
    return KVCacheConfig(9, [KVCacheGroupSpec(["f"], FullAttentionSpec(P)), spec, spec])


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: KVCacheManager(three_groups(), MOST), "got 1 and 2: join layers"),
        (lambda: KVCacheManager(config(1, "full"), MOST), "num_blocks must be"),
        (lambda: BlockPool(1, enable_caching=True), "num_gpu_blocks must be"),
        (
            lambda: KVCacheManager(
                KVCacheConfig(
                    9,
                    [
                        KVCacheGroupSpec([], FullAttentionSpec(2)),
                        KVCacheGroupSpec([], SlidingWindowSpec(4, 5)),
                    ],
                ),
                MOST,
            ),
            "one size in both groups",
        ),
        (lambda: manager().allocate_slots(Request("a", [1]), 0), "a token to allocate for"),
        (lambda: manager().allocate_slots(Request("a", [1] * 9), 1, 8), "0 are: ask"),
        (lambda: manager().block_pools[1].get_new_blocks(1), "comes and goes with the full block"),
        (lambda: manager(watermark=1.5), "watermark is a part"),
        (lambda: manager(watermark=-0.1), "watermark is a part"),
        (lambda: allocate(num_lookahead_tokens=-4), "num_lookahead_tokens must be"),
        (lambda: allocate(num_external_computed_tokens=-4), "num_external_computed_tokens must be"),
        (lambda: allocate(reserved_blocks=-50), "reserved_blocks must be"),
        (lambda: allocate(num_new_tokens=2.5), "num_new_tokens must be"),
        (lambda: allocate([1.5, 2]), r"integers that fit int32, got \[1.5, 2\]"),
        (lambda: allocate(["1", "2"]), "integers that fit int32"),
        (lambda: allocate([1, 2**40]), "integers that fit int32"),
        (lambda: allocate([1, 2**80]), "integers that fit int32"),
        (lambda: allocate([[1], [2, 3]]), "integers that fit int32"),
        (lambda: start(manager(), "a", [1, "x", 2]), "fit int32"),
    ],
)
def test_misuse_says_what_is_wrong(call, words):
    with pytest.raises(ValueError, match=words):
        call()


def allocate(tokens=(1, 2), **numbers):
    """On a manager where nothing is allowed to change by it."""
    kv = manager("full")
    try:
        kv.allocate_slots(Request("a", list(tokens)), **{"num_new_tokens": 2, **numbers})
    finally:
        assert kv.get_block_ids("a") == ([],)
        assert kv.usage == 0.0


def test_blocks_are_cached_for_tokens_that_there_are():
    kv = manager("full")
    a = Request("a", list(range(12)))
    assert kv.allocate_slots(a, 8, delay_cache_blocks=True) is not None
    with pytest.raises(MisuseError, match="blocks for 8, got num_computed_tokens=10"):
        kv.cache_blocks(a, 10)
    with pytest.raises(ValueError, match="num_computed_tokens must be"):
        kv.cache_blocks(a, -1)
    a.all_token_ids = a.all_token_ids[:6]
    with pytest.raises(MisuseError, match="has 6 tokens"):
        kv.cache_blocks(a, 8)
    kv.cache_blocks(a, 6)
    assert kv.get_computed_blocks(Request("b", list(range(12))))[1] == 6
    kv.free(a)
    nothing_is_left(kv)


def test_a_pool_takes_its_own_blocks_and_texts_that_fill_them():
    pool, other = (BlockPool(11, enable_caching=True, hash_block_size=P) for _ in range(2))
    blocks, foreign = pool.get_new_blocks(2), other.get_new_blocks(2)
    request = Request("a", [1, 2])
    for call in (
        lambda: pool.touch(foreign),
        lambda: pool.touch([foreign]),
        lambda: pool.free_blocks(foreign),
        lambda: pool.cache_full_blocks(Request("a", [1] * 4), foreign, 0, 2),
    ):
        with pytest.raises(MisuseError, match="not blocks of this pool"):
            call()
    with pytest.raises(MisuseError, match="has 2 tokens, 4 are needed"):
        pool.cache_full_blocks(request, blocks, 0, 2)
    with pytest.raises(MisuseError, match="there are 1 blocks"):
        pool.cache_full_blocks(request, blocks[:1], 0, 2)
    with pytest.raises(ValueError, match="num_cached_blocks must be"):
        pool.cache_full_blocks(request, blocks, -1, 1)
    assert [block.ref_cnt for block in blocks + foreign] == [1] * 4
    pool.free_blocks(blocks)
    with pytest.raises(MisuseError, match=r"blocks \[1\] are not in use"):
        pool.cache_full_blocks(request, blocks, 0, 1)
    assert pool.reset_prefix_cache()


def test_cached_blocks_are_for_the_start_of_a_request():
    kv = manager()
    a, _, _ = start(kv, "a", range(8))
    with pytest.raises(MisuseError, match="has blocks already"):
        kv.allocate_slots(a, 1, 2)
    kv.free(a)


# ---- a long run with the content of every block ----------------------------------------------


class Engine:
    """Runs requests and keeps what each block holds, by group: a wrong block shows at once."""

    def __init__(self, seed, *kinds):
        self.kv = manager(*kinds)
        self.kinds = kinds or HYBRID
        self.draw = np.random.default_rng(seed)
        self.content = [{} for _ in self.kinds]
        self.running, self.tables, self.serial, self.hits = [], {}, 0, 0

    def step(self):
        """Every running request and at most one new one are scheduled, then computed."""
        batch = []
        for request in list(self.running):
            if self.draw.random() < 0.08 or request.num_tokens > 30:
                self.end(request)
                continue
            computed = request.num_computed_tokens
            left = request.num_tokens - computed
            if not left:
                request.all_token_ids.append(int(self.draw.integers(0, 2)))
                left = 1
            new = min(left, int(self.draw.integers(1, 9)))
            if self.kv.allocate_slots(request, new) is None:
                self.end(request)  # preempted
                continue
            batch.append((request, computed, computed + new))
        if len(self.running) < 3:
            batch += self.admit()
        for request, begin, end in batch:
            self.compute(request, begin, end)
        for request, begin, end in batch:
            self.attend(request, begin, end)
            request.num_computed_tokens = end

    def admit(self):
        self.serial += 1
        length = int(self.draw.integers(1, 8))
        head = [0] * int(self.draw.integers(0, 10))  # many begin alike
        tokens = head + self.draw.integers(0, 2, size=length).tolist()
        request = Request(str(self.serial), tokens)
        blocks, hit = self.kv.get_computed_blocks(request)
        new = min(request.num_tokens - hit, int(self.draw.integers(1, 12)))
        if self.kv.allocate_slots(request, new, hit, blocks) is None:
            return []
        self.hits += hit
        self.running.append(request)
        return [(request, hit, hit + new)]

    def tables_of(self, request):
        tables = self.kv.get_block_ids(request.request_id)
        before = self.tables.get(request.request_id, ([],) * len(tables))
        for old, new in zip(before, tables, strict=True):  # a table grows, or turns to null blocks
            assert all(b in (a, 0) for a, b in zip(old, new, strict=False))
        self.tables[request.request_id] = tables
        return tables

    def compute(self, request, begin, end):
        for kind, table, content in zip(
            self.kinds, self.tables_of(request), self.content, strict=True
        ):
            for token in range(begin, end):
                block = table[token // P]
                assert block or (kind == "window" and token < end - 5)
                content[block, token % P] = tuple(request.all_token_ids[: token + 1])

    def attend(self, request, begin, end):
        for kind, table, content in zip(
            self.kinds, self.tables_of(request), self.content, strict=True
        ):
            for query in range(begin, end):
                first = 0 if kind == "full" else max(0, query - 4)
                for token in range(first, query + 1):
                    block = table[token // P]
                    assert block
                    assert content[block, token % P] == tuple(request.all_token_ids[: token + 1])

    def end(self, request):
        self.kv.free(request)
        self.running.remove(request)
        self.tables.pop(request.request_id)


@pytest.mark.parametrize("kinds", [(), ("full",), ("window",)])
def test_every_block_holds_what_is_read(kinds):
    engine = Engine(3, *kinds)
    for step in range(60):
        engine.step()
        if step % 20 == 0:
            check(engine.kv)
    assert engine.hits > 10
    for request in list(engine.running):
        engine.end(request)
    nothing_is_left(engine.kv)
