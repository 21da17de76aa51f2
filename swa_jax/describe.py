"""Static values as plain data that reads the same in every process.

To tell whether what was written under one configuration may be read under another, and what differs
if not. `repr` will not do: it shows addresses of functions.
"""

import dataclasses
import hashlib
import json
from collections.abc import Callable
from typing import Any, TypeAlias

import jax
import numpy as np

from swa_jax.models.decoder.kv_pool import KVPool

Plain: TypeAlias = Any  # what JSON can hold


def describe(value: object) -> Plain:
    """A static value as JSON can hold it.

    Args:
      value: None, a bool, number, string or bytes, a dtype, a class, a tuple, list, set or dict of
        these, or a dataclass with such fields. Fields that are functions are left out: they say how
        something is computed, not what.

    Raises:
      ValueError: anything else, since two of its kind could not be told apart.
    """
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, type):
        return _name(value)
    if dataclasses.is_dataclass(value):
        return {"kind": _name(type(value))} | {
            field.name: describe(part)
            for field in dataclasses.fields(value)
            if not _is_function(part := getattr(value, field.name))
        }
    if isinstance(value, tuple | list):
        return [describe(part) for part in value]
    if isinstance(value, set | frozenset):
        return sorted((describe(part) for part in value), key=as_json)
    if isinstance(value, dict):
        return {str(key): describe(part) for key, part in value.items()}
    return _describe_number(value)


def _describe_number(value: object) -> Plain:
    if isinstance(value, np.dtype):
        return value.name
    if isinstance(value, np.generic):
        return describe(value.item())
    raise ValueError(
        f"nothing tells one {_name(type(value))} from another, so what is written under it could "
        f"not be known again: make it a dataclass of numbers and names, got {value!r}"
    )


def _is_function(value: object) -> bool:
    is_plain = isinstance(value, type) or dataclasses.is_dataclass(value)
    return isinstance(value, Callable) and not is_plain


def _name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def describe_layers(pools: KVPool) -> Plain:
    """What each layer keeps for one token: its dtype and shape, by full and by SWA slot.

    Args:
      pools: arrays [pages + 1, page_size, ...], or anything with their shapes and dtypes.
    """

    def one(layer: jax.Array) -> list[Plain]:
        return [np.dtype(layer.dtype).name, list(layer.shape[2:])]

    return {
        "full": [one(layer) for layer in pools.full],
        "swa": [one(layer) for layer in pools.swa],
    }


def differences(made: Plain, wanted: Plain, name: str = "") -> list[str]:
    """What differs between two descriptions, each part by its name.

    Args:
      made: how something was written.
      wanted: how it shall be read.
      name: of the two in the texts.
    """
    if isinstance(made, dict) and isinstance(wanted, dict):
        names = [*made, *(key for key in wanted if key not in made)]
        parts = [
            differences(made.get(key), wanted.get(key), f"{name}.{key}" if name else key)
            for key in names
        ]
        return [text for part in parts for text in part]
    same = made == wanted and isinstance(made, bool) == isinstance(wanted, bool)
    return [] if same else [f"{name} was {made!r} and is {wanted!r}"]


def fingerprint(*parts: object) -> bytes:
    """32 bytes that differ where any part differs, the same in every process.

    Args:
      *parts: as `describe` takes them.
    """
    return hashlib.sha256(as_json([describe(part) for part in parts]).encode()).digest()


def as_json(plain: Plain) -> str:
    """The one text of plain data."""
    return json.dumps(plain, sort_keys=True, separators=(",", ":"))
