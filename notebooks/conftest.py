"""Settings for the kernels that run the notebooks: they compile as the tests do."""

import os
from collections.abc import Generator
from pathlib import Path
from unittest import mock

import pytest

ROOT = Path(__file__).parent.parent
# Looked at for docstring examples it would be taken for the conftest of the tests.
collect_ignore = ["conftest.py"]
# Kernels are processes of their own, so they read the environment and not what the tests have set.
KERNELS = {
    "JAX_COMPILATION_CACHE_DIR": str(ROOT / ".pytest_cache" / "jax-notebooks"),
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
    "JAX_PLATFORMS": os.environ.get("JAX_PLATFORMS", "cpu"),
}


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol() -> Generator[None, object, object]:
    """Asked for the items of this folder alone."""
    with mock.patch.dict(os.environ, KERNELS):
        return (yield)
