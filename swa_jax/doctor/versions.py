"""Are the packages of versions that swa_jax is tested with?"""

import platform
import re
from collections.abc import Iterator

import jax
import numpy as np
from jaxlib.version import __version__ as jaxlib_version

from swa_jax import supported
from swa_jax.doctor.finding import FAILED, NOTE, PASSED, Finding

_GROUP = "versions"


def version_findings() -> Iterator[Finding]:
    """Python, jax, jaxlib and numpy."""
    yield compare("python", platform.python_version(), *supported.PYTHON)
    yield compare("jax", jax.__version__, *supported.JAX)
    yield compare("jaxlib", jaxlib_version, *supported.JAX)
    yield compare("numpy", np.__version__, *supported.NUMPY)


def compare(name: str, seen: str, oldest: str, newest: str | None) -> Finding:
    """One version beside the oldest and the newest that are tested.

    Args:
      name: of the package, as pip knows it.
      seen: what is installed.
      oldest: that is supported.
      newest: that was tested; None where nothing newer has been a trouble.
    """
    if numbers(seen) < numbers(oldest):
        how = "install a newer Python" if name == "python" else f'pip install "{name}>={oldest}"'
        return Finding(_GROUP, name, FAILED, f"{seen}; {oldest} is the oldest supported: {how}")
    # 3.13.2 is no newer than 3.13.
    if newest is not None and numbers(seen)[: len(numbers(newest))] > numbers(newest):
        return Finding(_GROUP, name, NOTE, f"{seen}, newer than any that was tested ({newest})")
    return Finding(_GROUP, name, PASSED, seen)


def numbers(version: str) -> tuple[int, ...]:
    """The leading numbers of a version, to compare: (0, 10, 2) of "0.10.2.dev3"."""
    found = re.match(r"\d+(\.\d+)*", version)
    return tuple(int(part) for part in found[0].split(".")) if found else ()
