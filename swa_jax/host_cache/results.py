"""What is asked of the host tier, and what it answers."""

import functools
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from swa_jax.host_cache.claim import Claim, count_pages


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
