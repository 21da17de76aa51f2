"""Each kind of root cause put back on purpose: a check must see it.

The checks themselves pass unharmed in their own files.
"""

from __future__ import annotations

import dataclasses
import importlib

import jax
import jax.numpy as jnp
import pytest
import test_prefix_cache as calls
import test_prefix_misuse as misuse
import test_prefix_scenarios as scenarios
from prefix_pair import compiled

from swa_jax import prefix_cache as pc
from swa_jax.free import free
from swa_jax.paging import look_up
from swa_jax.state import PAD_SLOT, UNMAPPED

PACKAGE = "swa_jax.prefix_cache"


def _module(name):
    """The module itself: the package gives some functions the names of theirs."""
    return importlib.import_module(f"{PACKAGE}.{name}")


def _forget_compiled() -> None:
    compiled.cache_clear()
    jax.clear_caches()


@pytest.fixture
def damage(monkeypatch):
    """Replaces a function of the package, with nothing compiled before or after."""

    def put(module: str, name: str, mutant) -> None:
        target = _module(module) if module else pc
        assert hasattr(target, name)
        monkeypatch.setattr(target, name, mutant)
        _forget_compiled()

    yield put
    monkeypatch.undo()
    _forget_compiled()


def _fails(check, *args) -> None:
    with pytest.raises(AssertionError):
        check(*args)


def test_a_match_across_a_tombstone_is_seen(damage):
    damage("match", "usable_pages", lambda config, state, chain: chain.count)
    _fails(scenarios.test_b36_no_match_across_a_tombstone, 3, 3)


def test_a_run_counter_that_is_not_reset_is_seen(damage):
    def usable_pages(config, state, chain):
        place = jnp.arange(chain.nodes.shape[0], dtype=jnp.int32)
        live = look_up(state.full_to_swa, chain.nodes, UNMAPPED) != UNMAPPED
        run = jnp.cumsum(live.astype(jnp.int32), dtype=jnp.int32)
        needed = place + 1 - _module("match").window_start(config, place + 1)
        good = (place < chain.count) & live & (run >= needed)
        return jnp.max(jnp.where(good, place + 1, 0), initial=0)

    damage("match", "usable_pages", usable_pages)
    _fails(scenarios.test_b36_no_match_across_a_tombstone, 3, 3)


def test_an_swa_lock_that_is_released_twice_is_seen(damage):
    release = pc.release_swa_lock

    def keeps_the_receipt(cache, receipt, tokens=None):
        return release(cache, receipt, tokens)[0], receipt

    damage("", "release_swa_lock", keeps_the_receipt)
    _fails(scenarios.test_b45_an_early_swa_release_is_not_repeated)


def test_a_receipt_that_works_twice_is_seen(damage):
    damage("receipts", "standing", lambda cache, receipt: receipt.node)
    _fails(calls.test_a_receipt_is_good_once)


def test_a_receipt_that_outlives_its_node_is_seen(damage):
    damage("receipts", "standing", _while_locked)
    _fails(calls.test_a_stale_receipt_does_not_reach_the_next_tenant_of_its_page)


def _while_locked(cache, receipt):
    """`standing`, by the node alone: somebody holds it."""
    return jnp.where(cache.full_locks[receipt.node] > 0, receipt.node, 0)


def _but_the_serial(cache, receipt):
    """`standing`, without a look at the serial."""
    same = cache.receipt_serial[receipt.entry] > 0
    same = same & (cache.receipt_node[receipt.entry] == receipt.node)
    return jnp.where(same, receipt.node, 0)


@pytest.mark.parametrize(
    ("standing", "check"),
    [
        (_while_locked, misuse.test_a_spent_receipt_does_not_undo_the_lock_of_another),
        (_while_locked, misuse.test_a_spent_receipt_of_an_ancestor_leaves_the_path_below_it_locked),
        (_while_locked, misuse.test_any_use_of_receipts_keeps_the_counts_right),
        (_but_the_serial, misuse.test_a_receipt_that_was_replaced_by_an_early_release_is_spent),
        (_but_the_serial, misuse.test_a_spent_receipt_is_not_the_one_that_has_its_entry_now),
    ],
)
def test_a_spent_receipt_that_works_while_another_stands_is_seen(damage, standing, check):
    damage("receipts", "standing", standing)
    _fails(check)


@pytest.mark.parametrize("kept", [True, False])
def test_serials_that_begin_again_at_a_reset_are_seen(damage, kept):
    new = _module("tree").new_cache

    def reset(cache):
        # What came from a cache that was thrown away is not told by a serial that just goes on.
        serial = jnp.int32(0) if kept else cache.serial
        return dataclasses.replace(new(cache.config), serial=serial)

    damage("", "reset", reset)
    _fails(misuse.test_a_receipt_from_before_a_reset_holds_nothing, kept)


def test_an_entry_that_is_not_given_back_is_seen(damage):
    def keeps(cache, receipt, node):
        serials = cache.receipt_serial.at[jnp.where(node > 0, receipt.entry, 10**6)]
        return dataclasses.replace(cache, receipt_serial=serials.set(0, mode="drop"))

    damage("receipts", "give_back", keeps)
    _fails(misuse.test_a_spent_receipt_is_not_the_one_that_has_its_entry_now)


def _give_up(*, sees_stale: bool, clears_the_copy: bool):
    """`_give_up_copies`, with one step left out."""

    def give_up_copies(state, chain, own, by):
        size, outside = jnp.int32(state.config.page_size), state.full.free.shape[0]
        place = jnp.arange(chain.nodes.shape[0], dtype=jnp.int32)
        copy = own.usable & (place < chain.count)
        of_node = look_up(state.full_to_swa, chain.nodes, UNMAPPED)
        of_copy = look_up(state.full_to_swa, own.pages, UNMAPPED)
        dead = of_node == UNMAPPED
        recovers = copy & own.live & (dead | (of_node == of_copy) if sees_stale else dead)
        by_page = state.full_to_swa
        by_page = by_page.at[jnp.where(recovers, chain.nodes, outside)].set(of_copy, mode="drop")
        if clears_the_copy:
            bare = jnp.where(recovers, own.pages, outside)
            by_page = by_page.at[bare].set(UNMAPPED, mode="drop")
        moved = dataclasses.replace(state, full_to_swa=by_page, scratch=own.scratch)
        return free(moved, jnp.where(copy, own.pages * size, PAD_SLOT))

    return give_up_copies


@pytest.mark.parametrize("stale", [False, True])
def test_the_step_by_step_stand_in_is_sound(damage, stale):
    damage("insert", "_give_up_copies", _give_up(sees_stale=True, clears_the_copy=True))
    scenarios.test_b07_recovery_takes_the_new_data_and_not_what_a_mapping_once_said(stale)


def test_a_recovery_that_believes_a_stale_mapping_is_seen(damage):
    damage("insert", "_give_up_copies", _give_up(sees_stale=False, clears_the_copy=True))
    _fails(scenarios.test_b07_recovery_takes_the_new_data_and_not_what_a_mapping_once_said, True)


def test_a_recovery_whose_page_is_freed_with_the_copy_is_seen(damage):
    damage("insert", "_give_up_copies", _give_up(sees_stale=True, clears_the_copy=False))
    _fails(scenarios.test_b07_recovery_takes_the_new_data_and_not_what_a_mapping_once_said, False)


def test_a_copy_that_is_not_freed_is_seen(damage):
    def keeps(state, chain, own, by):
        return dataclasses.replace(state, scratch=own.scratch)

    damage("insert", "_give_up_copies", keeps)
    _fails(scenarios.test_b41_a_receipt_holds_across_an_insert_in_the_middle_of_its_path, False)


def test_a_leaf_that_is_a_tombstone_is_seen(damage):
    def new_length(chain, keys, own):
        place = jnp.arange(keys.hash.shape[0], dtype=jnp.int32)
        stops = (place >= chain.count) & ~own.usable
        return jnp.minimum(jnp.min(jnp.where(stops, place, keys.count)), keys.count)

    damage("insert", "_new_length", new_length)
    _fails(scenarios.test_b24_a_prefix_without_a_live_page_is_not_inserted)


@pytest.mark.parametrize("side", ["full_locks", "swa_locks"])
def test_an_eviction_of_locked_pages_is_seen(damage, side):
    evict = pc.evict

    def blind(cache, state, **wanted):
        unlocked = dataclasses.replace(cache, **{side: jnp.zeros_like(cache.full_locks)})
        after, state, evicted = evict(unlocked, state, **wanted)
        return dataclasses.replace(after, **{side: getattr(cache, side)}), state, evicted

    damage("", "evict", blind)
    _fails(calls.test_a_pinned_prefix_stays_usable)


def test_a_hash_that_is_trusted_is_seen(damage):
    def first_bad(cache, keys, nodes):
        place = jnp.arange(nodes.shape[0], dtype=jnp.int32)
        return jnp.min(jnp.where(nodes > 0, jnp.int32(nodes.shape[0]), place))

    damage("find", "_first_bad", first_bad)
    _fails(calls.test_one_other_token_under_the_same_hash_is_no_match, 0)


def test_a_namespace_that_is_ignored_is_seen(damage):
    insert = pc.insert

    def for_everybody(cache, state, tokens, length, slots, *, namespace=0, priority=0):
        return insert(cache, state, tokens, length, slots, priority=priority)

    damage("", "insert", for_everybody)
    _fails(calls.test_namespaces_never_share_a_page, calls.TOKENS, 32)


def test_a_namespace_that_only_the_hash_tells_is_seen(damage):
    cut, below = _module("keys").cut_pages, _module("keys").cut_pages_below

    def same_space(config, tokens, length, namespace):
        return cut(config, tokens, length, jnp.zeros_like(namespace))

    def same_space_below(cache, node, tokens, length, namespace):
        return below(cache, node, tokens, length, jnp.zeros_like(namespace))

    damage("find", "cut_pages_below", same_space_below)
    damage("insert", "cut_pages", same_space)
    _fails(calls.test_a_copy_is_given_up_only_to_its_own_namespace)


def test_an_eviction_without_tail_protection_is_seen(damage):
    def none_is_near(cache, *rest):
        return jnp.zeros_like(cache.in_tree)

    def order_by_id(cache, live):
        return (jnp.where(cache.depth <= 4, 1, 0),)  # so that the first pages are not the first

    damage("evict", "_near_leaf", none_is_near)
    damage("evict", "leaving_order", order_by_id)
    _fails(scenarios.test_b39_the_branch_tail_leaves_last)


def test_a_table_that_is_laid_out_with_evicted_nodes_is_seen(damage):
    lay_out = _module("table").lay_out_when_worn

    def with_all_that_ever_were(cache):
        everything = dataclasses.replace(cache, in_tree=cache.depth > 0)
        return dataclasses.replace(lay_out(everything), in_tree=cache.in_tree)

    damage("evict", "lay_out_when_worn", with_all_that_ever_were)
    _fails(calls.test_an_evicted_prefix_is_not_found_after_the_table_was_laid_out_anew)
