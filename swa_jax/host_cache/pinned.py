"""Rows of page images in JAX arrays of the device's own pinned host memory.

The device copies to and from there by itself, without a detour through pageable memory. A row is
one array a group; it takes memory only while it holds something.
"""

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from swa_jax.host_cache.images import Images, Layers, batches, gather, groups, padded
from swa_jax.host_cache.memory import Fence, have_come

PINNED = "pinned_host"
_Row = tuple[jax.Array, ...]  # the image of a page


def has_pinned_memory(layers: Layers) -> bool:
    """Whether every device that holds the layers can reach pinned host memory."""
    devices = {device for layer in layers for device in layer.sharding.device_set}
    return all(
        PINNED in {memory.kind for memory in device.addressable_memories()} for device in devices
    )


class _Arrived:
    """The end of a copy into pinned memory."""

    def __init__(self, rows: list[_Row]) -> None:
        self.arrays = [array for row in rows for array in row]

    def done(self) -> bool:
        return have_come(self.arrays)

    def wait(self) -> None:
        jax.block_until_ready(self.arrays)


class PinnedMemory:
    """Rows in pinned host memory.

    Args:
      layers: of the pool; rows are sharded as they are.
      rows: how many there are.

    Raises:
      ValueError: a backend without such memory.
    """

    def __init__(self, layers: Layers, rows: int) -> None:
        """Takes no memory yet."""
        if not has_pinned_memory(layers):
            raise ValueError(
                f"the devices of these layers have no {PINNED} memory: use memory='numpy'"
            )
        self._like = []  # shape and dtype of a row, a group each
        self._device = []
        for group in groups(layers):
            like = layers[group[0]]
            self._like.append(((len(group), *like.shape[1:]), np.dtype(like.dtype)))
            self._device.append(like.sharding)
        self._pinned = [sharding.with_memory_kind(PINNED) for sharding in self._device]
        self._rows: list[_Row] = [()] * rows
        self._cut = jax.jit(_cut, out_shardings=tuple(self._pinned))

    @property
    def num_bytes(self) -> int:
        """As for `HostMemory`: what it takes when every row holds something."""
        row = sum(int(np.prod(shape)) * dtype.itemsize for shape, dtype in self._like)
        return row * len(self._rows)

    def write(self, rows: Sequence[int], layers: Layers, pages: Sequence[int]) -> Fence:
        """As for `HostMemory`."""
        written: list[_Row] = []
        for part in batches(rows):
            images = gather(layers, padded(pages[part]))
            for at, row in enumerate(rows[part]):
                self._rows[row] = self._cut(images, jnp.int32(at))
                written.append(self._rows[row])
        return _Arrived(written)

    def read(self, rows: Sequence[int]) -> Images:
        """As for `HostMemory`."""
        kept = [self._rows[row] for row in rows]
        kept += [kept[-1]] * (len(padded(rows)) - len(kept))
        parts = []
        for at, sharding in enumerate(self._device):
            parts.append(_stack(tuple(jax.device_put([row[at] for row in kept], sharding))))
        return tuple(parts)

    def load(self, row: int) -> list[np.ndarray]:
        """As for `HostMemory`."""
        return [np.array(array) for array in self._rows[row]]

    def save(self, row: int, image: Sequence[np.ndarray]) -> None:
        """As for `HostMemory`."""
        self._rows[row] = tuple(
            jax.device_put(array, sharding)
            for array, sharding in zip(image, self._pinned, strict=True)
        )

    def fits(self, image: Sequence[np.ndarray]) -> bool:
        """As for `HostMemory`."""
        return [(array.shape, array.dtype) for array in image] == self._like


def _cut(images: Images, at: jax.Array) -> _Row:
    return tuple(jax.lax.dynamic_index_in_dim(image, at, keepdims=False) for image in images)


@functools.partial(jax.jit)
def _stack(rows: tuple[jax.Array, ...]) -> jax.Array:
    return jnp.stack(rows)
