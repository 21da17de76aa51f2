"""A model whose KV is the text itself, so that every wrong page shows in its next token.

The KV of a token is its id. What comes next is a sum over all tokens that a full layer sees and
over those that an SWA layer sees, each weighed by its place: cheap to compute and easy to redo in
plain Python. Attention that read a page of somebody else would give another token.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from swa_jax.models.decoder.batch import PagedBatch
from swa_jax.models.decoder.kv_pool import KVPool


@dataclass(frozen=True)
class Ledger:
    """A serving model without weights. `window` counts the query, as published windows do."""

    window: int
    vocab_size: int = 97
    eos_token_ids: tuple[int, ...] = ()

    def init_kv(self, pool):
        """Nothing written: -1 would show in every sum."""
        pages = (pool.full_pages + 1, pool.swa_pages + 1)
        return tuple(jnp.full((count, pool.page_size), -1, jnp.int32) for count in pages)

    def forward(self, params, kv, batch: PagedBatch):
        """The next token of each query as a float[R, Q, 1] "hidden state"."""
        full = _write(kv[0], batch.full_slots, batch.tokens)
        swa = _write(kv[1], batch.swa_slots, batch.tokens)
        total = _sum(full, batch.full_pages, batch, 2**20, 3)
        total = total + _sum(swa, batch.swa_pages, batch, self.window, 5)
        chosen = jax.lax.rem(total, jnp.int32(self.vocab_size))
        return chosen.astype(jnp.float32)[..., None], (full, swa)

    def unembed(self, params, hidden):
        """The next token alone is likely; the one after it is half as likely."""
        token = hidden[..., 0].astype(jnp.int32)
        after = jax.lax.rem(token + 1, jnp.int32(self.vocab_size))
        first, second = (jax.nn.one_hot(ids, self.vocab_size) for ids in (token, after))
        return first * 2 + second

    def move_kv(self, kv, old, new):
        """Copies ids between slots."""

        def move(layer, old, new):
            return _write(layer, jnp.where(old > 0, new, 0), layer.reshape(-1)[old])

        return move(kv[0], old.full, new.full), move(kv[1], old.swa, new.swa)

    def pools(self, kv):
        """Both layers of ids."""
        return KVPool(full=kv[:1], swa=kv[1:])

    def with_pools(self, kv, pools):
        """Other ids."""
        return pools.full + pools.swa

    def next_token(self, text):
        """What follows `text`, in plain Python."""
        total = _weigh(text, 0, 3) + _weigh(text, max(0, len(text) - self.window), 5)
        return total % self.vocab_size

    def continuation(self, prompt, count):
        """The next `count` tokens, or up to an end token."""
        text = list(prompt)
        for _ in range(count):
            text.append(self.next_token(text))
            if text[-1] in self.eos_token_ids:
                break
        return text[len(prompt) :]


def _weigh(text, start, factor):
    return sum((text[place] + 1) * (place * factor % 11 + 1) for place in range(start, len(text)))


def _write(layer, slots, tokens):
    at = jnp.where(slots > 0, slots, layer.size)
    return layer.reshape(-1).at[at].set(tokens, mode="drop").reshape(layer.shape)


def _sum(layer, pages, batch, window, factor):
    """int32[R, Q] the weighed sum over the keys that each query sees."""
    rows, columns = pages.shape
    queries = batch.tokens.shape[1]
    held = layer[pages].reshape(rows, columns * layer.shape[1])
    index = jnp.arange(held.shape[1], dtype=jnp.int32)[None, :]
    before = (batch.kv_lens - batch.q_lens)[:, None]
    fresh = index - before  # which of the new tokens a key is
    is_new = (fresh >= 0) & (index < batch.kv_lens[:, None])
    at = jnp.clip(fresh, 0, queries - 1)
    position = jnp.where(is_new, jnp.take_along_axis(batch.positions, at, axis=1), index)
    query = jnp.arange(queries, dtype=jnp.int32)[None, :, None]
    if batch.tree_mask is None:
        seen = at[:, None, :] <= query
    else:
        seen = jnp.take_along_axis(batch.tree_mask, at[:, None, :], axis=2)
    seen = jnp.where(is_new[:, None, :], seen, fresh[:, None, :] < 0)
    near = batch.positions[:, :, None] - position[:, None, :] < window
    weight = jax.lax.rem(position * jnp.int32(factor), jnp.int32(11)) + 1
    value = ((held + 1) * weight)[:, None, :]
    return jnp.sum(jnp.where(seen & near, value, 0), axis=2, dtype=jnp.int32)
