"""Host arrays in and out: whatever NumPy reads, in few lengths, so that few programs are needed."""

import operator

import numpy as np

from swa_jax.compat.common.errors import MisuseError
from swa_jax.compat.common.types import HostInts

_LEAST, _MOST = -(2**31), 2**31 - 1
_FEWEST = 16  # places of the shortest padded array


def host_ints(name: str, value: HostInts) -> np.ndarray:
    """`value` as a flat int32 array.

    Args:
      name: of the argument, for the message.
      value: int[...] NumPy array, list, or what `np.asarray` takes (a torch tensor on the CPU).

    Returns:
      int32[T].

    Raises:
      MisuseError: other than integers, or integers past int32.
    """
    array = np.asarray(value)
    if array.size == 0:
        return np.empty(0, np.int32)
    if array.dtype.kind not in "iu":
        raise MisuseError(f"{name} must hold integers, got dtype {array.dtype}: {value!r}")
    if array.dtype != np.int32 and (int(array.min()) < _LEAST or int(array.max()) > _MOST):
        raise MisuseError(f"{name} must fit int32, got values from {array.min()} to {array.max()}")
    return array.reshape(-1).astype(np.int32, copy=False)


def host_int(name: str, value: object) -> int:
    """`value` as an int of any size: no fraction, text or bool is rounded or read into one.

    Args:
      name: of the argument, for the message.
      value: an int, or what stands for one (a NumPy integer, an array of no dimensions).

    Raises:
      MisuseError: anything else.
    """
    try:
        if not isinstance(value, bool | np.bool_):
            return operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        pass
    raise MisuseError(f"{name} must be an integer, got {value!r}")


def room_for(count: int) -> int:
    """The padded length for `count` places: a power of two, at least 16."""
    return max(_FEWEST, 1 << (count - 1).bit_length()) if count > 0 else _FEWEST


def padded(array: np.ndarray, value: int = 0, most: int = _MOST) -> np.ndarray:
    """int32[T] made `room_for(T)` long with `value`, or `most` long if that is less."""
    out = np.full(max(len(array), min(room_for(len(array)), most)), value, np.int32)
    out[: len(array)] = array
    return out
