"""KV of all layers in one buffer: the decoder computes what it would with an array a layer."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from pair import _QUICKLY
from served_models import params_of, tiny

import swa_jax as swa
from swa_jax.models import PagedBatch, UnifiedKV, forward_paged, init_kv
from swa_jax.serving import Decoder, DraftHead, DraftModel
from swa_jax.serving.moved_slots import MovedSlots

MODEL = tiny(6, layer_kinds="SFSFS")  # a block is 3 full pages or 2 SWA pages
POOL = swa.PoolConfig.unified(400 * 256, MODEL, 4)


def layout_of(pool):
    assert pool.unified_layout is not None
    return pool.unified_layout


LAYOUT = layout_of(POOL)


def new_kv(pool, dtype=jnp.float32):
    kv = init_kv(MODEL, pool, dtype)
    assert isinstance(kv, UnifiedKV)
    return kv


def ints(values):
    return jnp.asarray(np.array(values, np.int32))


def batch_of(state, table, length, tokens):
    """One row that has `length` tokens and computes those of `tokens` behind them."""
    count = len(tokens)
    slots = table[length : length + count]
    swa_slots = swa.translate_full_to_swa(state, slots)
    firsts = table[::4]
    return PagedBatch(
        tokens=ints([tokens]),
        positions=ints([range(length, length + count)]),
        q_lens=ints([count]),
        kv_lens=ints([length + count]),
        full_slots=slots[None],
        swa_slots=swa_slots[None],
        full_pages=(firsts // 4)[None],
        swa_pages=(swa.translate_full_to_swa(state, firsts) // 4)[None],
    )


@pytest.fixture(scope="module")
def computed():
    """A row of 24 tokens computed in two steps, in both kinds of KV, the split moved in between."""
    assert (LAYOUT.full_pages, LAYOUT.swa_pages) == (3, 2)
    step = jax.jit(functools.partial(forward_paged, MODEL), compiler_options=_QUICKLY)
    state = swa.init(POOL)
    state, other = swa.alloc_extend(state, [0], [40], [-1], capacity=40)  # pages not from the start
    state = swa.rebalance(swa.free_swa(state, other.slots), POOL.full_pages, 6)
    tokens = np.random.default_rng(0).integers(0, 61, 24).tolist()
    table, answers = jnp.zeros(32, jnp.int32), []
    both = {"one": init_kv(MODEL, POOL), "many": init_kv(MODEL, POOL.apart)}
    for start in (0, 12):
        last = table[start - 1 : start] if start else [-1]
        state, grant = swa.alloc_extend(state, [start], [start + 12], last, capacity=12)
        assert grant.ok
        table = table.at[start + jnp.arange(12)].set(grant.slots)
        batch = batch_of(state, table, start, tokens[start : start + 12])
        for name in both:
            hidden, both[name] = step(params_of(MODEL), both[name], batch)
            answers.append(np.asarray(hidden))
        state = swa.rebalance(state, 4, POOL.swa_pages)
    return state, table, both, answers


def test_one_buffer_gives_the_bits_of_many(computed):
    _, _, both, answers = computed
    assert isinstance(both["one"], UnifiedKV)
    assert both["one"].units.nbytes == LAYOUT.kv_bytes <= 400 * 256
    for one, many in zip(answers[::2], answers[1::2], strict=True):
        np.testing.assert_array_equal(one, many)


def rows_of(pools, state, table):
    """The KV of the row's tokens, layer by layer."""
    slots = table[:24]
    of_swa = swa.translate_full_to_swa(state, slots)
    full = [np.asarray(layer.reshape(-1, *layer.shape[2:])[slots]) for layer in pools.full]
    return full + [np.asarray(layer.reshape(-1, *layer.shape[2:])[of_swa]) for layer in pools.swa]


def test_the_buffer_is_seen_and_written_layer_by_layer(computed):
    state, table, both, _ = computed
    decoder = Decoder(MODEL)
    pools = decoder.pools(both["one"])
    for one, many in zip(
        rows_of(pools, state, table), rows_of(both["many"], state, table), strict=True
    ):
        np.testing.assert_array_equal(one, many)
        assert np.any(one)
    assert decoder.with_pools(both["many"], pools) is pools
    same = both["one"].with_pools(pools)
    np.testing.assert_array_equal(same.units, both["one"].units)

    # NaN in one full page of layer 1 and one SWA page of layer 2, and nothing else.
    full, of_swa = int(table[4]) // 4, int(swa.translate_full_to_swa(state, table[4:5])[0]) // 4
    changed = type(pools)(
        (pools.full[0], pools.full[1].at[full].set(jnp.nan)),
        (*pools.swa[:2], pools.swa[2].at[of_swa].set(jnp.nan)),
    )
    units = np.asarray(both["one"].with_pools(changed).units)
    wrong = set(
        np.flatnonzero((units != np.asarray(both["one"].units)).any(axis=(1, 2, 3))).tolist()
    )
    kv = both["one"]
    assert wrong == {int(kv.pages_of("F", 1, ints(full))), int(kv.pages_of("S", 2, ints(of_swa)))}
    assert np.isnan(units[sorted(wrong)]).all()
    again = kv.with_pools(changed).with_pools(pools)
    np.testing.assert_array_equal(again.units, kv.units)


def test_kv_moves_between_slots_as_in_many_arrays(computed):
    state, table, both, _ = computed
    decoder = Decoder(MODEL)
    state, grant = swa.alloc_extend(state, [0], [4], [-1], capacity=4)
    assert grant.ok
    old, new = jnp.pad(table[20:24], (0, 1)), jnp.pad(grant.slots, (0, 1))
    moved = (
        MovedSlots(old, swa.translate_full_to_swa(state, old)),
        MovedSlots(new, swa.translate_full_to_swa(state, new)),
    )
    kv = decoder.move_kv(both["one"], *moved)
    one, many = decoder.pools(kv), decoder.move_kv(both["many"], *moved)
    longer = table.at[20 + jnp.arange(4)].set(grant.slots)
    for row, other in zip(rows_of(one, state, longer), rows_of(many, state, longer), strict=True):
        np.testing.assert_array_equal(row, other)
    for row, other in zip(rows_of(one, state, table), rows_of(many, state, table), strict=True):
        np.testing.assert_array_equal(row, other)


def test_padding_goes_nowhere():
    kv = new_kv(POOL)
    for kind, layers in (("F", 2), ("S", 3)):
        for place in range(layers):
            at = kv.slots_of(kind, place, ints([-1, 0, 3, 4]))
            assert at[:3].tolist() == [0, 0, 0]
            assert int(at[3]) == 4 * (LAYOUT.padding_units + place)
            assert int(kv.pages_of(kind, place, ints(0))) < LAYOUT.padding_units


def test_a_step_writes_the_donated_buffer_in_place():
    pool = swa.PoolConfig.unified(2**21, MODEL, 4)
    kv, pages, one = new_kv(pool), ints(np.zeros((3, 16))), ints(np.ones(3))
    new = ints(np.zeros((3, 5)))
    batch = PagedBatch(new, new, one, one, new, new, pages, pages)
    step = jax.jit(
        lambda params, kv, batch: forward_paged(MODEL, params, kv, batch), donate_argnums=1
    )
    memory = step.lower(params_of(MODEL), kv, batch).compile().memory_analysis()
    assert memory is not None
    assert memory.alias_size_in_bytes == kv.units.nbytes
    assert memory.temp_size_in_bytes < kv.units.nbytes / 8


def test_a_budget_that_was_cut_for_another_model_is_refused():
    with pytest.raises(ValueError, match=r"the model has 1 and 2 of 256 with float32 KV"):
        init_kv(tiny(6, layer_kinds="SFS"), POOL)
    with pytest.raises(ValueError, match=r"of 128 with bfloat16 KV: use .*kv_bytes_per_element=2"):
        init_kv(MODEL, POOL, jnp.bfloat16)
    half = swa.PoolConfig.unified(400 * 256, MODEL, 4, kv_bytes_per_element=2)
    kv = new_kv(half, jnp.bfloat16)
    assert 400 * 256 - 128 * 6 < kv.units.nbytes <= 400 * 256


def test_drafts_keep_their_kv_outside_the_budget():
    small = tiny(6, layer_kinds="SF", hidden_size=8)
    assert DraftModel(small, 2).init(POOL, 2).full[0].shape[0] == POOL.full_pages + 1
    assert DraftHead(MODEL, 2).init(POOL, 2).kv.shape[0] == POOL.full_pages + 1
