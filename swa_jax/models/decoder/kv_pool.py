"""KV of all layers: one array a layer, addressed by the slots that the allocator grants."""

import functools
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from swa_jax.config import PoolConfig
from swa_jax.models.decoder.config import DecoderConfig
from swa_jax.state import PAD_SLOT


@functools.partial(jax.tree_util.register_dataclass, data_fields=["full", "swa"], meta_fields=[])
@dataclass(frozen=True)
class KVPool:
    """The KV of every layer. Donate it to the step that writes it.

    A layer is float[pages + 1, page_size, 2 * kv_heads, head_dim], the K of head h at 2h and its V
    at 2h + 1: what JAX's ragged paged attention kernel reads. Page 0 is padding and stays 0.
    """

    full: tuple[jax.Array, ...]  # full layers in order, by full slot
    swa: tuple[jax.Array, ...]  # SWA layers in order, by SWA slot


def init_kv(config: DecoderConfig, pool: PoolConfig, dtype: DTypeLike = jnp.float32) -> KVPool:
    """KV of zeros for a model and the pools that an allocator hands out.

    Args:
      config: the model.
      pool: the allocator's sizes.
      dtype: of the KV.

    Raises:
      ValueError: pools that would lose KV which the model still reads: a window below
        `config.past_window`, chunks, or a single SWA pool for a model with full layers.
    """
    _check_pool(config, pool)
    width = (pool.page_size, 2 * config.kv_heads, config.head_dim)
    full, swa = (pool.full_pages + 1, *width), (pool.swa_pages + 1, *width)
    return KVPool(
        full=tuple(jnp.zeros(full, dtype) for _ in config.full_layers),
        swa=tuple(jnp.zeros(swa, dtype) for _ in config.swa_layers),
    )


def _check_pool(config: DecoderConfig, pool: PoolConfig) -> None:
    if pool.pure_swa_pool and config.full_layers:
        raise ValueError(
            f"a pure SWA pool keeps no KV for full layers, and the model has "
            f"{len(config.full_layers)}; use PoolConfig(full_tokens, swa_tokens, ...)"
        )
    if not config.swa_layers or pool.sliding_window is None:
        return
    if pool.chunked or pool.sliding_window < config.past_window:
        raise ValueError(
            f"the model's SWA layers read {config.past_window} past tokens; the pool keeps "
            f"{pool.sliding_window}{' in chunks' if pool.chunked else ''}: use "
            f"PoolConfig(..., sliding_window={config.past_window})"
        )


def write_kv(layer: jax.Array, slots: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """Writes the KV of some tokens.

    Args:
      layer: float[pages + 1, page_size, 2 * kv_heads, head_dim].
      slots: int32[...] where each token goes, page * page_size + offset; a token whose slot is 0
        or below goes nowhere, so that the padding page never holds anything.
      k: float[..., kv_heads, head_dim].
      v: float[..., kv_heads, head_dim].

    Returns:
      The layer after the call, in its own dtype.
    """
    rows = layer.reshape(-1, *layer.shape[2:])
    both = jnp.stack([k, v], axis=-2).astype(layer.dtype).reshape(-1, *layer.shape[2:])
    nowhere = jnp.int32(rows.shape[0])
    places = jnp.where(slots > PAD_SLOT, slots, nowhere).reshape(-1)
    return rows.at[places].set(both, mode="drop").reshape(layer.shape)
