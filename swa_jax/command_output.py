"""What the commands print, and the errors that are the user's to mend. Needs typer and rich."""

import contextlib
import sys
from collections.abc import Iterator
from typing import TextIO

from rich.console import Console, RenderableType

from swa_jax.replay.pool_options import in_option_names


class InputError(Exception):
    """The user must change something; the message says what."""

    def format_message(self) -> str:
        """As the errors of typer have it."""
        return str(self)


@contextlib.contextmanager
def bad_input() -> Iterator[None]:
    """A ValueError in here is the user's to mend."""
    try:
        yield
    except ValueError as error:
        raise InputError(in_option_names(error)) from None


class _Console(Console):
    """Rich would end the process where nobody reads any more; `swa_jax.cli.main` does that."""

    def on_broken_pipe(self) -> None:
        """Called for a BrokenPipeError."""
        raise BrokenPipeError


@contextlib.contextmanager
def _output() -> Iterator[None]:
    """Typer too would end the process, where it sees the error's number."""
    try:
        yield
    except BrokenPipeError:
        raise BrokenPipeError from None


def show(*parts: RenderableType, stream: TextIO | None = None) -> None:
    """Prints tables and lines, in colour on a terminal."""
    console = _Console(file=stream or sys.stdout, highlight=False, markup=False)
    with _output():
        for part in parts:
            console.print(part, soft_wrap=isinstance(part, str))


def emit(text: str, stream: TextIO | None = None) -> None:
    """Writes it as it is, at once."""
    with _output():
        print(text, end="", file=stream, flush=True)
