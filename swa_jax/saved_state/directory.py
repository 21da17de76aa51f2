"""Named arrays in a directory, by Orbax: one save after another, each finished or not there.

The newest finished save counts. It is removed only when the next one is finished.
"""

import contextlib
import hashlib
import importlib
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, TypeAlias

import jax.numpy as jnp
import numpy as np

from swa_jax.describe import Plain, as_json, differences

_FORMAT, _VERSION = "swa_jax saved state", 1
_PREFIX = "swa_jax"  # of a save's directory, so that others in the directory are let alone

Arrays = dict[str, np.ndarray]
Manager: TypeAlias = Any  # Orbax's CheckpointManager; the library is imported late


def write_arrays(path: str | Path, made: Plain, arrays: Arrays) -> None:
    """Saves arrays, in the place of what was saved before.

    Killed at any moment, it leaves the save before, or this one, whole.

    Args:
      path: a directory, made where it is missing. Nothing else in it is touched.
      made: what the arrays were made under, as JSON can hold it.
      arrays: by name, of any dtype and shape.

    Raises:
      ImportError: Orbax is not installed.
      ValueError: the path is no directory.
    """
    ocp, folder = require_orbax(), Path(path).absolute()
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"{path} must be a directory, or not be there yet; it is a file")
    described = {name: _describe(name, array) for name, array in arrays.items()}
    content = {"made": made, "arrays": described}
    about = {"format": _FORMAT, "version": _VERSION, "seal": _seal(content), "content": content}
    stored = {name: _stored(array) for name, array in arrays.items() if array.size}
    items = {"about": ocp.args.JsonSave(about)}
    if stored:  # Orbax saves no tree without leaves
        items["arrays"] = ocp.args.PyTreeSave(stored)
    with _manager(ocp, folder, writes=True) as manager:
        step = manager.latest_step()
        manager.save(0 if step is None else step + 1, args=ocp.args.Composite(**items))


def read_arrays(path: str | Path, made: Plain) -> Arrays:
    """The arrays of the newest finished save.

    Args:
      path: as for `write_arrays`.
      made: what they shall have been made under.

    Raises:
      FileNotFoundError: there is no finished save.
      ImportError: Orbax is not installed.
      ValueError: it was made under something else, says what; or it is not whole.
    """
    ocp, folder = require_orbax(), Path(path).absolute()
    if not folder.is_dir():
        raise FileNotFoundError(f"there is no directory {path} with a saved state")
    with _manager(ocp, folder, writes=False) as manager:
        step = manager.latest_step()
        if step is None:
            raise FileNotFoundError(f"there is no finished save in {path}")
        about = _restore(manager, step, path, about=ocp.args.JsonRestore())
        described = _check_about(path, about, made)
        kept = any(_size(one) for one in described.values())
        stored = _restore(manager, step, path, arrays=ocp.args.PyTreeRestore()) if kept else {}
    return _checked(path, described, stored)


def _restore(manager: Manager, step: int, path: str | Path, **wanted: object) -> Plain:
    """One item of a save."""
    (name,) = wanted
    composite = require_orbax().args.Composite
    try:
        return manager.restore(step, args=composite(**wanted))[name]
    except Exception as error:  # whatever Orbax makes of a directory that is not whole
        raise ValueError(f"{path} is damaged: its {name} cannot be read: {error}") from error


def _check_about(path: str | Path, about: Plain, made: Plain) -> dict[str, Plain]:
    """What the save says of its arrays, if it is whole and of what is wanted."""
    mark = (about.get("format"), about.get("version")) if isinstance(about, dict) else None
    if mark != (_FORMAT, _VERSION):
        raise ValueError(f"{path} is no {_FORMAT} of version {_VERSION}: it says {mark}")
    content: Plain = about.get("content")
    if about.get("seal") != _seal(content):
        raise ValueError(f"{path} is damaged: its description is not as saved")
    found = differences(content["made"], made)
    if found:
        raise ValueError(f"{path} was saved under another configuration: {'; '.join(found)}")
    return content["arrays"]


def _seal(content: Plain) -> str:
    return hashlib.blake2b(as_json(content).encode(), digest_size=32).hexdigest()


def _checked(path: str | Path, descriptions: Plain, stored: dict[str, Any]) -> Arrays:
    arrays = {}
    for name, about in descriptions.items():
        dtype = jnp.dtype(about["dtype"])
        try:
            flat = np.asarray(stored[name]) if _size(about) else np.zeros(0, np.uint8)
            arrays[name] = np.ascontiguousarray(flat).view(dtype).reshape(about["shape"])
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{path} is damaged: its array {name} is not as saved") from error
        if _describe(name, arrays[name]) != about:
            raise ValueError(f"{path} is damaged: its array {name} is not as saved")
    return arrays


def _size(about: Plain) -> int:
    return int(np.prod(about["shape"], dtype=np.int64))


def _stored(array: np.ndarray) -> np.ndarray:
    """The array as one row; of bytes, for dtypes that NumPy itself lacks (bfloat16, float8)."""
    row = np.ascontiguousarray(array).reshape(-1)
    return row if array.dtype.isbuiltin == 1 else row.view(np.uint8)


def _describe(name: str, array: np.ndarray) -> Plain:
    row = _stored(array).view(np.uint8)
    seal = hashlib.blake2b(name.encode(), digest_size=32)
    seal.update(row.data)
    shape = [int(size) for size in array.shape]
    return {"dtype": array.dtype.name, "shape": shape, "checksum": seal.hexdigest()}


@contextlib.contextmanager
def _manager(ocp: ModuleType, folder: Path, *, writes: bool) -> Iterator[Manager]:
    """Orbax's view of the saves; one that writes cleans up what killed ones left."""
    options = ocp.CheckpointManagerOptions(
        max_to_keep=1 if writes else None,
        step_prefix=_PREFIX,
        create=writes,
        cleanup_tmp_directories=writes,
        enable_async_checkpointing=False,
    )
    with ocp.CheckpointManager(folder, options=options) as manager:
        yield manager


def require_orbax() -> ModuleType:
    """The library.

    Raises:
      ImportError: names the extra that brings it.
    """
    try:
        return importlib.import_module("orbax.checkpoint")
    except ImportError as error:
        raise ImportError(
            "saving and restoring state needs Orbax: pip install 'swa-jax[checkpoint]'"
        ) from error
