"""One page as the bytes of a safetensors file that says what it is and proves itself whole.

The file's metadata holds the key, what the arrays are, and a checksum over these and all content:
a file that is truncated, flipped, renamed or of another layout is found out, not read.
"""

import hashlib
import importlib
import json
from types import ModuleType

import jax.numpy as jnp
import numpy as np

from swa_jax.host_cache.storage import Arrays, PageKey
from swa_jax.replay.trace_lines import show

_VERSION = 1
_RESERVED = "__metadata__"
_LENGTH_BYTES = 8  # of the header's length, before the header


class CorruptPageError(Exception):
    """The bytes are not what was written."""


class ForeignPageError(Exception):
    """The bytes are whole, but of something else."""


def require_safetensors(module: str = "safetensors") -> ModuleType:
    """The library.

    Raises:
      ImportError: names the extra that brings it.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ImportError(
            "file storage needs the safetensors library: pip install 'swa-jax[models]'"
        ) from error


def encode(key: PageKey, arrays: Arrays) -> bytes:
    """The bytes of a page's file.

    Args:
      key: of the page.
      arrays: by name. Dtypes that the format lacks (int4, complex128) and those that NumPy itself
        lacks (bfloat16, float8) are stored as bytes.

    Raises:
      ValueError: what could not be read again as it was: no numbers, numbers in the byte order of
        another machine, or a name that the format has for itself.
    """
    plain = {name: _plain(name, array) for name, array in arrays.items()}
    about = {
        "version": _VERSION,
        "fingerprint": key.fingerprint.hex(),
        "namespace": key.namespace,
        "digest": key.digest.hex(),
        "part": key.part,
        "tokens": key.tokens,
        "arrays": {name: [array.dtype.name, array.shape] for name, array in sorted(plain.items())},
    }
    text = json.dumps(about, separators=(",", ":"))
    stored = {name: _stored(array) for name, array in plain.items()}
    metadata = {"page": text, "checksum": _checksum(text, stored)}
    return require_safetensors("safetensors.numpy").save(stored, metadata=metadata)


def _plain(name: object, array: object) -> np.ndarray:
    values = np.asarray(array)
    dtype = values.dtype
    # NumPy's own kinds, without `longdouble`, which is another on another machine; or one of
    # those that were added to it.
    own = _is_numpys(dtype) and dtype.isnative and dtype.char not in "gG"
    if not own and dtype.isbuiltin != 2:
        raise ValueError(
            f"the array {name!r} of a page must hold plain numbers in this machine's byte order, "
            f"got {dtype}"
        )
    if not isinstance(name, str) or name == _RESERVED:
        raise ValueError(
            f"an array of a page must have a name other than {_RESERVED}, got {name!r}"
        )
    return np.ascontiguousarray(values).reshape(values.shape)


def _is_numpys(dtype: np.dtype) -> bool:
    """Not by `isbuiltin == 1`, which a dtype that was pickled has lost."""
    return dtype.isbuiltin != 2 and dtype.kind in "biufc"


def _stored(array: np.ndarray) -> np.ndarray:
    if _is_numpys(array.dtype) and array.dtype != np.complex128:
        return array
    return array.reshape(-1).view(np.uint8)


def _checksum(text: str, stored: Arrays) -> str:
    seal = hashlib.blake2b(text.encode(), digest_size=32)
    for name in sorted(stored):
        seal.update(f"{name} {stored[name].nbytes} ".encode())
        seal.update(stored[name].reshape(-1).view(np.uint8).data)
    return seal.hexdigest()


def decode(key: PageKey, content: bytes) -> Arrays:
    """The arrays of a page's file.

    Args:
      key: of the page that is asked for.
      content: of the file.

    Raises:
      CorruptPageError: it is not as it was written.
      ForeignPageError: it is a page of another model, layout or text.
    """
    try:
        text, checksum = _metadata(content)
        stored = {
            name: np.frombuffer(bytearray(view["data"]), np.uint8)
            for name, view in require_safetensors().deserialize(content)
        }
        about = json.loads(text)
        same = _checksum(text, stored) == checksum
        arrays = {
            name: stored[name].view(_number_dtype(dtype)).reshape(shape)
            for name, (dtype, shape) in about["arrays"].items()
        }
    except ImportError:
        raise
    except Exception as error:  # whatever a parser makes of garbage
        raise CorruptPageError(f"it cannot be read: {show(error)}") from error
    if not same:
        raise CorruptPageError("its checksum does not fit its content")
    _check_key(key, about)
    return arrays


def _number_dtype(name: str) -> np.dtype:
    """The dtype of that name; ValueError for one that `encode` does not write."""
    dtype = jnp.dtype(name)
    if dtype.name != name or (dtype.isbuiltin != 2 and dtype.kind not in "biufc"):
        raise ValueError(f"{name} is no dtype of numbers")
    return dtype


def _metadata(content: bytes) -> tuple[str, str]:
    length = int.from_bytes(content[:_LENGTH_BYTES], "little")
    header = json.loads(content[_LENGTH_BYTES : _LENGTH_BYTES + length])
    return header[_RESERVED]["page"], header[_RESERVED]["checksum"]


def _check_key(key: PageKey, about: dict) -> None:
    wanted = {
        "version": _VERSION,
        "fingerprint": key.fingerprint.hex(),
        "namespace": key.namespace,
        "digest": key.digest.hex(),
        "part": key.part,
        "tokens": list(key.tokens),
    }
    for name, value in wanted.items():
        if about.get(name) != value:
            raise ForeignPageError(f"its {name} is {show(about.get(name))}, wanted {show(value)}")
