"""Random numbers out of a counter: cheap to compile, the same everywhere."""

import jax
import jax.numpy as jnp

from swa_jax.prefix_cache.keys import mix

_STRIDE = 0x9E3779B1


def seed_of(*parts: jax.Array) -> jax.Array:
    """uint32[] bits that follow from int32 or uint32 parts."""
    seed = jnp.uint32(1)
    for part in parts:
        seed = mix(seed ^ (part.astype(jnp.uint32) * jnp.uint32(_STRIDE) + jnp.uint32(1)))
    return seed


def bits(seed: jax.Array, salt: int) -> jax.Array:
    """int32 from 0 to 2^31 - 1; another salt gives another number."""
    return (mix(seed + jnp.uint32((salt + 1) * _STRIDE % 2**32)) >> 1).astype(jnp.int32)


def roll(seed: jax.Array, salt: int, low: int | jax.Array, high: int | jax.Array) -> jax.Array:
    """int32 from `low` to `high - 1`; `low` where that is empty."""
    low, high = jnp.asarray(low, jnp.int32), jnp.asarray(high, jnp.int32)
    return low + jax.lax.rem(bits(seed, salt), jnp.maximum(high - low, 1))


def one_in(seed: jax.Array, salt: int, often: int | jax.Array) -> jax.Array:
    """bool: true once in `often` times; never where that is 0."""
    often = jnp.asarray(often, jnp.int32)
    return (often > 0) & (roll(seed, salt, 0, often) == 0)
