"""What nobody should send: spoiled files and odd JSON, and a child process with little memory."""

import copy
import json
import os
import resource
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

ROOT = Path(__file__).parent.parent
INT_MAX = 2**31 - 1

ODD_NUMBERS = [0, 1, -1, 2, 7, INT_MAX, 2**31, 2**63, -(2**63), 10**400, 0.5, -0.0, 1e308, 1e-308]
ODD_TEXTS = [
    "",
    "x",
    "a\nb",
    "\0",
    "é" * 300,
    "../../etc/passwd",
    "/dev/zero",
    "x" * 3000,
    "\ud800",
]
SCALARS = st.sampled_from(
    [None, True, False, float("nan"), float("inf"), *ODD_NUMBERS, *ODD_TEXTS]
) | st.integers(-(2**64), 2**64)
JSON = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(
            st.sampled_from([*ODD_TEXTS[:4], "type", "shape", "a"]), inner, max_size=3
        )
    ),
    max_leaves=6,
)


@st.composite
def spoiled(draw: st.DrawFn, content: bytes, most_edits: int = 3) -> bytes:
    """The content with a few edits: bytes changed, put in, cut out, repeated, the end cut off."""
    for _ in range(draw(st.integers(1, most_edits))):
        at = draw(st.integers(0, len(content)))
        length = draw(st.sampled_from([1, 1, 2, 8, 64]))
        new = draw(
            st.binary(max_size=length) | st.sampled_from([b"\xff" * 8, b"\0" * 8, b"[" * 64])
        )
        kind = draw(st.integers(0, 4))
        if kind == 0:
            content = content[:at] + new + content[at + len(new) :]
        elif kind == 1:
            content = content[:at] + new + content[at:]
        elif kind == 2:
            content = content[:at] + content[at + length :]
        elif kind == 3:
            content = content[:at] + content[at : at + length] + content[at:]
        else:
            content = content[:at]
    return content


@st.composite
def changed(draw: st.DrawFn, value: Any, names: tuple[str, ...] = ("a",)) -> Any:
    """Plain data with one to three places in it changed, removed or put in.

    `names` are keys that may be put in.
    """
    value = copy.deepcopy(value)
    for _ in range(draw(st.integers(1, 3))):
        holder = value
        while True:
            keys = list(holder) if isinstance(holder, dict) else list(range(len(holder)))
            if not keys:
                break
            key = draw(st.sampled_from(keys))
            if isinstance(holder[key], (dict, list)) and holder[key] and draw(st.booleans()):
                holder = holder[key]
                continue
            kind = draw(st.integers(0, 3))
            if kind < 2:
                holder[key] = draw(JSON)
            elif kind == 2:
                del holder[key]
            elif isinstance(holder, dict):
                holder[draw(st.sampled_from(names))] = draw(JSON)
            break
    return value


def as_text(value: Any) -> bytes:
    """JSON as Python writes it, NaN, halves of characters and all."""
    return json.dumps(value).encode("utf-8", "surrogatepass")


def is_plain(error: BaseException, most: int = 1000) -> bool:
    """Whether its message can be shown as it is: one line, of some length, that says something."""
    text = str(error)
    return 0 < len(text) <= most and len(text.splitlines()) == 1


def in_child(program: str, *arguments: str, more_mib: int) -> subprocess.CompletedProcess[str]:
    """Runs a program that may take `more_mib` of memory beyond what its imports take.

    The program calls `limit()` once it has imported what it needs.
    """
    head = f"""
import resource, sys
def limit():
    pages = int(open("/proc/self/statm").read().split()[0])
    most = pages * resource.getpagesize() + {more_mib} * 2**20
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
"""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    return subprocess.run(
        [sys.executable, "-c", head + program, *arguments],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def peak_mib() -> float:
    """The most memory that this process has had."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10


SEEN: Counter[tuple[str, str]] = Counter()  # how often a reader gave what
WORST: dict[str, float] = {}  # the longest that a reader took, seconds


def outcome(reader: str, call: Callable[[], Any], *documented: type[BaseException]) -> Any:
    """What a reader gives, or None where it raises an error that its documentation names.

    Any other error goes on to the test; so does a message that cannot be shown as it is.
    """
    start, found = time.monotonic(), None
    try:
        result = call()
    except documented as error:
        result, found = None, error
    SEEN[reader, "accepted" if found is None else type(found).__name__] += 1
    WORST[reader] = max(WORST.get(reader, 0.0), time.monotonic() - start)
    assert found is None or is_plain(found), (reader, type(found), str(found)[:2000])
    return result
