"""A host tier under the prefix cache: pages that leave the device's memory and come back.

`HostedServing` is imported where it is asked for: it brings the serving loop with it, which the
tier alone does without.
"""

from typing import TYPE_CHECKING

from swa_jax.host_cache.config import HostConfig
from swa_jax.host_cache.file_storage import FileStorage
from swa_jax.host_cache.index import HostIndex, Pin, Placed, Usable
from swa_jax.host_cache.memory import NumpyMemory
from swa_jax.host_cache.mirror import token_keys
from swa_jax.host_cache.pinned import PinnedMemory
from swa_jax.host_cache.plan import plan_host
from swa_jax.host_cache.results import Matched, Restored
from swa_jax.host_cache.storage import (
    MemoryStorage,
    PageKey,
    Storage,
    kv_fingerprint,
    page_keys,
)
from swa_jax.host_cache.storage_worker import StorageWorker
from swa_jax.host_cache.tier import HostCache

if TYPE_CHECKING:
    from swa_jax.host_cache.hosted import HostedServing

__all__ = (
    "FileStorage",
    "HostCache",
    "HostConfig",
    "HostIndex",
    "HostedServing",
    "Matched",
    "MemoryStorage",
    "NumpyMemory",
    "PageKey",
    "Pin",
    "PinnedMemory",
    "Placed",
    "Restored",
    "Storage",
    "StorageWorker",
    "Usable",
    "kv_fingerprint",
    "page_keys",
    "plan_host",
    "token_keys",
)


def __getattr__(name: str) -> object:
    if name == "HostedServing":
        from swa_jax.host_cache.hosted import HostedServing

        return HostedServing
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
