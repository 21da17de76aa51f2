"""Storage below the host tier: what names a page there, and what a store has to do.

A page is named by everything its KV depends on: the model with its layout and weights, the
namespace, and all tokens up to the page's end. The tokens are hashed page by page, so that each
page's name takes one hash, and the page's own tokens are kept beside it to be compared.
"""

import hashlib
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

import numpy as np

from swa_jax.describe import describe_layers, fingerprint
from swa_jax.inputs import whole_number
from swa_jax.models.decoder.kv_pool import KVPool

Arrays: TypeAlias = dict[str, np.ndarray]


def kv_fingerprint(model: object, pools: KVPool, page_size: int, *, weights: str) -> bytes:
    """32 bytes for all that KV depends on beside tokens and namespace.

    Args:
      model: static, as for `swa_jax.describe.describe`: a `DecoderConfig` or any serving model.
      pools: the layers that are kept, or their shapes: dtype and shape of a token count.
      page_size: tokens in a page.
      weights: what tells the model's weights from others, such as the checkpoint's name and
        revision. KV of other weights has the same shape and means nothing.

    Raises:
      ValueError: no name for the weights, or a model that cannot be described.
    """
    if not isinstance(weights, str) or not weights:
        raise ValueError(
            f"weights must name the model's weights, such as 'gpt-oss-20b@6cee5e8', got {weights!r}"
        )
    size = whole_number("page_size", page_size, 1)
    return fingerprint(model, describe_layers(pools), size, weights)


@dataclass(frozen=True)
class PageKey:
    """What names one page of KV. Make them with `page_keys`."""

    fingerprint: bytes  # of the model, its layout and its weights
    namespace: int  # prefixes of others are not shared
    digest: bytes  # 32 bytes for the namespace and all tokens up to the page's end
    tokens: tuple[int, ...]  # the page's own; with pairs as keys the one after it, too
    part: str = ""  # where a page's KV is stored in several parts ("full", "swa"): which one

    @property
    def name(self) -> str:
        """Letters and digits that no other page has, and no other part of this page."""
        return self.digest.hex() + (f"-{self.part}" if self.part else "")

    def of_part(self, part: str) -> "PageKey":
        """The key of one part of this page, of lower-case letters, digits and "_"."""
        if (
            not part
            or not part.isascii()
            or not part.replace("_", "a").isalnum()
            or part != part.lower()
        ):
            raise ValueError(
                f"part must be a name of lower-case letters, digits and '_', got {part!r}"
            )
        return PageKey(self.fingerprint, self.namespace, self.digest, self.tokens, part)


def page_keys(
    fingerprint: bytes,
    tokens: Sequence[int] | np.ndarray,
    page_size: int,
    *,
    namespace: int = 0,
    is_bigram: bool = False,
) -> list[PageKey]:
    """The key of every whole page of a text, in order.

    Args:
      fingerprint: of `kv_fingerprint`.
      tokens: the text's tokens, as many as count.
      page_size: tokens in a page.
      namespace: as for the prefix cache.
      is_bigram: pages are keyed by pairs of tokens, so the last token of the text only tells what
        follows the one before it.

    Raises:
      ValueError: a fingerprint that is no bytes, tokens that do not fit int32.
    """
    if not isinstance(fingerprint, bytes) or not fingerprint:
        raise ValueError(f"fingerprint must be bytes of kv_fingerprint, got {fingerprint!r}")
    size = whole_number("page_size", page_size, 1)
    space = whole_number("namespace", namespace, -(2**31))
    row = _as_row(tokens)
    lag = int(is_bigram)
    kind = b"pairs" if is_bigram else b"tokens"
    start = b"%d %d %d %s " % (len(fingerprint), space, size, kind)
    digest, keys = hashlib.sha256(start + fingerprint).digest(), []
    for first in range(0, row.size - lag - size + 1, size):
        own = row[first : first + size + lag]
        digest = hashlib.sha256(digest + own.tobytes()).digest()
        keys.append(PageKey(fingerprint, space, digest, tuple(own.tolist())))
    return keys


def _as_row(tokens: Sequence[int] | np.ndarray) -> np.ndarray:
    row = np.asarray(tokens)
    if row.ndim != 1 or (row.size and row.dtype.kind not in "iu"):
        raise ValueError(f"tokens must be a row of integers, got {row.dtype}{list(row.shape)}")
    if row.size and (int(row.min()) < -(2**31) or int(row.max()) > 2**31 - 1):
        raise ValueError(f"tokens must fit int32, got values from {row.min()} to {row.max()}")
    return row.astype("<i4")  # the same bytes on every machine


class Storage(Protocol):
    """Where pages are kept. A cache: what it forgets is computed again.

    Every call is synchronous and may come from any thread. `StorageWorker` makes them asynchronous.
    """

    def put(self, key: PageKey, arrays: Arrays) -> None:
        """Keeps a page, in the place of what was kept under the key.

        Args:
          key: names it.
          arrays: by name, of any shape and any dtype of numbers.
        """
        ...

    def get(self, key: PageKey) -> Arrays | None:
        """The arrays just as they were put, the caller's own; None where there are none."""
        ...

    def has(self, key: PageKey) -> bool:
        """Whether `get` is worth trying. It notes no use."""
        ...

    def delete(self, key: PageKey) -> None:
        """Forgets a page; nothing where there is none."""
        ...

    def keys(self) -> Iterator[str]:
        """`PageKey.name` of every page kept, the least recently used first."""
        ...

    def __len__(self) -> int:
        """Pages kept."""
        ...


class MemoryStorage:
    """Keeps pages in memory: for tests, and to try a tier without a disk.

    Args:
      max_pages: the least recently used leave beyond that.
    """

    def __init__(self, max_pages: int = 1 << 20) -> None:
        """Keeps nothing yet."""
        self._most = whole_number("max_pages", max_pages, 1)
        self._pages: dict[str, tuple[PageKey, Arrays]] = {}
        self._lock = threading.Lock()

    def put(self, key: PageKey, arrays: Arrays) -> None:
        """As for `Storage`."""
        kept = {name: np.array(array) for name, array in arrays.items()}
        with self._lock:
            self._pages.pop(key.name, None)
            self._pages[key.name] = key, kept
            while len(self._pages) > self._most:
                del self._pages[next(iter(self._pages))]

    def get(self, key: PageKey) -> Arrays | None:
        """As for `Storage`."""
        with self._lock:
            found = self._pages.pop(key.name, None)
            if found is None:
                return None
            self._pages[key.name] = found
        if found[0] != key:
            return None
        return {name: np.array(array) for name, array in found[1].items()}

    def has(self, key: PageKey) -> bool:
        """As for `Storage`."""
        with self._lock:
            return key.name in self._pages

    def delete(self, key: PageKey) -> None:
        """As for `Storage`."""
        with self._lock:
            self._pages.pop(key.name, None)

    def keys(self) -> Iterator[str]:
        """As for `Storage`."""
        with self._lock:
            return iter(list(self._pages))

    def __len__(self) -> int:
        """As for `Storage`."""
        return len(self._pages)
