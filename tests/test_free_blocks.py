"""Frees of many slots go by blocks of pages: the same state as all at once, bit for bit."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compare import assert_bitwise_equal, assert_invariants

import swa_jax as swa
from swa_jax import free_blocks

CONFIGS = {
    "hybrid": swa.PoolConfig(1024, 512, 4, 16),
    "pure": swa.PoolConfig.pure_swa(512, 4, 16),
}
CALLS = ("free", "free_swa", "free_full", "free_swa_grouped")
T = 48


def world(kind, *, group):
    """128 slots held, some pages shared, some without an SWA side, some free again."""
    state, grant = swa.alloc(swa.init(CONFIGS[kind]), 128, capacity=128)
    state = swa.share(state, grant.slots[16:48])
    state = swa.free_swa(state, grant.slots[40:64])
    state = swa.free(state, grant.slots[112:])
    return (swa.free_group_begin(state) if group else state), np.asarray(grant.slots)


def asks(slots):
    """Slots in any order, some twice, padding, and slots that are in no pool."""
    rng = np.random.default_rng(3)
    yield rng.permutation(slots[:100])[:T]
    yield np.resize(np.concatenate([slots[30:60], [0, -1, 5000, 3]]), T)
    yield np.zeros(T, np.int32)
    yield np.full(T, slots[5])
    yield 4 * np.arange(1, T + 1)  # a page in every place: the last block is full
    yield 4 * np.append(np.arange(1, T), T - 1)  # one less


@pytest.mark.parametrize("group", [False, True])
@pytest.mark.parametrize("kind", CONFIGS)
def test_blocks_give_the_same_state(kind, group, monkeypatch):
    state, slots = world(kind, group=group)
    calls = [(name, jnp.asarray(ask, jnp.int32)) for name in CALLS for ask in asks(slots)]
    right = [getattr(swa, name)(state, ask) for name, ask in calls]
    monkeypatch.setattr(free_blocks, "BLOCK", 8)
    monkeypatch.setattr(free_blocks, "LARGE", T)
    jax.clear_caches()
    try:
        for (name, ask), expected in zip(calls, right, strict=True):
            got = getattr(swa, name)(state, ask)
            assert_bitwise_equal(got, expected)
            assert_invariants(got)
    finally:
        jax.clear_caches()


def test_pages_of_one_token_are_taken_all_at_once():
    state = swa.init(swa.PoolConfig(64, 64))
    slots = jnp.zeros(free_blocks.LARGE, jnp.int32)
    assert not free_blocks.pays(state, slots)
    assert free_blocks.pays(swa.init(CONFIGS["hybrid"]), slots)


def test_no_copy_of_the_pool_and_every_buffer_reused():
    config = swa.PoolConfig(2**18, 2**17, 16, 64)
    state = jax.eval_shape(lambda: swa.init(config))
    slots = jax.ShapeDtypeStruct((free_blocks.LARGE,), jnp.int32)
    size = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(state))
    for name in CALLS:
        module = jax.jit(getattr(swa, name), donate_argnums=0).lower(state, slots).compile()
        memory = module.memory_analysis()
        assert memory is not None
        assert memory.alias_size_in_bytes == size
