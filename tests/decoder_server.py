"""Serves rows through the allocator a step at a time: what `forward_paged` is given in real use."""

import functools
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import swa_jax as swa
from swa_jax.models import DecoderConfig, PagedBatch, forward_paged, init_kv, unembed
from swa_jax.models.decoder.rope import Rope

GEMMA = DecoderConfig(
    family="gemma3",
    vocab_size=97,
    hidden_size=32,
    num_heads=4,
    kv_heads=2,
    head_dim=16,
    intermediate_size=48,
    layer_kinds="SFS",
    sliding_window=5,
    full_rope=Rope(10_000.0, "linear", 4.0),
    swa_rope=Rope(100.0),
    attention_scale=24**-0.5,
    max_context=256,
    qk_norm=True,
    tie_embeddings=True,
    embed_scale=32**0.5,
    attn_softcap=3.0,
    final_softcap=4.0,
)
GPT_OSS = DecoderConfig(
    family="gpt_oss",
    vocab_size=97,
    hidden_size=32,
    num_heads=4,
    kv_heads=1,
    head_dim=16,
    intermediate_size=24,
    layer_kinds="SF",
    sliding_window=5,
    full_rope=Rope(1_000.0, "yarn", 8.0, original_context=32, truncate=False, amplitude=1.2),
    swa_rope=Rope(1_000.0, "yarn", 8.0, original_context=32, truncate=False, amplitude=1.2),
    attention_scale=16**-0.5,
    max_context=256,
    sinks=True,
    attention_bias=True,
    activation="silu",
    num_experts=5,
    experts_per_token=2,
)


@functools.partial(jax.jit, static_argnums=0, donate_argnums=2)
def step_logits(config, params, kv, batch):
    """float32[R, Q, V] logits of a batch's new tokens, and the KV."""
    hidden, kv = forward_paged(config, params, kv, batch)
    return unembed(config, params, hidden), kv


class Server:
    """Some rows, their tables, an allocator and the model's KV."""

    def __init__(self, config, params, pool, num_rows, *, width=64, dtype=jnp.float32):
        self.config, self.params, self.pool = config, params, pool
        self.state = swa.init(pool)
        self.kv: Any = init_kv(config, pool, dtype)
        self.table = np.zeros((num_rows, width), np.int32)
        self.lens = np.zeros(num_rows, np.int32)
        self.evicted = jnp.zeros(num_rows, jnp.int32)
        self.swa_pages_written = []

    def step(self, news, queries, **changes):
        """float32[R, Q, V] logits after `news`, a list of new tokens for each row (maybe none)."""
        q_lens = np.array([len(new) for new in news], np.int32)
        self.grow(q_lens, queries)
        batch = self.batch(news, q_lens, queries)
        batch = replace(batch, **changes)
        logits, self.kv = step_logits(self.config, self.params, self.kv, batch)
        self.state, self.evicted = swa.free_out_of_window(
            self.state, self.table, self.lens, self.evicted
        )
        assert np.isfinite(logits).all()
        return np.asarray(logits)

    def grow(self, q_lens, queries):
        """Takes slots for the new tokens, by a decode step's call where it is one."""
        rows = np.arange(len(q_lens))
        before, after = self.lens, self.lens + q_lens
        last = np.where(before > 0, self.table[rows, before - 1], -1)
        if queries == 1:
            self.state, grant = swa.alloc_decode(self.state, after, last, q_lens > 0)
            assert grant.ok
            slots = np.asarray(grant.slots)[q_lens > 0]
        else:
            room = len(q_lens) * queries
            self.state, grant = swa.alloc_extend(self.state, before, after, last, capacity=room)
            assert grant.ok, (grant.full_short, grant.swa_short)
            slots = np.asarray(grant.slots)[: q_lens.sum()]
        for row, taken in zip(rows, np.split(slots, np.cumsum(q_lens)[:-1]), strict=True):
            self.table[row, before[row] : after[row]] = taken
        self.lens = after

    def batch(self, news, q_lens, queries):
        """What the model is given for tokens whose slots are in the table."""
        start = self.lens - q_lens
        place = np.arange(queries)[None, :]
        is_new = place < q_lens[:, None]
        at = np.minimum(start[:, None] + place, self.table.shape[1] - 1)
        full_slots = np.where(is_new, np.take_along_axis(self.table, at, axis=1), 0)
        # A masked query holds what nobody should look at: no token, and a place that is not there.
        tokens = np.full(is_new.shape, 10**6)
        for row, new in enumerate(news):
            tokens[row, : len(new)] = new
        swa_slots = swa.translate_full_to_swa(self.state, full_slots)
        size = self.pool.page_size
        self.swa_pages_written += np.unique(np.asarray(swa_slots)[is_new] // size).tolist()
        firsts = self.table[:, ::size]
        ints = functools.partial(jnp.asarray, dtype=jnp.int32)
        return PagedBatch(
            tokens=ints(tokens),
            positions=ints(np.where(is_new, start[:, None] + place, -(10**6))),
            q_lens=ints(q_lens),
            kv_lens=ints(self.lens),
            full_slots=ints(full_slots),
            swa_slots=swa_slots,
            full_pages=ints(firsts // size),
            swa_pages=ints(np.asarray(swa.translate_full_to_swa(self.state, firsts)) // size),
        )
