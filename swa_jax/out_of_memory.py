"""Memory that does not suffice, on the host or on a device: how to know it, and what there is."""

import os


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that memory was lacking: Python's own, NumPy's, or JAX's.

    Args:
      error: any. JAX is not loaded to look at it.
    """
    if isinstance(error, MemoryError):
        return True
    return isinstance(error, RuntimeError) and "RESOURCE_EXHAUSTED" in str(error)


def device_memory() -> str:
    """What the first device has in all, to be put at the end of a message: "; it has ... GiB".

    Returns:
      Nothing where the device does not say.
    """
    import jax

    device = jax.local_devices()[0]
    total = (device.memory_stats() or {}).get("bytes_limit")
    if total is None and device.platform == "cpu":
        total = _machine_memory()
    return "" if total is None else f"; {device.platform} has {total / 2**30:,.1f} GiB in all"


def _machine_memory() -> int | None:
    """Bytes of the machine's memory."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, OSError, ValueError):  # no such names on this system
        return None
