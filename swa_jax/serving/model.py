"""What a model is to the loop, and the decoder of `swa_jax.models` as one."""

from dataclasses import dataclass
from typing import Protocol

import jax
import jax.numpy as jnp

from swa_jax.config import PoolConfig
from swa_jax.models.decoder import (
    DecoderConfig,
    KVPool,
    PagedBatch,
    UnifiedKV,
    forward_paged,
    init_kv,
    unembed,
    write_kv,
)
from swa_jax.models.decoder.paged import KV
from swa_jax.models.decoder.paged_attention import Attend, attend_pages
from swa_jax.models.model_config import FULL, SWA
from swa_jax.serving.moved_slots import MovedSlots
from swa_jax.serving.trees import Tree


class ServingModel(Protocol):
    """Tree model over paged KV. Hashable: it is static under `jit`."""

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Tokens that end a text."""
        ...

    @property
    def vocab_size(self) -> int:
        """Tokens are 0 .. vocab_size - 1."""
        ...

    def init_kv(self, pool: PoolConfig) -> Tree:
        """KV for these pools: a pytree."""
        ...

    def forward(self, params: Tree, kv: Tree, batch: PagedBatch) -> tuple[jax.Array, Tree]:
        """float[R, Q, H] hidden states of the new tokens, and the KV with them written."""
        ...

    def unembed(self, params: Tree, hidden: jax.Array) -> jax.Array:
        """float32[..., V] logits of float[..., H] hidden states."""
        ...

    def move_kv(self, kv: Tree, old: MovedSlots, new: MovedSlots) -> Tree:
        """Copies KV between slots; what several write is never read."""
        ...

    def pools(self, kv: Tree) -> KVPool:
        """Its KV layer by layer, [pages + 1, page_size, ...] each: what is sent and kept apart."""
        ...

    def with_pools(self, kv: Tree, pools: KVPool) -> Tree:
        """The same KV with other layers, as `pools` gave them."""
        ...


@dataclass(frozen=True)
class Decoder:
    """A Gemma 3 or gpt-oss decoder for the loop.

    Args:
      config: the model.
      kv_dtype: of the KV, a name.
      attend: attention over pages, as `swa_jax.models.decoder.choose_attention` picks it.
    """

    config: DecoderConfig
    kv_dtype: str = "float32"
    attend: Attend = attend_pages

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Tokens that end a text."""
        return self.config.eos_token_ids

    @property
    def vocab_size(self) -> int:
        """Tokens are 0 .. vocab_size - 1."""
        return self.config.vocab_size

    def init_kv(self, pool: PoolConfig) -> KVPool | UnifiedKV:
        """KV of zeros for these pools."""
        return init_kv(self.config, pool, jnp.dtype(self.kv_dtype))

    def forward(self, params: Tree, kv: KV, batch: PagedBatch) -> tuple[jax.Array, KV]:
        """float[R, Q, H] hidden states of the new tokens, and the KV with them written."""
        return forward_paged(self.config, params, kv, batch, attend=self.attend)

    def unembed(self, params: Tree, hidden: jax.Array) -> jax.Array:
        """float32[..., V] logits of float[..., H] hidden states."""
        return unembed(self.config, params, hidden)

    def move_kv(self, kv: KV, old: MovedSlots, new: MovedSlots) -> KV:
        """Copies KV of int32[M] slots to other slots, all reading before any writing."""
        sides = {FULL: (old.full, new.full), SWA: (old.swa, new.swa)}
        for kind, places in ((FULL, self.config.full_layers), (SWA, self.config.swa_layers)):
            for place in range(len(places)):
                kv = _move_layer(kv, kind, place, *sides[kind])
        return kv

    def pools(self, kv: KVPool | UnifiedKV) -> KVPool:
        """Its KV layer by layer; of a unified budget a copy."""
        return kv.pools() if isinstance(kv, UnifiedKV) else kv

    def with_pools(self, kv: KVPool | UnifiedKV, pools: KVPool) -> KVPool | UnifiedKV:
        """The same KV with other layers; of a unified budget with the pages that are others."""
        return kv.with_pools(pools) if isinstance(kv, UnifiedKV) else pools


def _move_layer(kv: KV, kind: str, place: int, old: jax.Array, new: jax.Array) -> KV:
    """One layer of `Decoder.move_kv`."""
    pages = jnp.zeros((1, 1), jnp.int32)  # none is looked at
    layer, from_slots, _ = kv.open_layer(kind, place, old, pages)
    _, to, _ = kv.open_layer(kind, place, jnp.where(old > 0, new, 0), pages)
    rows = layer.reshape(-1, *layer.shape[2:]).at[from_slots].get(mode="fill", fill_value=0)
    return kv.close_layer(kind, place, write_kv(layer, to, rows[:, 0::2], rows[:, 1::2]))


def as_model(model: ServingModel | DecoderConfig) -> ServingModel:
    """The model as the loop takes it: a decoder's configuration alone will do."""
    return Decoder(model) if isinstance(model, DecoderConfig) else model
