"""The decoder gives transformers' logits, from checkpoints that transformers wrote."""

import decoder_models as models
import jax.numpy as jnp
import numpy as np
import pytest

from swa_jax.models import forward, load_checkpoint

TOKENS = np.random.default_rng(1).integers(0, 97, (2, 23))  # more than four windows of 5

YARN = {
    "rope_type": "yarn",
    "rope_theta": 10_000.0,
    "factor": 8.0,
    "original_max_position_embeddings": 32,
}
LINEAR = {
    "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 50_000.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
}
TWO = {"num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"]}
GEMMAS = {
    "tied": {},
    "untied, final softcap, no groups, another activation": {
        **TWO,
        "tie_word_embeddings": False,
        "final_logit_softcapping": 2.0,
        "num_key_value_heads": 4,
        "hidden_activation": "silu",
        "rms_norm_eps": 1e-2,
    },
    "published pattern, linear rope": {
        "num_hidden_layers": 6,
        "layer_types": None,
        "rope_parameters": LINEAR,
    },
    "yarn rope, biases, one KV head": {
        **TWO,
        "rope_parameters": {"full_attention": YARN, "sliding_attention": YARN},
        "attention_bias": True,
        "num_key_value_heads": 1,
    },
    "window of one": {**TWO, "sliding_window": 1},
    "only sliding, exact gelu": {
        "num_hidden_layers": 2,
        "layer_types": ["sliding_attention"] * 2,
        "hidden_activation": "gelu",
    },
    "window longer than the text": {**TWO, "sliding_window": 64},
}
GPT_OSSES = {
    "published rope": {},
    "yarn with bounds widened, one expert a token": {
        **TWO,
        "rope_parameters": {**YARN, "truncate": True},
        "num_experts_per_tok": 1,
    },
    "yarn with bounds kept and a given amplitude, tight clamp": {
        **TWO,
        "rope_parameters": {**YARN, "truncate": False, "beta_fast": 4.0, "attention_factor": 1.4},
        "swiglu_limit": 0.5,
        "swiglu_alpha": 3.0,
    },
    "plain rope, full layers first, all experts": {
        "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0},
        "num_hidden_layers": 2,
        "layer_types": ["full_attention", "sliding_attention"],
        "num_experts_per_tok": 5,
    },
    "tied, no biases, one KV head": {
        **TWO,
        "tie_word_embeddings": True,
        "attention_bias": False,
        "num_key_value_heads": 1,
    },
}


def difference(model, folder, **options):
    """The largest difference of two logits, and the spread of them."""
    model.save_pretrained(folder)
    config, params = load_checkpoint(folder)
    ours = np.asarray(forward(config, params, jnp.asarray(TOKENS, jnp.int32)))
    theirs = models.logits_of(model, TOKENS, **options)
    assert ours.shape == theirs.shape
    assert theirs.std() > 0.1  # logits that are all alike would show nothing
    print(f"{np.abs(ours - theirs).max():.2e} of {theirs.std():.2f}")
    return np.abs(ours - theirs).max()


@pytest.mark.parametrize("name", GEMMAS)
def test_gemma_3(name, tmp_path):
    assert difference(models.gemma(**GEMMAS[name]), tmp_path) < 1e-4


@pytest.mark.parametrize("name", GPT_OSSES)
def test_gpt_oss(name, tmp_path):
    assert difference(models.gpt_oss(**GPT_OSSES[name]), tmp_path) < 1e-4


def test_gemma_3_with_vision(tmp_path):
    assert difference(models.gemma_with_vision(**TWO), tmp_path) < 1e-4


def test_attention_softcap(tmp_path):
    # transformers' Gemma 3 keeps the setting without using it, but its attention takes one.
    model = models.gemma(**TWO, attn_logit_softcapping=0.5)
    assert difference(model, tmp_path, softcap=0.5) < 1e-4
    assert difference(model, tmp_path) > 1e-3
