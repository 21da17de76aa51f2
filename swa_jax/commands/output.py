"""What the commands print and write, and the errors that are the user's to mend.

Needs typer and rich. JAX is only loaded where an error has to be told in the options' words.
"""

import contextlib
import importlib
import sys
from collections.abc import Iterator
from typing import TextIO

from rich.console import Console, RenderableType

from swa_jax.json_output import JsonOutput, emit, reader_may_be_gone

__all__ = ("InputError", "JsonOutput", "bad_input", "emit", "need", "show")

# Columns of a table that goes to a file: beyond the first it is broken where words end.
_ENOUGH, _WIDEST = 120, 1000


class InputError(Exception):
    """The user must change something; the message says what."""

    def format_message(self) -> str:
        """As the errors of typer have it."""
        return str(self)


@contextlib.contextmanager
def bad_input(*, sizes_are_options: bool = True) -> Iterator[None]:
    """A ValueError in here is the user's to mend.

    Args:
      sizes_are_options: names of a pool's sizes are said as the options that set them.
    """
    try:
        yield
    except ValueError as error:
        if not sizes_are_options:
            raise InputError(str(error)) from None
        from swa_jax.replay.pool_options import in_option_names

        raise InputError(in_option_names(error)) from None


def need(command: str, *packages: str, extra: str) -> None:
    """Refuses to go on without these packages, and says what brings them.

    Args:
      command: what needs them, as the user called it.
      *packages: names that are imported.
      extra: of swa-jax, that has them.
    """
    for package in packages:
        try:
            importlib.import_module(package)
        except ModuleNotFoundError as error:
            raise InputError(
                f'{command} needs {error.name}: pip install "swa-jax[{extra}]"'
            ) from None


class _Console(Console):
    """Rich would end the process where nobody reads any more; `swa_jax.cli.main` does that."""

    def on_broken_pipe(self) -> None:
        """Called for a BrokenPipeError."""
        raise BrokenPipeError


def show(*parts: RenderableType, stream: TextIO | None = None) -> None:
    """Prints tables and lines, in colour on a terminal; elsewhere so wide that nothing is cut."""
    console = _Console(file=stream or sys.stdout, highlight=False, markup=False)
    with reader_may_be_gone():
        for part in parts:
            if isinstance(part, str):
                console.print(part, soft_wrap=True)
                continue
            if not console.is_terminal:
                needed = console.measure(part, options=console.options.update(width=_WIDEST))
                console.width = max(console.width, needed.minimum, min(needed.maximum, _ENOUGH))
            console.print(part)
