"""The two public trace formats, one line at a time."""

import json
import re
from datetime import UTC, datetime, timedelta
from typing import NamedTuple, NoReturn

import numpy as np

from swa_jax.replay.trace_lines import TraceError, show

MAX_TOKENS = 2**31 - 1
MAX_TIME_MS = 2**53 - 1
MOONCAKE_BLOCK = 512  # tokens of a prompt that one hash id stands for
AZURE_COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
MOONCAKE_KEYS = ("timestamp", "input_length", "output_length", "hash_ids")
_DIGITS = re.compile(r"-?[0-9]{1,19}")
_TIME = re.compile(
    r"(\d{4})-(\d\d)-(\d\d)[ T](\d\d):(\d\d):(\d\d)(?:\.(\d{1,9}))?"
    r"(Z|[+-]\d\d:\d\d)?",
    re.ASCII,
)
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


class Request(NamedTuple):
    """One line: its time in nanoseconds (of any zero), its lengths, its hash ids if it has any."""

    time_ns: int
    prompt_len: int
    output_len: int
    hash_ids: np.ndarray | None


class LineReader:
    """Reads one line of one format; knows the file for its messages."""

    name: str
    block_tokens: int | None

    def __init__(self, file: str) -> None:
        """`file` is the name for the messages."""
        self.file = file

    def read(self, number: int, text: str) -> Request:
        """The request on that line, or `TraceError`."""
        raise NotImplementedError

    def fail(self, number: int, problem: str) -> NoReturn:
        """Raises the error for that line."""
        raise TraceError(self.file, number, problem)

    def length(self, number: int, key: str, value: object, least: int) -> int:
        """A count of tokens."""
        return self.integer(number, key, value, least, MAX_TOKENS, "tokens")

    def integer(
        self, number: int, key: str, value: object, least: int, most: int, unit: str
    ) -> int:
        """`value` if it is an integer in range (a bool is none)."""
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            limit = f"2^{(most + 1).bit_length() - 1} - 1"
            self.fail(
                number,
                f"{key} must be an integer from {least} to {limit} ({unit}), got {show(value)}",
            )
        return value


class MooncakeReader(LineReader):
    """One JSON object a line: timestamp (ms), input_length, output_length, hash_ids."""

    name = "mooncake"
    block_tokens = MOONCAKE_BLOCK

    def read(self, number: int, text: str) -> Request:
        """See `LineReader.read`."""
        record = self._record(number, text)
        time_ms = self.integer(number, "timestamp", record["timestamp"], 0, MAX_TIME_MS, "ms")
        prompt = self.length(number, "input_length", record["input_length"], 1)
        output = self.length(number, "output_length", record["output_length"], 0)
        return Request(time_ms * 10**6, prompt, output, self._ids(number, prompt, record))

    def _record(self, number: int, text: str) -> dict[str, object]:
        try:
            record = json.loads(text)
        except json.JSONDecodeError as error:
            self.fail(number, f"not JSON: {error.msg} at character {error.pos + 1}")
        except (ValueError, RecursionError):  # a number of too many digits, brackets too deep
            self.fail(number, "not JSON that can be read: a number is too long or the nesting deep")
        if not isinstance(record, dict):
            self.fail(number, f"a line must hold one JSON object, got {show(record)}")
        missing = [key for key in MOONCAKE_KEYS if key not in record]
        if missing:
            self.fail(
                number,
                f"missing {', '.join(missing)}; a request has {', '.join(MOONCAKE_KEYS)}, "
                f"got the keys {show(list(record))}",
            )
        return record

    def _ids(self, number: int, prompt: int, record: dict[str, object]) -> np.ndarray:
        ids = record["hash_ids"]
        if not isinstance(ids, list):
            self.fail(number, f"hash_ids must be a list of integers, got {show(ids)}")
        blocks = -(-prompt // MOONCAKE_BLOCK)
        if len(ids) != blocks:
            self.fail(
                number,
                f"hash_ids must have one id for each {MOONCAKE_BLOCK} tokens of the prompt: "
                f"{blocks} for input_length={prompt}, got {len(ids)}",
            )
        for item in ids:
            if type(item) is not int or not 0 <= item < 2**63:
                self.fail(number, f"hash_ids must be integers from 0 to 2^63 - 1, got {show(item)}")
        return np.array(ids, np.int64)


class AzureReader(LineReader):
    """Three columns: date and time, prompt tokens, generated tokens."""

    name = "azure"
    block_tokens = None

    def read(self, number: int, text: str) -> Request:
        """See `LineReader.read`."""
        cells = text.split(",", len(AZURE_COLUMNS))  # one more than wanted is enough to refuse
        if len(cells) != len(AZURE_COLUMNS):
            got = f"{text.count(',') + 1} in {show(text)}"
            self.fail(number, f"need 3 columns, {','.join(AZURE_COLUMNS)}; got {got}")
        time, prompt, output = (cell.strip() for cell in cells)
        return Request(
            self._time_ns(number, time),
            self.length(number, "ContextTokens", _number(prompt), 1),
            self.length(number, "GeneratedTokens", _number(output), 0),
            None,
        )

    def _time_ns(self, number: int, text: str) -> int:
        try:
            return _nanoseconds(text)
        except ValueError:
            self.fail(
                number,
                "TIMESTAMP must be a date and time such as 2023-11-16 18:17:03.9799600, "
                f"got {show(text)}",
            )


def _nanoseconds(text: str) -> int:
    """Nanoseconds since 1970; `ValueError` where the text is no time."""
    match = _TIME.fullmatch(text)
    if match is None:
        raise ValueError(text)
    *fields, fraction, zone = match.groups()
    year, month, day, hour, minute, second = map(int, fields)
    whole = datetime(year, month, day, hour, minute, second, tzinfo=UTC) - _EPOCH
    seconds = whole.days * 86_400 + whole.seconds - _zone_seconds(zone)
    return seconds * 10**9 + int((fraction or "0").ljust(9, "0"))


def _zone_seconds(zone: str | None) -> int:
    """Seconds ahead of UTC; a time without a zone is UTC."""
    if zone is None or zone == "Z":
        return 0
    hours, minutes = int(zone[1:3]), int(zone[4:6])
    if hours > 23 or minutes > 59:
        raise ValueError(zone)
    shift = timedelta(hours=hours, minutes=minutes).seconds
    return -shift if zone[0] == "-" else shift


def _number(cell: str) -> object:
    """The cell as an integer where it is one, otherwise as it stands, for the message."""
    return int(cell) if _DIGITS.fullmatch(cell) else cell


def reader_for(file: str, number: int, text: str) -> tuple[LineReader, bool]:
    """The reader that the first line calls for, and whether that line is only a header."""
    if text.startswith("{"):
        return MooncakeReader(file), False
    columns = tuple(cell.strip().lower() for cell in text[:200].split(","))
    if columns == tuple(name.lower() for name in AZURE_COLUMNS):
        return AzureReader(file), True
    raise TraceError(
        file,
        number,
        "neither of the known formats: a trace starts with a JSON object with the keys "
        f"{', '.join(MOONCAKE_KEYS)} (Mooncake) or with the header {','.join(AZURE_COLUMNS)} "
        f"(Azure), got {show(text)}",
    )
