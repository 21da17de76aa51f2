"""The prefix cache call by call: isolation, collisions, batches, one program, misuse."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compare import assert_bitwise_equal, ints
from prefix_pair import QUICKLY, Sizes, World, compiled

import swa_jax as swa
from swa_jax import prefix_cache as pc

A = list(range(100, 132))  # 32 tokens that are all different
B = list(range(200, 232))
TOKENS = swa.PoolConfig(24, 16, 1, 4)  # the sizes that the machine uses too: compiled once
PAGES = swa.PoolConfig(48, 32, 4, 6)
INT_MAX, INT_MIN = 2**31 - 1, -(2**31)


# ---- isolation ------------------------------------------------------------------------------


@pytest.mark.parametrize("config", [TOKENS, PAGES])
@pytest.mark.parametrize("hash_bits", [32, 0])
def test_namespaces_never_share_a_page(config, hash_bits):
    world = World(config, hash_bits=hash_bits)
    spaces = [0, 1, -1, INT_MAX, INT_MIN][: 3 if config is PAGES else 5]
    length = 8 if config is PAGES else 3
    pages = []
    for ns in spaces:
        assert world.match(A[:length], ns=ns).length == 0
        taken = world.put(A[:length], ns=ns)
        assert (taken.cached, taken.length) == (0, length)
        pages.append(set(taken.slots))
    assert len(set.union(*pages)) == length * len(spaces)
    for ns, own in zip(spaces, pages, strict=True):
        assert set(world.match(A[:length], ns=ns).slots) == own
    assert world.match(A[:length], ns=7).length == 0
    world.verify()


def test_a_copy_is_given_up_only_to_its_own_namespace():
    world = World(TOKENS)
    first = world.put(A[:4], ns=1)
    again = world.put(A[:4], ns=1)
    other = world.put(A[:4], ns=2)
    assert again.slots == first.slots
    assert not set(other.slots) & set(first.slots)
    assert world.verify().sizes == Sizes(8, 8, 0, 0)


# ---- collisions -----------------------------------------------------------------------------


def _random_calls(world: World, seed: int) -> list[object]:
    """What a fixed series of calls answers, whatever the hash."""
    rng = random.Random(seed)
    answers: list[object] = []
    receipts = []
    for _ in range(60):
        digits = [rng.randrange(2) for _ in range(rng.randrange(1, 7))]
        tokens = [digit for digit in digits for _ in range(world.page)]
        ns, kind = rng.randrange(2), rng.randrange(8)
        if kind < 4:
            found = world.match(tokens, ns=ns)
            receipt = world.lock(found.node)
            pages = len(tokens) // world.page - found.length // world.page
            need = pages * world.page
            world.evict(full=need - world.left[0], swa_tokens=need - world.left[1])
            slots = world.try_extend(found.slots, len(tokens))
            if slots is None:
                world.unlock(receipt)
                continue
            answers += [found, world.finish(tokens, slots, ns=ns)]
            receipts.append(receipt)
        elif kind < 6 and receipts:
            world.unlock(receipts.pop(rng.randrange(len(receipts))))
        else:
            size = world.page * rng.randrange(4)
            answers.append(world.evict(full=size, swa_tokens=world.page))
        world.verify()
        answers.append((world.left, sorted(world.nodes().items()), sorted(world.tombstones())))
    return answers


@pytest.mark.parametrize(
    ("config", "options"),
    [(TOKENS, {}), (PAGES, {"policy": "priority"}), (TOKENS, {"is_bigram": True})],
)
def test_when_everything_collides_every_answer_is_the_same(config, options):
    wide = World(config, hash_bits=32, **options)
    none = World(config, hash_bits=0, **options)
    some = World(config, hash_bits=3, **options)
    right = _random_calls(wide, 5)
    assert _random_calls(none, 5) == right
    assert _random_calls(some, 5) == right
    assert_bitwise_equal(none.state, wide.state)
    for name in ("in_tree", "parent", "depth", "tokens", "children", "last_use", "rank"):
        left, other = getattr(none.cache, name), getattr(wide.cache, name)
        np.testing.assert_array_equal(np.asarray(left), np.asarray(other), err_msg=name)


@pytest.mark.parametrize("where", range(4))
def test_one_other_token_under_the_same_hash_is_no_match(where):
    world = World(PAGES, hash_bits=0)
    world.put(A[:8])
    other = [*A[:8]]
    other[4 + where] += 1
    assert world.match(other).length == 4
    other[where] += 1
    assert world.match(other).length == 0
    shifted = [*A[4:8], *A[4:8]]  # a cached page under another parent
    assert world.match(shifted).length == 0


# ---- keys -----------------------------------------------------------------------------------


def test_a_bigram_prefix_ends_one_token_earlier():
    world = World(PAGES, is_bigram=True)
    assert world.put(A[:8]).length == 4  # 7 pairs
    assert world.put(A[:9]).length == 8
    assert world.match(A[:9]).length == 8
    assert world.match(A[:8]).length == 4
    assert world.match([*A[:8], 1]).length == 4  # the last pair differs
    assert world.match([*A[:4], 1]).length == 0
    world.verify()


@pytest.mark.parametrize(("most", "kept"), [(0, 0), (3, 0), (4, 4), (6, 4), (8, 8), (99, 12)])
def test_max_prefix_tokens_cuts_what_is_cached(most, kept):
    world = World(PAGES, max_prefix_tokens=most)
    slots = world.extend([], 14)
    taken = world.insert(A[:14], slots)
    assert taken.length == kept
    assert taken.slots == slots
    assert world.match(A[:14]).length == kept
    world.verify(held=16 - kept, held_live=16 - kept)


@pytest.mark.parametrize("length", [INT_MIN, -1, 0])
def test_a_length_below_one_names_nothing(length):
    world = World(PAGES)
    world.put(A[:8])
    assert world.match(A[:8], length) == (0, [], 0)
    slots = world.extend([], 8)
    taken = world.insert(A[:8], slots, length)
    assert taken == (0, 0, slots, 0)
    world.verify(held=8, held_live=8)


@pytest.mark.parametrize("length", [33, 1000, INT_MAX])
def test_a_length_past_the_row_ends_with_the_row(length):
    world = World(PAGES)
    slots = world.extend([], 32)
    assert world.insert(A, slots, length).length == 32
    assert world.match(A, length).length == 32
    world.verify()


# ---- policies -------------------------------------------------------------------------------


def _leaves_first(policy: str, calls: list[tuple[str, int]]) -> list[int]:
    """The order in which branches 0, 1, 2 of three tokens leave."""
    world = World(TOKENS, policy=policy)
    words = {which: [which, 50, 51] for which in range(3)}
    for what, which in calls:
        if what == "put":
            world.put(words[which])
        elif what == "put high":
            world.finish(words[which], world.extend([], 3), priority=9)
        elif what == "put low":
            world.finish(words[which], world.extend([], 3), priority=-9)
        else:
            world.match(words[which])
    gone: list[int] = []
    while world.nodes():
        assert world.evict(full=3) == (3, 3)
        there = {name[1][0][0] for name in world.nodes()}
        gone += [which for which in words if which not in there and which not in gone]
        world.verify()
    return gone


def test_each_policy_lets_its_own_branch_go_first():
    puts = [("put", 0), ("put", 1), ("put", 2)]
    assert _leaves_first("lru", [*puts, ("match", 0)]) == [1, 2, 0]
    assert _leaves_first("lfu", [*puts, *[("match", 0)] * 2, ("match", 1)]) == [2, 1, 0]
    assert _leaves_first("fifo", [*puts, ("match", 0), ("put", 0)]) == [0, 1, 2]
    marked = [("put high", 0), ("put low", 1), ("put", 2), ("match", 1)]
    assert _leaves_first("priority", marked) == [1, 2, 0]


def test_cost_weighs_what_a_page_saves():
    # the long branch is the oldest, but dear to compute again: a younger, short one goes first
    world = World(TOKENS, policy="cost")
    world.put(A[:12])
    world.put(B[:1])
    world.put(B[1:2])
    assert world.evict(full=1) == (1, 1)
    assert world.match(B[:1]).length == 0
    assert world.match(A[:12]).length == 12
    world.evict(full=24)
    assert world.verify().sizes == Sizes(0, 0, 0, 0)


@pytest.mark.parametrize("extreme", [(INT_MAX, INT_MIN), (INT_MAX, 5), (-5, INT_MIN)])
def test_priorities_keep_their_order_at_the_ends_of_int32(extreme):
    world = World(TOKENS, policy="priority")
    high, low = extreme
    world.finish(B[:3], world.extend([], 3), priority=low)
    world.finish(A[:3], world.extend([], 3), priority=high)
    world.match(B[:3])
    world.evict(full=3)
    assert (world.match(A[:3]).length, world.match(B[:3]).length) == (3, 0)


# ---- eviction -------------------------------------------------------------------------------


@pytest.mark.parametrize(("asked", "freed"), [(0, 0), (1, 4), (4, 4), (5, 8), (99, 24), (-9, 0)])
def test_evict_rounds_up_to_pages_and_stops_at_what_there_is(asked, freed):
    world = World(PAGES)
    world.put(A[:16])
    world.put(B[:8])
    assert world.evict(full=asked) == (freed, freed)
    assert world.verify().left == (24 + freed, 8 + freed)


def test_a_pinned_prefix_stays_usable():
    world = World(TOKENS)
    world.put(A[:6])
    pin = world.lock(world.match(A[:6]).node)
    world.put([*A[:6], 1, 2, 3])
    for _ in range(3):
        world.evict(full=24, swa_tokens=16)
    assert world.match(A[:6]).length == 6
    assert world.verify().sizes == Sizes(0, 0, 6, 4)
    world.unlock(pin)
    assert world.evict(full=24) == (6, 4)
    assert world.verify().left == (24, 16)


def test_a_short_branch_is_cut_shorter_and_not_cut_through():
    world = World(TOKENS)
    world.put(A[:3])
    assert world.evict(swa_tokens=1) == (1, 1)
    assert world.match(A[:3]).length == 2
    world.verify()


def test_evicting_swa_spares_every_branchs_last_window_while_it_can():
    world = World(swa.PoolConfig(48, 48, 1, 4))
    trunk = A[:8]
    ends = [[*trunk, 1, 2, 3, 4, 5], [*trunk, 6, 7], [*trunk[:4], 9]]
    for end in ends:
        found = world.match(end)
        world.finish(end, world.extend(found.slots, len(end)))
    spare = 0
    while True:
        trial = world.copy()
        trial.evict(swa_tokens=1)
        if any(trial.match(end).length < len(end) for end in ends):
            break
        world = trial
        spare += 1
        world.verify()
    needed = set()
    for end in ends:
        needed |= {tuple(end[:n]) for n in range(max(1, len(end) - 3), len(end) + 1)}
    live = {tuple(key[0] for key in name[1]) for name in set(world.nodes()) - world.tombstones()}
    assert live == needed
    assert spare == len(world.nodes()) - len(needed)


def test_useless_tombstones_go_before_anything_good():
    world = World(TOKENS)
    world.put(A[:4])
    dead = world.put(B[:4])
    receipt = world.release_swa_lock(world.lock(dead.node))
    world.match(B[:4])
    world.free_swa(dead.slots)
    world.unlock(receipt)
    assert world.evict(full=4) == (4, 0)
    assert world.match(A[:4]).length == 4
    world.verify()


def test_pages_that_leave_in_several_blocks_leave_as_in_one(monkeypatch):
    def walk():
        world = World(swa.PoolConfig(26, 18, 1, 4))
        world.put(A[:10])
        world.put([*A[:5], 1, 2])
        world.lock(world.put(B[:2]).node)
        answers = [world.evict(swa_tokens=4), world.evict(full=5, swa_tokens=4)]
        world.verify()
        return world, answers, world.match(A[:10])

    world, *right = walk()
    compiled.cache_clear()
    jax.clear_caches()
    monkeypatch.setattr(importlib.import_module("swa_jax.prefix_cache.evict"), "_BLOCK", 3)
    other, *got = walk()
    compiled.cache_clear()
    jax.clear_caches()
    assert got == right
    assert_bitwise_equal(other.cache, world.cache)
    assert_bitwise_equal(other.state, world.state)


@pytest.mark.parametrize("hash_bits", [32, 3, 0])
def test_the_table_survives_many_rounds_of_insert_and_evict(hash_bits):
    world = World(TOKENS, hash_bits=hash_bits)
    assert world.cache.table.shape[0] == 128
    keep = world.put(B[:2])
    pin = world.lock(keep.node)
    for round_ in range(12):
        tokens = [round_, *A[:13]]
        world.evict(full=14 - world.left[0], swa_tokens=14 - world.left[1])
        world.put(tokens)
        assert world.match(tokens).length == 14
        assert world.match([round_ - 1, *A[:13]]).length < 14
        assert world.match(B[:2]).slots == keep.slots
        world.verify()
    world.unlock(pin)
    world.evict(full=24)
    assert world.verify().left == (24, 16)
    assert world.match(B[:2]).length == 0


def test_an_evicted_prefix_is_not_found_after_the_table_was_laid_out_anew():
    world = World(TOKENS)
    world.put(A[:8], ns=1)
    world.put(B[:8], ns=2)
    world.evict(swa_tokens=8)
    world.put(A[8:12])
    world.evict(full=24)
    assert int(world.cache.num_deleted) == 0
    for tokens, ns in ((A[:8], 1), (B[:8], 2), (A[8:12], 0)):
        assert world.match(tokens, ns=ns) == (0, [], 0)
    world.verify()


# ---- windows of other shapes ----------------------------------------------------------------


def test_without_a_window_all_of_a_prefix_must_be_live():
    world = World(swa.PoolConfig(24, 24, 1))
    taken = world.put(A[:6])
    receipt = world.lock(taken.node)
    assert world.locks(taken.slots) == [(1, 1)] * 6
    world.unlock(receipt)
    world.free_swa(taken.slots[2:3])
    assert world.match(A[:6]).length == 2


def test_a_pool_that_is_all_swa_keeps_whole_prefixes():
    world = World(swa.PoolConfig.pure_swa(24, 1, 8))
    world.put(A[:6])
    world.put(A[:6])
    assert world.left == (18, 18)
    slots = world.extend(world.match(A[:4]).slots, 9)
    world.finish([*A[:4], *B[:5]], slots)
    assert world.left == (13, 13)
    receipt = world.lock(world.match(A[:6]).node)
    assert world.evict(swa_tokens=20) == (5, 5)
    assert world.match(A[:6]).length == 6
    world.unlock(receipt)
    assert world.evict(full=20) == (6, 6)
    assert world.verify().left == (24, 24)


# ---- open groups ----------------------------------------------------------------------------


def test_in_an_open_group_copies_and_evictions_are_queued():
    world = World(PAGES)
    world.put(A[:8])
    copies = world.extend([], 8)
    world.begin_group()
    taken = world.insert(A[:8], copies)
    assert taken.cached == 8
    assert world.left == (32, 16)
    world.verify(pending=8)
    assert world.evict(full=8) == (8, 8)
    world.verify(pending=16)
    world.end_group()
    assert world.verify().left == (48, 32)


# ---- references -----------------------------------------------------------------------------


def test_a_reference_is_a_snapshot():
    world = World(TOKENS)
    world.put(A[:6])
    saved = world.copy()
    before = jax.tree.map(np.asarray, (saved.cache, saved.state))
    first = [world.put([*A[:6], 1, 2]), world.evict(full=3), world.match(A[:8])]
    again = saved.copy()
    assert [again.put([*A[:6], 1, 2]), again.evict(full=3), again.match(A[:8])] == first
    for mine, other in ((world.cache, again.cache), (world.state, again.state)):
        assert_bitwise_equal(mine, other)
    for mine, other in ((saved.cache, before[0]), (saved.state, before[1])):
        assert_bitwise_equal(mine, other)
    assert saved.match(A[:8]).length == 6
    saved.verify()


def test_reset_forgets_every_prefix_and_keeps_the_pages_held():
    world = World(TOKENS)
    taken = world.put(A[:6])
    world.cache = pc.reset(world.cache)
    serial = world.cache.serial  # goes on, so that receipts from before match nothing
    assert_bitwise_equal(world.cache, dataclasses.replace(pc.init(TOKENS), serial=serial))
    world.verify(held=6, held_live=6)
    world.free(taken.slots)
    assert world.verify().left == (24, 16)


# ---- batches --------------------------------------------------------------------------------


def _same(left, right, index):
    for name in dataclasses.fields(left):
        many, one = getattr(left, name.name), getattr(right, name.name)
        np.testing.assert_array_equal(np.asarray(many)[index], np.asarray(one), err_msg=name.name)


def test_a_batch_is_its_rows_one_after_the_other():
    world = World(PAGES)
    prompts = [A[:8], B[:8], A[:8], [*A[:4], *B[:4]], B[:4]]
    spaces = [0, 1, 0, 0, 0]
    slots = []
    for prompt in prompts:
        slots.append(world.extend([], len(prompt)))
        if len(slots) == 3:
            break
    slots += [world.extend([], 4) * 2, [0] * 4]  # a row with slots twice, one with none
    rows = jnp.stack([ints(p, 32) for p in prompts])
    own = jnp.stack([ints(s[: len(p)], 32) for p, s in zip(prompts, slots, strict=True)])
    lengths, ns = ints([len(p) for p in prompts]), ints(spaces)

    def all_at_once(cache, state):
        cache, state, taken = pc.insert_batch(cache, state, rows, lengths, own, namespace=ns)
        cache, found = pc.match_prefix_batch(cache, state, rows, lengths, namespace=ns)
        cache, receipts = pc.lock_batch(cache, state, found.node)
        return cache, state, taken, found, receipts, pc.unlock_batch(cache, receipts)

    many = jax.jit(all_at_once, compiler_options=QUICKLY)(world.cache, world.state)
    cache, state, taken, found, receipts, unlocked = many
    for i in range(5):
        world.cache, world.state, one = compiled("insert")(
            world.cache, world.state, rows[i], lengths[i], own[i], namespace=ns[i]
        )
        _same(taken, one, i)
    assert_bitwise_equal(world.state, state)
    finds = []
    for i in range(5):
        world.cache, one = compiled("match_prefix")(
            world.cache, world.state, rows[i], lengths[i], namespace=ns[i]
        )
        finds.append(one)
        _same(found, one, i)
    assert [int(one.length) for one in finds] == [8, 8, 8, 4, 0]
    each = []
    for i in range(5):
        each.append(world.lock(int(found.node[i])))
        _same(receipts, each[i], i)
    assert_bitwise_equal(world.cache, cache)
    for receipt in each:
        world.unlock(receipt)
    assert_bitwise_equal(world.cache, unlocked)


def test_vmap_asks_for_many_prompts_at_once():
    world = World(PAGES)
    world.put(A[:12])
    world.put([*A[:8], *B[:4]])
    prompts = [A[:12], A[:7], [*A[:8], *B[:8]], B[:8]]
    rows, lengths = jnp.stack([ints(p, 32) for p in prompts]), ints([len(p) for p in prompts])

    def ask(row, length):
        return pc.match_prefix(world.cache, world.state, row, length)[1]

    many = jax.jit(jax.vmap(ask), compiler_options=QUICKLY)(rows, lengths)
    assert many.length.tolist() == [12, 4, 12, 0]
    for i, prompt in enumerate(prompts):
        assert world.copy().match(prompt).slots == many.slots[i].tolist()[: many.length[i]]


# ---- one program ----------------------------------------------------------------------------

ROWS, WIDTH, OUTPUT = 8, 32, 3


def serve(carry, request):
    """match -> lock -> evict what is short -> extend -> decode -> insert -> unlock."""
    cache, state = carry
    tokens, length, ns = request
    size = jnp.int32(state.config.page_size)
    cache, found = pc.match_prefix(cache, state, tokens, length - 1, namespace=ns)
    cache, receipt = pc.lock(cache, state, found.node)
    end = length + OUTPUT
    need = (end + size - 1) // size * size - found.length
    cache, state, gone = pc.evict(
        cache,
        state,
        full_tokens=need - swa.full_available_size(state),
        swa_tokens=need - swa.swa_available_size(state),
    )
    place = jnp.arange(WIDTH, dtype=jnp.int32)
    last = found.slots[jnp.maximum(found.length - 1, 0)]
    state, grant = swa.alloc_extend(
        state, found.length[None], length[None], last[None], capacity=WIDTH
    )
    at = jnp.where((place < grant.count) & grant.ok, place + found.length, WIDTH)
    slots = found.slots.at[at].set(grant.slots, mode="drop")

    def step(inner, n):
        state, slots, ok = inner
        state, grant = swa.alloc_decode(state, n[None] + 1, slots[n - 1][None], ok[None])
        ok = ok & grant.ok
        return (state, slots.at[jnp.where(ok, n, WIDTH)].set(grant.slots[0], mode="drop"), ok), None

    steps = length + jnp.arange(OUTPUT, dtype=jnp.int32)
    (state, slots, ok), _ = jax.lax.scan(step, (state, slots, grant.ok), steps)
    done = jnp.where(ok, end, 0)
    cache, state, taken = pc.insert(cache, state, tokens, done, slots, namespace=ns)
    rest = jnp.where(place >= jnp.maximum(taken.length, found.length), taken.slots, 0)
    state = swa.free(state, rest)
    cache = pc.unlock(cache, receipt)
    return (cache, state), (found.length, ok, gone.full_tokens, gone.swa_tokens, taken.length)


def _requests(page: int, count: int = 24):
    rng = np.random.default_rng(3)
    rows = np.repeat(rng.integers(0, 2, (count, ROWS)), page, axis=1)
    rows = np.concatenate([rows, np.full((count, WIDTH), 9)], axis=1)[:, :WIDTH]
    lengths = rng.integers(1, ROWS + 1, count) * page
    return (
        jnp.asarray(rows, jnp.int32),
        jnp.asarray(np.minimum(lengths, WIDTH - OUTPUT), jnp.int32),
        jnp.asarray(rng.integers(0, 2, count), jnp.int32),
    )


@pytest.mark.parametrize("config", [TOKENS, PAGES])
def test_a_whole_serving_loop_in_one_scan_is_its_steps(config):
    requests = _requests(config.page_size)
    start = (pc.init(config), swa.init(config))

    @functools.partial(jax.jit, compiler_options=QUICKLY)
    def all_of_it(carry, requests):
        return jax.lax.scan(serve, carry, requests)

    (cache, state), answers = all_of_it(start, requests)
    step = jax.jit(serve, compiler_options=QUICKLY)
    carry, each = start, []
    for i in range(requests[0].shape[0]):
        carry, answer = step(carry, tuple(part[i] for part in requests))
        each.append(answer)
    assert_bitwise_equal(cache, carry[0])
    assert_bitwise_equal(state, carry[1])
    for many, single in zip(answers, zip(*each, strict=True), strict=True):
        np.testing.assert_array_equal(np.asarray(many), np.asarray(single))
    hits, ok, gone = np.asarray(answers[0]), np.asarray(answers[1]), np.asarray(answers[2])
    assert ok.all()
    assert hits.sum() > 0
    assert gone.sum() > 0
    world = World(config)
    world.cache, world.state = cache, state
    probe = world.verify()
    assert probe.sizes.full_protected == probe.sizes.swa_protected == 0


def test_donated_buffers_give_the_same_answers():
    requests = _requests(1, 6)
    kept, given = (
        jax.jit(serve, compiler_options=QUICKLY),
        jax.jit(serve, donate_argnums=0, compiler_options=QUICKLY),
    )
    plain = (pc.init(TOKENS), swa.init(TOKENS))
    donated = jax.tree.map(jnp.copy, plain)
    for i in range(6):
        request = tuple(part[i] for part in requests)
        plain, _ = kept(plain, request)
        before = donated
        donated, _ = given(donated, request)
        assert before[0].table.is_deleted()
        assert before[1].full.ring.is_deleted()
    assert_bitwise_equal(plain[0], donated[0])
    assert_bitwise_equal(plain[1], donated[1])


def test_nothing_becomes_64_bits_wide():
    with jax.enable_x64(True):
        world = World(swa.PoolConfig(20, 12, 1, 3))
        taken = world.put(A[:6])
        receipt = world.lock(taken.node)
        world.evict(full=3, swa_tokens=2)
        world.unlock(receipt)
        world.cache, found = pc.match_prefix(world.cache, world.state, A[:8], 8)
        leaves = jax.tree.leaves((world.cache, world.state, receipt, found))
        assert {str(leaf.dtype) for leaf in leaves} == {"int32", "bool"}


# ---- misuse ---------------------------------------------------------------------------------


@pytest.mark.parametrize("node", [0, 7, 24, 25, 1000, INT_MAX, -1, INT_MIN])
def test_a_node_that_is_not_in_the_tree_locks_nothing(node):
    world = World(TOKENS)
    world.put(A[:6])
    before = world.cache
    receipt = world.lock(node)
    assert_bitwise_equal(world.cache, before)
    receipt = world.release_swa_lock(receipt)
    world.unlock(receipt)
    assert_bitwise_equal(world.cache, before)
    world.verify()


def test_a_receipt_is_good_once():
    world = World(TOKENS)
    taken = world.put(A[:6])
    receipt = world.lock(taken.node)
    world.unlock(receipt)
    world.unlock(receipt)
    world.release_swa_lock(receipt)
    assert world.locks(taken.slots) == [(0, 0)] * 6
    world.verify()


def test_a_stale_receipt_does_not_reach_the_next_tenant_of_its_page():
    world = World(TOKENS)
    old = world.lock(world.put(A[:16]).node)
    world.unlock(old)
    world.evict(full=24)
    for first in range(3):  # all pages are somebody's by now
        world.lock(world.put([first, *B[:7]], dead=range(4)).node)
    assert world.left[0] == 0
    before = world.cache
    world.unlock(old)
    world.release_swa_lock(old)
    assert_bitwise_equal(world.cache, before)
    world.verify()


def _slots_of(world: World, kind: str) -> list[int]:
    """Eight slots that an insert must not take, all or in part."""
    good = world.extend([], 8)
    if kind == "never granted":
        world.free(good)
        return list(range(41, 49))
    if kind == "freed":
        world.free(good)
        return good
    if kind == "twice":
        world.free(good[4:])
        return [*good[:4], *good[:4]]
    if kind == "another prefix":
        return world.finish(B[:8], good).slots
    if kind == "inside a page":
        return [slot + 1 for slot in good]
    if kind == "negative":
        return [-slot for slot in good]
    if kind == "past the pool":
        return [slot + 10**6 for slot in good]
    if kind == "ends of int32":
        return [INT_MIN, INT_MAX] * 4
    return [0, 1, 2, 3] * 2  # the padding page


@pytest.mark.parametrize("with_copy", [False, True])
@pytest.mark.parametrize(
    ("kind", "taken", "left_over"),
    [
        ("never granted", 0, 0),
        ("freed", 0, 0),
        ("twice", 4, 0),
        ("another prefix", 0, 0),
        ("inside a page", 0, 8),
        ("negative", 0, 8),
        ("past the pool", 0, 8),
        ("ends of int32", 0, 8),
        ("padding", 0, 8),
    ],
)
def test_slots_that_are_nobodys_to_give_are_not_taken(kind, taken, left_over, with_copy):
    world = World(PAGES)
    if with_copy:  # the content is there already: nothing but an honest copy may be freed
        world.put(A[:8])
    slots = _slots_of(world, kind)
    got = world.insert(A[:8], slots)
    if with_copy:
        assert (got.cached, got.length) == (8, 8)
        taken = 0
    else:
        assert (got.cached, got.length) == (0, taken)
        assert got.slots[taken:] == slots[taken:]
    world.verify(held=left_over, held_live=left_over)
    if kind == "another prefix":
        assert world.match(B[:8]).length == 8


def test_what_may_not_be_given_ends_the_insert_and_the_pages_before_it_are_taken():
    world = World(PAGES)
    slots = world.extend([], 16)
    world.free(slots[8:12])
    got = world.insert(A[:16], slots)
    assert got.length == 8
    world.verify(held=4, held_live=4)


def test_inserting_the_same_request_twice_changes_nothing_the_second_time():
    world = World(PAGES)
    slots = world.extend([], 8)
    world.insert(A[:8], slots)
    state = world.state
    again = world.insert(A[:8], slots)
    assert (again.cached, again.length, again.slots) == (8, 8, slots)
    assert_bitwise_equal(world.state, state)
    world.verify()


def test_an_insert_under_two_namespaces_gives_a_page_once():
    world = World(PAGES)
    slots = world.extend([], 8)
    world.insert(A[:8], slots, ns=1)
    assert world.insert(A[:8], slots, ns=2).length == 0
    assert world.verify().sizes == Sizes(8, 8, 0, 0)


@pytest.mark.parametrize(
    "options",
    [{"policy": "random"}, {"max_prefix_tokens": -1}, {"hash_bits": -1}, {"hash_bits": 33}],
)
def test_init_says_what_is_wrong(options):
    with pytest.raises(ValueError, match=next(iter(options))):
        pc.init(TOKENS, **options)


def test_host_values_of_the_wrong_kind_are_refused():
    cache, state = pc.init(TOKENS), swa.init(TOKENS)
    with pytest.raises(ValueError, match="tokens"):
        pc.match_prefix(cache, state, [[1, 2]], 2)
    with pytest.raises(ValueError, match="tokens"):
        pc.match_prefix(cache, state, np.asarray([1.0, 2.0]), 2)
    with pytest.raises(ValueError, match="slots"):
        pc.insert(cache, state, [1, 2, 3], 3, [1, 2])
    with pytest.raises(ValueError, match="node"):
        pc.lock(cache, state, np.asarray([1]))
    with pytest.raises(ValueError, match="full_tokens"):
        pc.evict(cache, state, full_tokens=1.5)


@pytest.mark.parametrize("broken", ["in_tree", "children", "parent", "swa_locks", "num_deleted"])
def test_check_names_the_law(broken):
    world = World(TOKENS)
    world.put(A[:4])
    pc.check(world.cache, world.state)
    leaf = getattr(world.cache, broken)
    law, damage = {
        "in_tree": ("pages_are_held", lambda: leaf.at[20].set(True)),
        "children": ("child_counts", lambda: leaf + 1),
        "parent": ("links", lambda: leaf.at[2].set(3)),
        "swa_locks": ("locks", lambda: leaf - 1),
        "num_deleted": ("table", lambda: leaf + 1),
    }[broken]
    damaged = dataclasses.replace(world.cache, **{broken: damage()})
    with pytest.raises(swa.InvariantError, match=law):
        pc.check(damaged, world.state)
