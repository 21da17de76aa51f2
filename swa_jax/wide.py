"""Sums that pass int32, in two int32 halves: x64 may be off."""

import jax
import jax.numpy as jnp
import numpy as np

BITS = 20


def wide_zero() -> jax.Array:
    """int32[2] nothing yet."""
    return jnp.zeros(2, jnp.int32)


def wide_add(total: jax.Array, value: jax.Array) -> jax.Array:
    """int32[2] `total` and int32[] `value`, from 0 up to 2^31 - 2^20."""
    low = total[1] + value
    return jnp.stack([total[0] + (low >> BITS), low & jnp.int32(2**BITS - 1)])


def wide_value(total: np.ndarray) -> np.ndarray:
    """int64[...] what int32[..., 2] stands for, on the host."""
    halves = np.asarray(total, np.int64)
    return (halves[..., 0] << BITS) + halves[..., 1]
