"""A digest of a pytree: of every leaf its path, dtype, shape and bytes.

Paths are the names of fields, in the order of the alphabet: where a class lists its fields is of no
account, and a field that holds None is no leaf.
"""

import hashlib
import json
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np


def digest(tree: Any) -> str:
    """64 hex digits."""
    total = hashlib.sha256()
    for path, leaf in sorted(_leaves(tree)):
        head = json.dumps([path, leaf.dtype.name, list(leaf.shape)])
        total.update(head.encode())
        total.update(_bytes(leaf))
    return total.hexdigest()


def of_all(digests: Sequence[str]) -> str:
    """64 hex digits of digests in order."""
    return hashlib.sha256("\n".join(digests).encode()).hexdigest()


def _leaves(tree: Any) -> list[tuple[str, np.ndarray]]:
    found = jax.tree_util.tree_leaves_with_path(tree)
    leaves = [("/".join(map(_name, path)), np.asarray(leaf)) for path, leaf in found]
    assert len({path for path, _ in leaves}) == len(leaves), "two leaves of one path"
    return leaves


def _name(key: object) -> str:
    """How JAX writes a key may change with its version; what is in it does not."""
    for field in ("name", "key", "idx"):
        if hasattr(key, field):
            return str(getattr(key, field))
    raise TypeError(f"no name for {key!r} of {type(key).__name__}")


def _bytes(leaf: np.ndarray) -> bytes:
    """In C order, little end first."""
    if leaf.dtype.byteorder == ">":
        leaf = leaf.astype(leaf.dtype.newbyteorder("<"))
    return np.ascontiguousarray(leaf).tobytes()
