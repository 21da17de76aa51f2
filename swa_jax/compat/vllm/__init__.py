"""vLLM's KV cache manager and block pool, as views over the core's pools and its prefix tree.

A block is a page. A group of full-attention layers sees the full pages of a request, a group of
sliding-window layers their SWA sides, and the null block (id 0) stands where a window has left one
behind. Each group has a pool of its own, so an id means another block in another group.

What is cached lives in the tree: blocks that no request uses stay there and are evicted when an
allocation is short, least recently used first and the end of a text before its start.
"""

from swa_jax.compat.vllm.block_pool import BlockPool
from swa_jax.compat.vllm.blocks import FreeBlocks, KVCacheBlock, KVCacheBlocks
from swa_jax.compat.vllm.config import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    SlidingWindowSpec,
)
from swa_jax.compat.vllm.manager import KVCacheManager
from swa_jax.compat.vllm.stats import PrefixCacheStats

__all__ = [
    "BlockPool",
    "FreeBlocks",
    "FullAttentionSpec",
    "KVCacheBlock",
    "KVCacheBlocks",
    "KVCacheConfig",
    "KVCacheGroupSpec",
    "KVCacheManager",
    "PrefixCacheStats",
    "SlidingWindowSpec",
]
