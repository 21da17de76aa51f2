"""One layer of the decoder, and what stands before the first and after the last.

The layer does not know how attention gets at keys of earlier tokens: the caller passes `mix`.
"""

from collections.abc import Callable
from typing import TypeAlias, TypeVar

import jax
import jax.numpy as jnp

from swa_jax.models.decoder.attention import project_out, project_qkv
from swa_jax.models.decoder.config import DecoderConfig
from swa_jax.models.decoder.mlp import gated_mlp
from swa_jax.models.decoder.moe import moe_mlp
from swa_jax.models.decoder.norm import rms_norm, softcap
from swa_jax.models.decoder.params import Params, Weights
from swa_jax.models.decoder.rope import rope_angles
from swa_jax.models.model_config import FULL, SWA

Angles: TypeAlias = tuple[jax.Array, jax.Array]
Kept = TypeVar("Kept")
Mix: TypeAlias = Callable[[jax.Array, jax.Array, jax.Array], tuple[jax.Array, Kept]]


def embed(config: DecoderConfig, params: Params, tokens: jax.Array) -> jax.Array:
    """float[..., H] of int32[...] tokens; tokens outside the vocabulary (padding) give some row."""
    rows = params["embed"].at[jnp.maximum(tokens, 0)].get(mode="clip")
    return rows * jnp.asarray(config.embed_scale, rows.dtype)


def angles_by_kind(config: DecoderConfig, positions: jax.Array) -> dict[str, Angles]:
    """Cosines and sines of int32[...] positions for the layers of each kind."""
    return {
        kind: rope_angles(config.rope(kind), positions, config.head_dim)
        for kind in (FULL, SWA)
        if kind in config.layer_kinds
    }


def run_layer(
    config: DecoderConfig, weights: Weights, hidden: jax.Array, angles: Angles, mix: Mix[Kept]
) -> tuple[jax.Array, Kept]:
    """A layer: attention and MLP, each added to what goes by.

    Args:
      config: the model.
      weights: of this layer.
      hidden: float[B, T, H].
      angles: of the tokens, for the kind of this layer.
      mix: attention: q, k and v of the tokens to float[B, T, Hq, D], and anything to hand back.

    Returns:
      float[B, T, H], and what `mix` handed back.
    """
    normed = norm(config, weights["input_norm"], hidden)
    mixed, kept = mix(*project_qkv(config, weights, normed, angles))
    out = project_out(weights, mixed.astype(hidden.dtype))
    if config.norms_outputs:
        out = norm(config, weights["post_attention_norm"], out)
    hidden = hidden + out

    normed = norm(config, weights["pre_mlp_norm"], hidden)
    if config.num_experts:
        out = moe_mlp(config, weights, normed)
    else:
        out = gated_mlp(weights, normed, config.activation)
    if config.norms_outputs:
        out = norm(config, weights["post_mlp_norm"], out)
    return hidden + out, kept


def norm(config: DecoderConfig, weight: jax.Array, hidden: jax.Array) -> jax.Array:
    """float[..., H]: the model's norm with float[H] weights."""
    return rms_norm(hidden, weight, eps=config.norm_eps, offset=config.norm_offset)


def unembed(config: DecoderConfig, params: Params, hidden: jax.Array) -> jax.Array:
    """Logits of hidden states.

    Args:
      config: the model, for its final soft cap.
      params: its parameters.
      hidden: float[..., H] after the final norm.

    Returns:
      float32[..., V], summed in float32.
    """
    if config.tie_embeddings:
        pattern, matrix = "...h,vh->...v", params["embed"]
    else:
        pattern, matrix = "...h,hv->...v", params["unembed"]
    logits = jnp.einsum(
        pattern, hidden.astype(matrix.dtype), matrix, preferred_element_type=jnp.float32
    )
    return softcap(logits, config.final_softcap)
