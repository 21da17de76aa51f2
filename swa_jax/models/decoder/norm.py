"""Root-mean-square norm."""

import jax
import jax.numpy as jnp


def rms_norm(values: jax.Array, weight: jax.Array, *, eps: float, offset: float) -> jax.Array:
    """Divides by the root of the mean square over the last axis, then scales.

    Args:
      values: float[..., H].
      weight: float[H].
      eps: added to the mean square.
      offset: added to the weight (1 for Gemma, whose weights are kept around 0).

    Returns:
      float[..., H] of the dtype of `values`; computed in float32.
    """
    wide = values.astype(jnp.float32)
    mean_square = jnp.mean(wide * wide, axis=-1, keepdims=True)
    scale = weight.astype(jnp.float32) + jnp.float32(offset)
    scale = jnp.expand_dims(scale, tuple(range(values.ndim - 1)))
    return (wide * jax.lax.rsqrt(mean_square + jnp.float32(eps)) * scale).astype(values.dtype)


def softcap(values: jax.Array, cap: float | None) -> jax.Array:
    """float[...]: cap * tanh(values / cap), or `values` where there is no cap."""
    if cap is None:
        return values
    limit = jnp.asarray(cap, values.dtype)
    return jnp.tanh(values / limit) * limit
