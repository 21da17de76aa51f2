"""A device is there, or one line says why none is."""

import os
from typing import Any

import jax


def need_device() -> list[Any]:
    """The devices of this process.

    Raises:
      ValueError: JAX has none.
    """
    try:
        return jax.devices()
    except (RuntimeError, AssertionError) as error:  # which one depends on what is installed
        wanted = os.environ.get("JAX_PLATFORMS", "")
        raise ValueError(f"JAX has no device for JAX_PLATFORMS={wanted!r}: {error}") from None
