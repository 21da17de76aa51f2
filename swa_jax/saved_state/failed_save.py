"""A save that a full or broken disk ended: what is told of it, and what is left of it."""

import contextlib
import errno
import os
import re
import shutil
import threading
import time
from collections.abc import Iterator
from pathlib import Path

_HALF = re.compile(r"swa_jax_[0-9]+\.orbax-checkpoint-tmp.*")
_CODE = re.compile(r"os_error_code='([0-9]+)'")  # as the library that writes arrays says it
_MOST_TOLD = 200  # characters of a library's message
_MOST_WAIT = 2.0  # seconds for what still writes
_QUIET = 0.2  # seconds in which nothing came back


@contextlib.contextmanager
def failed_save_told(folder: Path) -> Iterator[None]:
    """What ends a save in here becomes an `OSError` that names the directory.

    The library that writes makes a `ValueError` of a full disk, and leaves the half save there:
    the bytes that it takes are wanted by others.

    Args:
      folder: of the saves.

    Raises:
      OSError: with the number of the system's error, EIO where that is not known.
    """
    try:
        yield
    except MemoryError:
        raise
    except Exception as error:
        _remove_halves(folder)
        number, why = _reason(error)
        raise OSError(number, why, str(folder)) from error


def _reason(error: BaseException) -> tuple[int, str]:
    """The system's error behind one of a library, with the text that goes with it."""
    seen: BaseException | None = error
    while seen is not None:
        code = _CODE.search(str(seen))
        number = seen.errno if isinstance(seen, OSError) else None
        number = int(code[1]) if number is None and code is not None else number
        if number is not None:
            return number, f"the state cannot be saved: {os.strerror(number)}"
        seen = seen.__cause__ or seen.__context__
    told = " ".join(str(error).split())[:_MOST_TOLD]
    return errno.EIO, f"the state cannot be saved: {told}"


def _remove_halves(folder: Path) -> None:
    """As the next save would; nobody else writes here meanwhile.

    What the library has begun goes on behind an error, and makes its directories again.
    """
    end = time.monotonic() + _MOST_WAIT
    for thread in threading.enumerate():
        if type(thread).__module__.startswith("orbax."):
            with contextlib.suppress(Exception):  # its own error, which was told already
                thread.join(max(0.0, end - time.monotonic()))
    quiet = time.monotonic()
    while time.monotonic() < min(end + _MOST_WAIT, quiet + _QUIET):
        for half in _halves(folder):
            shutil.rmtree(half, ignore_errors=True)
            quiet = time.monotonic()
        time.sleep(_QUIET / 10)


def _halves(folder: Path) -> list[Path]:
    with contextlib.suppress(OSError):
        return [p for p in folder.iterdir() if _HALF.fullmatch(p.name) and p.is_dir()]
    return []
