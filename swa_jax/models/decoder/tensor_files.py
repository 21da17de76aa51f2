"""The safetensors files of a checkpoint, one or several, as one set of named tensors."""

import contextlib
import importlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from swa_jax.models.decoder.json_file import MAX_INDEX_BYTES, read_object
from swa_jax.models.decoder.params import Shape
from swa_jax.models.decoder.published_names import text_name
from swa_jax.models.decoder.whole_file import whole_file
from swa_jax.replay.trace_lines import show

_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"
_LONGEST_NAME = 200  # characters
# As the format has them; whole numbers are what quantised weights are packed in.
FLOATS = ("F64", "F32", "F16", "BF16", "F8_E4M3", "F8_E5M2")
PACKED = ("U8",)


@dataclass(frozen=True)
class TensorFiles:
    """Open files. Tensors have the names of a text-only checkpoint; other parts are left out."""

    shapes: dict[str, Shape]
    dtypes: dict[str, str]  # as the format has them
    places: dict[str, tuple[Any, str]]  # open file, and the name in it

    def read(self, name: str, dtypes: tuple[str, ...] = FLOATS) -> np.ndarray:
        """The tensor, in the dtype that it was saved in.

        Raises:
          ValueError: a dtype other than these.
        """
        if self.dtypes[name] not in dtypes:
            raise ValueError(
                f"the tensor {name} must be one of {', '.join(dtypes)}, got {self.dtypes[name]}"
            )
        handle, stored = self.places[name]
        return handle.get_tensor(stored)


@contextlib.contextmanager
def open_files(folder: Path) -> Iterator[TensorFiles]:
    """Opens model.safetensors, or the shards that model.safetensors.index.json names.

    Raises:
      FileNotFoundError: neither is there, or a shard is missing.
      ImportError: `safetensors` is not installed.
      ValueError: a file that is no safetensors file or not in the folder, two tensors of one
        name, or a name that no model has.
    """
    library = _safetensors("safetensors")
    files = TensorFiles({}, {}, {})
    with contextlib.ExitStack() as stack:
        for path in _paths(folder):
            if not path.is_file():  # a pipe would wait
                raise ValueError(f"{path} must be a file of tensors; it is no regular file")
            try:
                handle = stack.enter_context(library.safe_open(path, framework="numpy"))
                _list_tensors(folder, handle, files)
            except (library.SafetensorError, OSError) as error:
                why = " ".join(str(error).split())[:_LONGEST_NAME]
                raise ValueError(f"{path} is no safetensors file: {why}") from None
        yield files


def _list_tensors(folder: Path, handle: Any, files: TensorFiles) -> None:  # noqa: ANN401
    """Adds the tensors of one open file; nothing of them is read."""
    for stored in handle.keys():  # noqa: SIM118 (a handle, not a dict)
        if not stored.isprintable() or len(stored) > _LONGEST_NAME:
            raise ValueError(f"{folder} has a tensor that no model has, {show(stored)}")
        name = text_name(stored)
        if name is None:
            continue
        if name in files.places:
            raise ValueError(f"{folder} has the tensor {name} twice")
        view = handle.get_slice(stored)
        files.shapes[name] = tuple(view.get_shape())
        files.dtypes[name] = view.get_dtype()
        files.places[name] = (handle, stored)


def _paths(folder: Path) -> list[Path]:
    if (folder / _SINGLE).exists():
        return [folder / _SINGLE]
    if not (folder / _INDEX).exists():
        raise FileNotFoundError(f"a checkpoint needs {_SINGLE} or {_INDEX}; {folder} has neither")
    index = read_object(folder / _INDEX, MAX_INDEX_BYTES)
    shards = index.get("weight_map")
    if not isinstance(shards, dict) or not shards:
        raise ValueError(f"weight_map of {_INDEX} must be an object, got {show(shards)}")
    for name in shards.values():
        if not _is_plain(name):
            raise ValueError(
                f"weight_map of {_INDEX} must name files in {folder} itself, got {show(name)}"
            )
    paths = [folder / name for name in sorted(set(shards.values()))]
    for path in paths:
        if not path.exists():
            raise FileNotFoundError(f"{_INDEX} names {path.name}; there is none in {folder}")
    return paths


def _is_plain(name: object) -> bool:
    """Whether it names a file that lies in a folder, and nothing outside of it."""
    if not isinstance(name, str) or not name.isprintable() or len(name) > _LONGEST_NAME:
        return False
    return name not in ("", ".", "..") and not set(name) & set("/\\:")


def write_file(folder: Path, tensors: dict[str, np.ndarray]) -> None:
    """Writes model.safetensors, whole or not at all.

    Args:
      folder: a directory.
      tensors: by name.

    Raises:
      OSError: the disk is full, or fails; the file before is as it was.
    """
    # transformers refuses a file that does not say for which framework it was written.
    with whole_file(folder / _SINGLE) as half:
        _safetensors("safetensors.numpy").save_file(tensors, half, metadata={"format": "pt"})


def _safetensors(module: str) -> ModuleType:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ImportError(
            "checkpoints need the safetensors library: pip install 'swa-jax[models]'"
        ) from error
