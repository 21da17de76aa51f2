"""Lines of a text file that nobody vouches for: bounded, UTF-8, numbered."""

from collections.abc import Iterator
from typing import IO

MAX_LINE_BYTES = 4 * 2**20  # hash ids for a prompt of more than 100 million tokens
_BOM = b"\xef\xbb\xbf"
_PACKED = {b"\x1f\x8b": "gzip", b"PK\x03\x04": "zip", b"\x28\xb5\x2f\xfd": "zstd"}


class TraceError(ValueError):
    """A trace that cannot be used. One message: file, line, what is wrong and what would be right.

    Attributes:
      file: the trace's name as it was given.
      line: the line, counted from 1; None where the fault is the file's.
    """

    def __init__(self, file: str, line: int | None, problem: str) -> None:
        """`problem` says what is wrong, what would be right and the value seen."""
        shown = file if file.isprintable() and len(file) <= 200 else repr(file[:200])
        where = shown if line is None else f"{shown}, line {line}"
        super().__init__(f"{where}: {problem}")
        self.file = file
        self.line = line


def show(value: object) -> str:
    """`value` for a message: on one line, not longer than is of use."""
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # an int of too many digits, a list too deep
        text = f"an integer of {value.bit_length()} bits" if isinstance(value, int) else "a value"
    return text if len(text) <= 80 else text[:77] + "..."


def numbered_lines(stream: IO[bytes], file: str) -> Iterator[tuple[int, str]]:
    """Number and text of each line that is not blank, without its ending.

    At most one line is held at a time, and none longer than `MAX_LINE_BYTES`.
    """
    number = 0
    while raw := stream.readline(MAX_LINE_BYTES + 1):
        number += 1
        if len(raw) > MAX_LINE_BYTES:
            raise TraceError(
                file, number, f"the line is longer than the {MAX_LINE_BYTES // 2**20} MiB allowed"
            )
        if number == 1:
            raw = _without_bom(raw, file)
        text = _decoded(raw, file, number).strip(" \t\r\n")
        if text:
            yield number, text


def _without_bom(raw: bytes, file: str) -> bytes:
    for magic, kind in _PACKED.items():
        if raw.startswith(magic):
            raise TraceError(file, None, f"this is a {kind} file; unpack it first")
    return raw.removeprefix(_BOM)


def _decoded(raw: bytes, file: str, number: int) -> str:
    zero = raw.find(b"\0")
    if zero >= 0:
        raise TraceError(
            file,
            number,
            f"not a text file: byte {zero + 1} of the line is zero; need UTF-8 text",
        )
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise TraceError(
            file,
            number,
            f"not UTF-8: byte {error.start + 1} of the line is 0x{raw[error.start]:02x}; "
            "save the file as UTF-8",
        ) from None
