"""What surrounds attention in a layer, and attention over a whole sequence without a KV pool.

Legend: B rows, T tokens, Hq query heads, Hkv key/value heads, G = Hq / Hkv, D head size.
"""

import jax
import jax.numpy as jnp

from swa_jax.models.decoder.config import DecoderConfig
from swa_jax.models.decoder.norm import rms_norm, softcap
from swa_jax.models.decoder.params import Weights
from swa_jax.models.decoder.rope import rotate


def project_qkv(
    config: DecoderConfig, weights: Weights, hidden: jax.Array, angles: tuple[jax.Array, jax.Array]
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Queries, keys and values of some tokens, queries and keys normed and turned.

    Args:
      config: the model.
      weights: of one layer.
      hidden: float[..., H] after the input norm.
      angles: float32[..., D/2] cosines and sines, see `rope_angles`.

    Returns:
      q float[..., Hq, D], k and v float[..., Hkv, D].
    """
    q, k, v = (_linear(weights, name, hidden) for name in ("q", "k", "v"))
    q = q.reshape(*q.shape[:-1], config.num_heads, config.head_dim)
    k = k.reshape(*k.shape[:-1], config.kv_heads, config.head_dim)
    v = v.reshape(*v.shape[:-1], config.kv_heads, config.head_dim)
    if config.qk_norm:
        eps, offset = config.norm_eps, config.norm_offset
        q = rms_norm(q, weights["q_norm"], eps=eps, offset=offset)
        k = rms_norm(k, weights["k_norm"], eps=eps, offset=offset)
    return rotate(q, *angles), rotate(k, *angles), v


def project_out(weights: Weights, mixed: jax.Array) -> jax.Array:
    """float[..., H] from float[..., Hq, D] that attention gave."""
    return _linear(weights, "o", mixed.reshape(*mixed.shape[:-2], -1))


def _linear(weights: Weights, name: str, values: jax.Array) -> jax.Array:
    product = values @ weights[name]
    bias = weights.get(f"{name}_bias")
    if bias is None:
        return product
    return product + jnp.expand_dims(bias, tuple(range(product.ndim - 1)))


def sequence_mask(num_tokens: int, window: int | None) -> jax.Array:
    """bool[T, T]: whether query i sees key j, i.e. j <= i and, with a window, i - j < window."""
    place = jnp.arange(num_tokens, dtype=jnp.int32)
    back = place[:, None] - place[None, :]
    seen = back >= 0
    return seen if window is None else seen & (back < jnp.int32(min(window, num_tokens)))


def dense_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    mask: jax.Array,
    *,
    scale: float,
    cap: float | None,
    sinks: jax.Array | None,
) -> jax.Array:
    """Attention with every score in memory at once: short, and easy to believe.

    Args:
      q: float[B, T, Hq, D].
      k: float[B, T, Hkv, D].
      v: float[B, T, Hkv, D].
      mask: bool[T, T], query sees key; every query sees some key.
      scale: what products are multiplied by.
      cap: soft cap of the scaled products, or None.
      sinks: float[Hq] scores without a value, or None.

    Returns:
      float[B, T, Hq, D] of the dtype of q; computed in float32.
    """
    groups = q.shape[2] // k.shape[2]
    wide = q.astype(jnp.float32).reshape(*q.shape[:2], k.shape[2], groups, q.shape[3])
    scores = jnp.einsum("bihgd,bjhd->bhgij", wide, k.astype(jnp.float32)) * jnp.float32(scale)
    scores = jnp.where(mask[None, None, None], softcap(scores, cap), -jnp.inf)
    if sinks is not None:
        sink = sinks.astype(jnp.float32).reshape(1, k.shape[2], groups, 1, 1)
        sink = jnp.broadcast_to(sink, (*scores.shape[:-1], 1))
        scores = jnp.concatenate([scores, sink], axis=-1)
    shares = jax.nn.softmax(scores, axis=-1)[..., : k.shape[1]]
    mixed = jnp.einsum("bhgij,bjhd->bihgd", shares, v.astype(jnp.float32))
    return mixed.reshape(q.shape).astype(q.dtype)
