"""The prefix cache in careless hands: receipts used again, short rows, strangers, bad values."""

from __future__ import annotations

import dataclasses
import random
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compare import assert_bitwise_equal
from prefix_pair import QUICKLY, Sizes, World, compiled

import swa_jax as swa
from swa_jax import prefix_cache as pc
from swa_jax.prefix_cache.events import empty_record, prefix_hashes, tree_events

A = list(range(100, 132))  # 32 tokens that are all different
B = list(range(200, 232))
TOKENS = swa.PoolConfig(24, 16, 1, 4)  # the sizes that the machine uses too: compiled once
PAGES = swa.PoolConfig(48, 32, 4, 6)
INT_MAX, INT_MIN = 2**31 - 1, -(2**31)


# ---- receipts -------------------------------------------------------------------------------


def test_a_spent_receipt_does_not_undo_the_lock_of_another():
    world = World(TOKENS)
    taken = world.put(A[:6])
    first, second = world.lock(taken.node), world.lock(taken.node)
    second = world.release_swa_lock(second)
    world.unlock(first)
    world.unlock(first)
    assert world.locks(taken.slots) == [(1, 0)] * 6
    world.verify()
    world.unlock(second)
    assert world.locks(taken.slots) == [(0, 0)] * 6
    assert world.verify().sizes == Sizes(6, 6, 0, 0)


def test_a_spent_receipt_of_an_ancestor_leaves_the_path_below_it_locked():
    world = World(TOKENS)
    world.put(A[:3])
    taken = world.put(A[:6])
    first = world.lock(world.match(A[:3]).node)
    world.lock(taken.node)
    world.unlock(first)
    world.unlock(first)
    assert world.locks(taken.slots) == [(1, 0)] * 2 + [(1, 1)] * 4
    world.verify()


def test_a_receipt_that_was_replaced_by_an_early_release_is_spent():
    world = World(TOKENS)
    taken = world.put(A[:6])
    old = world.lock(taken.node)
    new = world.release_swa_lock(old)
    before = world.cache
    world.unlock(old)
    assert not any(int(part) for part in vars(world.release_swa_lock(old)).values())
    assert_bitwise_equal(world.cache, before)
    world.unlock(new)
    assert world.locks(taken.slots) == [(0, 0)] * 6
    world.verify()


def test_a_spent_receipt_is_not_the_one_that_has_its_entry_now():
    world = World(TOKENS)
    taken = world.put(A[:6])
    old = world.lock(taken.node)
    world.unlock(old)
    new = world.lock(taken.node)
    assert int(new.entry) == int(old.entry)
    world.unlock(old)
    assert world.locks(taken.slots)[-1] == (1, 1)
    world.verify()


@pytest.mark.parametrize("kept", [True, False], ids=["of this cache", "of one thrown away"])
def test_a_receipt_from_before_a_reset_holds_nothing(kept):
    world = World(TOKENS)
    before = world.copy()
    node = before.put(A[:6]).node
    old = [before.lock(node) for _ in range(3)]
    if kept:
        world = before
    world.cache, world.state = pc.reset(world.cache), swa.clear(world.state)
    taken = world.put(B[:6])
    assert taken.node == node
    new = [world.lock(taken.node) for _ in range(3)]
    locked = world.cache
    for receipt in old:
        world.unlock(receipt)
        world.release_swa_lock(receipt)
    assert_bitwise_equal(world.cache, locked)
    for receipt in new:
        world.unlock(receipt)
    assert world.verify().sizes == Sizes(6, 6, 0, 0)


@pytest.mark.parametrize("field", ["node", "boundary", "entry", "serial"])
def test_a_receipt_that_nobody_gave_changes_nothing(field):
    world = World(TOKENS)
    taken = world.put(A[:6])
    world.put(B[:3])
    good = world.lock(taken.node)
    before = world.cache
    for value in (0, 1, 3, 7, 1047, 1048, INT_MAX, -1, INT_MIN):
        if value == int(getattr(good, field)):
            continue
        world.unlock(dataclasses.replace(good, **{field: jnp.int32(value)}))
        world.release_swa_lock(dataclasses.replace(good, **{field: jnp.int32(value)}))
        assert_bitwise_equal(world.cache, before)
    world.unlock(good)
    assert world.verify().sizes.full_protected == 0


def test_any_use_of_receipts_keeps_the_counts_right():
    rng = random.Random(7)
    world = World(TOKENS)
    nodes = [world.put(A[:8]).node, world.put([*A[:5], 1, 2]).node, world.match(A[:3]).node]
    given: list[pc.Receipt] = []
    good: dict[int, bool] = {}  # place in `given`: does it still lock anything?
    for _ in range(120):
        kind, which = rng.randrange(5), rng.randrange(max(1, len(given)))
        if kind < 2 or not given:
            given.append(world.lock(rng.choice(nodes)))
            good[len(given) - 1] = True
        elif kind < 4:
            world.unlock(given[which])
            good[which] = False
        else:
            given.append(world.release_below(given[which], rng.randrange(9)))
            good[len(given) - 1], good[which] = good[which], False
        world.verify()
        assert int(world.cache.num_receipts) == sum(good.values())
    for receipt in given:
        world.unlock(receipt)
    assert world.verify().sizes == Sizes(10, 10, 0, 0)


def test_when_the_receipts_run_out_nothing_more_is_locked():
    world = World(TOKENS)
    taken = world.put(A[:6])
    most = world.cache.config.most_receipts
    nodes = jnp.full(most + 3, taken.node, jnp.int32)
    world.cache, many = compiled("lock_batch")(world.cache, world.state, nodes)
    assert np.asarray(many.serial > 0).tolist() == [True] * most + [False] * 3
    assert len(set(np.asarray(many.entry)[:most].tolist())) == most
    assert world.locks(taken.slots)[-1] == (most, most)
    world.verify()
    one = jax.tree.map(lambda part: part[5], many)
    world.unlock(one)
    assert int(world.lock(taken.node).entry) == int(one.entry)
    world.cache = compiled("unlock_batch")(world.cache, many)
    assert world.locks(taken.slots)[-1] == (1, 1)
    world.verify()


def test_serials_go_round_and_are_never_none():
    world = World(TOKENS)
    taken = world.put(A[:6])
    world.cache = dataclasses.replace(world.cache, serial=jnp.int32(INT_MAX - 1))
    receipts = [world.lock(taken.node) for _ in range(3)]
    assert [int(receipt.serial) for receipt in receipts] == [INT_MAX, 1, 2]
    for receipt in receipts:
        world.unlock(receipt)
    assert world.verify().sizes.full_protected == 0
    world.cache = dataclasses.replace(world.cache, serial=jnp.int32(INT_MAX - 1))
    assert int(pc.reset(world.cache).serial) == world.cache.config.most_receipts - 2


def test_receipts_under_vmap_and_with_64_bits():
    world = World(TOKENS)
    nodes = jnp.asarray([world.put(A[:6]).node, 0, world.put(B[:3]).node], jnp.int32)

    def there_and_back(cache, node):
        locked, receipt = pc.lock(cache, world.state, node)
        locked, new = pc.release_swa_lock(locked, receipt, 1)
        once = pc.unlock(pc.unlock(locked, receipt), new)
        return receipt, new, once.full_locks, pc.unlock(once, new).num_receipts

    with jax.enable_x64(True):
        together = jax.jit(jax.vmap(there_and_back, (None, 0)), compiler_options=QUICKLY)
        receipts, new, locks, left = together(world.cache, nodes)
        assert {str(leaf.dtype) for leaf in jax.tree.leaves((receipts, new, locks))} == {"int32"}
    assert receipts.node.tolist() == nodes.tolist()
    assert (receipts.serial > 0).tolist() == [True, False, True]
    assert (new.serial > receipts.serial).tolist() == [True, False, True]
    assert not np.any(locks)
    assert not np.any(left)


LARGE = {"page16": swa.PoolConfig(2**17, 2**16, 16, 64), "page1": swa.PoolConfig(2**13, 2**12)}


@pytest.mark.parametrize("kind", LARGE)
@pytest.mark.parametrize("name", ["lock", "unlock", "release_swa_lock", "match_prefix", "insert"])
def test_no_call_copies_an_array_of_the_cache(name, kind):
    cache, state = jax.eval_shape(lambda: (pc.init(LARGE[kind]), swa.init(LARGE[kind])))
    receipt = jax.eval_shape(pc.no_receipt)
    number = jax.ShapeDtypeStruct((), jnp.int32)
    row = jax.ShapeDtypeStruct((64,), jnp.int32)
    args = {
        "lock": (cache, state, number),
        "unlock": (cache, receipt),
        "release_swa_lock": (cache, receipt, number),
        "match_prefix": (cache, state, row, number),
        "insert": (cache, state, row, number, row),
    }[name]
    given = (0, 1) if name == "insert" else 0
    text = jax.jit(getattr(pc, name), donate_argnums=given).lower(*args).compile().as_text() or ""
    sizes = {leaf.shape for leaf in jax.tree.leaves((cache, state)) if leaf.size > 1000}
    copied = re.findall(r"\w+\[([\d,]+)\]\S* copy\(", text)
    assert not sizes & {tuple(map(int, shape.split(","))) for shape in copied}


@pytest.mark.parametrize(
    ("field", "damage"),
    [
        ("num_receipts", lambda leaf: leaf + 1),
        ("receipt_serial", lambda leaf: leaf.at[0].set(0)),
        ("receipt_node", lambda leaf: leaf.at[0].add(-1)),
        ("spare_receipts", lambda leaf: leaf.at[1].set(0)),
        ("full_locks", lambda leaf: leaf.at[1].add(1)),  # the top of the path
    ],
)
def test_check_names_the_law_of_receipts(field, damage):
    world = World(TOKENS)
    world.lock(world.put(A[:6]).node)
    pc.check(world.cache, world.state)
    broken = dataclasses.replace(world.cache, **{field: damage(getattr(world.cache, field))})
    with pytest.raises(swa.InvariantError, match="receipts"):
        pc.check(broken, world.state)


# ---- rows shorter than a page ---------------------------------------------------------------


@pytest.mark.parametrize(
    ("page", "width", "is_bigram"),
    [(1, 0, False), (4, 0, False), (4, 1, False), (4, 3, False), (1, 1, True), (4, 4, True)],
)
def test_a_row_without_a_whole_page_matches_nothing_and_is_not_taken(page, width, is_bigram):
    config = swa.PoolConfig(48, 32, page, 6)
    world = World(config, is_bigram=is_bigram)
    world.put(A[:8])
    cache, state = world.cache, world.state
    slots = [900 + place for place in range(width)]
    for length in (width, 8):
        cache, found = pc.match_prefix(cache, state, A[:width], length)
        assert (int(found.length), int(found.node)) == (0, 0)
        assert found.slots.tolist() == [0] * width
        cache, after, taken = pc.insert(cache, state, A[:width], length, slots)
        assert (int(taken.length), int(taken.length_already_cached), int(taken.node)) == (0, 0, 0)
        assert taken.slots.tolist() == slots
        assert_bitwise_equal(after, state)
    assert_bitwise_equal(dataclasses.replace(cache, clock=world.cache.clock), world.cache)


@pytest.mark.parametrize("width", [0, 3])
def test_batches_of_rows_without_a_whole_page(width):
    world = World(PAGES)
    rows = np.asarray([A[:width], B[:width]], np.int32)
    cache, found = pc.match_prefix_batch(world.cache, world.state, rows, [width, width])
    assert (found.length.tolist(), found.slots.shape) == ([0, 0], (2, width))
    cache, state, taken = pc.insert_batch(cache, world.state, rows, [width, width], rows)
    assert (taken.length.tolist(), taken.slots.tolist()) == ([0, 0], rows.tolist())
    assert_bitwise_equal(state, world.state)


# ---- options --------------------------------------------------------------------------------


@pytest.mark.parametrize("most", [-1, 3.5, 4.0, float("nan"), True, "5", np.float32(4), [4]])
def test_max_prefix_tokens_is_a_count(most):
    with pytest.raises(ValueError, match="max_prefix_tokens must be an integer of 0 or more"):
        pc.init(TOKENS, max_prefix_tokens=most)


@pytest.mark.parametrize("most", [24, 25, 2**31, 2**70, np.int64(2**40)])
def test_more_prefix_tokens_than_the_pool_has_are_all_of_them(most):
    assert pc.init(TOKENS, max_prefix_tokens=most).config == pc.init(TOKENS).config


@pytest.mark.parametrize("config", [5, None, "pool"])
def test_a_cache_needs_the_sizes_of_a_pool(config):
    with pytest.raises(ValueError, match="config must be a PoolConfig"):
        pc.init(config)


@pytest.mark.parametrize("bits", [1.5, True, "8"])
def test_hash_bits_are_a_count(bits):
    with pytest.raises(ValueError, match="hash_bits"):
        pc.init(TOKENS, hash_bits=bits)


# ---- another allocator's state --------------------------------------------------------------

ROW = [1, 2]
WITH_STATE = {
    "match_prefix": lambda c, s: pc.match_prefix(c, s, ROW, 2),
    "insert": lambda c, s: pc.insert(c, s, ROW, 2, [2, 3]),
    "lock": lambda c, s: pc.lock(c, s, 1),
    "evict": lambda c, s: pc.evict(c, s, full_tokens=3),
    "match_prefix_batch": lambda c, s: pc.match_prefix_batch(c, s, [ROW], [2]),
    "insert_batch": lambda c, s: pc.insert_batch(c, s, [ROW], [2], [[2, 3]]),
    "lock_batch": lambda c, s: pc.lock_batch(c, s, [1]),
    "invariants": pc.invariants,
    "check": pc.check,
    "full_evictable_size": pc.full_evictable_size,
    "full_protected_size": pc.full_protected_size,
    "swa_evictable_size": pc.swa_evictable_size,
    "swa_protected_size": pc.swa_protected_size,
}


@pytest.mark.parametrize("name", WITH_STATE)
def test_a_tree_and_the_state_of_another_pool_are_refused(name):
    cache, other = pc.init(TOKENS), swa.init(dataclasses.replace(TOKENS, sliding_window=5))
    with pytest.raises(ValueError, match=r"sliding_window=4.*sliding_window=5"):
        WITH_STATE[name](cache, other)
    with pytest.raises(ValueError, match="got AllocatorState and PrefixCache"):
        WITH_STATE[name](other, cache)


# ---- messages -------------------------------------------------------------------------------


def test_one_receipt_and_many_are_told_apart():
    cache = pc.init(TOKENS)
    with pytest.raises(ValueError, match=r"receipt.node must be a scalar, got shape \(3,\)"):
        pc.unlock(cache, pc.no_receipt(3))
    with pytest.raises(ValueError, match=r"receipt.node must be a scalar, got shape \(3,\)"):
        pc.release_swa_lock(cache, pc.no_receipt(3))
    with pytest.raises(ValueError, match=r"receipt.node must be an array of 1 dimension"):
        pc.unlock_batch(cache, pc.no_receipt())
    uneven = dataclasses.replace(pc.no_receipt(3), serial=jnp.zeros(2, jnp.int32))
    with pytest.raises(ValueError, match="must agree in length"):
        pc.unlock_batch(cache, uneven)
    with pytest.raises(ValueError, match="receipt must be a Receipt, got PrefixCache"):
        pc.unlock(pc.no_receipt(), cache)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("size", [0, -1, 1.5, True, "2"])
def test_blocks_hold_tokens(size):
    with pytest.raises(ValueError, match="block_size must be a positive integer"):
        prefix_hashes([1, 2, 3], size)


@pytest.mark.parametrize("tokens", [[1.5], [2**31], [-(2**31) - 1], [[1, 2]], ["a"], [2**70]])
def test_only_rows_of_int32_have_hashes(tokens):
    with pytest.raises(ValueError, match="tokens must"):
        prefix_hashes(tokens, 1)


def test_an_empty_prompt_has_no_hashes():
    assert prefix_hashes([], 2) == prefix_hashes([1], 2) == []
    assert prefix_hashes(np.asarray([1, 2, 3], np.int64), 2) == prefix_hashes([1, 2], 2)


# ---- what the documents say -----------------------------------------------------------------


@pytest.mark.parametrize("page", [1, 2])
def test_a_router_finds_the_blocks_of_a_bigram_cache(page):
    world = World(swa.PoolConfig(24, 24, page, 4), is_bigram=True)
    record = empty_record(world.cache.config)
    prompts = [[1, 2, 3, 4, 5, 6], [1, 2, 9, 4, 5, 6], [1, 2, 3]]
    for prompt in prompts:
        world.put(prompt, ns=3)
    _, events = tree_events(record, world.cache)
    told = {name for event in events for name in getattr(event, "block_hashes", ())}
    wanted = [prefix_hashes(prompt, page, namespace=3, is_bigram=True) for prompt in prompts]
    assert [len(names) for names in wanted] == [5 // page, 5 // page, 2 // page]
    assert told == {name for names in wanted for name in names}


@pytest.mark.parametrize("asked", [0, -4])
def test_tombstones_that_nothing_hangs_from_go_whatever_is_asked(asked):
    world = World(TOKENS)
    world.put(A[:4])
    dead = world.put(B[:4])
    receipt = world.release_swa_lock(world.lock(dead.node))
    world.free_swa(dead.slots)
    world.unlock(receipt)
    assert world.evict(full=asked, swa_tokens=asked) == (4, 0)
    assert world.match(A[:4]).length == 4
    world.verify()
