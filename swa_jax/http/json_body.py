"""The JSON of a request: read with a limit, its values checked one by one."""

import json
import math
from typing import Any, NoReturn

import numpy as np
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request

from swa_jax.http.errors import ApiError, bad_value
from swa_jax.replay.trace_lines import show

MOST_BYTES = 32 * 2**20
# A body takes many times its length where a few bytes make a list (sixty bytes) or a short text
# (eighty). A batch of prompts has one list for each of them, and a value for each token.
MOST_LISTS, MOST_VALUES = 2**16, 2**21


async def read_object(request: Request) -> dict[str, Any]:
    """The body, a JSON object in UTF-8.

    Raises:
      ApiError: it is none, too long, or of too many lists, objects or values.
    """
    content = bytearray()
    async for part in request.stream():
        content += part
        if len(content) > MOST_BYTES:
            raise ApiError(413, f"the body must be at most {MOST_BYTES} bytes")
    return await run_in_threadpool(_parsed, content)  # a long one takes its time


def _parsed(content: bytearray) -> dict[str, Any]:
    lists, values = _outside_of_text(content)
    if lists > MOST_LISTS:
        raise ApiError(413, f"the body must have at most {MOST_LISTS} lists and objects")
    if values > MOST_VALUES:
        raise ApiError(413, f"the body must have at most {MOST_VALUES} values")
    try:
        body = json.loads(content.decode(), parse_constant=_no_number)
    except (ValueError, RecursionError) as error:
        why = str(error).partition(";")[0]  # past it Python advises the server, not the client
        raise ApiError(400, f"the body is not JSON: {why}") from None
    if not isinstance(body, dict):
        raise ApiError(400, f"the body must be a JSON object, got {show(body)}")
    return body


def _outside_of_text(content: bytearray) -> tuple[int, int]:
    """Lists and objects that begin in a body, and values; exact where there are too many."""
    lists, values = content.count(b"[") + content.count(b"{"), content.count(b",")
    if lists <= MOST_LISTS and values <= MOST_VALUES:
        return lists, values
    # Prose and code have brackets too. With what is escaped gone, every quote begins or ends text.
    plain = content.replace(b"\\\\", b"").replace(b'\\"', b"")
    letters = np.frombuffer(plain, np.uint8)
    begins = (letters == ord("[")) | (letters == ord("{"))
    in_string = np.logical_xor.accumulate(letters == ord('"'))
    commas = (letters == ord(",")) & ~in_string
    return int(np.count_nonzero(begins & ~in_string)), int(np.count_nonzero(commas))


def _no_number(text: str) -> NoReturn:
    raise ValueError(f"{text} is no JSON number")


class Fields:
    """Takes one field after the other out of an object; null is as if it were not there.

    Args:
      body: the object.
    """

    def __init__(self, body: dict[str, Any]) -> None:
        """Nothing has been taken yet."""
        self._left = {name: value for name, value in body.items() if value is not None}

    def take(self, name: str, default: object = None) -> Any:  # noqa: ANN401 - any JSON value
        """The value as it is."""
        return self._left.pop(name, default)

    def boolean(self, name: str) -> bool:
        """True or false; false where it is not there."""
        value = self.take(name, False)
        if not isinstance(value, bool):
            raise bad_value(name, f"must be true or false, got {show(value)}")
        return value

    def integer(self, name: str, default: int, least: int, most: int | None = None) -> int:
        """An integer between bounds."""
        value = self.take(name, default)
        above = most is not None and is_integer(value) and value > most
        if not is_integer(value) or value < least or above:
            bounds = f"at least {least}" if most is None else f"from {least} to {most}"
            raise bad_value(name, f"must be an integer {bounds}, got {show(value)}")
        return value

    def number(self, name: str, default: float, most: float) -> float:
        """A number from 0 to `most`."""
        value = self.take(name, default)
        good = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not good or not 0 <= value <= most or not math.isfinite(value):
            raise bad_value(name, f"must be a number from 0 to {most:g}, got {show(value)}")
        return float(value)

    def left(self) -> list[str]:
        """Names that nobody has asked for."""
        return list(self._left)


def is_integer(value: object) -> bool:
    """JSON's true is no number, though Python's is."""
    return isinstance(value, int) and not isinstance(value, bool)


def is_text(value: object) -> bool:
    """A string of characters: JSON can also name halves of a character."""
    if not isinstance(value, str):
        return False
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True
