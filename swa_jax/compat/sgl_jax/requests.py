"""What the radix cache reads and writes of an engine's objects, and nothing else."""

from typing import Protocol

import numpy as np

from swa_jax.compat.sgl_jax.tree_node import TreeNode


class ReqToTokenPool(Protocol):
    """The slots of each request's tokens, a row a request."""

    req_to_token: np.ndarray  # int[R, C]

    def write(self, indices: tuple[int, slice], values: np.ndarray) -> None:
        """Writes a piece of a row."""
        ...


class Request(Protocol):
    """A request of an engine."""

    origin_input_ids: list[int]
    output_ids: list[int]
    fill_ids: list[int]  # tokens whose KV is computed, of a request that goes on
    extra_key: str | None
    dp_rank: int | None
    req_pool_idx: int  # its row
    last_node: TreeNode | None  # what it has locked
    swa_uuid_for_lock: int | None  # and the number of that lock
    prefix_indices: np.ndarray  # int32[n] slots of all that it holds
    last_matched_prefix_len: int
    cache_protected_len: int  # tokens at its beginning that stand on the tree's slots
    swa_evicted_seqlen: int  # tokens below which its own SWA slots are given up

    def pop_committed_kv_cache(self) -> int:
        """Tokens whose KV it holds; it is asked once."""
        ...
