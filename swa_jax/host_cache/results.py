"""What is asked of the host tier, and what it answers."""

import functools
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from swa_jax.host_cache.claim import Claim, count_pages
from swa_jax.host_cache.mirror import token_keys
from swa_jax.inputs import Ints, as_int32
from swa_jax.prefix_cache.tree import CacheConfig


@dataclass(frozen=True)
class Matched:
    """What of a prompt device and host have together, in tokens. On the host."""

    length: int  # of the longest usable prefix
    device_length: int  # of it what is usable without the host
    full_tokens: int  # that would come back from the host
    swa_tokens: int


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["ok", "length", "full_tokens", "swa_tokens", "full_short", "swa_short", "node"],
    meta_fields=[],
)
@dataclass(frozen=True)
class Restored:
    """What a restore did, int32[] where nothing else is said."""

    ok: jax.Array  # bool[] False: refused, and the device is as it was
    length: jax.Array  # tokens that a match gives now; when refused, what it gave before
    full_tokens: jax.Array  # that came back from the host
    swa_tokens: jax.Array
    full_short: jax.Array  # pages that were missing
    swa_short: jax.Array
    node: jax.Array  # where the prefix ends, to be locked; 0 when nothing came back


def restored_of(claimed: Claim, length: jax.Array, before: jax.Array, page_size: int) -> Restored:
    """What a restore did.

    Args:
      claimed: the pages that it got.
      length: int32[] tokens that a match gives if it got them.
      before: int32[] tokens that a match gives if not.
      page_size: tokens in a page.
    """
    size = jnp.int32(page_size)
    return Restored(
        ok=claimed.ok,
        length=jnp.where(claimed.ok, length, before),
        full_tokens=count_pages(claimed.full) * size,
        swa_tokens=count_pages(claimed.swa) * size,
        full_short=claimed.full_short,
        swa_short=claimed.swa_short,
        node=claimed.node,
    )


@dataclass(frozen=True)
class Prompt:
    """A prompt, for the device and for the host."""

    tokens: jax.Array  # int32[T]
    length: jax.Array  # int32[]
    namespace: jax.Array  # int32[]
    keys: list[bytes]
    space: int


def prompt_of(config: CacheConfig, tokens: Ints, length: ArrayLike, namespace: ArrayLike) -> Prompt:
    """A prompt as the device and the host look it up.

    Args:
      config: of the tree.
      tokens: int32[T] padded.
      length: int32[] tokens of it that count.
      namespace: int32[].
    """
    row = as_int32("tokens", tokens, 1)
    count, space = as_int32("length", length, 0), as_int32("namespace", namespace, 0)
    most, size = max(0, min(int(count), row.shape[0])), config.pool.page_size
    keys = token_keys(np.asarray(row)[:most], size, is_bigram=config.key_tokens > size)
    return Prompt(row, count, space, keys[: config.max_prefix_tokens // size], int(space))
