"""Pytrees as named NumPy arrays and back, and KV as the pages that are held."""

import functools
from typing import TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from swa_jax.kv_layers import check_layers
from swa_jax.models.decoder.kv_pool import KVPool
from swa_jax.saved_state.directory import Form
from swa_jax.state import PAD_PAGE, AllocatorState

Arrays = dict[str, np.ndarray]
T = TypeVar("T")


def as_arrays(name: str, tree: object) -> Arrays:
    """Every array of a tree on the host, by its place in it. Waits for the device."""
    leaves = jax.tree_util.tree_leaves_with_path(jax.device_get(tree))
    return {_name(name, path): np.asarray(leaf) for path, leaf in leaves}


def from_arrays(name: str, like: T, arrays: Arrays) -> T:
    """The tree again.

    Args:
      name: as given to `as_arrays`.
      like: a tree of the same structure and shapes; its arrays, where they are arrays, say on
        which device each goes.
      arrays: of `as_arrays`.
    """

    def one(path: tuple, leaf: jax.Array) -> jax.Array:
        values = arrays[_name(name, path)]
        committed = isinstance(leaf, jax.Array) and leaf.committed
        return jax.device_put(values, leaf.sharding) if committed else jnp.asarray(values)

    return jax.tree_util.tree_map_with_path(one, like)


def forms_of(name: str, like: object) -> dict[str, Form]:
    """What each array of a tree must be, by its place in it.

    Args:
      name: as given to `as_arrays`.
      like: a tree of arrays, or of anything with their shapes and dtypes.
    """
    leaves = jax.tree_util.tree_leaves_with_path(like)
    return {
        _name(name, path): Form(np.dtype(leaf.dtype).name, tuple(leaf.shape))
        for path, leaf in leaves
    }


def kv_forms(pools: KVPool) -> dict[str, Form]:
    """What the arrays of `held_kv` are at most: every page but the padding held."""
    return {
        f"kv.{kind}.{place}": Form(
            np.dtype(layer.dtype).name, (layer.shape[0] - 1, *layer.shape[1:]), is_most=True
        )
        for kind in ("full", "swa")
        for place, layer in enumerate(getattr(pools, kind))
    }


def _name(name: str, path: tuple) -> str:
    inner = jax.tree_util.keystr(path, simple=True, separator=".")
    return f"{name}.{inner}" if inner else name


def held_kv(state: AllocatorState, pools: KVPool) -> Arrays:
    """The KV of the pages that are held, [pages held, page_size, ...] by layer.

    Raises:
      ValueError: layers that are not the allocator's.
    """
    check_layers(state.config, pools)
    arrays = {}
    for kind, pages in _held_pages(state).items():
        for place, layer in enumerate(getattr(pools, kind)):  # one layer on the host at a time
            arrays[f"kv.{kind}.{place}"] = np.asarray(layer)[pages]
    return arrays


def with_held_kv(state: AllocatorState, pools: KVPool, arrays: Arrays) -> KVPool:
    """The pools with the KV of `held_kv` in the pages that `state` holds; they are taken over.

    Raises:
      ValueError: KV of another number of pages, or layers that are not the allocator's.
    """
    check_layers(state.config, pools)
    for kind, pages in _held_pages(state).items():
        for place in range(len(getattr(pools, kind))):
            rows = arrays[f"kv.{kind}.{place}"].shape[0]
            if rows != pages.size:
                raise ValueError(f"kv.{kind}.{place} must have {pages.size} pages, got {rows}")
    made = {}
    for kind, pages in _held_pages(state).items():
        at = jnp.asarray(pages, jnp.int32)
        made[kind] = tuple(
            _write(layer, at, arrays[f"kv.{kind}.{place}"])
            for place, layer in enumerate(getattr(pools, kind))
        )
    return KVPool(**made)


def _held_pages(state: AllocatorState) -> dict[str, np.ndarray]:
    """The ids of the pages that are held."""
    found = {}
    for kind, pool in (("full", state.full), ("swa", state.swa)):
        held = ~np.asarray(pool.free)
        held[PAD_PAGE] = False
        found[kind] = np.flatnonzero(held)
    if state.config.has_rings:  # what is held there are rings, of so many pages each
        length = state.config.swa_unit_tokens // state.config.page_size
        first = 1 + (found["swa"] - 1) * length
        found["swa"] = (first[:, None] + np.arange(length)).reshape(-1)
    return found


@functools.partial(jax.jit, donate_argnums=0)
def _write(layer: jax.Array, pages: jax.Array, rows: jax.Array) -> jax.Array:
    return layer.at[pages].set(rows, mode="drop")
