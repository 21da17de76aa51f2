"""A radix cache whose nodes are full pages: prefixes that requests share, on the device."""

from swa_jax.choices import POLICIES
from swa_jax.prefix_cache.batch import (
    insert_batch,
    lock_batch,
    match_prefix_batch,
    unlock_batch,
)
from swa_jax.prefix_cache.check import check, invariants
from swa_jax.prefix_cache.evict import Evicted, evict
from swa_jax.prefix_cache.insert import Inserted, insert
from swa_jax.prefix_cache.locks import lock, release_swa_lock, unlock
from swa_jax.prefix_cache.match import Match, match_prefix
from swa_jax.prefix_cache.receipts import Receipt, no_receipt
from swa_jax.prefix_cache.sizes import (
    full_evictable_size,
    full_protected_size,
    swa_evictable_size,
    swa_protected_size,
)
from swa_jax.prefix_cache.tree import CacheConfig, PrefixCache, init, reset

__all__ = [
    "POLICIES",
    "CacheConfig",
    "Evicted",
    "Inserted",
    "Match",
    "PrefixCache",
    "Receipt",
    "check",
    "evict",
    "full_evictable_size",
    "full_protected_size",
    "init",
    "insert",
    "insert_batch",
    "invariants",
    "lock",
    "lock_batch",
    "match_prefix",
    "match_prefix_batch",
    "no_receipt",
    "release_swa_lock",
    "reset",
    "swa_evictable_size",
    "swa_protected_size",
    "unlock",
    "unlock_batch",
]
