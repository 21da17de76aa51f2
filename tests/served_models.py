"""Tiny random models for the serving tests, and a dense greedy decoder to compare with."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from swa_jax.models import DecoderConfig, forward, random_params
from swa_jax.models.decoder.rope import Rope

ROPE = Rope(theta=10_000.0)


def tiny(window, *, family="gemma3", eos=(), **changes):
    """A model of two full and two SWA layers."""
    numbers = {
        "vocab_size": 61,
        "hidden_size": 16,
        "num_heads": 2,
        "kv_heads": 1,
        "head_dim": 8,
        "intermediate_size": 16,
        "layer_kinds": "SFSF",
        "sliding_window": window,
        "full_rope": ROPE,
        "swa_rope": ROPE,
        "attention_scale": 0.35,
        "max_context": 512,
        "eos_token_ids": eos,
        "qk_norm": family == "gemma3",
        "tie_embeddings": False,  # tied, random ones repeat one token for ever
        "sinks": family == "gpt_oss",
        "attention_bias": family == "gpt_oss",
        "num_experts": 4 if family == "gpt_oss" else 0,
        "experts_per_token": 2 if family == "gpt_oss" else 0,
    }
    return DecoderConfig(family=family, **{**numbers, **changes})


@functools.cache
def params_of(model, seed=0):
    """Random weights, large enough that the tokens before matter for the next."""
    params = random_params(model, jax.random.key(seed))
    return jax.tree.map(lambda weights: weights * jnp.float32(1.5), params)


@functools.partial(jax.jit, static_argnums=0)
def _next(model, params, tokens):
    return forward(model, params, tokens)


class DenseGreedy:
    """The likeliest continuation by a dense pass over the whole text for each token."""

    def __init__(self, model, params, columns=64):
        self.model, self.params, self.columns = model, params, columns

    def __call__(self, prompt, count):
        text = list(prompt)
        for _ in range(count):
            row = np.zeros((1, self.columns), np.int32)
            row[0, : len(text)] = text
            logits = _next(self.model, self.params, jnp.asarray(row))
            text.append(int(np.argmax(np.asarray(logits[0, len(text) - 1]))))
            if text[-1] in self.model.eos_token_ids:
                break
        return text[len(prompt) :]
