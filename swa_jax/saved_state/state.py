"""Saving and restoring an allocator, with its prefix cache and KV or without."""

import dataclasses
from pathlib import Path

import jax

from swa_jax.check import invariants
from swa_jax.describe import Plain, describe, describe_layers
from swa_jax.kv_layers import check_layers
from swa_jax.models.decoder.kv_pool import KVPool
from swa_jax.prefix_cache import PrefixCache
from swa_jax.prefix_cache import invariants as cache_invariants
from swa_jax.prefix_cache.arguments import check_pair
from swa_jax.saved_state.directory import read_arrays, write_arrays
from swa_jax.saved_state.leaves import (
    as_arrays,
    forms_of,
    from_arrays,
    held_kv,
    kv_forms,
    with_held_kv,
)
from swa_jax.state import AllocatorState


def save_state(
    path: str | Path,
    state: AllocatorState,
    cache: PrefixCache | None = None,
    pools: KVPool | None = None,
    *,
    made: Plain = None,
) -> None:
    """Saves an allocator bit for bit, locks and requests under way included.

    Whoever saves it with requests under way keeps their tables himself. `save_world` leaves out
    what nobody could give back. Waits for the device.

    Args:
      path: a directory, made where it is missing. What it holds counts until this save is finished,
        also if the process is killed.
      state: the allocator.
      cache: beside it.
      pools: KV by slot; the pages that are held are saved, of the others nothing.
      made: more that must be the same where this is restored, as JSON can hold it: the model, say.

    Raises:
      ImportError: Orbax is not installed (the extra `checkpoint`).
      OSError: the disk is full, or fails; what was saved before is as it was.
      ValueError: cache or KV of another allocator, a path that is no directory or has one that is
        called as a save and is none, or a `made` that JSON cannot hold.
    """
    arrays = as_arrays("state", state)
    if cache is not None:
        check_pair(cache, state)
        arrays |= as_arrays("cache", cache)
    if pools is not None:
        arrays |= held_kv(state, pools)
    write_arrays(path, _made(state, cache, pools, made), arrays)


def restore_state(
    path: str | Path,
    state: AllocatorState,
    cache: PrefixCache | None = None,
    pools: KVPool | None = None,
    *,
    made: Plain = None,
) -> tuple[AllocatorState, PrefixCache | None, KVPool | None]:
    """What `save_state` saved last.

    Args:
      path: as for `save_state`.
      state: any of the same configuration, such as a new one. Its arrays say where the restored
        ones go.
      cache: likewise; None where none was saved.
      pools: likewise, and taken over: pages that were not held keep what is in them.
      made: as it was saved with.

    Returns:
      The three, as they were saved.

    Raises:
      FileNotFoundError: there is no finished save.
      ImportError: Orbax is not installed (the extra `checkpoint`).
      ValueError: it was saved under another configuration, with each thing that differs; or what is
        there is damaged, or no saved state.
    """
    if cache is not None:
        check_pair(cache, state)
    if pools is not None:
        check_layers(state.config, pools)
    forms = forms_of("state", state) | ({} if cache is None else forms_of("cache", cache))
    forms |= {} if pools is None else kv_forms(pools)
    arrays = read_arrays(path, _made(state, cache, pools, made), forms)
    state = from_arrays("state", state, arrays)
    if cache is not None:
        cache = from_arrays("cache", cache, arrays)
    _check_laws(path, state, cache)
    if pools is not None:
        pools = with_held_kv(state, pools, arrays)
    return state, cache, pools


def _check_laws(path: str | Path, state: AllocatorState, cache: PrefixCache | None) -> None:
    """Refuses what no allocator could have come to: a tree that goes round would never be left."""
    broken = [name for name, holds in jax.device_get(invariants(state)).items() if not holds]
    if cache is not None:
        laws = jax.device_get(cache_invariants(cache, state))
        broken += [name for name, holds in laws.items() if not holds]
    if broken:
        raise ValueError(f"{path} is damaged: its state breaks {', '.join(broken)}")


def _made(
    state: AllocatorState, cache: PrefixCache | None, pools: KVPool | None, more: Plain
) -> Plain:
    made = {"pool": describe(state.config), "cache": None, "layers": None, "made": more}
    if cache is not None:
        fields = dataclasses.fields(cache.config)
        names = [field.name for field in fields if field.name != "pool"]  # it is there already
        made["cache"] = {name: describe(getattr(cache.config, name)) for name in names}
    if pools is not None:
        made["layers"] = describe_layers(pools)
    return made
