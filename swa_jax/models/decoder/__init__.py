"""A decoder in plain JAX for Gemma 3 and gpt-oss, over whole sequences and over paged KV."""

from swa_jax.models.decoder.batch import PagedBatch
from swa_jax.models.decoder.checkpoint import load_checkpoint, save_checkpoint
from swa_jax.models.decoder.config import DecoderConfig
from swa_jax.models.decoder.dense import forward
from swa_jax.models.decoder.kv_pool import KVPool, write_kv
from swa_jax.models.decoder.layer import unembed
from swa_jax.models.decoder.new_kv import init_kv
from swa_jax.models.decoder.paged import forward_paged
from swa_jax.models.decoder.paged_attention import attend_pages
from swa_jax.models.decoder.pallas_attention import choose_attention
from swa_jax.models.decoder.params import num_params, random_params
from swa_jax.models.decoder.published_config import config_from_hf
from swa_jax.models.decoder.rope import Rope
from swa_jax.models.decoder.unified_kv import UnifiedKV

__all__ = (
    "DecoderConfig",
    "KVPool",
    "PagedBatch",
    "Rope",
    "UnifiedKV",
    "attend_pages",
    "choose_attention",
    "config_from_hf",
    "forward",
    "forward_paged",
    "init_kv",
    "load_checkpoint",
    "num_params",
    "random_params",
    "save_checkpoint",
    "unembed",
    "write_kv",
)
