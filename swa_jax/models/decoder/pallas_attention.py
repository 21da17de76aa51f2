"""JAX's own paged attention kernels behind the call of `attend_pages`, and who uses which.

Legend: R rows, Q new tokens a row, N pages a row, P page_size, D head_dim, Hq query heads, Hkv key
heads, T = R * Q places for new tokens.

What a kernel cannot do is known before tracing, and `attend_pages` does it instead. Unlike that,
kernels multiply what nobody sees by 0: a pool must hold finite numbers, as a new one does.
"""

import math

import jax
import jax.numpy as jnp

from swa_jax.models.decoder.batch import PagedBatch
from swa_jax.models.decoder.paged_attention import (
    Attend,
    attend_pages,
    check_attention,
    first_pages,
    widest_reach,
)
from swa_jax.page_table import columns_from, ragged_rows

LANES = 128  # the TPU kernel keeps its sums in tiles of so many numbers
GPU_TILE = 8192  # numbers of K and V that a step of the GPU kernel holds
GPU_SPLITS = 16  # parts of a row that the GPU kernel works on at once
GPU_MIN_TILE = 16  # keys: the least that Triton multiplies


def choose_attention(backend: str | None = None) -> Attend:
    """The attention for a backend.

    Args:
      backend: "tpu", "gpu" (or "cuda", "rocm"), "cpu" or any other that JAX has; the one that JAX
        uses by default if None.

    Returns:
      `attend_pages_tpu`, `attend_pages_gpu` or, elsewhere, `attend_pages`.
    """
    name = jax.default_backend() if backend is None else backend
    if name == "tpu":
        return attend_pages_tpu
    return attend_pages_gpu if name in ("gpu", "cuda", "rocm") else attend_pages


def tpu_kernel_fits(
    q: jax.Array, kv_layer: jax.Array, batch: PagedBatch, sinks: jax.Array | None
) -> bool:
    """Whether ragged paged attention can do this: static, so one program has one answer.

    It knows neither sinks nor draft trees, wants q and KV in one type of 16 or 32 bits, heads of a
    multiple of 128, and as many of them as fill whole tiles.

    Args:
      q: float[R, Q, Hq, D].
      kv_layer: float[pages + 1, P, 2 * Hkv, D].
      batch: looked at only for its draft trees.
      sinks: float[Hq] or None.

    Returns:
      A Python bool.
    """
    bits = 8 * kv_layer.dtype.itemsize
    if sinks is not None or batch.tree_mask is not None or q.dtype != kv_layer.dtype:
        return False
    if bits not in (16, 32) or q.shape[-1] % LANES:
        return False
    words, rest = divmod(kv_layer.shape[2] * bits, 32)
    return not rest and (words in (1, 2, 4) or words % 8 == 0)


def attend_pages_tpu(
    q: jax.Array,
    kv_layer: jax.Array,
    pages: jax.Array,
    batch: PagedBatch,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: jax.Array | None = None,
    pages_per_block: int | None = None,
    queries_per_block: int | None = None,
) -> jax.Array:
    """`attend_pages` by JAX's ragged paged attention, where `tpu_kernel_fits`.

    The kernel has no positions: it takes the place in the row for the position, which is the same
    as long as there is no draft tree. Its table holds only the pages that the window reaches, so
    it does not walk dead ones.

    Args:
      q: float[R, Q, Hq, D] queries, rope applied.
      kv_layer: float[pages + 1, P, 2 * Hkv, D] one layer's pool, all finite.
      pages: int32[R, N] pages of each row in token order.
      batch: who is on.
      scale: what scores are multiplied by. Static.
      window: in tokens, the query counts. Static.
      softcap: as for `attend_pages`. Static.
      sinks: float[Hq] as for `attend_pages`, which then does all of it.
      pages_per_block: pages that the kernel takes at a time, static; None: as JAX has tuned it.
      queries_per_block: queries likewise. Give both or neither.

    Returns:
      float[R, Q, Hq, D] in the type of q; 0 for queries that are off.
    """
    if not tpu_kernel_fits(q, kv_layer, batch, sinks):
        return attend_pages(
            q, kv_layer, pages, batch, scale=scale, window=window, softcap=softcap, sinks=sinks
        )
    from jax.experimental.pallas.ops.tpu.ragged_paged_attention import ragged_paged_attention

    check_attention(q, kv_layer, pages, batch, window, sinks)
    first = first_pages(batch, window, kv_layer.shape[1])
    table = columns_from(pages, first, widest_reach(q, kv_layer, pages, window))
    lens = batch.kv_lens - first * jnp.int32(kv_layer.shape[1])
    rows = ragged_rows(lens, batch.q_lens)
    places = _packed_places(batch, rows[1])

    def run(packed: jax.Array) -> jax.Array:
        return ragged_paged_attention(
            packed,
            kv_layer,
            rows[0],
            table,
            rows[1],
            rows[2],
            sm_scale=scale,
            sliding_window=window,
            soft_cap=softcap,
            num_kv_pages_per_block=pages_per_block,
            num_queries_per_block=queries_per_block,
        )

    flat = (-1, *q.shape[2:])
    packed = jnp.zeros(q.shape, q.dtype).reshape(flat)
    packed = packed.at[places.reshape(-1)].set(q.reshape(flat), mode="drop")
    # With no query at all the kernel would fetch a page and never wait for it.
    out = jax.lax.cond(rows[1][-1] > 0, run, jnp.zeros_like, packed)
    return out.at[places].get(mode="fill", fill_value=0)


def _packed_places(batch: PagedBatch, cu_q_lens: jax.Array) -> jax.Array:
    """int32[R, Q] place of each new token when all stand one behind the other; T for none."""
    rows, queries = batch.positions.shape
    place = jnp.arange(queries, dtype=jnp.int32)[None, :]
    on = place < batch.q_lens[:, None]
    return jnp.where(on, cu_q_lens[:-1, None] + place, rows * queries)


def gpu_kernel_fits(
    q: jax.Array,
    kv_layer: jax.Array,
    batch: PagedBatch,
    window: int | None,
    sinks: jax.Array | None,
) -> bool:
    """Whether the GPU's paged attention can do this: static, so one program has one answer.

    It decodes: one new token a row that sees all tokens before, no window, no sinks, no draft
    tree. Heads must be a power of two of at least 16 and pools no wider than 32 bits.

    Args:
      q: float[R, Q, Hq, D].
      kv_layer: float[pages + 1, P, 2 * Hkv, D].
      batch: looked at only for its draft trees.
      window: as for `attend_pages`.
      sinks: float[Hq] or None.

    Returns:
      A Python bool.
    """
    dim = q.shape[-1]
    plain = window is None and sinks is None and batch.tree_mask is None
    return (
        plain
        and q.shape[1] == 1
        and dim >= 16
        and dim.bit_count() == 1
        and kv_layer.dtype.itemsize in (2, 4)
    )


def attend_pages_gpu(
    q: jax.Array,
    kv_layer: jax.Array,
    pages: jax.Array,
    batch: PagedBatch,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: jax.Array | None = None,
    interpret: bool = False,
) -> jax.Array:
    """`attend_pages` by JAX's paged attention for GPUs, where `gpu_kernel_fits`.

    The kernel wants K and V apart and a pool for each head. A copy of the pool would cost more
    than the attention, so the kernel is given what lies side by side in ours, K and V of a head
    of a token, as one long key and value: queries are padded with zeros where V is, and of what
    comes out the V half counts. Pages are then of one token of one head.

    Args:
      q: float[R, Q, Hq, D] queries, rope applied.
      kv_layer: float[pages + 1, P, 2 * Hkv, D] one layer's pool, all finite.
      pages: int32[R, N] pages of each row in token order.
      batch: who is on.
      scale: what scores are multiplied by.
      window: in tokens, the query counts. Static.
      softcap: as for `attend_pages`. Static.
      sinks: float[Hq] as for `attend_pages`, which then does all of it.
      interpret: runs the kernel on any backend, slowly. Static.

    Returns:
      float[R, 1, Hq, D] in the type of q; 0 for rows that are off. Queries are scaled in float32
      and then rounded to the type of the pool.
    """
    if not gpu_kernel_fits(q, kv_layer, batch, window, sinks):
        return attend_pages(
            q, kv_layer, pages, batch, scale=scale, window=window, softcap=softcap, sinks=sinks
        )
    from jax.experimental.pallas.ops.gpu.paged_attention import paged_attention

    check_attention(q, kv_layer, pages, batch, window, sinks)
    rows, _, q_heads, dim = q.shape
    heads = kv_layer.shape[2] // 2
    pairs = kv_layer.reshape(1, -1, 1, 2 * dim)
    scaled = (q.astype(jnp.float32) * jnp.float32(scale)).astype(kv_layer.dtype)
    scaled = scaled.reshape(rows * heads, q_heads // heads, dim)
    lens = jnp.where(batch.q_lens > 0, batch.kv_lens, 0)
    step = max(GPU_MIN_TILE, GPU_TILE // (2 * dim))
    out = paged_attention(
        jnp.pad(scaled, ((0, 0), (0, 0), (0, dim))),
        pairs,
        pairs,
        _token_table(pages, kv_layer.shape[1], heads, step * GPU_SPLITS),
        jnp.repeat(lens, heads, total_repeat_length=rows * heads),
        pages_per_compute_block=step,
        k_splits=GPU_SPLITS,
        attn_logits_soft_cap=softcap,
        interpret=interpret,
    )
    return out[:, :, dim:].reshape(q.shape).astype(q.dtype)


def _token_table(pages: jax.Array, page_size: int, heads: int, multiple: int) -> jax.Array:
    """int32[R * Hkv, N * P rounded up] where K and V of each token of each row lie for each head.

    Counted in pairs of K and V; 0 past the table.
    """
    offsets = jnp.arange(page_size, dtype=jnp.int32)[None, None, :]
    slots = (pages[:, :, None] * jnp.int32(page_size) + offsets).reshape(pages.shape[0], 1, -1)
    head = jnp.arange(heads, dtype=jnp.int32)[None, :, None]
    table = (slots * jnp.int32(heads) + head).reshape(pages.shape[0] * heads, -1)
    spare = math.ceil(table.shape[1] / multiple) * multiple - table.shape[1]
    return jnp.pad(table, ((0, 0), (0, spare)))
