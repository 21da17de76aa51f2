"""Cutting a prompt into page keys, and hashing every prefix of it at once."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from swa_jax.prefix_cache.tree import CacheConfig

_STEP = 0x9E3779B1  # odd, so multiplication loses nothing


@dataclass(frozen=True)
class Keys:
    """The whole pages of a prompt. N pages (static), the first `count` of them in use."""

    tokens: jax.Array  # int32[N, K]
    hash: jax.Array  # int32[N] of the prefix that ends with this page
    count: jax.Array  # int32[]
    namespace: jax.Array  # int32[]


def mix(bits: jax.Array) -> jax.Array:
    """Spreads uint32 bits (the finaliser of MurmurHash3, public domain)."""
    bits = (bits ^ (bits >> 16)) * jnp.uint32(0x85EBCA6B)
    bits = (bits ^ (bits >> 13)) * jnp.uint32(0xC2B2AE35)
    return bits ^ (bits >> 16)


def at_least(room: int, values: jax.Array) -> jax.Array:
    """`values`, with zeros after them where they are fewer than `room`."""
    return jnp.pad(values, (0, max(0, room - values.shape[0])))


def cut_pages(
    config: CacheConfig, tokens: jax.Array, length: jax.Array, namespace: jax.Array
) -> Keys:
    """Page keys of int32[T] `tokens`, of which the first `length` count.

    There is one page at least, not in use, where the tokens make none: no array is empty.
    """
    size, width = config.pool.page_size, config.key_tokens
    extra = width - size
    room = tokens.shape[0]
    usable = jnp.clip(length, 0, room)
    usable = jnp.minimum(jnp.maximum(usable - extra, 0), jnp.int32(config.max_prefix_tokens))
    pages = max(1, (room - extra) // size)
    count = jax.lax.div(usable, jnp.int32(size))
    first = jnp.arange(pages, dtype=jnp.int32)[:, None] * jnp.int32(size)
    at = first + jnp.arange(width, dtype=jnp.int32)[None, :]
    keys = at_least(width, tokens).at[at].get(mode="fill", fill_value=0)
    return Keys(keys, _prefix_hashes(config, keys, namespace), count, namespace)


def _prefix_hashes(config: CacheConfig, keys: jax.Array, namespace: jax.Array) -> jax.Array:
    """int32[N]: h[i] = h[i-1] * step + page[i], all at once since such steps compose."""
    spread = mix(keys.astype(jnp.uint32) + jnp.uint32(_STEP))
    place = jnp.arange(keys.shape[1], dtype=jnp.uint32)[None, :]
    page = jnp.sum(spread * (2 * place + 1), axis=1, dtype=jnp.uint32)
    factor = jnp.full(page.shape, _STEP, jnp.uint32)

    def compose(
        earlier: tuple[jax.Array, jax.Array], later: tuple[jax.Array, jax.Array]
    ) -> tuple[jax.Array, jax.Array]:
        return earlier[0] * later[0], earlier[1] * later[0] + later[1]

    scale, added = jax.lax.associative_scan(compose, (factor, mix(page)))
    start = mix(namespace.astype(jnp.uint32) + jnp.uint32(1))
    bits = mix(start * scale + added)
    if config.hash_bits < 32:
        bits = bits & jnp.uint32(2**config.hash_bits - 1)
    return jax.lax.bitcast_convert_type(bits, jnp.int32)
