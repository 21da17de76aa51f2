"""One line of the report."""

import time
from collections.abc import Callable
from dataclasses import dataclass

PASSED, NOTE, FAILED = "ok", "note", "failed"


@dataclass(frozen=True)
class Finding:
    """What was seen of one thing.

    Attributes:
      group: heading it stands under.
      name: of the thing.
      status: PASSED, NOTE (works, but the reader should know) or FAILED (swa_jax cannot be relied
        on here).
      text: what was seen, and what to do where that is not enough.
    """

    group: str
    name: str
    status: str
    text: str


def tried(group: str, name: str, work: Callable[[], str]) -> Finding:
    """PASSED with what `work` says and the seconds it took; FAILED with the error if it raises."""
    start = time.perf_counter()
    try:
        text = work()
    except Exception as error:
        message = " ".join(str(error).split())
        return Finding(group, name, FAILED, f"{type(error).__name__}: {message[:300]}")
    return Finding(group, name, PASSED, f"{text} ({time.perf_counter() - start:.1f} s)")
