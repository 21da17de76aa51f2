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

_VERSION = 1
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
      arrays: by name. Dtypes that NumPy itself lacks (bfloat16, float8) are stored as bytes.
    """
    plain = {
        name: np.ascontiguousarray(array).reshape(array.shape) for name, array in arrays.items()
    }
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


def _stored(array: np.ndarray) -> np.ndarray:
    if array.dtype.isbuiltin == 1:
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
            name: stored[name].view(jnp.dtype(dtype)).reshape(shape)
            for name, (dtype, shape) in about["arrays"].items()
        }
    except ImportError:
        raise
    except Exception as error:  # whatever a parser makes of garbage
        raise CorruptPageError(f"it cannot be read: {error}") from error
    if not same:
        raise CorruptPageError("its checksum does not fit its content")
    _check_key(key, about)
    return arrays


def _metadata(content: bytes) -> tuple[str, str]:
    length = int.from_bytes(content[:_LENGTH_BYTES], "little")
    header = json.loads(content[_LENGTH_BYTES : _LENGTH_BYTES + length])
    return header["__metadata__"]["page"], header["__metadata__"]["checksum"]


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
            raise ForeignPageError(f"its {name} is {about.get(name)!r}, wanted {value!r}")
