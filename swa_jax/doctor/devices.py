"""What JAX has here: devices, their memories, and what it does with donated arrays."""

import os
import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from swa_jax.doctor.finding import FAILED, NOTE, PASSED, Finding
from swa_jax.need_device import need_device

_GROUP = "device"


def device_findings() -> Iterator[Finding]:
    """Devices, memories, donation, x64 and the compilation cache."""
    try:
        devices = need_device()
    except ValueError as error:
        yield Finding(_GROUP, "devices", FAILED, str(error))
        return
    yield Finding(_GROUP, "devices", PASSED, _listed(devices))
    yield Finding(_GROUP, "memory kinds", PASSED, _memories(devices))
    yield _donation(devices)
    yield _x64()
    yield cache_finding(getattr(jax.config, "jax_compilation_cache_dir", None))


def _listed(devices: list[Any]) -> str:
    kinds = Counter((device.platform, device.device_kind) for device in devices)
    names = (platform if platform == kind else f"{kind} ({platform})" for platform, kind in kinds)
    return ", ".join(f"{count} {name}" for name, count in zip(names, kinds.values(), strict=True))


def _memories(devices: list[Any]) -> str:
    device = devices[0]
    default = device.default_memory().kind
    others = sorted({memory.kind for memory in device.addressable_memories()} - {default})
    stats = device.memory_stats() or {}
    room = f", {stats['bytes_limit'] / 2**30:.1f} GiB" if "bytes_limit" in stats else ""
    return f"{default} (default{room})" + "".join(f", {kind}" for kind in others)


def _donation(devices: list[Any]) -> Finding:
    """Gives an array away, and looks whether its memory was used for the result."""
    given = jax.block_until_ready(jax.device_put(jnp.arange(1024, dtype=jnp.int32), devices[0]))
    place = given.unsafe_buffer_pointer()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # JAX's own about what is looked at here
        taken = jax.jit(lambda x: x + jnp.int32(1), donate_argnums=0)(given)
        jax.block_until_ready(taken)
    if not given.is_deleted():
        text = "not supported here: every call copies the pools"
        return Finding(_GROUP, "donation", NOTE, text)
    if taken.unsafe_buffer_pointer() != place:
        text = "the donated array is gone, but its memory was not used again"
        return Finding(_GROUP, "donation", NOTE, text)
    return Finding(_GROUP, "donation", PASSED, "a donated state is updated in place")


def _x64() -> Finding:
    state = "on" if getattr(jax.config, "jax_enable_x64", False) else "off"
    return Finding(_GROUP, "x64", PASSED, f"{state}; swa_jax's arrays are int32 either way")


def cache_finding(folder: str | None) -> Finding:
    """Whether programs that were compiled once are found again.

    Args:
      folder: where JAX keeps them; None where it does not.
    """
    name = "compilation cache"
    if not folder:
        text = (
            "none: every process compiles anew; JAX_COMPILATION_CACHE_DIR=DIR keeps what was "
            "compiled"
        )
        return Finding(_GROUP, name, NOTE, text)
    if "://" in folder:
        return Finding(_GROUP, name, PASSED, folder)
    # JAX makes the directory when it first writes there.
    there = next(
        path
        for path in (Path(folder).absolute(), *Path(folder).absolute().parents)
        if path.exists()
    )
    if not (there.is_dir() and os.access(there, os.W_OK)):
        return Finding(_GROUP, name, NOTE, f"{folder} cannot be written to: nothing is kept")
    return Finding(_GROUP, name, PASSED, folder)
