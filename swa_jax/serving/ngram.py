"""Drafts out of the request's own text: what followed the last time its last tokens occurred."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from swa_jax.config import PoolConfig
from swa_jax.inputs import whole_number
from swa_jax.models.decoder.batch import PagedBatch
from swa_jax.models.decoder.kv_pool import KVPool
from swa_jax.serving.draft import DraftView, KeepsNoText
from swa_jax.serving.moved_slots import MovedSlots
from swa_jax.serving.trees import Tree


@dataclass(frozen=True)
class NGramDraft(KeepsNoText):
    """Prompt lookup: copies what came after an earlier occurrence of the last tokens.

    Args:
      num_drafts: K, tokens to copy.
      match: tokens at the end that must have occurred before.

    Raises:
      ValueError: a number below 1.
    """

    num_drafts: int = 4
    match: int = 2

    is_bigram = False

    def __post_init__(self) -> None:
        for name in ("num_drafts", "match"):
            object.__setattr__(self, name, whole_number(name, getattr(self, name), 1, 1024))

    @property
    def parents(self) -> tuple[int, ...]:
        """A chain."""
        return tuple(range(-1, self.num_drafts - 1))

    def init(self, pool: PoolConfig, rows: int) -> None:
        """It has no state."""

    def prefill(
        self, params: Tree, state: None, batch: PagedBatch, hidden: jax.Array, following: jax.Array
    ) -> None:
        """Nothing to do."""

    def propose(
        self, params: Tree, state: None, view: DraftView
    ) -> tuple[None, jax.Array, jax.Array]:
        """int32[R, K] the tokens after the latest earlier occurrence; bool[R] is there one."""
        drafts, found = jax.vmap(self._look_back)(view.tokens, view.length)
        return None, drafts, found

    def _look_back(self, tokens: jax.Array, length: jax.Array) -> tuple[jax.Array, jax.Array]:
        columns = tokens.shape[0]
        place = jnp.arange(columns, dtype=jnp.int32)
        same = place < length  # an earlier place for the last token, which stands at `length`
        for back in range(self.match):
            wanted = tokens.at[jnp.maximum(length - back, 0)].get(mode="clip")
            seen = jnp.roll(tokens, back)
            same = same & (place >= back) & (seen == wanted) & (length >= back)
        found = jnp.any(same)
        latest = jnp.max(jnp.where(same, place, 0))
        at = latest + 1 + jnp.arange(self.num_drafts, dtype=jnp.int32)
        # Past the last known token the copy goes on with itself.
        period = jnp.maximum(length - latest, 1)
        at = jnp.where(at > length, latest + 1 + jax.lax.rem(at - latest - 1, period), at)
        return tokens.at[at].get(mode="clip"), found

    def observe(
        self, params: Tree, state: None, view: DraftView, hidden: jax.Array, kept: jax.Array
    ) -> None:
        """Nothing to do."""

    def move(self, state: None, old: MovedSlots, new: MovedSlots) -> None:
        """It has no KV."""

    def pools(self, state: None) -> KVPool:
        """No layers."""
        return KVPool((), ())

    def with_pools(self, state: None, pools: KVPool) -> None:
        """Nothing to do."""
