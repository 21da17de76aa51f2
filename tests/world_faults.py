"""What can go wrong around a program, made to go wrong: a full disk, no memory, a child's death."""

import contextlib
import gc
import os
import resource
import sys
import threading
import time
from pathlib import Path

import jax
import jax.numpy as jnp

HERE = Path(__file__).parent


@contextlib.contextmanager
def full_disk(left=0):
    """No file of this process grows beyond so many bytes: EFBIG, which is as good as ENOSPC."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (left, before[1]))  # Python ignores SIGXFSZ
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@contextlib.contextmanager
def unheard():
    """What the library that writes saves says in threads of its own, some time after a failure."""
    before = threading.excepthook, sys.unraisablehook
    threading.excepthook = sys.unraisablehook = lambda _: None
    try:
        yield
        gc.collect()
    finally:
        threading.excepthook, sys.unraisablehook = before


def no_memory(*_args, **_kwargs):
    """Asks the device for more than there is; JAX may say so after the call."""
    return jax.block_until_ready(jnp.zeros(2**58, jnp.int32))


def child_environment(**more):
    """For a child that compiles what this process has compiled: it finds it in the same place."""
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(HERE), str(HERE.parent)]),
        "JAX_PLATFORMS": "cpu",
        "JAX_NUM_CPU_DEVICES": "2",
        "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
        "JAX_COMPILATION_CACHE_DIR": str(jax.config.values["jax_compilation_cache_dir"]),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
        **more,
    }


def python(script, *arguments):
    """A command line for a child program of the tests."""
    return [sys.executable, str(HERE / script), *map(str, arguments)]


def line_of(process):
    """What a child says next, one line."""
    return process.stdout.readline()


class Clock:
    """A wall clock that is put forward or back by hand.

    Args:
      monkeypatch: of pytest.
      at: seconds since 1970.
    """

    def __init__(self, monkeypatch, at=1.8e9):
        self.at = at
        monkeypatch.setattr(time, "time", lambda: self.at)
        monkeypatch.setattr(time, "time_ns", lambda: int(self.at * 10**9))
