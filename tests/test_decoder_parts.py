"""The pieces of the decoder by themselves, and the modes of JAX that they must stand."""

from dataclasses import replace

import decoder_server as server
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import swa_jax as swa
from swa_jax.models import (
    PagedBatch,
    forward,
    forward_paged,
    init_kv,
    num_params,
    random_params,
    unembed,
)
from swa_jax.models.decoder.attention import sequence_mask
from swa_jax.models.decoder.moe import choose_experts, moe_mlp
from swa_jax.models.decoder.rope import Rope, inverse_wavelengths, rope_angles, rotate

CONFIGS = {"gemma": server.GEMMA, "gpt_oss": server.GPT_OSS}


@pytest.fixture(params=CONFIGS)
def model(request):
    config = CONFIGS[request.param]
    return config, random_params(config, jax.random.key(0))


def test_random_params_are_counted_and_give_logits_near_one(model):
    config, params = model
    assert num_params(config) == sum(leaf.size for leaf in jax.tree.leaves(params))
    logits = np.asarray(forward(config, params, jnp.arange(60, dtype=jnp.int32).reshape(2, 30)))
    assert logits.shape == (2, 30, 97)
    assert logits.dtype == np.float32
    assert 0.3 < logits.std() < 3


def test_a_token_sees_nothing_behind_it_and_nothing_of_other_rows(model):
    config, params = model
    tokens = np.random.default_rng(0).integers(0, 97, (2, 30)).astype(np.int32)
    changed = tokens.copy()
    changed[0, 12:] = 3
    before, after = (np.asarray(forward(config, params, row)) for row in (tokens, changed))
    assert np.abs(before - after)[0, :12].max() < 1e-5
    assert np.abs(before - after)[1].max() < 1e-5
    assert np.abs(before - after)[0, 12:].max() > 1e-2


def test_an_swa_layer_sees_its_window_and_the_query_counts():
    # One layer: what token 0 says reaches sliding_window tokens, its own included.
    config = replace(server.GEMMA, layer_kinds="S", sliding_window=5)
    params = random_params(config, jax.random.key(0))
    tokens = np.arange(12, dtype=np.int32)[None]
    other = tokens.copy()
    other[0, 0] = 50
    first, second = (np.asarray(forward(config, params, row))[0] for row in (tokens, other))
    moved = np.abs(first - second).max(axis=-1) > 1e-4
    assert moved.tolist() == [True] * 5 + [False] * 7
    assert config.past_window == 4


def test_the_mask_of_a_window():
    assert np.asarray(sequence_mask(4, 2)).astype(int).tolist() == [
        [1, 0, 0, 0],
        [1, 1, 0, 0],
        [0, 1, 1, 0],
        [0, 0, 1, 1],
    ]
    assert np.array_equal(sequence_mask(4, None), np.tril(np.ones((4, 4), bool)))
    assert np.array_equal(sequence_mask(4, 2**31 + 5), sequence_mask(4, None))


def test_x64_changes_no_type(model):
    config, params = model
    tokens = np.random.default_rng(0).integers(0, 97, (1, 6)).astype(np.int32)
    narrow = forward(config, params, jnp.asarray(tokens))
    with jax.enable_x64(True):
        hidden, kv = jax.jit(forward_paged, static_argnums=0)(
            config, params, *one_row(config, tokens)
        )
        wide = unembed(config, params, hidden)
    assert wide.dtype == jnp.float32
    assert {leaf.dtype for leaf in jax.tree.leaves(kv)} == {jnp.dtype(jnp.float32)}
    assert np.abs(narrow - wide).max() < 1e-4


def one_row(config, tokens):
    """Empty KV, and a batch that writes all of one row's tokens into pages 1 and 2."""
    kv = init_kv(config, swa.PoolConfig(8, 8, 4, config.past_window))
    place = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None]
    length, pages = jnp.array([tokens.shape[1]], jnp.int32), jnp.array([[1, 2]], jnp.int32)
    return kv, PagedBatch(
        tokens=jnp.asarray(tokens),
        positions=place,
        q_lens=length,
        kv_lens=length,
        full_slots=place + 4,
        swa_slots=place + 4,
        full_pages=pages,
        swa_pages=pages,
    )


def test_rotation_is_by_complex_numbers():
    rope, positions = Rope(100.0, "linear", 2.0), np.array([[0, 3, 50]], np.int32)
    heads = np.random.default_rng(0).normal(size=(1, 3, 2, 8)).astype(np.float32)
    turned = np.asarray(rotate(jnp.asarray(heads), *rope_angles(rope, jnp.asarray(positions), 8)))
    speeds = 100.0 ** (-np.arange(4) / 4) / 2
    pairs = heads[..., :4] + 1j * heads[..., 4:]
    pairs = pairs * np.exp(1j * positions[..., None, None] * speeds)
    assert np.abs(turned - np.concatenate([pairs.real, pairs.imag], axis=-1)).max() < 1e-5


def test_yarn_keeps_fast_pairs_and_stretches_slow_ones():
    plain = inverse_wavelengths(Rope(150_000.0), 64)
    yarn = Rope(150_000.0, "yarn", 32.0, original_context=4096, truncate=False)
    ratio = plain / inverse_wavelengths(yarn, 64)
    turns = 4096 * plain / (2 * np.pi)
    assert np.allclose(ratio[turns > 32], 1)
    assert np.allclose(ratio[turns < 1], 32)
    between = ratio[(turns < 32) & (turns > 1)]
    assert (np.diff(between) > 0).all()
    assert between.size > 5


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"scaling": "llama3"}, "'llama3'"),
        ({"theta": 0.0}, "theta must be positive, got 0.0"),
        ({"scaling": "yarn", "factor": 2.0}, "original_context must be positive"),
    ],
)
def test_impossible_ropes_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        Rope(**{"theta": 1.0, **change})


def test_experts_one_token_at_a_time():
    config = replace(server.GPT_OSS, swiglu_limit=1.0)
    weights = random_params(config, jax.random.key(0))["layers"][0]
    hidden = jax.random.normal(jax.random.key(1), (3, 5, 32)) * 2
    hidden = hidden.at[0, 0].set(hidden[2, 4])
    answer = jax.jit(moe_mlp, static_argnums=0)(config, weights, hidden)
    answer = np.asarray(answer).reshape(15, 32)
    w = {name: np.asarray(value, np.float64) for name, value in weights.items()}
    for row, expected in zip(np.asarray(hidden, np.float64).reshape(15, 32), answer, strict=True):
        scores = row @ w["router"] + w["router_bias"]
        best = np.argsort(-scores)[:2]
        shares = np.exp(scores[best]) / np.exp(scores[best]).sum()
        total = 0
        for expert, share in zip(best, shares, strict=True):
            both = row @ w["gate_up"][expert] + w["gate_up_bias"][expert]
            gate, up = np.minimum(both[::2], 1), np.clip(both[1::2], -1, 1)
            middle = (up + 1) * gate / (1 + np.exp(-1.702 * gate))
            total = total + share * (middle @ w["down"][expert] + w["down_bias"][expert])
        assert np.abs(total - expected).max() < 1e-4
    assert np.array_equal(answer[0], answer[14])  # equal tokens, equal bits


def test_all_tokens_may_want_the_same_experts():
    config = server.GPT_OSS
    weights = random_params(config, jax.random.key(0))["layers"][0]
    weights = {**weights, "router_bias": jnp.array([0, 50.0, 0, 99.0, 0])}
    experts, shares = choose_experts(config, weights, jnp.ones((7, 32)))
    assert np.asarray(experts).tolist() == [[3, 1]] * 7
    assert np.allclose(np.asarray(shares).sum(axis=-1), 1)
    assert np.isfinite(moe_mlp(config, weights, jnp.ones((7, 32)))).all()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"family": "llama"}, "family must be one of"),
        ({"layer_kinds": "SFX"}, "made of F and S, got 'SFX'"),
        ({"sliding_window": 0}, "sliding_window must be positive, got 0"),
        ({"num_experts": 4, "experts_per_token": 0}, "experts_per_token must be 1 .. "),
        ({"attn_softcap": 0.0}, "attn_softcap must be positive or None"),
    ],
)
def test_impossible_configs_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        replace(server.GEMMA, **change)
