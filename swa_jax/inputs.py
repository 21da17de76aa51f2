"""What a caller may pass: host values are checked here, device values are only converted."""

import operator
from collections.abc import Sequence
from typing import TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

Ints: TypeAlias = ArrayLike | Sequence[int] | Sequence[Sequence[int]]
_LEAST, _MOST = -(2**31), 2**31 - 1


def as_int32(name: str, value: Ints, ndim: int | None) -> jax.Array:
    """`value` as an int32 array of `ndim` dimensions (None: any), never wrapping on the way.

    Lists and NumPy arrays are checked on the host. Wider device integers are clipped, so that a
    value past int32 stays out of range instead of turning into somebody's slot.
    """
    if not isinstance(value, jax.Array):
        value = _host_ints(name, value)
    if not jnp.issubdtype(value.dtype, jnp.integer):
        raise ValueError(f"{name} must hold integers, got dtype {value.dtype}")
    if ndim is not None and value.ndim != ndim:
        kind = "a scalar" if ndim == 0 else f"an array of {ndim} dimension(s)"
        raise ValueError(f"{name} must be {kind}, got shape {value.shape}")
    if isinstance(value, np.ndarray) or value.dtype == jnp.int32:
        return jnp.asarray(value, jnp.int32)
    info = jnp.iinfo(value.dtype)
    if info.max > _MOST:
        low = max(int(info.min), _LEAST)
        value = jnp.clip(value, jnp.asarray(low, value.dtype), jnp.asarray(_MOST, value.dtype))
    return value.astype(jnp.int32)


def _host_ints(name: str, value: Ints) -> np.ndarray:
    array = np.asarray(value)
    if array.size == 0 and array.dtype.kind == "f":  # np.asarray([]) is a float array
        array = array.astype(np.int32)
    if array.dtype.kind not in "iu":
        raise ValueError(f"{name} must hold integers, got dtype {array.dtype}: {value!r}")
    if array.size and (int(array.min()) < _LEAST or int(array.max()) > _MOST):
        raise ValueError(
            f"{name} must fit int32 (-2^31 .. 2^31 - 1), got values from {array.min()} to "
            f"{array.max()}"
        )
    return array.astype(np.int32)


def as_bool(name: str, value: ArrayLike | list[bool] | tuple[bool, ...]) -> jax.Array:
    """`value` as a bool array of one dimension."""
    array = value if isinstance(value, jax.Array) else np.asarray(value)
    if array.dtype != bool or array.ndim != 1:
        raise ValueError(
            f"{name} must be a bool array of 1 dimension, got {array.dtype}{list(array.shape)}"
        )
    return jnp.asarray(array)


MAX_ROWS = 2**15 - 1  # what `paging.sum_exceeds` sums without overflow


def check_lengths(**arrays: jax.Array) -> dict[str, int]:
    """Arrays that are read place by place must have one length."""
    lengths = {name: array.shape[0] for name, array in arrays.items()}
    if len(set(lengths.values())) > 1:
        raise ValueError(f"{' and '.join(lengths)} must agree in length, got {lengths}")
    return lengths


def check_rows(**arrays: jax.Array) -> None:
    """The arrays of a batch must have one length, 1 .. MAX_ROWS."""
    lengths = check_lengths(**arrays)
    if not 1 <= next(iter(lengths.values())) <= MAX_ROWS:
        raise ValueError(f"a batch takes 1 .. {MAX_ROWS} rows, got {lengths}")


def as_rows(**columns: Ints) -> tuple[jax.Array, ...]:
    """The columns of a batch as int32[B] each, of one length."""
    arrays = {name: as_int32(name, column, 1) for name, column in columns.items()}
    check_rows(**arrays)
    return tuple(arrays.values())


def as_active(active: ArrayLike | list[bool] | None, **column: jax.Array) -> jax.Array:
    """bool[B] rows of a batch that take part, all by default; `column` is one of the batch's."""
    (rows,) = column.values()
    marks = jnp.ones(rows.shape[0], bool) if active is None else as_bool("active", active)
    check_rows(**column, active=marks)
    return marks


def check_capacity(capacity: int) -> int:
    """A static room for slots: a positive int below 2^31 that is known before tracing."""
    if isinstance(capacity, bool) or not isinstance(capacity, int | np.integer):
        raise ValueError(
            f"capacity must be a positive Python int, known before tracing, got {capacity!r}"
        )
    if not 1 <= capacity <= _MOST:
        raise ValueError(f"capacity must be 1 .. 2^31 - 1 slots, got {capacity}")
    return int(capacity)


def whole_number(name: str, value: object, least: int, most: int = _MOST) -> int:
    """`value` as a Python int from `least` to `most`; bools and fractions are no numbers of things.

    Raises:
      ValueError: says the range and the value.
    """
    try:
        number = None if isinstance(value, bool | np.bool_) else operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        number = None
    if number is None or not least <= number <= most:
        raise ValueError(f"{name} must be an integer from {least} to {most}, got {value!r}")
    return number
