"""KV of zeros for a model: an array a layer, or one for all."""

import jax.numpy as jnp
from jax.typing import DTypeLike

from swa_jax.config import PoolConfig
from swa_jax.models.decoder.config import DecoderConfig
from swa_jax.models.decoder.kv_pool import KVPool
from swa_jax.models.decoder.unified_kv import UnifiedKV
from swa_jax.unified import UnifiedLayout, sizes_of


def init_kv(
    config: DecoderConfig, pool: PoolConfig, dtype: DTypeLike = jnp.float32
) -> KVPool | UnifiedKV:
    """KV of zeros for a model and the pools that an allocator hands out.

    Args:
      config: the model.
      pool: the allocator's sizes.
      dtype: of the KV.

    Returns:
      An array a layer, or one array for all layers where both pools draw from one budget.

    Raises:
      ValueError: pools that would lose KV which the model still reads: a window below
        `config.past_window`, chunks, or a single SWA pool for a model with full layers; a budget
        that was cut for another model or dtype.
    """
    layout = pool.unified_layout
    if layout is None:
        return init_layers(config, pool, dtype)
    _check_pool(config, pool)
    _check_layout(config, pool, layout, jnp.dtype(dtype))
    width = (pool.page_size, 2 * config.kv_heads, config.head_dim)
    return UnifiedKV(jnp.zeros((layout.units, *width), dtype), layout)


def init_layers(config: DecoderConfig, pool: PoolConfig, dtype: DTypeLike = jnp.float32) -> KVPool:
    """KV of zeros in an array a layer, beside a unified budget where there is one.

    Args:
      config: the model.
      pool: the allocator's sizes.
      dtype: of the KV.

    Raises:
      ValueError: as for `init_kv`, but for the budget.
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


def _check_layout(
    config: DecoderConfig, pool: PoolConfig, layout: UnifiedLayout, dtype: jnp.dtype
) -> None:
    sizes = sizes_of(config, dtype.itemsize)
    made = (layout.full_units, layout.swa_units, layout.unit_bytes)
    wanted = (sizes.full_units, sizes.swa_units, sizes.unit_bytes * pool.page_size)
    if made != wanted:
        raise ValueError(
            f"the budget was cut for {made[0]} full and {made[1]} SWA layers of {made[2]} bytes a "
            f"page; the model has {wanted[0]} and {wanted[1]} of {wanted[2]} with {dtype} KV: use "
            f"PoolConfig.unified(bytes, model, ..., kv_bytes_per_element={dtype.itemsize}), or "
            "`pool.apart` for KV outside the budget"
        )
