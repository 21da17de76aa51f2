"""Who saves into a directory, or reads from it, waits for whoever is saving there now.

Two savers at once would remove each other's half saves, and a reader would see a save go away under
its hands and call it damaged.
"""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None


@contextlib.contextmanager
def saving_alone(folder: Path) -> Iterator[None]:
    """Nobody else saves or reads there meanwhile."""
    with _locked(folder, shared=False):
        yield


@contextlib.contextmanager
def reading(folder: Path) -> Iterator[None]:
    """Nobody saves there meanwhile; others may read."""
    with _locked(folder, shared=True):
        yield


@contextlib.contextmanager
def _locked(folder: Path, *, shared: bool) -> Iterator[None]:
    """The lock is the directory's own, so no file is left behind, and a killed process has none.

    Where a file system has no locks, or the directory cannot be opened, nobody waits.
    """
    handle = None
    with contextlib.suppress(OSError):
        handle = os.open(folder, os.O_RDONLY) if fcntl is not None else None
    try:
        if fcntl is not None and handle is not None:
            with contextlib.suppress(OSError):
                fcntl.flock(handle, fcntl.LOCK_SH if shared else fcntl.LOCK_EX)
        yield
    finally:
        if fcntl is not None and handle is not None:
            # Closing alone would leave it to a child that was forked meanwhile.
            with contextlib.suppress(OSError):
                fcntl.flock(handle, fcntl.LOCK_UN)
            os.close(handle)
