"""A file that is written whole or not at all, by a library that wants a name to write to."""

import contextlib
import errno
import os
import re
from collections.abc import Iterator
from pathlib import Path

_CODE = re.compile(r"os error ([0-9]+)")  # as safetensors says it


@contextlib.contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """A name in the file's directory to write to; it becomes `path` when all went well.

    Args:
      path: of the file; what is there stays until then.

    Raises:
      OSError: the disk is full, or fails; names `path`.
    """
    half = path.with_name(f".{path.name}.half")
    try:
        yield half
        with half.open("rb") as stream:
            os.fsync(stream.fileno())
        half.replace(path)
    except (MemoryError, ValueError):
        raise
    except Exception as error:  # the library's own class, for the system's errors too
        if getattr(error, "filename", None) not in (None, str(half)):
            raise  # of another file that was written meanwhile
        code = _CODE.search(str(error))
        number = getattr(error, "errno", None) or (int(code[1]) if code else errno.EIO)
        why = os.strerror(number) if code or isinstance(error, OSError) else str(error)
        raise OSError(number, f"cannot be written: {why}", str(path)) from error
    finally:
        with contextlib.suppress(OSError):
            half.unlink(missing_ok=True)
