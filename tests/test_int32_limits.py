"""Counting at the limits of int32: pools of up to 2^31 - 1 slots, by shape and at the borders."""

import functools
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import plan_loads
import pytest

import swa_jax as swa
from swa_jax import prefix_cache
from swa_jax.models import get_model
from swa_jax.paging import sum_exceeds
from swa_jax.prefix_cache.match import note_use
from swa_jax.wide import wide_add, wide_value, wide_zero

MOST = 2**31 - 1
WINDOW = 128
# 2^31 - 2 = 2046 * 1049601: the slots of these pages end at 2^31 - 3, and there are few pages.
PAGE, PAGES = 1_049_601, 2045
LAST = (PAGES + 1) * PAGE - 1
assert LAST == MOST - 2


def most_tokens(page):
    return (MOST - page) // page * page


def ints(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.int32)


LIST, ROWS, TABLE = ints(16), ints(4), ints(4, 8)
CALLS = {
    "alloc": (functools.partial(swa.alloc, capacity=64), ints()),
    "alloc_extend": (functools.partial(swa.alloc_extend, capacity=64), ROWS, ROWS, ROWS),
    "alloc_extend_swa_tail": (
        functools.partial(swa.alloc_extend_swa_tail, capacity=64),
        *(ROWS,) * 4,
    ),
    "alloc_decode": (swa.alloc_decode, ROWS, ROWS),
    "free": (swa.free, LIST),
    "free_swa": (swa.free_swa, LIST),
    "free_full": (swa.free_full, LIST),
    "free_segment": (swa.free_segment, LIST),
    "free_swa_segment": (swa.free_swa_segment, LIST),
    "free_swa_grouped": (swa.free_swa_grouped, LIST),
    "free_group_begin": (swa.free_group_begin,),
    "free_group_end": (swa.free_group_end,),
    "free_out_of_window": (swa.free_out_of_window, TABLE, ROWS, ROWS),
    "share": (swa.share, LIST),
    "copy_on_write": (swa.copy_on_write, ROWS, ROWS),
    "invariants": (swa.invariants,),
    "clear": (swa.clear,),
    "snapshot": (swa.snapshot,),
    "available_size": (swa.available_size,),
}
WITH_PAGES = {
    "translate_full_to_swa": (swa.translate_full_to_swa, LIST),
    "page_tables": (swa.page_tables, TABLE, ROWS, ROWS),
    "window_page_tables": (
        functools.partial(swa.window_page_tables, max_queries=4),
        *(TABLE, ROWS, ROWS),
    ),
}
WITH_TWO_POOLS = {
    "clear_full_to_swa_mapping": (swa.clear_full_to_swa_mapping, LIST),
    "set_full_to_swa_mapping": (swa.set_full_to_swa_mapping, LIST, LIST),
}
WITH_RINGS = {
    "ring_acquire": (swa.ring_acquire, ROWS),
    "ring_release": (swa.ring_release, ROWS),
}


def largest(kind, page):
    """The largest pools of a kind, and the calls that they take."""
    tokens = most_tokens(page)
    if kind == "one pool":
        return swa.PoolConfig.pure_swa(tokens, page, WINDOW), CALLS | WITH_PAGES
    if kind == "rings":
        ring = -(-(WINDOW + 1) // page) * page
        count = (MOST - page) // ring
        config = swa.PoolConfig.request_ring(tokens, count, page_size=page, sliding_window=WINDOW)
        return config, CALLS | WITH_RINGS
    return swa.PoolConfig(tokens, tokens, page, WINDOW), CALLS | WITH_PAGES | WITH_TWO_POOLS


# ---- by shape ----------------------------------------------------------------------------------


@pytest.mark.parametrize("page", [1, 16, 64, PAGE])
@pytest.mark.parametrize("kind", ["two pools", "one pool", "rings"])
def test_every_call_can_be_traced_for_the_largest_pools(kind, page):
    config, calls = largest(kind, page)
    assert config.full_tokens + page <= MOST < config.full_tokens + 2 * page
    state = jax.eval_shape(lambda: swa.init(config))
    for name, (call, *arguments) in calls.items():
        made = jax.eval_shape(call, state, *arguments)
        after = made[0] if isinstance(made, tuple) else made
        if isinstance(after, swa.AllocatorState):
            assert jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), after) == jax.tree.map(
                lambda leaf: (leaf.shape, leaf.dtype), state
            ), name
        for leaf in jax.tree.leaves(made):
            assert leaf.dtype in (jnp.int32, jnp.bool_), name


def test_a_prefix_cache_can_be_traced_for_the_largest_pools():
    """Its table has four places or more for a page, which are counted in int32 too."""
    page = 8
    config, _ = largest("two pools", page)
    assert config.full_pages == 2**28 - 2
    more = swa.PoolConfig(2**28, 64)
    with pytest.raises(ValueError, match=r"at most 2\^28 - 1 full pages, got 268435456: use pages"):
        prefix_cache.init(more)
    state = jax.eval_shape(lambda: swa.init(config))
    cache = jax.eval_shape(lambda: prefix_cache.init(config))
    calls = {
        "match_prefix": lambda c, s, t: prefix_cache.match_prefix(c, s, t, 16)[0],
        "insert": lambda c, s, t: prefix_cache.insert(c, s, t, 16, t)[0],
        "lock": lambda c, s, t: prefix_cache.lock(c, s, t[0])[0],
        "evict": lambda c, s, t: prefix_cache.evict(c, s, full_tokens=t[0], swa_tokens=t[1])[0],
        "invariants": lambda c, s, t: prefix_cache.invariants(c, s),
    }
    for name, call in calls.items():
        for leaf in jax.tree.leaves(jax.eval_shape(call, cache, state, LIST)):
            assert leaf.dtype in (jnp.int32, jnp.uint32, jnp.bool_), (name, leaf.dtype)


def test_the_largest_pools_compile_without_being_made():
    """2^31 - 1 slots of pages of one token: the program is made, its 48 GB are not."""
    config, calls = largest("two pools", 1)
    state = jax.eval_shape(lambda: swa.init(config))
    assert swa.state_bytes(config) > 48 * 10**9
    for name in ("alloc_decode", "free"):
        call, *arguments = calls[name]
        jax.jit(call, donate_argnums=0).lower(state, *arguments)


@pytest.mark.parametrize("page", [1, 16, 64, 2**20, PAGE, 2**30 - 1])
def test_one_page_more_is_refused_with_the_most_there_can_be(page):
    tokens = most_tokens(page)
    assert swa.PoolConfig(tokens, tokens, page).full_pages == tokens // page
    for sizes in ((tokens + page, tokens), (tokens, tokens + page), (2**63, tokens)):
        with pytest.raises(ValueError, match=rf"at most 2\^31 - 1 slots.* is {tokens}$"):
            swa.PoolConfig(*sizes, page)
    with pytest.raises(ValueError, match=rf"at most 2\^31 - 1 slots.* is {tokens}$"):
        swa.PoolConfig.pure_swa(tokens + page, page)


@pytest.mark.parametrize("page", [2**31 - 1, 2**31, 2**64])
def test_a_page_that_leaves_no_slot_is_refused(page):
    with pytest.raises(ValueError, match=r"must be|at most"):
        swa.PoolConfig(page, page, page)


def test_other_sizes_past_int32_are_refused():
    with pytest.raises(ValueError, match=r"sliding_window must be at most 2\^31 - 1"):
        swa.PoolConfig(64, 64, sliding_window=2**31)
    with pytest.raises(ValueError, match=r"more than 2\^31 - 1 slots; the most .* is 16777215 req"):
        swa.PoolConfig.request_ring(64, 2**24, sliding_window=127)
    state = swa.init(swa.PoolConfig(64, 64))
    for capacity in (2**31, 2**63):
        with pytest.raises(ValueError, match=r"capacity must be 1 \.\. 2\^31 - 1"):
            swa.alloc(state, 1, capacity=capacity)
    for call in (swa.free, swa.share, swa.translate_full_to_swa):
        with pytest.raises(ValueError, match=r"slots must fit int32"):
            call(state, [2**31])
        with pytest.raises(ValueError, match=r"slots must fit int32"):
            call(state, np.asarray([-(2**31) - 1]))


def test_one_budget_goes_no_further_than_slots_do():
    config = swa.PoolConfig.unified(2**62, get_model("gpt-oss-20b"), 16)
    assert config.full_tokens + 16 <= MOST
    assert config.swa_tokens + 16 <= MOST
    state = jax.eval_shape(lambda: swa.init(config))
    jax.eval_shape(swa.rebalance, state, ints(), ints())
    jax.eval_shape(swa.unified_available, state)


# ---- at the borders, by value ------------------------------------------------------------------


@pytest.fixture(scope="module")
def nearly_full():
    """Every page but the last two is held; the first slot of each, in order."""
    state = swa.init(swa.PoolConfig(PAGES * PAGE, PAGES * PAGE, PAGE, sliding_window=PAGE))
    ones = np.ones(PAGES - 2, np.int32)
    state, grant = swa.alloc_extend(state, 0 * ones, ones, -ones, capacity=PAGES)
    assert grant.ok
    assert int(grant.count) == PAGES - 2
    return state, np.asarray(grant.slots[: PAGES - 2])


def no_fault_but(state, **counts):
    seen = {kind: count for kind, count in swa.faults(state).items() if count}
    assert seen == counts


def test_the_last_page_is_granted_filled_and_freed(nearly_full):
    state, slots = nearly_full
    np.testing.assert_array_equal(slots, np.arange(1, PAGES - 1) * PAGE)
    state, grant = swa.alloc_extend(state, [0, 0], [3, PAGE], [-1, -1], capacity=PAGE + 3)
    assert grant.ok
    last = np.asarray(grant.slots[3:])
    np.testing.assert_array_equal(last, np.arange(PAGES * PAGE, LAST + 1))
    assert int(swa.full_available_size(state)) == 0
    np.testing.assert_array_equal(swa.translate_full_to_swa(state, [LAST]), [LAST])
    swa.check(state)

    # A row that stands on the last slot of all has no room there, and there is no page left.
    after, grant = swa.alloc_decode(state, [PAGE + 1], [LAST])
    assert (bool(grant.ok), int(grant.full_short), int(grant.swa_short)) == (False, 1, 1)
    no_fault_but(after)
    after, grant = swa.alloc_decode(state, [4], [int(grant.slots[0]) + (PAGES - 1) * PAGE + 2])
    assert grant.ok
    assert int(grant.slots[0]) == (PAGES - 1) * PAGE + 3
    after = swa.free(state, [LAST, PAGE, LAST - PAGE])
    assert int(swa.full_available_size(after)) == 3 * PAGE
    swa.check(after)
    no_fault_but(after)


def test_slots_past_the_last_are_refused(nearly_full):
    state, _ = nearly_full
    past = [LAST + 1, LAST + 2, -1, -(2**31)]
    assert max(past) == MOST
    for call in (swa.free, swa.free_swa, swa.free_full, swa.share, swa.clear_full_to_swa_mapping):
        after = call(state, past)
        no_fault_but(after, out_of_range=4)
        assert same_but_faults(state, after)
    after, grant = swa.alloc_decode(state, [2, 3, 4, 5], past)
    assert not grant.ok
    assert same_but_faults(state, after)
    no_fault_but(after, out_of_range=4)
    np.testing.assert_array_equal(swa.translate_full_to_swa(state, past), [0, 0, -1, 0])


def same_but_faults(before, after):
    pairs = zip(
        jax.tree.leaves(replace(before, faults=after.faults)), jax.tree.leaves(after), strict=True
    )
    return all(bool(jnp.array_equal(old, new)) for old, new in pairs)


def test_shares_and_copies_of_the_last_page(nearly_full):
    state, _ = nearly_full
    state, grant = swa.alloc_extend(state, [0], [5], [-1], capacity=PAGE)
    mine = int(grant.slots[4])
    state = swa.share(state, [mine])
    state, copies = swa.copy_on_write(state, [5], [mine])
    assert copies.ok
    assert int(copies.last_loc[0]) == PAGES * PAGE + 4
    assert int(copies.target[0].max()) == PAGES * PAGE + 4
    swa.check(state)
    no_fault_but(state)


def test_a_window_near_two_to_the_31_is_left(nearly_full):
    """One row of all pages: its length ends at the border, and so do the frees."""
    state, slots = nearly_full
    table = np.zeros((1, PAGES + 1), np.int32)
    table[0, : slots.size] = slots
    start = 0
    for length in (3 * PAGE, (PAGES - 2) * PAGE):
        state, evicted = swa.free_out_of_window(state, table, [length], [start], stride=PAGE)
        start = int(evicted[0])
        assert start == length - PAGE
        assert int(swa.swa_available_size(state)) == 2 * PAGE + start
    no_fault_but(state)
    swa.check(state)
    # All that is left, a few at a time, and past every page.
    held = int(swa.swa_available_size(state))
    state, evicted = swa.free_out_of_window(state, table, [MOST], [start], stride=PAGE, max_pages=1)
    assert int(evicted[0]) == start + PAGE
    assert int(swa.swa_available_size(state)) == held + PAGE
    state, evicted = swa.free_out_of_window(state, table, [MOST], [MOST // PAGE * PAGE])
    no_fault_but(state)  # a frontier below what was given up already


def test_a_table_wider_than_any_text_is_no_error(nearly_full):
    state, slots = nearly_full
    table = np.zeros((1, 2 * PAGES), np.int32)
    table[0, : slots.size] = slots
    state, evicted = swa.free_out_of_window(state, table, [3 * PAGE], [0], stride=PAGE)
    assert int(evicted[0]) == 2 * PAGE
    no_fault_but(state)


@pytest.mark.parametrize("length", [MOST, MOST - 1, 2**30])
def test_lengths_past_every_pool_are_refused(nearly_full, length):
    state, _ = nearly_full
    for tails in ((), ([1, 1, 1],)):
        call = swa.alloc_extend_swa_tail if tails else swa.alloc_extend
        after, grant = call(
            state, [0, 0, 0], [length, length, 1], [-1, -1, -1], *tails, capacity=PAGES
        )
        assert not grant.ok
        assert int(grant.count) == 0
        assert not np.asarray(grant.slots).any()
        assert same_but_faults(state, after)
        no_fault_but(after, bad_length=1)  # their sum is past int32: more than the capacity
    after, grant = swa.alloc(state, length // PAGE * PAGE, capacity=PAGE)
    assert not grant.ok
    no_fault_but(after, bad_length=1)


def test_counters_stay_at_the_most(nearly_full):
    state, _ = nearly_full
    full = replace(state, faults=jnp.full_like(state.faults, MOST - 1))
    after = swa.free(full, [-1] * 4)
    assert swa.faults(after)["out_of_range"] == MOST
    assert swa.faults(swa.free(after, [-1] * 4))["out_of_range"] == MOST
    after = swa.free_group_begin(swa.free_group_begin(swa.free_group_begin(full)))
    assert swa.faults(after)["nested_group"] == MOST


def test_holders_stay_at_the_most(nearly_full):
    state, slots = nearly_full
    page = jnp.asarray([1, 1])
    many = replace(state.full, holders=state.full.holders.at[page].set(MOST - 1, mode="drop"))
    sides = replace(state.swa, holders=state.swa.holders.at[page].set(MOST - 1, mode="drop"))
    state = replace(state, full=many, swa=sides)
    once = swa.share(state, slots[:1])
    assert int(once.full.holders[1]) == MOST
    assert int(once.swa.holders[1]) == MOST
    no_fault_but(once)
    again = swa.share(once, slots[:1])
    assert same_but_faults(once, again)
    no_fault_but(again, bad_length=1)
    assert int(swa.free(again, slots[:1]).full.holders[1]) == MOST - 1


@pytest.mark.parametrize("policy", ["lru", "lfu"])
def test_times_and_hits_of_a_cache_stay_at_the_most(policy):
    """A clock that went round would have new prefixes leave before old ones, for ever."""
    cache = prefix_cache.init(swa.PoolConfig(8, 8), policy=policy)
    most_hits = 2**30
    cache = replace(cache, clock=jnp.int32(MOST - 1), rank=cache.rank.at[1].set(most_hits - 1))
    for path in ([1, 2, 0], [1, 3, 0], [1, 2, 0]):
        cache = note_use(cache, jnp.asarray(path), jnp.int32(2), hit=True)
    assert int(cache.clock) == MOST
    np.testing.assert_array_equal(cache.last_use[:4], [0, MOST, MOST, MOST])
    hits = [0, most_hits, 2, 1] if policy == "lfu" else [0, most_hits - 1, 0, 0]
    np.testing.assert_array_equal(cache.rank[:4], hits)


def test_rings_near_two_to_the_31():
    rings = 3
    config = swa.PoolConfig.request_ring(
        PAGE, rings, page_size=PAGE, sliding_window=510 * PAGE, extra_tokens=PAGE
    )
    length = config.swa_unit_tokens
    top = PAGE + rings * length
    assert MOST - length < top <= MOST
    slots = swa.ring_slots(config, [1, rings, rings + 1, -1, MOST], [0, MOST, 1, 1, 1])
    wanted = [PAGE, PAGE + (rings - 1) * length + MOST % length, 0, 0, 0]
    np.testing.assert_array_equal(slots, wanted)
    slots = swa.ring_slots(config, [rings] * 3, [MOST - 1, MOST, -(2**31)], [MOST, -(2**31), MOST])
    np.testing.assert_array_equal(slots, [PAGE + (rings - 1) * length + (MOST - 1) % length, 0, 0])


# ---- sums --------------------------------------------------------------------------------------


@pytest.mark.parametrize("limit", [0, 1, 2**15, MOST - 1, MOST])
def test_sums_of_a_batch_are_right_past_int32(limit):
    rng = np.random.default_rng(0)
    for rows in (1, 2, 2**15 - 1):
        for _ in range(20):
            high = max(1, limit // rows) + int(rng.integers(0, 3))
            values = rng.integers(0, min(high, MOST) + 1, rows)
            values[0] = rng.choice([0, MOST, limit - min(limit, int(values[1:].sum()))])
            seen = bool(sum_exceeds(jnp.asarray(values, jnp.int32), limit))
            assert seen == (int(values.sum()) > limit), (rows, values)


@pytest.mark.parametrize("chunk", [2**20, 2**30])
def test_a_plan_of_texts_of_two_to_the_30_tokens_counts_right(chunk):
    """Tokens over all steps pass int32 a thousandfold."""
    page = 2**20
    sizes = plan_loads.Sizes(most_tokens(page), most_tokens(page), page, 3 * page)
    requests = [(2**30, 2**30 + 5), (most_tokens(page) - 5, most_tokens(page)), (1, 3)]
    requests += [(2**30 - 1, 2**30 + 9), (7 * page, 7 * page + 2), (5, 6)]
    figures = plan_loads.run(sizes, [plan_loads.limits_of(sizes, chunk)], [requests])
    wanted = plan_loads.expected(sizes, chunk, requests)
    assert {name: int(getattr(figures, name)[0]) for name in wanted} == wanted
    assert int(figures.sum_full_tokens[0]) > 2**34


def test_sums_over_a_run_are_right_past_int32():
    step = MOST - 2**20
    total = jax.lax.fori_loop(0, 3000, lambda _, sum_: wide_add(sum_, jnp.int32(step)), wide_zero())
    assert int(wide_value(np.asarray(total))) == 3000 * step > 2**42
