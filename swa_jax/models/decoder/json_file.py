"""JSON files of a checkpoint that nobody vouches for: bounded, and an object at the top."""

import json
import stat
from pathlib import Path
from typing import Any

MAX_CONFIG_BYTES = 2**20  # published ones take a few thousand
MAX_INDEX_BYTES = 2**24  # names of about a hundred thousand tensors


def read_object(path: Path, most: int) -> dict[str, Any]:
    """The object that a JSON file holds.

    Args:
      path: the file. Only a regular one is read: a pipe would wait, a device never end.
      most: bytes that it may have; the rest is not read.

    Raises:
      FileNotFoundError: it is not there.
      ValueError: it cannot be read, is longer, or is no JSON object.
    """
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            raise ValueError(f"{path} must be a file with a JSON object; it is no regular file")
        with path.open("rb") as stream:
            content = stream.read(most + 1)
    except FileNotFoundError:
        raise FileNotFoundError(
            f"a checkpoint needs {path.name}; there is none in {path.parent}"
        ) from None
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror or error}") from None
    if len(content) > most:
        raise ValueError(f"{path} must be at most {most} bytes")
    try:
        found = json.loads(content.decode("utf-8"))
    except RecursionError:
        raise ValueError(f"{path} is not JSON that can be read: it is nested too deep") from None
    except ValueError as error:
        why = str(error).partition(";")[0]  # past it Python gives advice on its own limits
        raise ValueError(f"{path} is not JSON: {why}") from None
    if not isinstance(found, dict):
        raise ValueError(f"{path} must hold a JSON object, got {type(found).__name__}")
    return found
