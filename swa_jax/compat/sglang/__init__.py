"""The KV-slot allocators of sglang's interface (0.5.23), over the pure core, without torch.

Same constructors and methods, NumPy int64 in and out; a torch tensor on the CPU is taken as well.
"""

from swa_jax.compat.common.errors import MisuseError
from swa_jax.compat.common.registering import register_classes
from swa_jax.compat.sglang.base import BaseTokenToKVPoolAllocator
from swa_jax.compat.sglang.one_pool import PagedTokenToKVPoolAllocator, TokenToKVPoolAllocator
from swa_jax.compat.sglang.swa import (
    PureSWATokenToKVPoolAllocator,
    SWATokenToKVPoolAllocator,
    is_swa_req_ring,
)

__all__ = [
    "BaseTokenToKVPoolAllocator",
    "MisuseError",
    "PagedTokenToKVPoolAllocator",
    "PureSWATokenToKVPoolAllocator",
    "SWATokenToKVPoolAllocator",
    "TokenToKVPoolAllocator",
    "is_swa_req_ring",
    "register_classes",
]
