"""What came into the tree and what left it, as block events that a KV-aware router reads.

Compiled code cannot report a block at a time, so events are the difference between two looks at the
tree from the host: what came and went in between is not seen. A block is a page. It is removed when
its full page leaves the tree; a tombstone, whose SWA side alone is gone, stays stored.

The events have the names and fields of vLLM's and SGLang's, see
https://github.com/vllm-project/vllm/blob/main/vllm/distributed/kv_events.py and
https://github.com/sgl-project/sglang/blob/main/python/sglang/srt/disaggregation/kv_events.py
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np

from swa_jax.prefix_cache.arguments import host_tokens
from swa_jax.prefix_cache.read_nodes import ABSENT, read_nodes
from swa_jax.prefix_cache.tree import ROOT, CacheConfig, PrefixCache


@dataclass(frozen=True)
class BlockStored:
    """Blocks that follow each other in one prefix are there now."""

    block_hashes: tuple[int, ...]
    parent_block_hash: int | None  # of the block before the first; None at the start of a prompt
    token_ids: tuple[int, ...]  # of all blocks; hashes of a bigram cache cover one more token
    block_size: int
    lora_id: int | None  # the namespace; None for namespace 0


@dataclass(frozen=True)
class BlockRemoved:
    """Blocks are gone; none comes before one that hung from it."""

    block_hashes: tuple[int, ...]


@dataclass(frozen=True)
class AllBlocksCleared:
    """The tree was reset."""


Event = BlockStored | BlockRemoved | AllBlocksCleared


@dataclass(frozen=True, eq=False)
class TreeRecord:
    """What the host knows of a tree; a page's entries mean nothing where `born` is -1."""

    born: np.ndarray  # int32[F+1] tells a node from a later one on its page
    mark: np.ndarray  # int32[F+1] the tree's own hash: does so across a reset, too
    depth: np.ndarray  # int32[F+1]
    hash: np.ndarray  # uint64[F+1]
    clock: int


def empty_record(config: CacheConfig) -> TreeRecord:
    """The record of a tree that holds nothing."""
    nodes = config.pool.full_pages + 1
    return TreeRecord(
        born=np.full(nodes, ABSENT, np.int32),
        mark=np.zeros(nodes, np.int32),
        depth=np.zeros(nodes, np.int32),
        hash=np.zeros(nodes, np.uint64),
        clock=0,
    )


def block_hash(parent: int | None, tokens: Sequence[int] | np.ndarray, namespace: int = 0) -> int:
    """64 bits that name a prefix in every run: a BLAKE2b chain over its blocks.

    Args:
      parent: the hash of the prefix before this block, None if the block is the first.
      tokens: int32 tokens that the block is compared by.
      namespace: int32, enters with the first block.
    """
    before = f"namespace {namespace}".encode() if parent is None else parent.to_bytes(8, "little")
    row = np.asarray(tokens, "<i4").tobytes()
    return int.from_bytes(hashlib.blake2b(before + row, digest_size=8).digest(), "little")


def prefix_hashes(
    tokens: Sequence[int] | np.ndarray,
    block_size: int,
    *,
    namespace: int = 0,
    is_bigram: bool = False,
) -> list[int]:
    """The hash of every prefix of whole blocks: what a router looks a prompt up by.

    Args:
      tokens: int32[T] the prompt.
      block_size: P, the cache's page size in tokens.
      namespace: int32, the prompt's.
      is_bigram: as the cache's. A block is compared by pairs of tokens then, so its hash covers
        P + 1 tokens, the first of the next block included: blocks with equal `token_ids` may have
        different hashes, and the last block of a prompt needs one token after it.

    Returns:
      One hash for each whole block, those that the events name.

    Raises:
      ValueError: tokens that are no row of int32, or a block of no tokens.
    """
    row = host_tokens(tokens)
    if isinstance(block_size, bool) or not isinstance(block_size, int | np.integer):
        raise ValueError(f"block_size must be a positive integer, got {block_size!r}")
    if block_size < 1:
        raise ValueError(f"block_size must be a positive integer, got {block_size}")
    extra = 1 if is_bigram else 0
    found: list[int] = []
    for start in range(0, row.size - block_size - extra + 1, int(block_size)):
        above = found[-1] if found else None
        found.append(block_hash(above, row[start : start + block_size + extra], namespace))
    return found


def tree_events(before: TreeRecord, after: PrefixCache) -> tuple[TreeRecord, list[Event]]:
    """What happened to a tree since the host looked at it last. Waits for the device.

    Args:
      before: the record of the last look, `empty_record` at first.
      after: the tree as it is now.

    Returns:
      The record for the next look, and the events in order: what was removed comes first, and a
      block comes after the one it hangs from. A tree whose clock went back was reset.
    """
    born, mark, clock = jax.device_get(_stamps(after))
    events: list[Event] = []
    if int(clock) < before.clock:
        before = empty_record(after.config)
        events.append(AllBlocksCleared())
    changed = (born != before.born) | (mark != before.mark)
    gone = np.flatnonzero(changed & (before.born != ABSENT))
    if gone.size:
        deepest_first = gone[np.argsort(-before.depth[gone], kind="stable")]
        events.append(BlockRemoved(tuple(before.hash[deepest_first].tolist())))
    record = replace(before, born=born, mark=mark, clock=int(clock))
    new = np.flatnonzero(changed & (born != ABSENT))
    if new.size:
        record, stored = _store(record, after, new)
        events += stored
    return record, events


@jax.jit
def _stamps(cache: PrefixCache) -> tuple[jax.Array, jax.Array, jax.Array]:
    here = cache.in_tree
    return jnp.where(here, cache.born, ABSENT), jnp.where(here, cache.hash, 0), cache.clock


def _store(
    record: TreeRecord, cache: PrefixCache, new: np.ndarray
) -> tuple[TreeRecord, list[Event]]:
    """Hashes new nodes, parents first; an event for each run of pages of one prefix."""
    parent, depth, namespace, tokens = read_nodes(cache, new)
    depths, hashes = record.depth.copy(), record.hash.copy()
    depths[new] = depth
    size = cache.config.pool.page_size
    runs: list[list[int]] = []
    order = np.lexsort((depth, record.born[new]))  # a parent never came later than its child
    for index in order.tolist():
        above = int(parent[index])
        parent_hash = None if above == ROOT else int(hashes[above])
        hashes[new[index]] = block_hash(parent_hash, tokens[index], int(namespace[index]))
        if runs and above == new[runs[-1][-1]]:
            runs[-1].append(index)
        else:
            runs.append([index])
    events: list[Event] = []
    for run in runs:
        above, space = int(parent[run[0]]), int(namespace[run[0]])
        events.append(
            BlockStored(
                block_hashes=tuple(hashes[new[run]].tolist()),
                parent_block_hash=None if above == ROOT else int(hashes[above]),
                token_ids=tuple(tokens[run, :size].ravel().tolist()),
                block_size=size,
                lora_id=space or None,
            )
        )
    return replace(record, depth=depths, hash=hashes), events
