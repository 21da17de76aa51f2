"""Where the bytes of the host tier lie: rows of page images, of the full or of the SWA layers.

A copy from the device has two halves. The pages are gathered on the device into an array of their
own: whatever runs there later comes after that, so the pages may be freed and granted again at
once. Then that array comes over while the host goes on; until its *fence* the row must not be read,
and a row that is read sooner waits for it.
"""

from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import jax
import numpy as np

from swa_jax.host_cache.images import Images, Layers, batches, gather, groups, padded


class Fence(Protocol):
    """The end of a copy that is under way."""

    def done(self) -> bool:
        """Whether the rows can be read without waiting."""
        ...

    def wait(self) -> None:
        """Returns when they can."""
        ...


class HostMemory(Protocol):
    """Rows of page images. All calls come from one thread."""

    @property
    def num_bytes(self) -> int:
        """Bytes that all rows take."""
        ...

    def write(self, rows: Sequence[int], layers: Layers, pages: Sequence[int]) -> Fence:
        """Starts copying pages of a pool into rows; the pages may be freed right after."""
        ...

    def read(self, rows: Sequence[int]) -> Images:
        """Images of at most a batch of rows, padded; the rows may be dropped right after."""
        ...

    def load(self, row: int) -> list[np.ndarray]:
        """The image of one row, an array a group; the caller's own."""
        ...

    def save(self, row: int, image: Sequence[np.ndarray]) -> None:
        """Writes a row from the host."""
        ...

    def fits(self, image: Sequence[np.ndarray]) -> bool:
        """Whether an image has the shapes and dtypes of these rows."""
        ...


def have_come(arrays: Iterable[Any]) -> bool:
    """Whether what computes or copies these JAX arrays has ended."""
    return all(array.is_ready() for array in arrays)


class _Copy:
    """A copy under way into rows of a `NumpyMemory`."""

    def __init__(self, memory: "NumpyMemory", rows: Sequence[int], images: Images) -> None:
        self.memory, self.rows, self.images = memory, list(rows), images
        self.settled = not images
        self.error: Exception | None = None  # why the rows were not written
        for image in images:
            image.copy_to_host_async()

    def done(self) -> bool:
        if not self.settled and have_come(self.images):
            self.memory.settle(self)
        return self.settled

    def wait(self) -> None:
        self.memory.settle(self)
        if self.error is not None:
            raise self.error

    def land(self) -> None:
        """Ends the copy. It may be somebody else who waits: an error is kept for its own fence."""
        try:
            for values, image in zip(self.memory.values, self.images, strict=True):
                values[self.rows] = np.asarray(image)[: len(self.rows)]
        except Exception as error:
            self.error = error
            self.memory.unwritten.update(self.rows)
        self.images, self.settled = (), True


class _All:
    """The end of several copies."""

    def __init__(self, fences: Sequence[Fence]) -> None:
        self.fences = fences

    def done(self) -> bool:
        return all(fence.done() for fence in self.fences)

    def wait(self) -> None:
        for fence in self.fences:
            fence.wait()


class NumpyMemory:
    """Rows in NumPy arrays, one a group.

    Args:
      layers: of the pool, or their shapes.
      rows: how many there are.
    """

    def __init__(self, layers: Layers, rows: int) -> None:
        """Takes the memory; the operating system backs it as it is written."""
        self.values = []
        for group in groups(layers):
            like = layers[group[0]]
            shape = (rows, len(group), *like.shape[1:])
            self.values.append(np.zeros(shape, np.dtype(like.dtype)))
        self._pending: deque[_Copy] = deque()  # in the order in which they were begun
        self.unwritten: set[int] = set()  # rows whose copy failed

    @property
    def num_bytes(self) -> int:
        """As for `HostMemory`."""
        return sum(values.nbytes for values in self.values)

    def write(self, rows: Sequence[int], layers: Layers, pages: Sequence[int]) -> Fence:
        """As for `HostMemory`."""
        copies = []
        self.unwritten.difference_update(rows)
        for part in batches(rows):
            copy = _Copy(self, rows[part], gather(layers, padded(pages[part])))
            copies.append(copy)
            self._pending.append(copy)
        return _All(copies)

    def settle(self, last: _Copy | None = None) -> None:
        """Ends the copies under way up to one of them, all by default, the oldest first."""
        while self._pending and not (last is not None and last.settled):
            self._pending.popleft().land()

    def _await(self, rows: Sequence[int]) -> None:
        wanted = set(rows)
        for copy in list(self._pending):
            if wanted.intersection(copy.rows):
                self.settle(copy)

    def _need(self, rows: Sequence[int]) -> None:
        """The rows hold what was written there last, or nobody reads them."""
        self._await(rows)
        if not self.unwritten.isdisjoint(rows):
            raise MemoryError("the copy of these rows into host memory failed")

    def read(self, rows: Sequence[int]) -> Images:
        """As for `HostMemory`."""
        self._need(rows)
        at = padded(rows)
        return tuple(jax.numpy.asarray(values[at]) for values in self.values)

    def load(self, row: int) -> list[np.ndarray]:
        """As for `HostMemory`."""
        self._need([row])
        return [values[row].copy() for values in self.values]

    def save(self, row: int, image: Sequence[np.ndarray]) -> None:
        """As for `HostMemory`."""
        self._await([row])
        self.unwritten.discard(row)
        for values, array in zip(self.values, image, strict=True):
            values[row] = array

    def fits(self, image: Sequence[np.ndarray]) -> bool:
        """As for `HostMemory`."""
        mine = [(values.shape[1:], values.dtype) for values in self.values]
        return [(array.shape, array.dtype) for array in image] == mine
