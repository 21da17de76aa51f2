"""Whether KV is that of an allocator's slots, and that of the layers that were seen before."""

import numpy as np

from swa_jax.config import PoolConfig
from swa_jax.models.decoder.kv_pool import KVPool


def check_layers(config: PoolConfig, pools: KVPool) -> None:
    """Refuses KV that the slots of such an allocator do not address.

    Args:
      config: of the allocator.
      pools: the KV, or its shapes. No layers at all are well.

    Raises:
      ValueError: says which layer.
    """
    size = config.page_size
    for kind, pages in (("full", config.full_pages), ("swa", config.swa_pages)):
        for place, layer in enumerate(getattr(pools, kind)):
            if tuple(layer.shape[:2]) != (pages + 1, size):
                raise ValueError(
                    f"{kind} layer {place} must be [{pages + 1}, {size}, ...] for this allocator, "
                    f"got {list(layer.shape)}"
                )


class KnownLayers:
    """The layers that somebody was made for.

    Args:
      config: of the allocator.
      pools: the KV, or its shapes.

    Raises:
      ValueError: layers that are not the allocator's.
    """

    def __init__(self, config: PoolConfig, pools: KVPool) -> None:
        """Keeps dtypes and shapes, no arrays."""
        check_layers(config, pools)
        self._wanted = _told(pools)

    def check(self, pools: KVPool) -> None:
        """Refuses any other layers, before something is done with them.

        Raises:
          ValueError: says which layer.
        """
        seen = _told(pools)
        for kind, wanted in self._wanted.items():
            if len(seen[kind]) != len(wanted):
                raise ValueError(
                    f"pools must have {len(wanted)} {kind} layer(s), got {len(seen[kind])}"
                )
            for place, (one, other) in enumerate(zip(wanted, seen[kind], strict=True)):
                if one != other:
                    raise ValueError(f"{kind} layer {place} must be {one}, got {other}")


def _told(pools: KVPool) -> dict[str, list[str]]:
    return {
        kind: [f"{np.dtype(one.dtype).name}{list(one.shape)}" for one in getattr(pools, kind)]
        for kind in ("full", "swa")
    }
