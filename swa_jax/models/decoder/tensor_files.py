"""The safetensors files of a checkpoint, one or several, as one set of named tensors."""

import contextlib
import importlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from swa_jax.models.decoder.params import Shape
from swa_jax.models.decoder.published_names import text_name

_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"


@dataclass(frozen=True)
class TensorFiles:
    """Open files. Tensors have the names of a text-only checkpoint; other parts are left out."""

    shapes: dict[str, Shape]
    places: dict[str, tuple[Any, str]]  # open file, and the name in it

    def read(self, name: str) -> np.ndarray:
        """The tensor, in the dtype that it was saved in."""
        handle, stored = self.places[name]
        return handle.get_tensor(stored)


@contextlib.contextmanager
def open_files(folder: Path) -> Iterator[TensorFiles]:
    """Opens model.safetensors, or the shards that model.safetensors.index.json names.

    Raises:
      FileNotFoundError: neither is there, or a shard is missing.
      ImportError: `safetensors` is not installed.
      ValueError: two tensors of one name.
    """
    library = _safetensors("safetensors")
    shapes: dict[str, Shape] = {}
    places: dict[str, tuple[Any, str]] = {}
    with contextlib.ExitStack() as stack:
        for path in _paths(folder):
            handle = stack.enter_context(library.safe_open(path, framework="numpy"))
            for stored in handle.keys():  # noqa: SIM118 (a handle, not a dict)
                name = text_name(stored)
                if name is None:
                    continue
                if name in places:
                    raise ValueError(f"{folder} has the tensor {name} twice")
                shapes[name] = tuple(handle.get_slice(stored).get_shape())
                places[name] = (handle, stored)
        yield TensorFiles(shapes, places)


def _paths(folder: Path) -> list[Path]:
    if (folder / _SINGLE).exists():
        return [folder / _SINGLE]
    if not (folder / _INDEX).exists():
        raise FileNotFoundError(f"a checkpoint needs {_SINGLE} or {_INDEX}; {folder} has neither")
    index = json.loads((folder / _INDEX).read_text(encoding="utf-8"))
    paths = [folder / name for name in sorted(set(index["weight_map"].values()))]
    for path in paths:
        if not path.exists():
            raise FileNotFoundError(f"{_INDEX} names {path.name}; there is none in {folder}")
    return paths


def write_file(folder: Path, tensors: dict[str, np.ndarray]) -> None:
    """Writes model.safetensors."""
    # transformers refuses a file that does not say for which framework it was written.
    _safetensors("safetensors.numpy").save_file(
        tensors, folder / _SINGLE, metadata={"format": "pt"}
    )


def _safetensors(module: str) -> ModuleType:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ImportError(
            "checkpoints need the safetensors library: pip install 'swa-jax[models]'"
        ) from error
