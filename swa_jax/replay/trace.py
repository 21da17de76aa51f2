"""Request traces: who arrives when, with how long a prompt, and how much is generated.

Two public formats are read, told apart by their first line: Mooncake (JSON lines, with a hash id
for each 512-token block of the prompt) and Azure (CSV, lengths only).
"""

import dataclasses
import difflib
import operator
import os
import stat
from contextlib import closing
from pathlib import Path
from typing import IO

import numpy as np

from swa_jax.choices import MAX_REQUESTS
from swa_jax.replay.bundled import BUNDLED, bundled_file
from swa_jax.replay.trace_formats import LineReader, Request, reader_for
from swa_jax.replay.trace_lines import TraceError, numbered_lines, show

__all__ = ("Trace", "TraceError", "load_trace")

# A trace is held in memory; this and MAX_REQUESTS bound it, to about 1 GB.
MAX_HASH_IDS = 50_000_000


@dataclasses.dataclass(frozen=True, eq=False)
class Trace:
    """N requests in order of arrival; those of one moment in the order of the file.

    A request with `output_lens` 0 is legal: it completes when its prompt is prefilled and decodes
    nothing. A prompt has at least one token. The arrays are read-only.

    Args:
      name: the file's name, or the bundled trace's.
      source_format: "mooncake" or "azure".
      arrival_ms: int64[N] milliseconds since the first request, rounded down.
      prompt_lens: int32[N] tokens of each prompt.
      output_lens: int32[N] tokens generated for each.
      hash_ids: int64[blocks] for each request: one id for each `block_tokens` of its prompt, the
        last block may be partial; equal ids mean an equal prompt up to and with that block. None
        where the format has no such thing.
      block_tokens: tokens that an id stands for, None without ids.
    """

    name: str
    source_format: str
    arrival_ms: np.ndarray
    prompt_lens: np.ndarray
    output_lens: np.ndarray
    hash_ids: tuple[np.ndarray, ...] | None
    block_tokens: int | None

    def __len__(self) -> int:
        return len(self.arrival_ms)


def load_trace(source: str | os.PathLike[str], limit: int | None = None) -> Trace:
    """Reads a trace file, or the bundled trace of that name.

    Args:
      source: a path, or "mooncake-conversation" (write ./mooncake-conversation for a file).
      limit: the number of requests to take from the start of the file; the rest is not looked at.

    Raises:
      TraceError: the file is missing, cannot be read, or is no trace.
      ValueError: `limit` is no positive integer.

    Example:
      >>> trace = load_trace("mooncake-conversation", limit=3)
      >>> trace.prompt_lens.tolist(), trace.hash_ids[0][:3].tolist()
      ([6758, 7322, 7236], [0, 1, 2])
    """
    most = MAX_REQUESTS if limit is None else _checked_limit(limit)
    if isinstance(source, str) and not source:
        raise TraceError("''", None, "an empty name; give a file or a bundled trace's name")
    if isinstance(source, str) and source in BUNDLED:
        with bundled_file(source).open("rb") as stream:
            return _read(stream, source, source, most, limited=limit is not None)
    try:
        file = os.fspath(source)
    except TypeError:
        file = None
    if not isinstance(file, str):
        raise TraceError(repr(source)[:200], None, f"need a path or a name: {_names()}")
    with closing(_opened(file)) as stream:
        return _read(stream, file, Path(file).stem, most, limited=limit is not None)


def _checked_limit(limit: object) -> int:
    try:
        number = 0 if isinstance(limit, bool) else operator.index(limit)  # type: ignore[arg-type]
    except TypeError:
        number = 0
    if not 1 <= number <= MAX_REQUESTS:
        raise ValueError(
            f"limit must be None or an integer from 1 to {MAX_REQUESTS}, got {show(limit)}"
        )
    return number


def _names() -> str:
    return f"bundled: {', '.join(BUNDLED)}"


def _opened(file: str) -> IO[bytes]:
    """The file for reading. Only a regular file: a pipe would wait, a device never end."""
    try:
        mode = Path(file).stat().st_mode
        if stat.S_ISDIR(mode):
            raise TraceError(file, None, "this is a directory; name the trace file in it")
        if not stat.S_ISREG(mode):
            raise TraceError(file, None, "not a regular file; save the trace to a file first")
        return Path(file).open("rb")
    except FileNotFoundError:
        close = difflib.get_close_matches(file[:80], BUNDLED, n=1)
        hint = f"; did you mean {close[0]!r}?" if close else f" ({_names()})"
        raise TraceError(file, None, f"no such file{hint}") from None
    except OSError as error:
        raise TraceError(file, None, f"cannot be read: {error.strerror or error}") from None
    except TraceError:
        raise
    except ValueError as error:  # a path with a zero byte or a lone surrogate
        raise TraceError(file, None, f"not a path: {error}") from None


def _read(stream: IO[bytes], file: str, name: str, most: int, *, limited: bool) -> Trace:
    reader: LineReader | None = None
    requests: list[Request] = []
    total_ids = 0
    try:
        for number, text in numbered_lines(stream, file):
            if reader is None:
                reader, header_only = reader_for(file, number, text)
                if header_only:
                    continue
            if len(requests) == most and not limited:
                reader.fail(number, f"more than the {most} requests allowed; give a limit")
            request = reader.read(number, text)
            total_ids += 0 if request.hash_ids is None else len(request.hash_ids)
            if total_ids > MAX_HASH_IDS:
                reader.fail(number, f"more than the {MAX_HASH_IDS} hash ids allowed; give a limit")
            requests.append(request)
            if limited and len(requests) == most:
                break
    except OSError as error:
        raise TraceError(file, None, f"cannot be read: {error.strerror or error}") from None
    if reader is None:
        raise TraceError(file, None, "the file is empty; a trace has at least one request")
    if not requests:
        raise TraceError(file, None, "the file has a header but no request")
    return _trace(name, reader, requests)


def _trace(name: str, reader: LineReader, requests: list[Request]) -> Trace:
    requests.sort(key=lambda request: request.time_ns)  # stable
    first = requests[0].time_ns
    ids = tuple(request.hash_ids for request in requests if request.hash_ids is not None)
    trace = Trace(
        name=name,
        source_format=reader.name,
        arrival_ms=np.array([(r.time_ns - first) // 10**6 for r in requests], np.int64),
        prompt_lens=np.array([request.prompt_len for request in requests], np.int32),
        output_lens=np.array([request.output_len for request in requests], np.int32),
        hash_ids=ids if reader.block_tokens is not None else None,
        block_tokens=reader.block_tokens,
    )
    for array in (trace.arrival_ms, trace.prompt_lens, trace.output_lens, *ids):
        array.setflags(write=False)
    return trace
