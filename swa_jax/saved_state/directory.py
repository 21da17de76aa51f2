"""Named arrays in a directory, by Orbax: one save after another, each finished or not there.

The newest finished save counts. It is removed only when the next one is finished.
"""

import contextlib
import hashlib
import importlib
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, TypeAlias

import jax.numpy as jnp
import numpy as np

from swa_jax.describe import Plain, as_json, differences
from swa_jax.replay.trace_lines import show
from swa_jax.saved_state.failed_save import failed_save_told
from swa_jax.saved_state.turns import reading, saving_alone

_FORMAT, _VERSION = "swa_jax saved state", 1
_PREFIX = "swa_jax"  # of a save's directory, so that others in the directory are let alone
_SAVE = re.compile(_PREFIX + "_([0-9]+)")
_ABOUT, _ARRAYS = "about", "arrays"  # the first is what every save has
_MOST_TOLD = 8  # differences
_MOST_DIMENSIONS, _MOST_NUMBERS = 32, 2**48  # of an array
MAX_ABOUT_BYTES = 2**24  # of what a save says of itself: names, shapes and checksums of arrays

Arrays = dict[str, np.ndarray]


@dataclass(frozen=True)
class Form:
    """What an array must be."""

    dtype: str
    shape: tuple[int, ...]
    is_most: bool = False  # the first dimension may be smaller

    def fits(self, dtype: str, shape: Sequence[int]) -> bool:
        """Whether an array of these is one."""
        same = len(shape) == len(self.shape) and tuple(shape)[1:] == self.shape[1:]
        if not same or dtype != self.dtype:
            return False
        return shape[:1] == list(self.shape[:1]) or (self.is_most and shape[0] <= self.shape[0])


Manager: TypeAlias = Any  # Orbax's CheckpointManager; the library is imported late


def write_arrays(path: str | Path, made: Plain, arrays: Arrays) -> None:
    """Saves arrays, in the place of what was saved before.

    Killed at any moment, it leaves the save before, or this one, whole. Several that save into one
    directory at once, or read from it, take turns.

    Args:
      path: a directory, made where it is missing. Nothing else in it is touched.
      made: what the arrays were made under, as JSON can hold it: tuples are lists there, and keys
        of dicts texts.
      arrays: by name, of any dtype and shape.

    Raises:
      ImportError: Orbax is not installed.
      OSError: the disk is full, or fails; what was saved before is as it was.
      ValueError: the path is no directory, or has one that is called as a save and is none; `made`
        is nothing that JSON can hold.
    """
    made = as_plain(made)
    arrays = {name: _own_dtype(array) for name, array in arrays.items()}
    ocp, folder = require_orbax(), Path(path).absolute()
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"{path} must be a directory, or not be there yet; it is a file")
    _refuse_others(folder)
    described = {name: _describe(name, array) for name, array in arrays.items()}
    content = {"made": made, "arrays": described}
    about = {"format": _FORMAT, "version": _VERSION, "seal": _seal(content), "content": content}
    stored = {name: _stored(array) for name, array in arrays.items() if array.size}
    items = {_ABOUT: ocp.args.JsonSave(about)}
    if stored:  # Orbax saves no tree without leaves
        items[_ARRAYS] = ocp.args.PyTreeSave(stored)
    with failed_save_told(folder):
        folder.mkdir(parents=True, exist_ok=True)
    with (
        saving_alone(folder),
        failed_save_told(folder),
        _manager(ocp, folder, writes=True) as manager,
    ):
        step = manager.latest_step()
        manager.save(0 if step is None else step + 1, args=ocp.args.Composite(**items))


def read_arrays(path: str | Path, made: Plain, forms: Mapping[str, Form] | None = None) -> Arrays:
    """The arrays of the newest finished save.

    Args:
      path: as for `write_arrays`.
      made: what they shall have been made under.
      forms: which arrays to read, by name, and what each must be: a save by a stranger says what
        it likes, and whatever it says is not made before it was compared with these. All by
        default, in the sizes that the save says.

    Raises:
      FileNotFoundError: there is no finished save.
      ImportError: Orbax is not installed.
      ValueError: it was made under something else, says what; or it is not whole.
    """
    made = as_plain(made)
    with _newest(path) as (manager, step):
        described = _check_about(path, _read_about(manager, step, path), made)
        if forms is not None:
            described = _check_forms(path, described, forms)
        kept = [name for name, one in described.items() if _size(one)]
        stored = _read_kept(manager, step, path, {name: described[name] for name in kept})
    return _checked(path, described, stored)


def _check_forms(
    path: str | Path, described: dict[str, Plain], forms: Mapping[str, Form]
) -> dict[str, Plain]:
    """The descriptions of the arrays that are wanted, each of the right form."""
    for name, form in forms.items():
        about = described.get(name)
        if about is None or not form.fits(about["dtype"], about["shape"]):
            found = "not there" if about is None else f"{about['dtype']}{about['shape'][:8]}"
            raise ValueError(
                f"{path} is damaged: its array {name} must be {form.dtype}{list(form.shape)}, and "
                f"is {found}"
            )
    return {name: described[name] for name in forms}


def _read_kept(
    manager: Manager, step: int, path: str | Path, described: dict[str, Plain]
) -> dict[str, Any]:
    """What is stored of the arrays that have content, if it is as large as they are described."""
    if not described:
        return {}
    ocp = require_orbax()
    try:
        files = manager.item_metadata(step)[_ARRAYS].tree
        sizes = {
            name: (tuple(files[name].shape), np.dtype(files[name].dtype)) for name in described
        }
    except MemoryError:
        raise  # there is nothing wrong with the save
    except Exception as error:  # whatever Orbax makes of a directory that is not whole
        raise ValueError(f"{path} is damaged: {_short(error)}") from error
    for name, about in described.items():
        dtype = jnp.dtype(about["dtype"])
        plain = dtype.isbuiltin == 1
        row = (_size(about) if plain else _size(about) * dtype.itemsize,)
        if sizes[name] != (row, dtype if plain else np.dtype(np.uint8)):
            raise ValueError(f"{path} is damaged: its array {name} is not as saved")
    restore = ocp.args.PyTreeRestore(
        item=dict.fromkeys(described, 0),
        restore_args={name: ocp.RestoreArgs(restore_type=np.ndarray) for name in described},
        partial_restore=True,
    )
    return _restore(manager, step, path, **{_ARRAYS: restore})


def read_made(path: str | Path) -> Plain:
    """What the newest finished save was made under.

    Args:
      path: as for `write_arrays`.

    Raises:
      FileNotFoundError: there is no finished save.
      ImportError: Orbax is not installed.
      ValueError: it is not whole.
    """
    with _newest(path) as (manager, step):
        return _content(path, _read_about(manager, step, path))["made"]


def _short(said: object) -> str:
    """What an error of a library or a description says, for a message of ours: on one line."""
    return " ".join(str(said).split())[:200]


@contextlib.contextmanager
def _newest(path: str | Path) -> Iterator[tuple[Manager, int]]:
    """The saves of a directory, and which of them counts."""
    ocp, folder = require_orbax(), Path(path).absolute()
    if not folder.is_dir():
        raise FileNotFoundError(f"there is no directory {path} with a saved state")
    with reading(folder):
        step = max((step for step, save in _saves(folder) if _is_ours(save)), default=None)
        if step is None:
            raise FileNotFoundError(f"there is no finished save in {path}")
        with _manager(ocp, folder, writes=False) as manager:
            yield manager, step


def _read_about(manager: Manager, step: int, path: str | Path) -> Plain:
    for _, save in (pair for pair in _saves(Path(path).absolute()) if pair[0] == step):
        # What Orbax reads whole: its own notes and ours.
        notes = [*(save / _ABOUT).glob("*"), *save.glob("_*"), *(save / _ARRAYS).glob("_*")]
        if not all(note.is_file() for note in notes):
            raise ValueError(f"{path} is damaged: {save.name} has something else than files")
        if sum(note.stat().st_size for note in notes) > MAX_ABOUT_BYTES:
            raise ValueError(
                f"{path} is damaged: what it says of itself must be at most {MAX_ABOUT_BYTES} bytes"
            )
    return _restore(manager, step, path, about=require_orbax().args.JsonRestore())


def as_plain(made: Plain) -> Plain:
    """What JSON gives back of `made`, so that it is the same where it is read.

    Raises:
      ValueError: something that JSON cannot hold.
    """
    try:
        return json.loads(json.dumps(made, sort_keys=True), parse_constant=_constant)
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"made must be plain data as JSON can hold it: {error}") from error


def _constant(name: str) -> float:
    if name == "NaN":
        raise ValueError("NaN equals nothing, not even itself")
    return float(name)


def _saves(folder: Path) -> list[tuple[int, Path]]:
    """What is called as a finished save, with its number."""
    if not folder.is_dir():
        return []
    named = [(_SAVE.fullmatch(path.name), path) for path in folder.iterdir() if path.is_dir()]
    return [(int(match[1]), path) for match, path in named if match]


def _is_ours(save: Path) -> bool:
    return (save / _ABOUT).is_dir()


def _refuse_others(folder: Path) -> None:
    """Older saves are removed: somebody else's directory must not be taken for one."""
    for _, save in _saves(folder):
        if not _is_ours(save):
            raise ValueError(
                f"{save} is called as a saved state and is none, and would be removed: give "
                "another directory, or move it away"
            )


def _restore(manager: Manager, step: int, path: str | Path, **wanted: object) -> Plain:
    """One item of a save."""
    (name,) = wanted
    composite = require_orbax().args.Composite
    try:
        return manager.restore(step, args=composite(**wanted))[name]
    except MemoryError:
        raise  # there is nothing wrong with the save
    except Exception as error:  # whatever Orbax makes of a directory that is not whole
        why = _short(error)
        raise ValueError(f"{path} is damaged: its {name} cannot be read: {why}") from error


def _check_about(path: str | Path, about: Plain, made: Plain) -> dict[str, Plain]:
    """What the save says of its arrays, if it is whole and of what is wanted."""
    content = _content(path, about)
    found = differences(content["made"], made)
    if found:
        told = "; ".join(_short(one) for one in found[:_MOST_TOLD])
        raise ValueError(f"{path} was saved under another configuration: {told}")
    return content["arrays"]


def _content(path: str | Path, about: Plain) -> Plain:
    """What a save says of itself, if that is whole."""
    mark = (about.get("format"), about.get("version")) if isinstance(about, dict) else None
    if mark != (_FORMAT, _VERSION):
        raise ValueError(f"{path} is no {_FORMAT} of version {_VERSION}: it says {show(mark)}")
    content: Plain = about.get("content")
    if about.get("seal") != _seal(content):
        raise ValueError(f"{path} is damaged: its description is not as saved")
    if not isinstance(content, dict) or content.keys() != {"made", "arrays"}:
        raise ValueError(f"{path} is damaged: it does not say what it holds")
    if not isinstance(content["arrays"], dict) or not all(
        map(_is_form, content["arrays"].values())
    ):
        raise ValueError(f"{path} is damaged: it does not say what its arrays are")
    return content


def _is_form(about: Plain) -> bool:
    """Whether it is what `_describe` writes, of a dtype that there is."""
    if not isinstance(about, dict) or about.keys() != {"dtype", "shape", "checksum"}:
        return False
    shape, dtype = about["shape"], about["dtype"]
    if not isinstance(shape, list) or not isinstance(dtype, str) or len(shape) > _MOST_DIMENSIONS:
        return False
    whole = all(type(size) is int and 0 <= size < 2**31 for size in shape)
    return whole and math.prod(shape) < _MOST_NUMBERS and _is_plain_dtype(dtype)


def _is_plain_dtype(name: str) -> bool:
    try:
        dtype = jnp.dtype(name)
    except TypeError:
        return False
    return dtype.name == name and (dtype.isbuiltin == 2 or dtype.kind in "biufc")


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
    return math.prod(about["shape"])


def _own_dtype(array: np.ndarray) -> np.ndarray:
    """Of the dtype that its name stands for, as pickled ones and other byte orders are not.

    It would be stored as something else than its description says, and refused as damaged.
    """
    return np.asarray(array, jnp.dtype(array.dtype.name))


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
    # Named so that what is stored can be looked at before it is read.
    handlers = {_ABOUT: ocp.JsonCheckpointHandler(), _ARRAYS: ocp.PyTreeCheckpointHandler()}
    options = ocp.CheckpointManagerOptions(
        max_to_keep=1 if writes else None,
        step_prefix=_PREFIX,
        create=writes,
        cleanup_tmp_directories=writes,
        enable_async_checkpointing=False,
    )
    how = {} if writes else {"item_handlers": handlers}
    with ocp.CheckpointManager(folder, options=options, **how) as manager:
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
