"""Published models: descriptions of their KV memory, pool sizes for them, and a decoder."""

from swa_jax.models.configs import MODELS, get_model, list_models
from swa_jax.models.decoder import (
    DecoderConfig,
    KVPool,
    PagedBatch,
    Rope,
    UnifiedKV,
    config_from_hf,
    forward,
    forward_paged,
    init_kv,
    load_checkpoint,
    num_params,
    random_params,
    save_checkpoint,
    unembed,
    write_kv,
)
from swa_jax.models.model_config import ModelConfig
from swa_jax.models.planning import PoolSizes, plan_pools, swa_pages_needed, window_pages
from swa_jax.models.units import format_bytes, parse_bytes

__all__ = (
    "MODELS",
    "DecoderConfig",
    "KVPool",
    "ModelConfig",
    "PagedBatch",
    "PoolSizes",
    "Rope",
    "UnifiedKV",
    "config_from_hf",
    "format_bytes",
    "forward",
    "forward_paged",
    "get_model",
    "init_kv",
    "list_models",
    "load_checkpoint",
    "num_params",
    "parse_bytes",
    "plan_pools",
    "random_params",
    "save_checkpoint",
    "swa_pages_needed",
    "unembed",
    "window_pages",
    "write_kv",
)
