"""How far a command is: a bar on a terminal, elsewhere a line now and then. Needs rich."""

import contextlib
import sys
import threading
import time
from types import TracebackType
from typing import Protocol

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

SECONDS = 10.0  # between two lines


class Shown(Protocol):
    """Called as the work goes on."""

    def __call__(self, what: str, done: int = 0, total: int | None = None, more: str = "") -> None:
        """Says how far it is.

        Args:
          what: is being done.
          done: of it.
          total: in all; None where nobody knows.
          more: figures beside it.
        """
        ...


def show_progress(*, wanted: bool) -> contextlib.AbstractContextManager[Shown]:
    """What to call while a command works; nothing is shown before `with` and after it.

    Args:
      wanted: no `--quiet` and no `--no-progress`.
    """
    if not wanted or sys.stderr is None:
        return contextlib.nullcontext(_nothing)
    return _Bar() if sys.stderr.isatty() else _Lines()


def _nothing(what: str, done: int = 0, total: int | None = None, more: str = "") -> None:
    """Says nothing."""


class _Bar:
    """A bar on stderr that goes when all is done."""

    def __init__(self) -> None:
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[more]}"),
            TimeElapsedColumn(),
            console=Console(stderr=True, highlight=False),
            transient=True,
        )
        # Nothing is heard of a compilation, which comes first.
        self._task = self._bar.add_task("compiling", total=None, more="")

    def __enter__(self) -> Shown:
        self._bar.start()
        return self._show

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._bar.stop()

    def _show(self, what: str, done: int = 0, total: int | None = None, more: str = "") -> None:
        self._bar.update(self._task, description=what, completed=done, total=total, more=more)


class _Lines:
    """Every `SECONDS` a line on stderr, also while native code runs and nothing is called."""

    def __init__(self) -> None:
        self._line = "compiling"
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._print, daemon=True, name="progress")

    def __enter__(self) -> Shown:
        self._start = time.monotonic()
        self._thread.start()
        return self._show

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._over.set()
        self._thread.join()

    def _show(self, what: str, done: int = 0, total: int | None = None, more: str = "") -> None:
        part = "" if total is None else f" {done:,} of {total:,}"
        self._line = f"{what}{part}" + (f", {more}" if more else "")

    def _print(self) -> None:
        while not self._over.wait(SECONDS):
            spent = time.monotonic() - self._start
            try:
                print(f"swa-jax: {self._line} ({spent:.0f} s)", file=sys.stderr, flush=True)
            except (OSError, ValueError):  # nobody reads stderr any more
                return
