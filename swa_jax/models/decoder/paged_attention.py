"""Attention over paged KV in plain JAX: right on every backend, and what kernels are held to.

Legend: R rows, Q new tokens a row, N pages a row, P page_size, K keys in a block, D head_dim,
Hq query heads, Hkv key heads, G = Hq / Hkv query heads that share a key head.

Keys are taken a block of pages at a time and the softmax is kept up as it goes, so memory is
R * Q * K and never the whole table. A windowed layer starts each row at the first page that its
window reaches.
"""

from typing import NamedTuple, Protocol

import jax
import jax.numpy as jnp

from swa_jax.models.decoder.batch import PagedBatch
from swa_jax.page_table import columns_from, reach
from swa_jax.paging import page_of, pages_for

LOWEST = float(jnp.finfo(jnp.float32).min)  # finite, so that LOWEST - LOWEST is 0


class Attend(Protocol):
    """Attention of a batch's new tokens over one layer's paged KV; `attend_pages` says how."""

    def __call__(
        self,
        q: jax.Array,
        kv_layer: jax.Array,
        pages: jax.Array,
        batch: PagedBatch,
        *,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
        sinks: jax.Array | None = None,
    ) -> jax.Array:
        """float[R, Q, Hq, D] attention."""
        ...


class _Softmax(NamedTuple):
    """A softmax over the keys seen so far: weighted values, and what to divide them by."""

    top: jax.Array  # float32[R, Hkv, G, Q] largest score
    total: jax.Array  # float32[R, Hkv, G, Q] sum of exp(score - top)
    values: jax.Array  # float32[R, Hkv, G, Q, D] sum of exp(score - top) * value


def attend_pages(
    q: jax.Array,
    kv_layer: jax.Array,
    pages: jax.Array,
    batch: PagedBatch,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: jax.Array | None = None,
    block_tokens: int = 256,
) -> jax.Array:
    """Attention of each row's new tokens over what the row holds, the new tokens included.

    The KV of the new tokens must have been written. All is computed in float32, at the matrix
    precision that JAX is set to. The loop ends with the longest row of the batch, whatever the
    width of the table; it cannot be differentiated in reverse.

    Args:
      q: float[R, Q, Hq, D] queries, rope applied.
      kv_layer: float[pages + 1, P, 2 * Hkv, D] one layer's pool, K of head h at 2h, V at 2h + 1.
      pages: int32[R, N] pages of each row in token order, of this layer's kind. Pages past the
        row's end or wholly behind its window are not looked at, nor are tokens that nobody sees:
        whatever is there, NaN included, changes nothing.
      batch: who is on, and who sees whom. Positions of new tokens are at least
        `kv_lens - q_lens`, and equal to it plus the place unless there is a `tree_mask`.
      scale: what scores are multiplied by.
      window: a key is seen only if query position - key position < window (as published, the
        query counts); None: no window. Static.
      softcap: scores s become softcap * tanh(s / softcap); None: they do not. Static.
      sinks: float[Hq] a score a head that takes its share of the softmax and gives nothing.
      block_tokens: about as many keys are taken at a time. Static.

    Returns:
      float[R, Q, Hq, D] in the type of q; 0 for queries that are off or see no key.

    Raises:
      ValueError: shapes that do not fit together, a window or a block below 1.
    """
    check_attention(q, kv_layer, pages, batch, window, sinks)
    if block_tokens < 1:
        raise ValueError(f"block_tokens must be at least 1, got {block_tokens!r}")
    size, heads = kv_layer.shape[1], kv_layer.shape[2] // 2
    rows, queries, q_heads, dim = q.shape
    grouped = q.reshape(rows, queries, heads, q_heads // heads, dim).transpose(0, 2, 3, 1, 4)
    grouped = grouped.astype(jnp.float32) * jnp.float32(scale)

    widest = widest_reach(q, kv_layer, pages, window)
    step = max(1, min(widest, block_tokens // size))
    first = first_pages(batch, window, size)
    ends = jnp.where(batch.q_lens > 0, pages_for(batch.kv_lens, size) - first, 0)
    walked = jnp.clip(jnp.max(ends), 0, widest)

    def take_block(block: jax.Array, softmax: _Softmax) -> _Softmax:
        at = first + block * jnp.int32(step)
        tokens = at[:, None] * jnp.int32(size) + jnp.arange(step * size, dtype=jnp.int32)[None, :]
        seen = seen_keys(batch, tokens, window)
        # Or XLA moves the conversion to float32 out of the loop, where it is of the whole pool.
        pool = jax.lax.optimization_barrier((kv_layer, block))[0]
        k, v = _load(pool, columns_from(pages, at, step), seen.any(axis=1))
        scores = jnp.einsum("rhgqd,rkhd->rhgqk", grouped, k)
        if softcap is not None:
            scores = jnp.tanh(scores / jnp.float32(softcap)) * jnp.float32(softcap)
        scores = jnp.where(seen[:, None, None], scores, -jnp.inf)
        return _extend(softmax, scores, v)

    blocks = pages_for(walked, step)
    start = _empty(grouped, sinks)
    softmax = jax.lax.fori_loop(jnp.zeros_like(blocks), blocks, take_block, start)
    total = jnp.where(softmax.total > 0, softmax.total, 1)
    out = softmax.values / total[..., None]
    return out.transpose(0, 3, 1, 2, 4).reshape(q.shape).astype(q.dtype)


def seen_keys(batch: PagedBatch, tokens: jax.Array, window: int | None) -> jax.Array:
    """Which of some tokens each query sees.

    Args:
      batch: who is on, and who sees whom.
      tokens: int32[R, K] places of tokens in their rows, from 0.
      window: as for `attend_pages`.

    Returns:
      bool[R, Q, K].
    """
    queries = batch.positions.shape[1]
    place = jnp.arange(queries, dtype=jnp.int32)[None, :]
    before = (batch.kv_lens - batch.q_lens)[:, None]
    new = tokens - before  # place among the new tokens, below 0 for those held before
    seen = (place < batch.q_lens[:, None])[:, :, None] & (tokens < batch.kv_lens[:, None])[:, None]
    if batch.tree_mask is None:
        seen = seen & (new[:, None, :] <= place[:, :, None])
    else:
        named = jnp.take_along_axis(batch.tree_mask, new[:, None, :], axis=2, mode="clip")
        seen = seen & (named | (new < 0)[:, None, :])
    if window is None:
        return seen
    stands = jnp.take_along_axis(batch.positions, new, axis=1, mode="clip")
    stands = jnp.where(new < 0, tokens, stands)
    return seen & (batch.positions[:, :, None] - stands[:, None, :] < jnp.int32(window))


def first_pages(batch: PagedBatch, window: int | None, page_size: int) -> jax.Array:
    """int32[R] the first page of each row that its window reaches."""
    if window is None:
        return jnp.zeros_like(batch.kv_lens)
    edge = batch.kv_lens - batch.q_lens - jnp.int32(window - 1)
    return page_of(jnp.maximum(edge, 0), page_size)


def widest_reach(q: jax.Array, kv_layer: jax.Array, pages: jax.Array, window: int | None) -> int:
    """The most pages that a row can need from its first page on."""
    if window is None:
        return pages.shape[1]
    return reach(window - 1 + q.shape[1], kv_layer.shape[1], pages.shape[1])


def _load(kv_layer: jax.Array, pages: jax.Array, seen: jax.Array) -> tuple[jax.Array, jax.Array]:
    """float32[R, K, Hkv, D] keys and values of int32[R, K / P] pages, 0 where not bool[R, K] seen.

    Zeros, since a weight of 0 does not hide a NaN.
    """
    rows, keys = seen.shape
    block = kv_layer.at[pages].get(mode="clip").reshape(rows, keys, -1, 2, kv_layer.shape[-1])
    block = jnp.where(seen[:, :, None, None, None], block.astype(jnp.float32), 0)
    return block[:, :, :, 0], block[:, :, :, 1]


def _empty(grouped: jax.Array, sinks: jax.Array | None) -> _Softmax:
    """The softmax before any key: nothing, or the sinks alone."""
    shape = grouped.shape[:-1]
    if sinks is None:
        top, total = jnp.full(shape, LOWEST, jnp.float32), jnp.zeros(shape, jnp.float32)
    else:
        by_group = sinks.astype(jnp.float32).reshape(1, *shape[1:3], 1)
        top, total = jnp.broadcast_to(by_group, shape), jnp.ones(shape, jnp.float32)
    return _Softmax(top, total, jnp.zeros(grouped.shape, jnp.float32))


def _extend(softmax: _Softmax, scores: jax.Array, values: jax.Array) -> _Softmax:
    """Takes in float32[R, Hkv, G, Q, K] scores, -inf where a key is not seen."""
    top = jnp.maximum(softmax.top, scores.max(axis=-1))
    shrink = jnp.exp(softmax.top - top)
    weights = jnp.exp(scores - top[..., None])
    new = jnp.einsum("rhgqk,rkhd->rhgqd", weights, values)
    return _Softmax(
        top,
        softmax.total * shrink + weights.sum(axis=-1),
        softmax.values * shrink[..., None] + new,
    )


def check_attention(
    q: jax.Array,
    kv_layer: jax.Array,
    pages: jax.Array,
    batch: PagedBatch,
    window: int | None,
    sinks: jax.Array | None,
) -> None:
    """Raises ValueError where the arguments of `attend_pages` do not fit together."""
    if q.ndim != 4 or kv_layer.ndim != 4 or pages.ndim != 2:
        raise ValueError(
            "attention takes q[R, Q, Hq, D], kv_layer[pages, P, 2 * Hkv, D] and pages[R, N], got "
            f"{q.shape}, {kv_layer.shape} and {pages.shape}"
        )
    heads, odd = divmod(kv_layer.shape[2], 2)
    if odd or q.shape[2] % heads or q.shape[3] != kv_layer.shape[3]:
        raise ValueError(
            "kv_layer must hold K and V of heads that divide the query heads, of the same size, "
            f"got q {q.shape} and kv_layer {kv_layer.shape}"
        )
    if batch.positions.shape != q.shape[:2] or pages.shape[0] != q.shape[0]:
        raise ValueError(
            f"q, batch and pages must have the same rows and queries, got q {q.shape}, positions "
            f"{batch.positions.shape} and pages {pages.shape}"
        )
    if sinks is not None and sinks.shape != (q.shape[2],):
        raise ValueError(f"sinks must be one a query head, [{q.shape[2]}], got {sinks.shape}")
    if window is not None and window < 1:
        raise ValueError(f"window must be at least 1, the query itself, got {window!r}")
