"""What goes into the radix cache's calls and what comes out of them.

Field by field as in sglang-jax, whose own objects do as well: only the fields are read.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from swa_jax.compat.sgl_jax.keys import KeyLike
from swa_jax.compat.sgl_jax.tree_node import TreeNode


@dataclass
class MatchPrefixParams:
    """A prompt to look up. Of the fields only `key` means anything to an SWA cache."""

    key: KeyLike | Sequence[int]
    cow_recurrent: bool = False
    req: object = None
    full_only: bool = False


@dataclass
class InsertParams:
    """KV to hand over to the tree."""

    key: KeyLike | Sequence[int] | None = None
    value: object = None  # int[T] full slots of the key's tokens
    prev_prefix_len: int = 0  # tokens of `value` that are the tree's already
    swa_evicted_seqlen: int = 0  # tokens below which the request has given its SWA side up
    recurrent_value: object = None


@dataclass
class EvictParams:
    """Tokens wanted of each kind, from one rank or (None) from all together."""

    num_tokens: int = 0
    swa_num_tokens: int = 0
    dp_rank: int | None = None
    recurrent_num: int = 0


@dataclass
class EvictResult:
    """Tokens that went."""

    num_tokens_evicted: int = 0
    swa_num_tokens_evicted: int = 0
    recurrent_num_evicted: int = 0


@dataclass
class DecLockRefParams:
    """Which of the locks on a node to undo; None is one that reaches up to the root in SWA."""

    swa_uuid_for_lock: int | None = None
    skip_lock_node_ids: dict = field(default_factory=dict)


@dataclass
class IncLockRefResult:
    """A lock that was taken."""

    delta: int | None = None
    swa_uuid_for_lock: int | None = None
    skip_lock_node_ids: dict = field(default_factory=dict)

    def to_dec_params(self) -> DecLockRefParams:
        """What undoes it."""
        return DecLockRefParams(self.swa_uuid_for_lock, self.skip_lock_node_ids)


class MatchResult(NamedTuple):
    """What of a prompt is cached. There is no host tier, so the three nodes are one."""

    device_indices: np.ndarray  # int32[n] full slots
    last_device_node: TreeNode
    last_host_node: TreeNode
    best_match_node: TreeNode
    host_hit_length: int = 0
    recurrent_branching_seqlen: int | None = None
