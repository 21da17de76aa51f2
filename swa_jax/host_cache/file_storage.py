"""Pages in a directory, a safetensors file each: a crash at any moment leaves it whole or absent.

A file is written under a temporary name, synced, renamed, and the directory synced. What a killed
writer left is cleaned up by the next.
"""

import contextlib
import fcntl
import math
import os
import re
import stat
import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import IO

import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from swa_jax.host_cache.page_file import (
    CorruptPageError,
    ForeignPageError,
    decode,
    encode,
    require_safetensors,
)
from swa_jax.host_cache.storage import Arrays, PageKey
from swa_jax.inputs import whole_number

_SUFFIX, _TEMPORARY = ".safetensors", ".swa-jax-page-"
_LEFT = re.compile(re.escape(_TEMPORARY) + "[0-9]+")
_OURS = re.compile(r"[0-9a-f]{64}(-[a-z0-9_]+)?\.safetensors")
_MOST_BYTES = 2**63 - 1
_HEADER_BYTES = 4096  # more than a header takes beside names and tokens, and for each array

Layout = Mapping[str, tuple[DTypeLike, tuple[int, ...]]]


class FileStorage:
    """A `Storage` in a directory, of one process at a time.

    Of the directory's files it touches only those that it named itself. One under a page's name
    that is larger than all pages together may be is none of its pages: it is let alone, and neither
    counted nor there.

    Args:
      directory: made where it is missing.
      fingerprint: of `kv_fingerprint`: keys and files of another one are refused.
      max_bytes: that the files may take; the least recently used leave beyond that.
      layout: dtype and shape of each array a page may have, if all are to be checked.

    Attributes:
      corrupt: files that were not as they had been written; they are removed.
      foreign: files under a page's name that held something else; they are removed.

    Raises:
      ImportError: `safetensors` is not installed.
      ValueError: another process has the directory, or it cannot be used.
    """

    def __init__(
        self,
        directory: str | Path,
        fingerprint: bytes,
        max_bytes: int,
        *,
        layout: Layout | None = None,
    ) -> None:
        """Takes the directory, cleans up, and lists what is there without reading it."""
        require_safetensors()
        if not isinstance(fingerprint, bytes) or not fingerprint:
            raise ValueError(f"fingerprint must be bytes of kv_fingerprint, got {fingerprint!r}")
        self.fingerprint = fingerprint
        self.max_bytes = whole_number("max_bytes", max_bytes, 1, _MOST_BYTES)
        self.corrupt = self.foreign = 0
        self._layout = _as_layout(layout)
        self._sizes: OrderedDict[str, int] = OrderedDict()  # by name, the least recently used first
        self._used = self._reserved = self._serial = 0  # bytes, bytes, number of files begun
        self._latest = 0  # nanoseconds, the date of the last use
        self._changed = threading.Condition()
        self._folder = Path(directory)
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            self._handle = _take(self._folder)
            self._close = weakref.finalize(self, os.close, self._handle)
            self._clean()
            self._list()
        except OSError as error:
            raise ValueError(f"{directory} cannot be used as a page store: {error}") from error

    def _clean(self) -> None:
        """Removes what writers left that were killed."""
        for path in self._folder.iterdir():
            if _LEFT.fullmatch(path.name) and not path.is_dir():
                path.unlink(missing_ok=True)

    def _list(self) -> None:
        found = []
        for path in self._folder.iterdir():
            if _OURS.fullmatch(path.name) and path.is_file():
                status = path.stat()
                if status.st_size > self.max_bytes:  # it would drive out all pages
                    continue
                found.append((status.st_mtime_ns, path.name.removesuffix(_SUFFIX), status.st_size))
        now = time.time_ns()
        for at, (date, name, size) in enumerate(sorted(found)):
            self._sizes[name] = size
            self._used += size
            if date > now:  # the clock was put back since, or somebody dated a file as he liked
                self._latest = now + at
                _date(self._path(name), self._latest)
            self._latest = max(self._latest, min(date, now))
        with self._changed:
            self._make_room(0)

    def put(self, key: PageKey, arrays: Arrays) -> None:
        """As for `Storage`; on return the page is on the disk, whatever happens to the machine.

        Raises:
          OSError: the disk is full, or fails; the page is not there then, or what was before. Where
            it was only the directory that could not be synced, the page is there, and may be gone
            when the machine has crashed.
          ValueError: a key of another model, arrays of another layout or of no plain numbers, or a
            page that is larger than all pages together may be.
        """
        self._check_key(key)
        content = encode(key, arrays)
        self._check_layout({name: np.asarray(array) for name, array in arrays.items()})
        if len(content) > self.max_bytes:
            raise ValueError(
                f"max_bytes must hold at least one page of {len(content)} bytes, got "
                f"{self.max_bytes}"
            )
        with self._changed:
            self._changed.wait_for(lambda: self._reserved + len(content) <= self.max_bytes)
            self._make_room(len(content))
            self._reserved += len(content)
            temporary = self._next_temporary()
        try:
            self._write(key, temporary, content)
        finally:
            with self._changed:
                self._reserved -= len(content)
                self._changed.notify_all()

    def _write(self, key: PageKey, temporary: Path, content: bytes) -> None:
        try:
            with temporary.open("wb") as stream:
                stream.write(content)
                stream.flush()
                self._touch(stream.fileno())
                os.fsync(stream.fileno())
            with self._changed:
                temporary.replace(self._path(key.name))
                self._used += len(content) - self._sizes.pop(key.name, 0)
                self._sizes[key.name] = len(content)
        except BaseException:
            with contextlib.suppress(OSError):
                temporary.unlink()
            raise
        os.fsync(self._handle)  # the name, too, is to outlive a crash

    def _touch(self, handle: int) -> None:
        """Dates a file as used last, by a finer clock than the file system's.

        The wall clock may stand still or go back; the order of use does not.
        """
        with self._changed:
            self._latest = max(time.time_ns(), self._latest + 1)
            _date(handle, self._latest)

    def _next_temporary(self) -> Path:
        """A name that nothing has, in a directory that is this store's alone."""
        while True:
            self._serial += 1
            path = self._folder / f"{_TEMPORARY}{self._serial}"
            if not os.path.lexists(path):
                return path

    def _make_room(self, size: int) -> None:
        """Removes the least recently used pages until so many bytes more fit."""
        while self._sizes and self._used + self._reserved + size > self.max_bytes:
            name = next(iter(self._sizes))
            try:
                self._remove(name)
            except OSError:
                self._sizes.move_to_end(name)  # another one may leave the next time
                raise

    def _remove(self, name: str) -> None:
        """Removes a file, and forgets it once it is gone: until then it takes its bytes."""
        if name not in self._sizes:  # what else has the name is somebody else's
            return
        with contextlib.suppress(IsADirectoryError):  # that is somebody else's, too
            self._path(name).unlink(missing_ok=True)
        self._used -= self._sizes.pop(name)

    def get(self, key: PageKey) -> Arrays | None:
        """As for `Storage`. What is corrupt or foreign is counted, removed, and not there.

        Where the disk does not let it be removed it is None all the same, and counted each time.

        Raises:
          OSError: the file is there and cannot be read.
          ValueError: a key of another model.
        """
        self._check_key(key)
        path = self._path(key.name)
        try:
            with self._changed:
                if key.name not in self._sizes:
                    return None
                stream = _opened(path)
                most = min(self._sizes[key.name], self._most_bytes(key))
                self._sizes.move_to_end(key.name)
                self._touch(stream.fileno())
            with stream:
                status = os.fstat(stream.fileno())
                made, grown = status.st_ino, status.st_size > most
                content = b"" if grown or not stat.S_ISREG(status.st_mode) else stream.read(most)
        except (FileNotFoundError, IsADirectoryError):
            with self._changed:
                self._used -= self._sizes.pop(key.name, 0)
            return None
        try:
            arrays = decode(key, content)
            self._check_read(arrays)
        except (CorruptPageError, ForeignPageError) as error:
            self._refuse(key.name, made, isinstance(error, ForeignPageError))
            return None
        return arrays

    def _most_bytes(self, key: PageKey) -> int:
        """Bytes that the file of a page can have: what is longer is not read."""
        if self._layout is None:
            return self.max_bytes
        names = sum(_HEADER_BYTES + 12 * len(name) for name in self._layout)
        arrays = sum(
            jnp.dtype(dtype).itemsize * math.prod(shape) for dtype, shape in self._layout.values()
        )
        return _HEADER_BYTES + names + 32 * len(key.tokens) + arrays

    def _refuse(self, name: str, made: int, is_foreign: bool) -> None:
        with self._changed:
            self.foreign += is_foreign
            self.corrupt += not is_foreign
            with contextlib.suppress(OSError):
                if self._path(name).stat().st_ino == made:  # nobody has written it again
                    self._remove(name)

    def _check_read(self, arrays: Arrays) -> None:
        try:
            self._check_layout(arrays)
        except ValueError as error:
            raise ForeignPageError(str(error)) from error

    def has(self, key: PageKey) -> bool:
        """As for `Storage`; the file is not looked at."""
        self._check_key(key)
        return key.name in self._sizes

    def delete(self, key: PageKey) -> None:
        """As for `Storage`.

        Raises:
          OSError: the file cannot be removed; the page is still there then.
          ValueError: a key of another model.
        """
        self._check_key(key)
        with self._changed:
            self._remove(key.name)

    def keys(self) -> Iterator[str]:
        """As for `Storage`; pages of other models that share the directory are among them."""
        with self._changed:
            return iter(list(self._sizes))

    def __len__(self) -> int:
        """As for `Storage`."""
        return len(self._sizes)

    @property
    def used_bytes(self) -> int:
        """Bytes that the files take."""
        return self._used

    def close(self) -> None:
        """Leaves the directory to others. Nothing is to be asked of this store any more."""
        self._close()

    def __enter__(self) -> "FileStorage":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _path(self, name: str) -> Path:
        return self._folder / f"{name}{_SUFFIX}"

    def _check_key(self, key: PageKey) -> None:
        if not self._close.alive:
            raise ValueError(f"the page store in {self._folder} is closed")
        if key.fingerprint != self.fingerprint:
            raise ValueError(
                f"this store keeps pages of the model {self.fingerprint.hex()[:12]}..., got a key "
                f"of {key.fingerprint.hex()[:12]}..."
            )

    def _check_layout(self, arrays: Arrays) -> None:
        if self._layout is None:
            return
        for name, array in arrays.items():
            seen = (array.dtype.name, array.shape)
            if self._layout.get(name) != seen:
                raise ValueError(
                    f"the array {name!r} of a page must be {self._layout.get(name)}, got {seen}"
                )


def _opened(path: Path) -> IO[bytes]:
    """The file for reading; does not wait where somebody put a pipe in its place."""
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    try:
        return os.fdopen(handle, "rb")
    except IsADirectoryError:
        os.close(handle)
        raise


def _date(file: int | Path, date: int) -> None:
    """Sets the nanoseconds since 1970 by which the next process orders files."""
    # A full disk, or one that is read only, may refuse; the order is not worth a page.
    with contextlib.suppress(OSError):
        os.utime(file, ns=(date, date))


def _as_layout(layout: Layout | None) -> dict[str, tuple[str, tuple[int, ...]]] | None:
    if layout is None:
        return None
    return {name: (np.dtype(dtype).name, tuple(shape)) for name, (dtype, shape) in layout.items()}


def _take(folder: Path) -> int:
    """A handle on the directory, with a lock on it that ends with the process."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(handle)
        raise ValueError(
            f"another page store has {folder}: give each process a directory of its own"
        ) from None
    return handle
