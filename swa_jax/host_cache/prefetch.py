"""Fetching ahead: from storage into host memory, and from there towards the device."""

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

from swa_jax.host_cache.config import HostConfig
from swa_jax.host_cache.index import Pin, Usable
from swa_jax.host_cache.memory import HostMemory
from swa_jax.host_cache.rows import HostRows, Staged
from swa_jax.host_cache.storage import Arrays
from swa_jax.host_cache.stored import FULL, SWA, Stored, image_of

_Reads = dict[int, "Future[Arrays | None]"]


@dataclass(eq=False)
class Prefetch:
    """A prompt that is fetched ahead; what the host has of it is pinned until it is released."""

    keys: list[bytes]
    namespace: int
    pin: Pin
    full: _Reads = field(default_factory=dict)  # by page number
    swa: _Reads = field(default_factory=dict)
    staged: Staged | None = None

    def is_of(self, keys: Sequence[bytes], namespace: int, pages: int | None = None) -> bool:
        """Whether a prompt is this one, or begins with the same `pages` pages."""
        return namespace == self.namespace and self.keys[:pages] == list(keys[:pages])

    def done(self) -> bool:
        """Whether everything has come that was asked for."""
        return all(read.done() for read in (*self.full.values(), *self.swa.values()))

    def wait(self) -> None:
        """Waits for storage. The next call of the tier takes it over."""
        for read in (*self.full.values(), *self.swa.values()):
            read.exception()


def longest_prefix(
    pages: int,
    window_start: Callable[[int], int],
    has_full: Callable[[int], bool],
    has_swa: Callable[[int], bool],
) -> int:
    """Pages of the longest prefix with all its full KV and SWA for the window at its end."""
    best, dead = 0, -1
    for page in range(pages):
        if not has_full(page):
            break
        if not has_swa(page):
            dead = page
        if dead < window_start(page + 1):
            best = page + 1
    return best


def start_reads(
    config: HostConfig,
    rows: HostRows,
    stored: Stored | None,
    prefetch: Prefetch,
    device_pages: int,
    device_live: Sequence[bool],
) -> None:
    """Asks storage for what would make the match of a prompt longer.

    Args:
      config: of the tier.
      rows: what the host has.
      stored: what storage has; None: nothing is asked for.
      prefetch: the prompt; gets the reads.
      device_pages: pages whose full KV the device has.
      device_live: for each whether it has its SWA side.
    """
    if stored is None:
        return
    names = stored.keys(prefetch.keys, prefetch.namespace)
    full, of_swa = rows.have(prefetch.keys, prefetch.namespace)
    full |= set(range(device_pages))
    of_swa |= {page for page in range(device_pages) if device_live[page]}

    def has_full(page: int) -> bool:
        return page in full or stored.has(names[page], FULL)

    def has_swa(page: int) -> bool:
        return page in of_swa or stored.has(names[page], SWA)

    pages = longest_prefix(len(names), config.window_start, has_full, has_swa)
    window = range(config.window_start(pages), pages)
    prefetch.full = {p: stored.read(names[p], FULL) for p in range(pages) if p not in full}
    prefetch.swa = {p: stored.read(names[p], SWA) for p in window if p not in of_swa}


def land(rows: HostRows, prefetch: Prefetch) -> None:
    """Takes what has been read into host memory, and pins that too."""
    full, of_swa = _images(rows.full, prefetch.full), _images(rows.swa, prefetch.swa)
    prefetch.full, prefetch.swa = {}, {}
    if not full and not of_swa:
        return
    placed = rows.index.put(prefetch.keys, prefetch.namespace, full=full, swa=of_swa)
    try:
        for page, row in placed.full:
            rows.full.save(row, full[page])
        for page, row in placed.swa:
            rows.swa.save(row, of_swa[page])
    except BaseException:
        rows.index.take_back(prefetch.keys, prefetch.namespace, placed)
        raise
    before, prefetch.pin = prefetch.pin, rows.index.pin(prefetch.keys, prefetch.namespace)
    rows.index.unpin(before)


def _images(memory: HostMemory, reads: _Reads) -> dict[int, list]:
    """What came, by page number; what cannot be of these pools did not come."""
    found = {}
    for page, read in reads.items():
        image = None if read.exception() is not None else image_of(read.result())
        if image is not None and memory.fits(image):
            found[page] = image
    return found


def staged_for(
    prefetches: Sequence[Prefetch], keys: Sequence[bytes], namespace: int, usable: Usable
) -> Staged | None:
    """Images that were fetched ahead for just this; None where there are none."""
    for prefetch in prefetches:
        staged = prefetch.staged
        same = staged is not None and staged.usable == usable
        if same and prefetch.is_of(keys, namespace, usable.pages):
            return staged
    return None
