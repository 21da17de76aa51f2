"""Bytes on their way: what a token's KV takes, and what a piece really carries."""

import math

import jax

from swa_jax.disagg.pack import Piece
from swa_jax.models.decoder.kv_pool import KVPool


def token_bytes(pools: KVPool) -> tuple[int, int]:
    """Bytes of one token's KV in all full layers and in all SWA layers.

    Args:
      pools: layers of [pages + 1, page_size, ...].
    """
    return _bytes(pools.full, 2), _bytes(pools.swa, 2)


def piece_bytes(piece: Piece) -> int:
    """Bytes of the tokens that a piece carries, unused room not counted. Waits for the device.

    Args:
      piece: of `pack`, one or a batch of them from `vmap`.
    """
    axes = piece.ok.ndim + 1
    full, swa = _bytes(piece.rows.full, axes), _bytes(piece.rows.swa, axes)
    counts = jax.device_get((piece.full_count, piece.swa_count))
    return int(counts[0].sum(dtype="int64")) * full + int(counts[1].sum(dtype="int64")) * swa


def everything_bytes(pools: KVPool, tokens: int) -> int:
    """Bytes of the KV of so many tokens in every layer: sending without a tail and without reuse.

    Args:
      pools: layers of [pages + 1, page_size, ...].
      tokens: of a request.
    """
    return tokens * sum(token_bytes(pools))


def _bytes(layers: tuple[jax.Array, ...], axes: int) -> int:
    """Bytes of one row of every layer, whose first `axes` axes say which row."""
    return sum(math.prod(layer.shape[axes:]) * layer.dtype.itemsize for layer in layers)
