"""Values of a config.json: each of the type that it must have, and in range."""

from collections.abc import Mapping
from typing import Any, TypeAlias

from swa_jax.replay.trace_lines import show

Json: TypeAlias = Mapping[str, Any]

_MOST = 2**31 - 1
_LEAST_NUMBER, _MOST_NUMBER = 1e-30, 1e30  # what float32 can still be multiplied with


def positive(values: Json, key: str, where: str = "") -> int:
    """An integer from 1 to 2^31 - 1; `where` goes on with what the key is in, for the message."""
    value = values.get(key)
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= _MOST:
        raise ValueError(
            f"{key} must be a positive integer{where}, got {show(value)}; the most is 2^31 - 1"
        )
    return value


def number(values: Json, key: str, where: str = "") -> float:
    """A number above 0 that arithmetic can take."""
    value = values.get(key)
    if (
        not isinstance(value, int | float)
        or isinstance(value, bool)
        or not _LEAST_NUMBER <= value <= _MOST_NUMBER  # nor is NaN
    ):
        raise ValueError(
            f"{key} must be a positive number from {_LEAST_NUMBER:g} to {_MOST_NUMBER:g}{where}, "
            f"got {show(value)}"
        )
    return float(value)


def boolean(values: Json, key: str, where: str = "") -> bool:
    """True or false."""
    value = values.get(key)
    if not isinstance(value, bool):
        raise ValueError(f"{key} must be true or false{where}, got {show(value)}")
    return value


def part(values: Json, key: str) -> Json:
    """An object in the object; empty where it is not there or null."""
    value = values.get(key)
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise ValueError(f"{key} must be an object, got {show(value)}")
    return value


def token_ids(value: object) -> tuple[int, ...]:
    """The ids of a key that holds null, an id or a list of ids.

    Raises:
      ValueError: something else.
    """
    listed = [] if value is None else value if isinstance(value, list | tuple) else [value]
    ids = [token for token in listed if isinstance(token, int) and not isinstance(token, bool)]
    if len(ids) != len(listed) or not all(0 <= token <= _MOST for token in ids):
        raise ValueError(
            f"eos_token_id must be an id from 0 to 2^31 - 1 or a list of ids, got {show(value)}"
        )
    return tuple(ids)
