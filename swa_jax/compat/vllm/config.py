"""The groups of layers that a model has, and the core's pools for them.

The classes here have the fields that are read. Objects with these fields do as well, such as
vLLM's own.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import swa_jax as swa
from swa_jax.inputs import whole_number

AnyConfig: TypeAlias = Any  # with `num_blocks` and `kv_cache_groups`
AnySpec: TypeAlias = Any  # with `block_size`, and what kind of window there is


@dataclass(frozen=True)
class FullAttentionSpec:
    """Layers that attend to everything."""

    block_size: int  # tokens


@dataclass(frozen=True)
class SlidingWindowSpec:
    """Layers that attend to the last tokens."""

    block_size: int  # tokens
    sliding_window: int  # tokens, the one that attends included


@dataclass(frozen=True)
class KVCacheGroupSpec:
    """Layers that share a block table."""

    layer_names: list[str]
    kv_cache_spec: FullAttentionSpec | SlidingWindowSpec


@dataclass(frozen=True)
class KVCacheConfig:
    """How many blocks there are, and for what."""

    num_blocks: int  # of each group, the null block included
    kv_cache_groups: Sequence[KVCacheGroupSpec]
    num_swa_blocks: int | None = None  # of the group with a window, where it has another number
    kv_cache_tensors: Sequence[object] = field(default_factory=list)  # not looked at


@dataclass(frozen=True)
class Groups:
    """Which group is which, and the pools they draw from."""

    count: int
    full: int | None  # index of the group of full-attention layers
    window: int | None  # index of the group whose blocks leave a window
    pool: swa.PoolConfig
    names_only: bool  # full pages are names without memory, for window layers alone

    @property
    def block_size(self) -> int:
        """Tokens in a block, in both groups."""
        return self.pool.page_size


def window_of(spec: AnySpec) -> tuple[int | None, bool]:
    """Past tokens that a layer keeps (None: all), and whether they are those of its chunk."""
    chunk = getattr(spec, "attention_chunk_size", None)
    if chunk is not None:
        return int(chunk), True
    window = getattr(spec, "sliding_window", None)
    # Theirs counts the token itself. One that sees nothing else keeps a token more than it needs.
    return (None, False) if window is None else (max(int(window) - 1, 1), False)


def read_groups(config: AnyConfig, max_model_len: int) -> Groups:
    """The groups of a configuration, as far as there are pools for them here.

    Args:
      config: with `num_blocks`, `kv_cache_groups` and, where given, `num_swa_blocks`.
      max_model_len: tokens of the longest request.

    Raises:
      ValueError: more than one group of a kind, groups with unequal blocks, or sizes that cannot
        work.
    """
    specs = [group.kv_cache_spec for group in config.kv_cache_groups]
    windows = [window_of(spec) for spec in specs]
    full = [index for index, (window, _) in enumerate(windows) if window is None]
    others = [index for index, (window, _) in enumerate(windows) if window is not None]
    if len(full) > 1 or len(others) > 1 or not specs:
        raise ValueError(
            "there are pools for one group of full-attention layers, for one of layers with a "
            f"window, or for one of each; got {len(full)} and {len(others)}: join layers with one "
            "spec into one group"
        )
    sizes = [whole_number("block_size", spec.block_size, 1) for spec in specs]
    if len(set(sizes)) > 1:
        raise ValueError(f"blocks must have one size in both groups, got {sizes}")
    page = sizes[0]
    tokens = (whole_number("num_blocks", config.num_blocks, 2) - 1) * page
    of_swa = getattr(config, "num_swa_blocks", None)
    blocks = config.num_blocks if of_swa is None else whole_number("num_swa_blocks", of_swa, 2)
    swa_tokens = (blocks - 1) * page
    if not others:  # one pool that nothing leaves
        pool = swa.PoolConfig.pure_swa(tokens, page)
    else:
        window, chunked = windows[others[0]]
        if not full:
            # A text of several windows keeps its place in the tree while the blocks before its
            # last window have gone: the tree's pages are names, more of them than there are blocks.
            tokens = 4 * swa_tokens + 16 * -(-max_model_len // page) * page
        pool = swa.PoolConfig(tokens, swa_tokens, page, window, chunked=chunked)
    return Groups(
        count=len(specs),
        full=full[0] if full else None,
        window=others[0] if others else None,
        pool=pool,
        names_only=not full,
    )
