"""What a caller may pass, as far as it is known before tracing."""

import numpy as np

from swa_jax.inputs import Ints
from swa_jax.prefix_cache.tree import PrefixCache
from swa_jax.state import AllocatorState


def check_pair(cache: PrefixCache, state: AllocatorState) -> None:
    """A tree stands beside an allocator with its own configuration, and no other."""
    if not isinstance(cache, PrefixCache) or not isinstance(state, AllocatorState):
        raise ValueError(
            "expected a PrefixCache and an AllocatorState, in this order, got "
            f"{type(cache).__name__} and {type(state).__name__}"
        )
    if cache.config.pool != state.config:
        raise ValueError(
            "cache and state must have one configuration, got a cache of "
            f"{cache.config.pool} and a state of {state.config}"
        )


def host_tokens(tokens: Ints) -> np.ndarray:
    """int32[T] tokens for work on the host; ValueError for what is no such row."""
    row = np.asarray(tokens)
    if row.ndim != 1 or (row.size and row.dtype.kind not in "iu"):
        raise ValueError(f"tokens must be one row of integers, got {row.dtype}{list(row.shape)}")
    if row.size and not -(2**31) <= int(row.min()) <= int(row.max()) < 2**31:
        raise ValueError(f"tokens must fit int32, got values from {row.min()} to {row.max()}")
    return row.astype(np.int32)
