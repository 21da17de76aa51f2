"""What a state, a configuration and a prefix cache show of themselves."""

import dataclasses
import html
import json
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import swa_jax as swa
from swa_jax import prefix_cache
from swa_jax.models import get_model
from swa_jax.state_summary import as_dict, summarize
from swa_jax.viz.examples import small_tree

POOL = swa.PoolConfig(64, 32, 4, 8)
PURE = swa.PoolConfig.pure_swa(32, 4, 8)
RINGS = swa.PoolConfig.request_ring(64, 3, page_size=4, sliding_window=8)
UNIFIED = swa.PoolConfig.unified(2**26, get_model("gpt-oss-20b"), 16)
CONFIGS = [
    POOL,
    PURE,
    RINGS,
    UNIFIED,
    swa.PoolConfig(8, 8),
    swa.PoolConfig(64, 64, 4, 8, chunked=True),
]


@pytest.fixture(scope="module")
def used():
    """Two requests of two pages, one of them without its first SWA page, one queued; a fault."""
    state, grant = swa.alloc(swa.init(POOL), 16, capacity=16)
    state = swa.free_swa(state, grant.slots[:4])
    state = swa.free_group_begin(state)
    state = swa.free(state, grant.slots[12:])
    return swa.free(state, grant.slots[12:])


def test_a_state_says_what_its_pools_hold(used):
    assert repr(used).splitlines() == [
        "AllocatorState: 16 full and 8 SWA pages of 4 tokens, window 8",
        "  full    3 held, 1 pending, 12 free",
        "  SWA     2 held, 1 pending, 5 free",
        "  mapped  2 of 3 held full pages (67 %)",
        "  group   open",
        "  faults  double_free 1",
    ]
    assert repr(used.full) == "PagePool(16 pages: 3 held, 1 pending, 12 free)"


def test_a_new_state_has_nothing_to_complain_of():
    assert repr(swa.init(POOL)).splitlines()[1:] == [
        "  full    0 held, 0 pending, 16 free",
        "  SWA     0 held, 0 pending, 8 free",
        "  mapped  0 of 0 held full pages (none held)",
        "  faults  none",
    ]


def test_the_figures_are_those_of_the_transitions(used):
    figures: dict[str, Any] = as_dict(summarize(used))
    json.dumps(figures)
    pools = figures["pools"]
    assert pools["full"]["free"] * 4 == int(swa.full_available_size(used))
    assert pools["swa"]["free"] * 4 == int(swa.swa_available_size(used))
    assert figures["faults"] == swa.faults(used)
    assert figures["mapped_full_pages"] == np.count_nonzero(used.full_to_swa)
    assert figures["group_open"] is True


def test_shared_pages_are_counted():
    state, grant = swa.alloc(swa.init(POOL), 16, capacity=16)
    state = swa.share(state, grant.slots[:8])
    assert "  full    4 held, 0 pending, 12 free; 2 shared" in repr(state)


def test_a_batch_gives_least_and_most(used):
    batch = jax.tree.map(lambda a, b: jnp.stack([a, b]), swa.init(POOL), used)
    assert repr(batch).splitlines() == [
        "AllocatorState[2]: 16 full and 8 SWA pages of 4 tokens, window 8, each",
        "  full    0 to 3 held, 0 to 1 pending, 12 to 16 free",
        "  SWA     0 to 2 held, 0 to 1 pending, 5 to 8 free",
        "  mapped  0 to 2 of 0 to 3 held full pages",
        "  group   open in 1 of 2 states",
        "  faults  double_free 1",
    ]
    assert repr(batch.swa) == "PagePool[2](8 pages: 0 to 2 held, 0 to 1 pending, 5 to 8 free)"
    none = jax.tree.map(lambda leaf: leaf[:0], batch)
    assert "no held" in repr(none)
    assert none._repr_html_()


def test_a_large_batch_is_listed_in_part(used):
    batch = jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, (3, 5, *leaf.shape)), used)
    assert repr(batch).startswith("AllocatorState[3][5]: ")
    page = batch._repr_html_()
    assert "a batch of 3 x 5" in page
    assert page.count("<tr>") == 1 + 2 * 8
    assert "and 7 more states" in page


def test_a_pure_swa_state_has_one_pool():
    state, grant = swa.alloc(swa.init(PURE), 16, capacity=16)
    state = swa.free_swa(state, grant.slots[:4])
    assert repr(state).splitlines() == [
        "AllocatorState: one pool of 8 SWA pages of 4 tokens, window 8",
        "  SWA     3 held, 0 pending, 5 free",
        "  left    behind a window and not given back by their holders: 1",
        "  faults  none",
    ]
    assert repr(state.full) == "PagePool(8 pages: 4 held)"


def test_request_rings_are_called_rings():
    state, _ = swa.ring_acquire(swa.init(RINGS), [0, 0])
    lines = repr(state).splitlines()
    assert lines[0] == (
        "AllocatorState: 16 full pages of 4 tokens, 3 SWA rings of 12 tokens, window 8"
    )
    assert lines[2] == "  SWA     2 held, 0 pending, 1 free"
    assert "3 rings" in str(state._repr_html_())


def test_one_budget_tells_the_pools_apart():
    state = swa.init(UNIFIED)
    layout = UNIFIED.unified_layout
    assert layout is not None
    assert state.block_is_full is not None
    blocks = int(np.sum(state.block_is_full))
    full, of_swa = summarize(state).pools
    assert int(full.size) == blocks * layout.full_pages == int(full.free)
    assert int(of_swa.size) == (layout.blocks - blocks) * layout.swa_pages == int(of_swa.free)
    assert int(full.absent) == UNIFIED.full_pages - int(full.size)
    assert f"one budget of {layout.blocks} blocks" in repr(state)
    assert "in the other pool" in repr(state)


def test_a_broken_state_does_not_add_up(used):
    pool = dataclasses.replace(used.full, num_free=used.full.num_free - 2)
    assert "2 unaccounted for, see swa.check" in repr(dataclasses.replace(used, full=pool))


def test_a_traced_state_says_so_and_is_not_waited_for(used):
    seen = []

    @jax.jit
    def look(state):
        seen.extend([repr(state), repr(state.full), state._repr_html_(), repr(used)])
        return state.faults

    look(used)
    traced, pool, page, concrete = seen
    title = "16 full and 8 SWA pages of 4 tokens, window 8"
    assert traced == f"AllocatorState({title}; traced: its values are there when the program runs)"
    assert pool.startswith("PagePool(traced")
    assert page is None
    assert concrete == repr(used)  # one that is not traced shows itself here, too
    batch = jax.tree.map(lambda leaf: leaf[None], used)
    jax.vmap(lambda state: seen.append(repr(state)) or state.faults)(batch)
    assert seen[-1] == traced


def test_a_donated_state_is_gone(used):
    state = swa.snapshot(used)
    jax.jit(lambda s: s, donate_argnums=0)(state)
    assert "its arrays are gone: they were donated" in repr(state)
    assert state._repr_html_() is None
    assert repr(state.swa).startswith("PagePool(its arrays are gone")


@pytest.mark.parametrize("leaf", [None, "text", 3, object(), np.zeros(3), jnp.zeros((2, 2))])
def test_a_tree_of_anything_has_a_repr(used, leaf):
    odd = jax.tree.unflatten(jax.tree.structure(used), [leaf] * len(jax.tree.leaves(used)))
    assert repr(odd).startswith("AllocatorState(16 full")
    assert repr(odd.full).startswith("PagePool")
    assert odd._repr_html_() is None
    axes = swa.AllocatorState(leaf, leaf, leaf, leaf, leaf, leaf, leaf, leaf)
    assert repr(axes).startswith("AllocatorState(of no configuration")


def test_shapes_alone_have_a_repr():
    shapes = jax.eval_shape(lambda: swa.init(POOL))
    assert "no values: it is made of ShapeDtypeStruct" in repr(shapes)


@pytest.mark.parametrize("show", [repr, lambda state: state._repr_html_()])
def test_a_state_crosses_to_the_host_once(used, show, monkeypatch):
    calls, get = [], jax.device_get
    monkeypatch.setattr(jax, "device_get", lambda tree: calls.append(tree) or get(tree))
    with jax.transfer_guard("disallow"):
        show(used)
    assert len(calls) == 1


def test_a_notebook_shows_a_row_for_each_pool(used):
    page = used._repr_html_()
    assert page.count("<tr>") == 3
    assert "AllocatorState: 16 full and 8 SWA pages of 4 tokens, window 8" in page
    assert "faults: double_free 1" in page
    assert 'title="3 held"' in page
    assert "width:18.75%" in page  # 3 of 16 pages


@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_the_repr_of_a_configuration_makes_it_again(config):
    names = {"PoolConfig": swa.PoolConfig, "UnifiedLayout": type(config.unified_layout)}
    assert eval(repr(config), names) == config
    assert "PoolConfig" in config._repr_html_()


def test_the_repr_of_a_configuration_leaves_defaults_out():
    assert repr(POOL) == (
        "PoolConfig(full_tokens=64, swa_tokens=32, page_size=4, sliding_window=8)"
    )
    assert repr(PURE) == "PoolConfig.pure_swa(tokens=32, page_size=4, sliding_window=8)"


def test_a_prefix_cache_says_what_it_keeps():
    _, cache = small_tree()
    assert repr(cache).splitlines() == [
        "PrefixCache: lru over 40 full and 32 SWA pages of 4 tokens, window 8",
        "  cached  22 of 40 full pages, 4 ends, at most 10 pages deep",
        "  locked  10 pages, 2 with their SWA side",
        "  locks   1 receipts outstanding",
        f"  clock   {int(cache.clock)}",
    ]
    assert html.escape("22 of 40 full pages") in str(cache._repr_html_())
    empty = prefix_cache.init(cache.config.pool)
    batch = jax.tree.map(lambda a, b: jnp.stack([a, b]), cache, empty)
    assert repr(batch).startswith("PrefixCache[2]: ")
    assert "0 to 22 of 40 full pages" in repr(batch)


def test_a_traced_or_odd_prefix_cache_has_a_repr():
    cache, seen = prefix_cache.init(POOL), []
    jax.jit(lambda tree: seen.append((repr(tree), tree._repr_html_())) or tree.clock)(cache)
    assert seen == [("PrefixCache(traced: its values are there when the program runs)", None)]
    odd = jax.tree.map(lambda _: None, cache)
    assert repr(odd).startswith("PrefixCache(")
