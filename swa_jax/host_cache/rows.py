"""The host's tree with its bytes: rows are given out, filled from the device, and read back."""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import jax
import numpy as np

from swa_jax.host_cache.config import HostConfig
from swa_jax.host_cache.images import Images, batches, padded
from swa_jax.host_cache.index import HostIndex, Pin, Placed, Usable
from swa_jax.host_cache.memory import Fence, HostMemory, NumpyMemory
from swa_jax.host_cache.nodes import NO_ROW
from swa_jax.host_cache.pinned import PinnedMemory, has_pinned_memory
from swa_jax.host_cache.stored import Stored
from swa_jax.models.decoder.kv_pool import KVPool

MEMORIES = ("auto", "numpy", "pinned")
_MOST_COPIES = 16  # under way at once: what they were gathered into is memory of the device


@dataclass
class _Copy:
    """Rows of a path that are being written, and the pin that keeps them until they are."""

    pin: Pin
    fences: list[Fence]
    keys: Sequence[bytes]
    namespace: int
    placed: Placed

    def done(self) -> bool:
        return all(fence.done() for fence in self.fences)


@dataclass(frozen=True)
class Staged:
    """Images of what a restore needs, on their way to the device or there."""

    usable: Usable
    full: list[tuple[np.ndarray, Images]]  # pages of the prompt, padded, and their images
    swa: list[tuple[np.ndarray, Images]]


class HostRows:
    """Index and memory of both kinds of row.

    Args:
      config: how many there are.
      pools: the KV, or its shapes.
      memory: one of MEMORIES.
      stored: the storage below; None: there is none.

    Raises:
      ValueError: a memory that is unknown or that the backend has not.
    """

    def __init__(
        self, config: HostConfig, pools: KVPool, memory: str, stored: Stored | None
    ) -> None:
        """Every row is free."""
        if memory not in MEMORIES:
            raise ValueError(f"memory must be one of {', '.join(MEMORIES)}, got {memory!r}")
        self.index = HostIndex(config)
        self.full = _memory_for(memory, pools.full, config.full_pages)
        self.swa = _memory_for(memory, pools.swa, config.swa_pages)
        self._stored = stored
        self._copies: deque[_Copy] = deque()

    def copy_in(
        self,
        keys: Sequence[bytes],
        namespace: int,
        pools: KVPool,
        full: Mapping[int, int],
        of_swa: Mapping[int, int],
    ) -> int:
        """Starts copying pages of one path from the device; they stay until they are there.

        Args:
          keys: of the path.
          namespace: of the path.
          pools: the KV.
          full: device page for each page number whose full KV is wanted, ascending.
          of_swa: likewise for SWA.

        Returns:
          Pages that are being copied: what is there already is not copied again, and some may have
          found no row.
        """
        placed = self._place(keys, namespace, full, of_swa)
        if not placed.full and not placed.swa:
            return 0
        try:
            fences = self._start(placed, pools, full, of_swa)
        except BaseException:
            self.index.take_back(keys, namespace, placed)
            raise
        pin = self.index.pin(keys, namespace)
        self._copies.append(_Copy(pin, fences, keys, namespace, placed))
        while len(self._copies) > _MOST_COPIES:
            self._settle(self._copies.popleft())
        return len(placed.full) + len(placed.swa)

    def _start(
        self,
        placed: Placed,
        pools: KVPool,
        full: Mapping[int, int],
        of_swa: Mapping[int, int],
    ) -> list[Fence]:
        fences = []
        if placed.full:
            rows, pages = [row for _, row in placed.full], [full[page] for page, _ in placed.full]
            fences.append(self.full.write(rows, pools.full, pages))
        if placed.swa:
            rows, pages = [row for _, row in placed.swa], [of_swa[page] for page, _ in placed.swa]
            fences.append(self.swa.write(rows, pools.swa, pages))
        return fences

    def _place(
        self,
        keys: Sequence[bytes],
        namespace: int,
        full: Mapping[int, int],
        of_swa: Mapping[int, int],
    ) -> Placed:
        placed = self.index.put(keys, namespace, full=full, swa=of_swa)
        have = self.have(keys, namespace)
        if self._copies and not (have[0].issuperset(full) and have[1].issuperset(of_swa)):
            try:
                self.wait()  # rows that are being written are kept from leaving
            except BaseException:
                self.index.take_back(keys, namespace, placed)
                raise
            more = self.index.put(keys, namespace, full=full, swa=of_swa)
            placed = Placed(placed.full + more.full, placed.swa + more.swa)
        return placed

    def have(self, keys: Sequence[bytes], namespace: int) -> tuple[set[int], set[int]]:
        """Page numbers of a path that have a full row, and that have an SWA row."""
        path = self.index.find(keys, namespace)
        return (
            {page for page, node in enumerate(path) if node.full != NO_ROW},
            {page for page, node in enumerate(path) if node.swa != NO_ROW},
        )

    def stage(self, keys: Sequence[bytes], namespace: int, usable: Usable, places: int) -> Staged:
        """Starts copying to the device what a restore needs.

        Args:
          keys: of the prompt.
          namespace: of the prompt.
          usable: what of it comes from the host.
          places: a page number that no prompt has.
        """
        path = self.index.find(keys[: usable.pages], namespace)
        full_rows = [path[page].full for page in usable.full]
        swa_rows = [path[page].swa for page in usable.swa]
        return Staged(
            usable,
            _read(self.full, full_rows, usable.full, places),
            _read(self.swa, swa_rows, usable.swa, places),
        )

    def poll(self) -> None:
        """Lets go of what has been copied by now. Waits for nothing."""
        while self._copies and self._copies[0].done():
            self._settle(self._copies.popleft())

    def wait(self) -> None:
        """Waits for every copy under way, also where one of them fails."""
        failed: Exception | None = None
        while self._copies:
            try:
                self._settle(self._copies.popleft())
            except Exception as error:
                failed = failed or error
        if failed is not None:
            raise failed

    def _settle(self, copy: _Copy) -> None:
        """Ends a copy. Where it failed, its rows are taken back."""
        try:
            for fence in copy.fences:
                fence.wait()
        except BaseException:
            self.index.unpin(copy.pin)
            self.index.take_back(copy.keys, copy.namespace, copy.placed)
            raise
        try:
            if self._stored is not None:
                full = {page: self.full.load(row) for page, row in copy.placed.full}
                of_swa = {page: self.swa.load(row) for page, row in copy.placed.swa}
                self._stored.write(copy.keys, copy.namespace, full, of_swa)
        finally:
            self.index.unpin(copy.pin)


def _memory_for(kind: str, layers: tuple[jax.Array, ...], rows: int) -> HostMemory:
    if kind == "auto":
        on_cpu = jax.default_backend() == "cpu"
        kind = "pinned" if layers and not on_cpu and has_pinned_memory(layers) else "numpy"
    return PinnedMemory(layers, rows) if kind == "pinned" else NumpyMemory(layers, rows)


def _read(
    memory: HostMemory, rows: Sequence[int], pages: Sequence[int], places: int
) -> list[tuple[np.ndarray, Images]]:
    return [(padded(pages[part], places), memory.read(rows[part])) for part in batches(rows)]
