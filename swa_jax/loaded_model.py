"""A checkpoint directory as something to serve: model, parameters, tokenizer."""

from dataclasses import dataclass
from pathlib import Path

import jax.numpy as jnp

from swa_jax.models import DecoderConfig, ModelConfig, load_checkpoint
from swa_jax.models.decoder import choose_attention
from swa_jax.models.model_config import FULL, SWA
from swa_jax.serving import Decoder
from swa_jax.serving.trees import Tree
from swa_jax.text import TextTokenizer, load_tokenizer


@dataclass(frozen=True)
class LoadedModel:
    """What `load_model` gives."""

    name: str
    decoder: Decoder
    params: Tree
    tokenizer: TextTokenizer
    weights: str = ""  # tells these parameters from others

    @property
    def config(self) -> DecoderConfig:
        """The model."""
        return self.decoder.config

    @property
    def kv_config(self) -> ModelConfig:
        """The model as the planning of pools sees it."""
        config = self.config
        return ModelConfig(
            name=self.name,
            num_layers=config.num_layers,
            num_full_layers=config.layer_kinds.count(FULL),
            num_swa_layers=config.layer_kinds.count(SWA),
            kv_heads=config.kv_heads,
            head_dim=config.head_dim,
            sliding_window=config.sliding_window,
            kv_bytes_per_element=jnp.dtype(self.decoder.kv_dtype).itemsize,
            max_context=config.max_context,
        )


def load_model(folder: str | Path, dtype: str, name: str | None = None) -> LoadedModel:
    """Reads a checkpoint and its tokenizer.

    Args:
      folder: with config.json, tensors and tokenizer.json.
      dtype: of parameters and KV, float32 or bfloat16.
      name: of the model, by default the folder's.

    Raises:
      ValueError: something is missing or not as it should be.
    """
    path = Path(folder)
    if not path.is_dir():
        raise ValueError(f"{folder}: there is no such directory; name one with a config.json")
    try:
        tokenizer = load_tokenizer(path)
        config, params = load_checkpoint(path, dtype=jnp.dtype(dtype))
    except OSError as error:
        raise ValueError(str(error)) from None
    except Exception as error:
        if type(error).__name__ != "SafetensorError":
            raise
        raise ValueError(f"{folder}: the tensors cannot be read: {error}") from None
    decoder = Decoder(config, kv_dtype=dtype, attend=choose_attention())
    return LoadedModel(
        name or path.resolve().name, decoder, params, tokenizer, _weights(path, dtype)
    )


def _weights(path: Path, dtype: str) -> str:
    """Names the tensors by their files: hashing all of them would take as long as loading."""
    files = sorted(path.glob("*.safetensors"))
    parts = [f"{file.name} {file.stat().st_size} {file.stat().st_mtime_ns}" for file in files]
    return "; ".join([str(path.resolve()), dtype, *parts])
