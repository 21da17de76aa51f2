"""Both pools out of one budget: how it is cut, whose a page is, and how the split moves."""

import dataclasses
import importlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from unified_walk import OPS, Walk, long_walk, unified_config

import swa_jax as swa
from swa_jax.counts import held_pages
from swa_jax.models import get_model, list_models
from swa_jax.models.decoder.unified_kv import UnifiedKV
from swa_jax.unified import WASTE, UnifiedLayout

# `swa_jax.rebalance` is the function; this is its module.
rebalancing = importlib.import_module("swa_jax.rebalance")

MIXED = unified_config(8, 6, 2, 3)  # 3 full pages or 2 SWA pages a block
WIDE = unified_config(10, 5, 1, 5)  # 5 or 1, as five SWA layers to a full one


# ---- how a budget is cut -------------------------------------------------------------------


def hybrid_models():
    return [name for name in list_models() if not get_model(name).pure_swa]


@pytest.mark.parametrize("name", hybrid_models())
def test_every_published_model_has_a_layout_that_wastes_little(name):
    model, budget = get_model(name), 40 * 2**30
    config = swa.PoolConfig.unified(budget, model, 16)
    layout = config.unified_layout
    assert layout is not None
    assert config.sliding_window == model.past_window
    assert config.chunked == model.chunked
    a, c = layout.full_pages, layout.swa_pages
    assert (a, c) == (config.full_pages // layout.blocks, config.swa_pages // layout.blocks)
    page = 16 * model.full_bytes_per_token, 16 * model.swa_bytes_per_token
    assert (page[0], page[1]) == (
        layout.full_units * layout.unit_bytes,
        layout.swa_units * layout.unit_bytes,
    )
    block = layout.block_units * layout.unit_bytes
    assert block - max(block // WASTE, 1) <= a * page[0] <= block
    assert block - max(block // WASTE, 1) <= c * page[1] <= block
    assert budget - block < layout.kv_bytes <= budget


def test_equal_layers_make_a_page_of_either_kind_a_block():
    layout = swa.PoolConfig.unified(2**30, get_model("gpt-oss-20b"), 16).unified_layout
    assert layout is not None
    assert layout == UnifiedLayout(2729, 12, 12, 12, 32768)
    assert (layout.full_pages, layout.swa_pages) == (1, 1)


def test_a_block_too_large_for_its_budget_is_the_one_that_wastes_least():
    model = get_model("gemma-3-4b")  # 5 full and 29 SWA layers
    for budget, wanted in ((2**30, (30, 6, 1)), (2**26, (29, 5, 1))):
        config = swa.PoolConfig.unified(budget, model, 16, sliding_window=64)
        layout = config.unified_layout
        assert layout is not None
        assert (layout.block_units, layout.full_pages, layout.swa_pages) == wanted


def test_a_budget_beyond_int32_slots_is_not_used_in_full():
    config = swa.PoolConfig.unified(2**62, get_model("gpt-oss-20b"), 16)
    layout = config.unified_layout
    assert layout is not None
    assert layout.units * 16 < 2**31
    assert max(config.full_tokens, config.swa_tokens) + 16 < 2**31


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ((0, "gpt-oss-20b", 16), "budget must be a positive integer, got 0"),
        ((2**30, "gpt-oss-20b", 0), "page_size must be a positive integer, got 0"),
        ((2**30, "mistral-7b-v0.1", 16), r"got 0 full and 32 SWA layers; use PoolConfig.pure_swa"),
        ((2**16, "gpt-oss-20b", 16), "need at least 1179648 bytes"),
        ((2**20, "gemma-3-4b", 16), "has no two blocks of 29 units of 65536 bytes"),
        ((2**22, "gpt-oss-20b", 16), r"need at least 7471104 bytes \(18 blocks\)"),
    ],
)
def test_budgets_that_cannot_work_are_refused(args, words):
    budget, name, page = args
    with pytest.raises(ValueError, match=words):
        swa.PoolConfig.unified(budget, get_model(name), page)


def test_what_a_refusal_says_is_enough_is_enough():
    model = get_model("gpt-oss-20b")
    config = swa.PoolConfig.unified(7471104, model, 16)
    assert config.most_pages_beside(config.window_pages) == 9
    with pytest.raises(ValueError, match="need at least 7471104"):
        swa.PoolConfig.unified(7471103, model, 16)


def test_no_model_and_sizes_of_another_layout_are_refused():
    with pytest.raises(ValueError, match="must be a ModelConfig or a DecoderConfig, got 'gpt'"):
        swa.PoolConfig.unified(2**30, "gpt")  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="48 full and 32 SWA tokens; got 48 and 48"):
        swa.PoolConfig(48, 48, 2, 5, unified_layout=MIXED.unified_layout)
    even = UnifiedLayout(blocks=16, block_units=1, full_units=1, swa_units=1, unit_bytes=128)
    assert swa.PoolConfig(32, 32, 2, 5, unified_layout=even).unified_layout == even
    with pytest.raises(ValueError, match="pools with one budget follow from its layout"):
        swa.PoolConfig(32, 32, 2, 5, pure_swa_pool=True, unified_layout=even)
    state = swa.init(MIXED.apart)
    for call in (swa.unified_available, lambda state: swa.rebalance(state, 1, 1)):
        with pytest.raises(ValueError, match="two pools of fixed sizes"):
            call(state)


def test_an_ordinary_state_is_as_it_was():
    plain = swa.init(swa.PoolConfig(48, 32, 2, 5))
    assert plain.block_is_full is None
    assert len(jax.tree.leaves(plain)) == 14
    assert swa.state_bytes(MIXED) == swa.state_bytes(MIXED.apart) + 8


def test_the_most_that_one_request_holds():
    layout = UnifiedLayout(10, 6, 2, 3, 16)
    assert layout.most_full_pages(None) == 12  # 4 + 6 blocks
    assert layout.most_full_pages(3) == 21  # 7 blocks, and at most 3 for 3 SWA pages
    assert UnifiedLayout(10, 5, 1, 5, 16).most_full_pages(4) == 30
    assert UnifiedLayout(3, 5, 1, 5, 16).most_full_pages(4) == 2  # no more than SWA pages


@pytest.mark.parametrize(("full_pages", "blocks"), [(0, 0), (3, 1 + 2), (6, 2 + 3), (7, 3 + 6)])
def test_no_page_of_a_request_within_its_window_is_recycled(full_pages, blocks):
    layout = UnifiedLayout(20, 6, 2, 3, 16)  # 3 full pages or 2 SWA pages a block
    assert layout.blocks_for(full_pages, 6) == blocks


# ---- the split -----------------------------------------------------------------------------


def sizes(state):
    return [int(size(state)) for size in (swa.full_available_size, swa.swa_available_size)]


def test_a_new_state_has_as_many_pages_of_either_kind():
    state = swa.init(WIDE)  # 1 block of 5 full pages, 9 of one SWA page
    assert sizes(state) == [10, 18]
    assert [int(tokens) for tokens in swa.unified_available(state)] == [100, 20]
    swa.check(state)
    assert [int(pages) for pages in held_pages(state)] == [0, 0]


def test_whole_free_blocks_go_where_pages_are_lacking():
    state = swa.rebalance(swa.init(WIDE), 11, 2)  # 5 full pages: 2 blocks more
    assert sizes(state) == [30, 14]
    state = swa.rebalance(state, 0, 9)
    assert sizes(state) == [10, 18]
    state = swa.rebalance(state, 100, 9)  # nothing to spare
    assert sizes(state) == [10, 18]
    state = swa.rebalance(state, 100, 0)
    assert sizes(state) == [100, 0]
    state = swa.rebalance(state, 0, 100)
    assert sizes(state) == [0, 20]
    swa.check(state)


def test_a_block_with_one_page_held_or_pending_stays():
    state = swa.rebalance(swa.init(WIDE), 50, 0)
    state = swa.rebalance(state, 0, 1)
    state, first = swa.alloc_extend(state, [0], [1], [-1], capacity=1)
    assert first.ok
    state = swa.rebalance(state, 0, 100)
    assert sizes(state) == [8, 16]  # of one block a page is held; 9 are SWA, one page is held
    state = swa.free(swa.free_group_begin(state), first.slots)
    state = swa.rebalance(state, 0, 100)
    assert sizes(state) == [8, 16]
    state = swa.rebalance(swa.free_group_end(state), 0, 100)
    assert sizes(state) == [0, 20]
    swa.check(state)


def test_a_stale_page_is_never_granted_and_never_freed():
    state = swa.init(MIXED)
    state, grant = swa.alloc_extend(state, [0], [10], [-1], capacity=10)
    state = swa.free(state, grant.slots)
    state = swa.rebalance(state, 0, 100)  # the full pages belong to nobody's pool now
    before = state
    state = swa.free_swa(swa.free(state, grant.slots), grant.slots)
    assert swa.faults(state)["double_free"] == 10
    assert sizes(state) == sizes(before) == [0, 32]
    state, refused = swa.alloc_extend(state, [0], [2], [-1], capacity=2)
    assert not refused.ok
    assert (int(refused.full_short), int(refused.swa_short)) == (1, 0)
    swa.check(state)


def test_a_page_absent_from_its_pool_and_yet_in_its_ring_is_found():
    state = swa.init(MIXED)
    assert state.block_is_full is not None
    wrong = dataclasses.replace(state, block_is_full=~state.block_is_full)
    with pytest.raises(swa.InvariantError, match="one_owner"):
        swa.check(wrong)


@settings(max_examples=15)
@given(st.lists(st.tuples(st.sampled_from(OPS), st.integers(0, 63), st.integers(0, 63))))
def test_any_program_agrees_with_the_oracle(program):
    walk = Walk(MIXED)
    for op, x, y in program:
        walk.step(op, x, y)


@pytest.mark.parametrize("config", [MIXED, WIDE], ids=["mixed", "wide"])
def test_long_walk(config):
    for seed in range(2):
        long_walk(config, seed, 400)


def test_the_same_bits_in_every_mode():
    """Under vmap and scan, and jitted within a program of its own."""
    asks = jnp.array([[30, 1], [2, 9], [7, 7], [0, 16]], jnp.int32)

    def one(state, ask):
        state = swa.rebalance(state, ask[0], ask[1])
        state, _ = swa.alloc_extend(state, [0], ask[1:] + 1, [-1], capacity=8)
        return state, swa.unified_available(state)

    state, available = jax.jit(lambda s: jax.lax.scan(one, s, asks))(swa.init(MIXED))
    eager = swa.init(MIXED)
    for index, ask in enumerate(asks):
        eager, size = one(eager, ask)
        assert [int(x) for x in size] == [int(x[index]) for x in available]
    jax.tree.map(np.testing.assert_array_equal, state, eager)
    batch = jax.tree.map(lambda leaf: jnp.stack([leaf] * 4), swa.init(MIXED))
    several = jax.vmap(lambda s, ask: swa.rebalance(s, ask[0], ask[1]))(batch, asks)
    swa.check(several)
    for index, ask in enumerate(asks):
        alone = swa.rebalance(swa.init(MIXED), ask[0], ask[1])
        at = jax.tree.map(lambda leaf, at=index: leaf[at], several)
        jax.tree.map(np.testing.assert_array_equal, at, alone)


# ---- known bugs, put back ------------------------------------------------------------------


def a_block_in_use_moves(patch):
    """One free page is taken for a free block."""
    right = rebalancing._by_block

    def wrong(marks, pages):
        return jnp.where(right(marks, pages) > 0, jnp.int32(pages), 0)

    patch.setattr(rebalancing, "_by_block", wrong)


def what_is_pending_counts_as_free(patch):
    """A page that a fence has queued moves with its block."""
    patch.setattr(rebalancing, "_grantable", lambda pool: pool.free)


def the_giving_pool_falls_below_what_it_needs(patch):
    """All free blocks go, whatever their pool was to keep."""
    right = rebalancing._moves

    def wrong(state, layout, full_pages, swa_pages):
        return right(
            state,
            layout,
            jnp.where(full_pages > state.full.num_free, full_pages, 0),
            jnp.where(swa_pages > state.swa.num_free, swa_pages, 0),
        )

    patch.setattr(rebalancing, "_moves", wrong)


def what_is_pending_is_forgotten(patch):
    """The new ring holds the free pages alone."""
    right = rebalancing._used

    def wrong(pool):
        used, offset = right(pool)
        return used & (offset < pool.num_free), offset

    patch.setattr(rebalancing, "_used", wrong)


def whole_blocks_are_opened_first(patch):
    """Grants go in the order of page ids, and every block has somebody in it soon."""
    right = rebalancing._refill

    def wrong(pool, free, pages):
        made = right(pool, free, pages)
        place = jnp.arange(made.ring.shape[0], dtype=jnp.int32)
        return type(made)(
            made.holders,
            jnp.where(place < made.num_free, jnp.flip(made.ring), made.ring),
            made.head,
            made.num_free,
            made.num_pending,
        )

    patch.setattr(rebalancing, "_refill", wrong)


def pages_lie_over_one_another(patch):
    """SWA pages take their places from the first unit, without the padding's."""
    right = UnifiedKV.pages_of

    def wrong(self, kind, place, pages):
        return right(self, kind, place, pages) - jnp.int32(kind == "S")

    patch.setattr(UnifiedKV, "pages_of", wrong)


BUGS = (
    a_block_in_use_moves,
    what_is_pending_counts_as_free,
    the_giving_pool_falls_below_what_it_needs,
    what_is_pending_is_forgotten,
    whole_blocks_are_opened_first,
    pages_lie_over_one_another,
)


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.__name__)
def test_a_known_bug_is_noticed(bug, monkeypatch):
    bug(monkeypatch)
    with pytest.raises((AssertionError, swa.InvariantError)):
        long_walk(MIXED, 0, 400, fresh=True)


def test_pages_that_count_as_free_too_come_to_those_that_are():
    state = swa.init(MIXED)
    state, _ = swa.alloc_extend(state, [0], [3], [-1], capacity=8)
    none = [jnp.zeros_like(pool.holders, bool) for pool in (state.full, state.swa)]
    room, same = rebalancing.room_of(state), rebalancing.room_of(state, *none)
    assert jax.tree.all(jax.tree.map(lambda one, two: int(one) == int(two), room, same))
    held = [pool.holders > 0 for pool in (state.full, state.swa)]
    more = rebalancing.room_of(state, *held)
    assert int(more.blocks) == int(rebalancing.room_of(swa.init(MIXED)).blocks) > int(room.blocks)
