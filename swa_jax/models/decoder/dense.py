"""The model over whole sequences, without a KV pool: what everything else is checked against."""

import functools

import jax
import jax.numpy as jnp

from swa_jax.models.decoder.attention import dense_attention, sequence_mask
from swa_jax.models.decoder.config import DecoderConfig
from swa_jax.models.decoder.layer import angles_by_kind, embed, norm, run_layer, unembed
from swa_jax.models.decoder.params import Params, Weights


@functools.partial(jax.jit, static_argnums=0)
def forward(config: DecoderConfig, params: Params, tokens: jax.Array) -> jax.Array:
    """Logits at every place of whole sequences. Memory grows with the square of T.

    Args:
      config: the model, static.
      params: see `random_params` and `load_checkpoint`.
      tokens: int32[B, T], at positions 0 .. T-1. Padding at the end does not change what is
        before it.

    Returns:
      float32[B, T, V].
    """
    hidden = embed(config, params, tokens)
    angles = angles_by_kind(config, jnp.arange(tokens.shape[1], dtype=jnp.int32)[None, :])
    for kind, weights in zip(config.layer_kinds, params["layers"], strict=True):
        mix = functools.partial(_mix, config, weights, kind)
        hidden, _ = run_layer(config, weights, hidden, angles[kind], mix)
    return unembed(config, params, norm(config, params["final_norm"], hidden))


def _mix(
    config: DecoderConfig, weights: Weights, kind: str, q: jax.Array, k: jax.Array, v: jax.Array
) -> tuple[jax.Array, None]:
    mixed = dense_attention(
        q,
        k,
        v,
        sequence_mask(q.shape[1], config.window(kind)),
        scale=config.attention_scale,
        cap=config.attn_softcap,
        sinks=weights.get("sinks"),
    )
    return mixed, None
