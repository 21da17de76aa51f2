"""The storage below the host tier, page by page and part by part.

The full and the SWA side of a page are stored apart: SWA is kept for one window at each end only.
"""

from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import TypeAlias

import numpy as np

from swa_jax.host_cache.storage import Arrays, PageKey, Storage, page_keys
from swa_jax.host_cache.storage_worker import StorageWorker

FULL, SWA = "full", "swa"
Image: TypeAlias = Sequence[np.ndarray]  # an array a group


class Stored:
    """Writes behind and reads ahead.

    Args:
      storage: where pages are kept; a worker of its own is made for one that has none.
      fingerprint: of model, weights and layout, as `kv_fingerprint` makes it.
      page_size: tokens in a page.
      is_bigram: pages are keyed by pairs of tokens.
    """

    def __init__(
        self,
        storage: Storage | StorageWorker,
        fingerprint: bytes,
        page_size: int,
        *,
        is_bigram: bool,
    ) -> None:
        """Nothing is read or written yet."""
        own = not isinstance(storage, StorageWorker)
        self.worker = StorageWorker(storage) if own else storage  # type: ignore[arg-type]
        self._own = own
        self._fingerprint, self._size, self._is_bigram = fingerprint, page_size, is_bigram

    def keys(self, keys: Sequence[bytes], namespace: int) -> list[PageKey]:
        """What the pages of a path are called there."""
        tokens = all_tokens(keys, self._size)
        return page_keys(
            self._fingerprint, tokens, self._size, namespace=namespace, is_bigram=self._is_bigram
        )

    def write(
        self,
        keys: Sequence[bytes],
        namespace: int,
        full: Mapping[int, Image],
        of_swa: Mapping[int, Image],
    ) -> None:
        """Starts writing images of pages of one path, by page number."""
        names = self.keys(keys, namespace)
        for part, images in ((FULL, full), (SWA, of_swa)):
            for page, image in images.items():
                key = names[page].of_part(part)
                if not self.worker.has(key):
                    self.worker.put(key, {str(at): array for at, array in enumerate(image)})

    def read(self, key: PageKey, part: str) -> "Future[Arrays | None]":
        """Starts reading one side of a page."""
        return self.worker.prefetch(key.of_part(part))

    def has(self, key: PageKey, part: str) -> bool:
        """Whether there is something to read."""
        return self.worker.has(key.of_part(part))

    def close(self) -> None:
        """Finishes what is being written, and ends the threads that are this object's own."""
        if self._own:
            self.worker.close()
        else:
            self.worker.wait()


def stored_in(
    storage: Storage | StorageWorker | None, fingerprint: bytes, page_size: int, is_bigram: bool
) -> Stored | None:
    """What a tier has below it; None where there is no storage.

    Raises:
      ValueError: no storage, one without a fingerprint, or one that keeps pages of another.
    """
    if storage is None:
        return None
    below = storage.storage if isinstance(storage, StorageWorker) else storage
    if not all(callable(getattr(below, name, None)) for name in ("put", "get", "has")):
        raise ValueError(f"storage must have the methods of Storage, got {storage!r}")
    if not isinstance(fingerprint, bytes):
        raise ValueError(f"fingerprint must be bytes of kv_fingerprint, got {fingerprint!r}")
    if not fingerprint:
        raise ValueError(
            "a storage needs a fingerprint, or KV of another model could come back: give "
            "fingerprint=kv_fingerprint(model, pools, page_size, weights=...)"
        )
    own = getattr(below, "fingerprint", fingerprint)
    if own != fingerprint:
        raise ValueError(f"fingerprint must be the storage's, {own!r}, got {fingerprint!r}")
    return Stored(storage, fingerprint, page_size, is_bigram=is_bigram)


def image_of(arrays: Arrays | None) -> list[np.ndarray] | None:
    """The image that was stored, None where there is none."""
    if not isinstance(arrays, dict) or arrays.keys() != {str(at) for at in range(len(arrays))}:
        return None
    if not all(isinstance(array, np.ndarray) for array in arrays.values()):
        return None
    return [arrays[str(at)] for at in range(len(arrays))]


def all_tokens(keys: Sequence[bytes], page_size: int) -> np.ndarray:
    """int32[T] the text whose pages have these keys."""
    pages = [np.frombuffer(key, np.int32) for key in keys]
    rest = [pages[-1][page_size:]] if pages else []
    return np.concatenate([np.zeros(0, np.int32), *(page[:page_size] for page in pages), *rest])
