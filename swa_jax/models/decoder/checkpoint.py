"""Published checkpoints: config.json beside safetensors files, read and written."""

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from swa_jax.models.decoder.config import DecoderConfig
from swa_jax.models.decoder.json_file import MAX_CONFIG_BYTES, read_object
from swa_jax.models.decoder.mxfp4 import BLOCK, dequantise
from swa_jax.models.decoder.params import Params, Shape, layer_shapes, model_shapes
from swa_jax.models.decoder.published_config import config_from_hf, config_to_hf
from swa_jax.models.decoder.published_names import TIED_UNEMBED, Published, published_arrays
from swa_jax.models.decoder.published_values import token_ids
from swa_jax.models.decoder.tensor_files import PACKED, TensorFiles, open_files, write_file
from swa_jax.models.decoder.whole_file import whole_file

_CONFIG, _GENERATION = "config.json", "generation_config.json"
_MOST_NAMED = 5  # tensors of one sort named in a message
_QUANTISED = ("gate_up", "down")  # published as MXFP4 blocks and scales, or plain


def load_checkpoint(
    path: str | Path, *, dtype: DTypeLike = jnp.float32
) -> tuple[DecoderConfig, Params]:
    """Reads a published checkpoint: Gemma 3 (its text model) or gpt-oss.

    Args:
      path: a directory with config.json, and model.safetensors or the shards that
        model.safetensors.index.json names. Where there is a generation_config.json, the tokens
        that end a text are taken from it.
      dtype: of every array returned; quantised experts (MXFP4) are expanded to it.

    Returns:
      The configuration, and the parameters as `random_params` gives them.

    Raises:
      FileNotFoundError: no config.json, or no tensors.
      ImportError: `safetensors` is not installed.
      ValueError: a model that the decoder does not run; files that are not what they should be,
        or longer; tensors that are missing, surplus or of another shape or kind, each named with
        what was expected and what was found.
    """
    folder = Path(path)
    config = _read_config(folder)
    arrays = published_arrays(config)
    with open_files(folder) as files:
        _check_tensors(config, arrays, files)
        return config, _collect(config, arrays, files, dtype)


def _read_config(folder: Path) -> DecoderConfig:
    config = config_from_hf(read_object(folder / _CONFIG, MAX_CONFIG_BYTES))
    if (folder / _GENERATION).exists():
        ids = read_object(folder / _GENERATION, MAX_CONFIG_BYTES).get("eos_token_id")
        if ids is not None:
            return replace(config, eos_token_ids=token_ids(ids))
    return config


def _check_tensors(config: DecoderConfig, arrays: list[Published], files: TensorFiles) -> None:
    """Raises unless the files hold just the model's tensors, in their shapes."""
    expected: dict[str, Shape] = {}
    for array in arrays:
        expected |= _stored_shapes(array, files)
    found = dict(files.shapes)
    if config.tie_embeddings:
        found.pop(TIED_UNEMBED, None)
    _compare(expected, found, "the tensors do not fit the config.json")


def _compare(expected: dict[str, Shape], found: dict[str, Shape], summary: str) -> None:
    sorts = [
        [f"missing {name} {expected[name]}" for name in sorted(set(expected) - set(found))],
        [f"surplus {name} {found[name]}" for name in sorted(set(found) - set(expected))],
        [
            f"{name} expected {shape}, found {found[name]}"
            for name, shape in expected.items()
            if found.get(name, shape) != shape
        ],
    ]
    if any(sorts):
        raise ValueError(f"{summary}: {'; '.join(_cut(sort) for sort in sorts if sort)}")


def _cut(problems: list[str]) -> str:
    more = len(problems) - _MOST_NAMED
    return "; ".join(problems[:_MOST_NAMED]) + (f"; and {more} more of these" if more > 0 else "")


def _stored_shapes(array: Published, files: TensorFiles) -> dict[str, Shape]:
    """The tensors that hold an array: itself, or its MXFP4 blocks and scales."""
    if not _is_quantised(array, files):
        return {array.name: array.shape}
    experts, rows, columns = array.shape
    scales = (experts, columns, -(-rows // BLOCK))
    return {f"{array.name}_blocks": (*scales, BLOCK // 2), f"{array.name}_scales": scales}


def _is_quantised(array: Published, files: TensorFiles) -> bool:
    return (
        array.key in _QUANTISED
        and len(array.shape) == 3
        and array.name not in files.shapes
        and f"{array.name}_blocks" in files.shapes
    )


def _collect(
    config: DecoderConfig, arrays: list[Published], files: TensorFiles, dtype: DTypeLike
) -> Params:
    params: Params = {}
    layers: list[dict[str, jax.Array]] = [{} for _ in range(config.num_layers)]
    for array in arrays:
        group = params if array.layer is None else layers[array.layer]
        group[array.key] = jnp.asarray(_read_array(array, files), dtype)
    if config.tie_embeddings and TIED_UNEMBED in files.shapes:
        _check_copy(files)
    return params | {"layers": tuple(layers)}


def _read_array(array: Published, files: TensorFiles) -> np.ndarray:
    if _is_quantised(array, files):
        blocks = files.read(f"{array.name}_blocks", PACKED)
        return dequantise(blocks, files.read(f"{array.name}_scales", PACKED))
    values = files.read(array.name)
    return values.T if array.turned else values


def _check_copy(files: TensorFiles) -> None:
    embedding = "model.embed_tokens.weight"
    if not np.array_equal(files.read(TIED_UNEMBED), files.read(embedding)):
        raise ValueError(
            f"tie_word_embeddings is set, but {TIED_UNEMBED} is not the same as {embedding}"
        )


def save_checkpoint(path: str | Path, config: DecoderConfig, params: Mapping[str, Any]) -> None:
    """Writes config.json and model.safetensors in the published layout.

    `load_checkpoint` reads them back bit for bit, and so does transformers'
    `AutoModelForCausalLM.from_pretrained`.

    Args:
      path: a directory, made where it is missing.
      config: the model.
      params: its parameters, all of one dtype.

    Raises:
      ImportError: `safetensors` is not installed.
      OSError: the disk is full, or fails; what was there before is as it was.
      ValueError: arrays that are missing, surplus or of another shape, each named; or a
        configuration that config.json cannot describe.
    """
    published = config_to_hf(config)
    _check_params(config, params)
    tensors: dict[str, np.ndarray] = {}
    for array in published_arrays(config):
        group = params if array.layer is None else params["layers"][array.layer]
        values = np.asarray(group[array.key])
        tensors[array.name] = np.ascontiguousarray(values.T if array.turned else values)
    published["dtype"] = str(params["embed"].dtype)
    folder = Path(path)
    folder.mkdir(parents=True, exist_ok=True)
    text = json.dumps(published, indent=2) + "\n"
    with whole_file(folder / _CONFIG) as half:
        half.write_text(text, encoding="utf-8")
        write_file(folder, tensors)


def _check_params(config: DecoderConfig, params: Mapping[str, Any]) -> None:
    """Raises unless the parameters are those of the model, by their names here."""
    expected, found = dict(model_shapes(config)), _shapes(params)
    for place in range(config.num_layers):
        expected |= {f"layers.{place}.{key}": shape for key, shape in layer_shapes(config).items()}
    for place, layer in enumerate(params.get("layers", ())):
        found |= {f"layers.{place}.{key}": shape for key, shape in _shapes(layer).items()}
    _compare(expected, found, "the parameters do not fit the configuration")


def _shapes(group: Mapping[str, Any]) -> dict[str, Shape]:
    return {key: array.shape for key, array in group.items() if key != "layers"}
