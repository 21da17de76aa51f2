"""The requests that each server gets."""

import functools
import heapq
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from swa_jax.choices import DEALS


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["prompt_lens", "final_lens", "arrivals", "count"],
    meta_fields=[],
)
@dataclass(frozen=True)
class Load:
    """Requests in the order in which they are served; leaves [B, ...] for B servers."""

    prompt_lens: jax.Array  # int32[N] tokens
    final_lens: jax.Array  # int32[N] tokens whose KV exists when the request is done
    arrivals: jax.Array  # int32[N] step in which it arrives, rising
    count: jax.Array  # int32[] requests; what is behind them is padding


def deal(
    prompts: np.ndarray,
    finals: np.ndarray,
    arrivals: np.ndarray,
    ranks: int,
    mode: str,
) -> tuple[Load, np.ndarray]:
    """Deals requests to ranks, each to one, and keeps their order.

    Args:
      prompts: int[M] tokens.
      finals: int[M] tokens whose KV exists when the request is done.
      arrivals: int[M] steps.
      ranks: B.
      mode: "round-robin" or "least-loaded": to the rank that was given the fewest tokens so far.

    Returns:
      `Load` with leaves [B, ...], and int32[M] the rank of each request.
    """
    if mode not in DEALS:
        raise ValueError(f"requests are dealt by one of {', '.join(DEALS)}, got {mode!r}")
    if ranks < 1:
        raise ValueError(f"ranks must be at least 1, got {ranks}")
    rank = _round_robin(len(prompts), ranks) if mode == DEALS[0] else _least_loaded(finals, ranks)
    counts = np.bincount(rank, minlength=ranks)
    width = max(int(counts.max(initial=0)), 1)
    order = np.argsort(rank, kind="stable")
    starts = np.concatenate([[0], np.cumsum(counts)[:-1]])
    place = np.arange(len(rank)) - starts[rank[order]]

    def table(values: np.ndarray) -> jax.Array:
        rows = np.zeros((ranks, width), np.int32)
        rows[rank[order], place] = values[order]
        return jnp.asarray(rows)

    load = Load(table(prompts), table(finals), table(arrivals), jnp.asarray(counts, jnp.int32))
    return load, rank


def _round_robin(count: int, ranks: int) -> np.ndarray:
    return (np.arange(count) % ranks).astype(np.int32)


def _least_loaded(finals: np.ndarray, ranks: int) -> np.ndarray:
    given = [(0, rank) for rank in range(ranks)]
    rank = np.zeros(len(finals), np.int32)
    for request, tokens in enumerate(finals.tolist()):
        sum_so_far, least = given[0]
        rank[request] = least
        heapq.heapreplace(given, (sum_so_far + tokens, least))
    return rank


def same_for_all(load: Load, servers: int) -> Load:
    """For each of so many servers the loads [D, ...], one after the other: leaves [servers * D]."""
    return jax.tree.map(lambda leaf: jnp.tile(leaf, (servers,) + (1,) * (leaf.ndim - 1)), load)
