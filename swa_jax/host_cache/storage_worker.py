"""Storage off the caller's thread: pages are read ahead and written behind."""

import threading
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType

from swa_jax.host_cache.storage import Arrays, PageKey, Storage
from swa_jax.inputs import whole_number


class StorageWorker:
    """Reads and writes pages of a store with threads of its own.

    A page that is being written can be read already, from memory. Storage is a cache: writes that
    find the queue full are skipped, and counted.

    Args:
      storage: what is read and written. It stays the caller's.
      threads: that work at once.
      max_writes: pages that may wait to be written. Their arrays stay in memory until then.
    """

    def __init__(self, storage: Storage, *, threads: int = 2, max_writes: int = 256) -> None:
        """Starts no thread before there is work."""
        self.storage = storage
        self.skipped = 0  # writes not begun, since the queue was full
        self.failed = 0  # writes, reads and looks that raised
        self._most = whole_number("max_writes", max_writes, 1)
        workers = whole_number("threads", threads, 1)
        self._pool = ThreadPoolExecutor(workers, thread_name_prefix="swa-jax-storage")
        self._lock = threading.Lock()
        self._writes: dict[PageKey, tuple[Arrays, Future[bool]]] = {}
        self._reads: dict[PageKey, Future[Arrays | None]] = {}

    def put(self, key: PageKey, arrays: Arrays) -> "Future[bool]":
        """Writes a page behind the caller's back.

        Args:
          key: names it.
          arrays: not to be changed until the future is done.

        Returns:
          Whether the page was written; False, at once, where the queue was full. The future raises
          what the store raised. A second write of a key that still waits is the first one: equal
          keys have equal KV.
        """
        with self._lock:
            if key in self._writes:
                return self._writes[key][1]
            if len(self._writes) >= self._most:
                self.skipped += 1
                return _done(False)
            try:
                future = self._pool.submit(self._write, key, arrays)
            except RuntimeError as error:  # it is closed
                self.failed += 1
                return _failed(error)
            self._writes[key] = arrays, future
            return future

    def _write(self, key: PageKey, arrays: Arrays) -> bool:
        try:
            self.storage.put(key, arrays)
        except BaseException:
            with self._lock:
                self.failed += 1
            raise
        finally:
            with self._lock:
                self._writes.pop(key, None)
        return True

    def prefetch(self, key: PageKey) -> "Future[Arrays | None]":
        """Reads a page ahead.

        Returns:
          Its arrays, or None where the store has none. Whoever asks for a page that is being read
          gets the same future, so the arrays are to be read only.
        """
        with self._lock:
            if key in self._writes:
                return _done(self._writes[key][0])
            if key not in self._reads:
                try:
                    self._reads[key] = self._pool.submit(self._read, key)
                except RuntimeError as error:  # it is closed
                    self.failed += 1
                    return _failed(error)
            return self._reads[key]

    def _read(self, key: PageKey) -> Arrays | None:
        try:
            return self.storage.get(key)
        except BaseException:
            with self._lock:
                self.failed += 1
            raise
        finally:
            with self._lock:
                self._reads.pop(key, None)

    def has(self, key: PageKey) -> bool:
        """Whether `prefetch` is worth trying; not where the store raises."""
        with self._lock:
            if key in self._writes:
                return True
        try:
            return self.storage.has(key)
        except Exception:
            with self._lock:
                self.failed += 1
            return False

    def wait(self) -> None:
        """Returns when what was asked for before is done, failed or not."""
        with self._lock:
            futures = [future for _, future in self._writes.values()] + list(self._reads.values())
        for future in futures:
            future.exception()

    def close(self) -> None:
        """Finishes what was asked for and ends the threads."""
        self._pool.shutdown(wait=True)

    def __enter__(self) -> "StorageWorker":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


def _done(value: object) -> Future:
    future: Future = Future()
    future.set_result(value)
    return future


def _failed(error: Exception) -> Future:
    future: Future = Future()
    future.set_exception(error)
    return future
