"""Text and JSON as the commands write them: to stdout, or to a file that is checked beforehand."""

import contextlib
import json
import sys
from collections.abc import Iterator, Mapping
from typing import TextIO

from swa_jax.replay.outfile import OutFile

STDOUT = "-"


class JsonOutput:
    """Where `--json` goes: nowhere, to a file, or to stdout, which then holds nothing else.

    Attributes:
      to_stdout: nothing else may be printed there.
      stream: where tables and lines go meanwhile.
      file: None where there is no file to write.
    """

    def __init__(self, name: str | None, reads: Mapping[str, str] | None = None) -> None:
        """Checked before the work begins.

        Args:
          name: what `--json` was given.
          reads: files that the command reads, by what they are to the user.

        Raises:
          ValueError: a file that cannot be written, or must not be.
        """
        self.to_stdout = name == STDOUT
        self.stream = sys.stderr if self.to_stdout else sys.stdout
        self.file = None if name is None or self.to_stdout else OutFile("--json", name)
        for what, read in (reads or {}).items():
            if self.file is not None and self.file.replaced and self.file.same_file(read):
                raise ValueError(f"--json would overwrite {what} {read}; name another file")

    def write(self, figures: object) -> None:
        """Writes plain data."""
        text = json.dumps(figures, indent=2, allow_nan=False) + "\n"
        if self.to_stdout:
            emit(text)
        elif self.file is not None:
            self.file.write(text.encode())


@contextlib.contextmanager
def reader_may_be_gone() -> Iterator[None]:
    """Typer too would end the process, where it sees the error's number."""
    try:
        yield
    except BrokenPipeError:
        raise BrokenPipeError from None


def emit(text: str, stream: TextIO | None = None) -> None:
    """Writes it as it is, at once."""
    with reader_may_be_gone():
        print(text, end="", file=stream, flush=True)
