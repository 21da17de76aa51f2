"""Cutting a prompt into page keys, and hashing every prefix of it at once.

The hash of a prefix is made from the hash of a shorter one and the pages between, so a prompt of
which the beginning is in the tree is cut from there on.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from swa_jax.paging import look_up
from swa_jax.prefix_cache.tree import ROOT, CacheConfig, PrefixCache

_STEP = 0x9E3779B1  # odd, so multiplication loses nothing

# Gives int32[count] tokens of a prompt from int32[] place on; anything past its end.
ReadTokens: TypeAlias = Callable[[jax.Array, int], jax.Array]


def reader(row: jax.Array) -> ReadTokens:
    """Reads int32[T] tokens."""
    some = at_least(1, row)

    def read(start: jax.Array, count: int) -> jax.Array:
        return look_up(some, start + jnp.arange(count, dtype=jnp.int32), 0)

    return read


@dataclass(frozen=True)
class Keys:
    """The whole pages of a prompt. N pages (static), the first `count` of them in use."""

    tokens: jax.Array  # int32[N, K]
    hash: jax.Array  # int32[N] of the prefix that ends with this page
    count: jax.Array  # int32[]
    namespace: jax.Array  # int32[]
    above: jax.Array  # int32[] node that the first of these pages hangs from, ROOT for a prompt's
    depth: jax.Array  # int32[] pages of the prompt before these


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
    most, zero = jnp.int32(config.max_prefix_tokens), jnp.int32(0)
    start = _root_hash(namespace)
    return _cut(config, tokens, length, most, start, namespace, jnp.int32(ROOT), zero)


def _root_hash(namespace: jax.Array) -> jax.Array:
    """int32[] what the hashes of a namespace's prompts begin with."""
    return jax.lax.bitcast_convert_type(mix(namespace.astype(jnp.uint32) + 1), jnp.int32)


def cut_pages_below(
    cache: PrefixCache,
    node: jax.Array,
    tokens: jax.Array,
    length: jax.Array,
    namespace: jax.Array,
) -> Keys:
    """The same for what follows a prefix that is in the tree.

    Args:
      cache: the tree.
      node: int32[] the prefix's last page; ROOT where there is none.
      tokens: int32[T] the prompt's tokens behind it, padded.
      length: int32[] how many of them count, 0 or less for none.
      namespace: int32[] of the node.
    """
    config, depth = cache.config, cache.depth[node]
    start = jnp.where(node > ROOT, cache.hash[node], _root_hash(namespace))
    most = jnp.int32(config.max_prefix_tokens) - depth * jnp.int32(config.pool.page_size)
    return _cut(config, tokens, length, most, start, namespace, node, depth)


def _cut(
    config: CacheConfig,
    tokens: jax.Array,
    length: jax.Array,
    most: jax.Array,
    start: jax.Array,
    namespace: jax.Array,
    above: jax.Array,
    depth: jax.Array,
) -> Keys:
    size, width = config.pool.page_size, config.key_tokens
    extra = width - size
    room = tokens.shape[0]
    usable = jnp.clip(length, 0, room)
    usable = jnp.minimum(jnp.maximum(usable - extra, 0), jnp.maximum(most, 0))
    pages = max(1, (room - extra) // size)
    count = jax.lax.div(usable, jnp.int32(size))
    keys = _in_pages(at_least(pages * size + extra, tokens), pages, size, extra)
    return Keys(keys, _prefix_hashes(config, keys, start), count, namespace, above, depth)


def _in_pages(tokens: jax.Array, pages: int, size: int, extra: int) -> jax.Array:
    """int32[pages, size + extra]: each page's tokens, and the `extra` that follow it."""
    keys = tokens[: pages * size].reshape(pages, size)
    if not extra:
        return keys
    after = tokens[size : pages * size + extra : size]  # one token: the next page's first
    return jnp.concatenate([keys, after[:, None]], axis=1)


@functools.cache
def _powers(count: int) -> tuple[np.ndarray, np.ndarray]:
    """uint32[N] the step to the power of 1 .. N, and their inverses in 32 bits."""
    steps = np.array([[_STEP], [pow(_STEP, -1, 2**32)]], np.uint32)
    both = np.multiply.accumulate(np.repeat(steps, count, axis=1), axis=1, dtype=np.uint32)
    return both[0], both[1]


def _prefix_hashes(config: CacheConfig, keys: jax.Array, start: jax.Array) -> jax.Array:
    """int32[N]: h[i] = h[i-1] * step + page[i] in 32 bits, all at once.

    The low bits of h come from the low bits of what it is made of, and each page is mixed well, so
    any number of them spreads as well and can be gone on from.
    """
    spread = mix(keys.astype(jnp.uint32) + jnp.uint32(_STEP))
    place = jnp.arange(keys.shape[1], dtype=jnp.uint32)[None, :]
    page = jnp.sum(spread * (2 * place + 1), axis=1, dtype=jnp.uint32)
    grown, shrunk = _powers(keys.shape[0])
    # Divided by its power of the step each page is a summand: an odd number has an inverse.
    sums = jax.lax.associative_scan(jnp.add, mix(page) * shrunk)
    bits = grown * (jax.lax.bitcast_convert_type(start, jnp.uint32) + sums)
    if config.hash_bits < 32:
        bits = bits & jnp.uint32(2**config.hash_bits - 1)
    return jax.lax.bitcast_convert_type(bits, jnp.int32)
