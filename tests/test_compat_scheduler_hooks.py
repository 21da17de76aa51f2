"""What sglang's scheduler asks allocators, on those of `swa_jax.compat.sglang`."""

import sys
from dataclasses import replace
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from swa_jax.compat import sglang
from tests.test_compat_allocators import FULL, OF_SWA, PAGE, new_sglang, sizes


class Tree:
    """Holds slots, and gives them back in order when it is asked to."""

    def __init__(self, allocator, tokens, shares=True):
        self.allocator, self.slots, self.shares = allocator, allocator.alloc(tokens), shares
        self.asked = []

    def supports_prefix_sharing(self):
        return self.shares

    def evict_for_alloc(self, params):
        self.asked.append((params.num_tokens, params.swa_num_tokens))
        count = max(self.asked[-1])
        self.allocator.free(self.slots[:count])
        self.slots = self.slots[count:]


def one_pool() -> Any:
    return sglang.PagedTokenToKVPoolAllocator(OF_SWA, PAGE, None, "cpu", None, False)


def test_one_pool_makes_room_and_says_whether_it_fits():
    allocator = one_pool()
    tree = Tree(allocator, OF_SWA - PAGE)
    assert allocator.size_full == OF_SWA
    assert allocator.evict_to_free_tokens(None, OF_SWA) is None
    assert allocator.evict_to_free_tokens(tree, PAGE) is None
    assert tree.asked == []
    assert allocator.check_decode_capacity(num_tokens=3 * PAGE, tree_cache=tree)
    assert tree.asked == [(2 * PAGE, 0)]
    assert not allocator.check_decode_capacity(num_tokens=OF_SWA + PAGE, tree_cache=tree)
    deaf = Tree(allocator, 2 * PAGE, shares=False)
    assert not allocator.check_decode_capacity(
        num_tokens=OF_SWA, tree_cache=deaf, requests=[], spec_algorithm=None
    )
    assert deaf.asked == []


def test_two_pools_ask_for_what_each_lacks():
    allocator = new_sglang()
    tree = Tree(allocator, OF_SWA - PAGE)
    assert allocator.check_decode_capacity(num_tokens=3 * PAGE, tree_cache=tree)
    assert tree.asked == [(0, 2 * PAGE)]
    assert allocator.reclaim_for_prealloc(tree, FULL, 3 * PAGE) is None
    assert len(tree.asked) == 1
    assert allocator.reclaim_for_prealloc(tree, 0, 4 * PAGE) is None
    assert tree.asked[1:] == [(0, PAGE)]
    short = allocator.reclaim_for_prealloc(tree, 0, 2 * OF_SWA)
    assert str(OF_SWA) in short  # lacking after all is gone
    assert sizes(allocator) == (FULL, OF_SWA)
    assert allocator.swa_capacity_and_available(full_capacity=5, swa_capacity=6) == (
        (5, FULL),
        (6, OF_SWA),
    )


@pytest.mark.parametrize("make", [one_pool, new_sglang])
def test_sizes_that_need_no_state(make):
    allocator = make()
    clip = {"sliding_window_size": None, "chunk_size": None}
    # 5 tokens are two pages; another page and a token stay free.
    assert allocator.max_new_tokens_for_memory(5, 99, token_capacity=32, **clip) == 19
    assert allocator.max_new_tokens_for_memory(5, 7, token_capacity=32, **clip) == 7
    assert allocator.max_new_tokens_for_memory(32, 7, token_capacity=32, **clip) == 0
    assert allocator.request_slot_reserve(has_req_pool_slot=False, prefill_tokens=9) == 0
    assert not allocator.prealloc_fits_assumes_reclaim()
    assert allocator.prealloc_ceiling_fits(10**6, 10**6) is None
    for full, of_swa, budget, fits in ((8, 8, 8, True), (9, 8, 8, False), (8, 9, 8, False)):
        budgets = {"full_budget_tokens": 8, "swa_budget_tokens": budget}
        assert allocator.prealloc_fits(None, full, of_swa, **budgets) == fits
    assert allocator.prealloc_fits(None, 8, 10**6, full_budget_tokens=8)
    demand = allocator.get_extend_allocation_demand(
        [0], [5], conservative_num_tokens=13, shard_size=1
    )
    assert demand == 13
    assert allocator.mamba_full_cache_donor() is None
    assert allocator.set_hicache_transfer_done_event("key", None) is None


def test_broken_accounts_are_told():
    allocator = new_sglang()
    assert allocator.verify_byte_accounting() == []
    state = allocator.pools.take()
    mapping = state.full_to_swa.at[1].set(1, mode="drop")  # of pages that nobody holds
    allocator.pools.put(0, replace(state, full_to_swa=mapping))
    assert len(allocator.verify_byte_accounting()) == 1


def test_a_budget_is_sglangs_own(monkeypatch):
    pure = sglang.PureSWATokenToKVPoolAllocator(OF_SWA, PAGE, None, "cpu", SimpleNamespace(), False)
    home = "sglang.srt.mem_cache.prefill_budget"
    monkeypatch.setitem(sys.modules, home, None)  # as where it is not installed
    with pytest.raises(NotImplementedError, match="sglang's scheduler"):
        pure.create_prefill_budget("tree")
    theirs: Any = ModuleType(home)
    for name in ("PrefillBudget", "SWAPrefillBudget"):
        setattr(theirs, name, lambda *args, name=name, **kwargs: (name, args[1:], kwargs))
    for part in ("sglang", "sglang.srt", "sglang.srt.mem_cache"):
        monkeypatch.setitem(sys.modules, part, ModuleType(part))
    monkeypatch.setitem(sys.modules, home, theirs)
    decodes = {"num_mixed_decode_tokens": 3}
    two = "SWAPrefillBudget"
    assert one_pool().create_prefill_budget("t", **decodes) == ("PrefillBudget", ("t",), decodes)
    assert new_sglang().create_prefill_budget("t", **decodes) == (two, ("t",), decodes)
    assert pure.create_prefill_budget("t", **decodes) == (two, ("t",), decodes | {"all_swa": True})
