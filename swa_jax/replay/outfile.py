"""Files that a long run writes at its end: checked before it, written whole or not at all."""

import contextlib
import errno
import os
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path


def _resolved(name: str) -> Path:
    """The file that a name stands for; a loop of links is an OSError in every Python."""
    try:
        return Path(name).resolve()
    except RuntimeError as error:  # before Python 3.13
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), name) from error


class OutFile:
    """A file to be written later.

    A regular file is replaced in one step, so a reader never sees half of it and a failure leaves
    the old one. Anything else that can be written to (a pipe, /dev/null) is written to directly.

    Raises:
      ValueError: it cannot be written; the message begins with `option`.
    """

    def __init__(self, option: str, name: str) -> None:
        """`option` is what the user calls it, `name` the path given."""
        self.option, self.name = option, name
        with self._explained():
            self.path = _resolved(name)  # a symbolic link stays; what it names is replaced
            self._check()

    def _check(self) -> None:
        if not self.name:
            raise OSError("the name is empty; give a file name")
        mode = self.path.stat().st_mode if self.path.exists() else None
        if mode is not None and stat.S_ISDIR(mode):
            raise OSError("this is a directory; name a file in it")
        if mode is not None and not os.access(self.path, os.W_OK):
            raise OSError("no permission to write to it")
        self.replaced = mode is None or stat.S_ISREG(mode)
        if not self.replaced:
            return
        if not self.path.parent.is_dir():
            raise OSError(f"no directory {str(self.path.parent)!r}; make it first")
        with tempfile.NamedTemporaryFile(dir=self.path.parent, prefix=".swa-jax-"):
            pass  # only to see whether a file can be made there

    def same_file(self, other: str | os.PathLike[str]) -> bool:
        """Whether `other` is this file, or a directory (a saved state) that has it inside."""
        with contextlib.suppress(OSError, ValueError):
            place = Path(other).resolve()
            inside = place in list(self.path.parents)[1:]
            return place == self.path or inside or self.path.samefile(other)
        return False

    def write(self, content: bytes) -> None:
        """Writes the file."""
        with self._explained():
            if self.replaced:
                self._replace(content)
            else:
                self.path.write_bytes(content)

    def _replace(self, content: bytes) -> None:
        handle, temporary = tempfile.mkstemp(dir=self.path.parent, prefix=".swa-jax-")
        try:
            with os.fdopen(handle, "wb") as stream:
                stream.write(content)
                stream.flush()
                os.fsync(stream.fileno())
            Path(temporary).chmod(self._mode())
            Path(temporary).replace(self.path)
        except BaseException:
            Path(temporary).unlink(missing_ok=True)
            raise

    def _mode(self) -> int:
        """Permissions of the file that is replaced, or those that a new file gets."""
        if self.path.exists():
            return stat.S_IMODE(self.path.stat().st_mode)
        mask = os.umask(0)
        os.umask(mask)
        return 0o666 & ~mask

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except (OSError, ValueError) as error:  # ValueError: a zero byte in the name
            shown = self.name if self.name.isprintable() and self.name else repr(self.name)
            reason = getattr(error, "strerror", None) or str(error)
            raise ValueError(f"{self.option} {shown}: cannot be written: {reason}") from None
