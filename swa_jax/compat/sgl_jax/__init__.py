"""The KV-slot allocators and the prefix cache of sglang-jax's interface, over the pure core.

Same constructors, methods and host types; what is behind them is one immutable state a rank and
the compiled calls of `swa_jax`.
"""

from swa_jax.compat.common.errors import MisuseError
from swa_jax.compat.common.registering import register_classes
from swa_jax.compat.sgl_jax.base import BaseTokenToKVPoolAllocator
from swa_jax.compat.sgl_jax.keys import RadixKey
from swa_jax.compat.sgl_jax.one_pool import PagedTokenToKVPoolAllocator, TokenToKVPoolAllocator
from swa_jax.compat.sgl_jax.params import (
    DecLockRefParams,
    EvictParams,
    EvictResult,
    IncLockRefResult,
    InsertParams,
    MatchPrefixParams,
    MatchResult,
)
from swa_jax.compat.sgl_jax.radix_cache import SWARadixCache
from swa_jax.compat.sgl_jax.swa import PureSWATokenToKVPoolAllocator, SWATokenToKVPoolAllocator
from swa_jax.compat.sgl_jax.tree_node import TreeNode

__all__ = [
    "BaseTokenToKVPoolAllocator",
    "DecLockRefParams",
    "EvictParams",
    "EvictResult",
    "IncLockRefResult",
    "InsertParams",
    "MatchPrefixParams",
    "MatchResult",
    "MisuseError",
    "PagedTokenToKVPoolAllocator",
    "PureSWATokenToKVPoolAllocator",
    "RadixKey",
    "SWARadixCache",
    "SWATokenToKVPoolAllocator",
    "TokenToKVPoolAllocator",
    "TreeNode",
    "register_classes",
]
