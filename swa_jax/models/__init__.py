"""Memory descriptions of published models, and pool sizes for them."""

from swa_jax.models.configs import MODELS, get_model, list_models
from swa_jax.models.model_config import ModelConfig
from swa_jax.models.planning import PoolSizes, plan_pools, swa_pages_needed, window_pages
from swa_jax.models.units import format_bytes, parse_bytes

__all__ = (
    "MODELS",
    "ModelConfig",
    "PoolSizes",
    "format_bytes",
    "get_model",
    "list_models",
    "parse_bytes",
    "plan_pools",
    "swa_pages_needed",
    "window_pages",
)
