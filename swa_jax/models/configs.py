"""The models that the package knows, by name."""

import difflib

from swa_jax.models.gemma import GEMMA_MODELS
from swa_jax.models.model_config import ModelConfig
from swa_jax.models.other_models import OTHER_MODELS

MODELS: dict[str, ModelConfig] = {model.name: model for model in GEMMA_MODELS + OTHER_MODELS}


def list_models() -> tuple[str, ...]:
    """The names that `get_model` takes."""
    return tuple(MODELS)


def get_model(name: str) -> ModelConfig:
    """The model of that name, in any case of letters.

    Raises:
      ValueError: no such model; the message lists the known names and the nearest one.

    Example:
      >>> get_model("gpt-oss-20b").full_bytes_per_token
      24576
    """
    known = ", ".join(MODELS)
    if not isinstance(name, str):
        raise ValueError(f"a model name must be a string, got {name!r}; known models: {known}")
    key = name.strip().lower()
    if key in MODELS:
        return MODELS[key]
    shown = name if len(name) <= 80 else name[:77] + "..."
    # difflib's cost is quadratic in the length, so a name that is far too long is not compared.
    close = difflib.get_close_matches(key, MODELS, n=1) if len(key) <= 80 else []
    hint = f"did you mean {close[0]!r}? " if close else ""
    raise ValueError(f"unknown model {shown!r}; {hint}known models: {known}")
