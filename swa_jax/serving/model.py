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
    forward_paged,
    init_kv,
    unembed,
    write_kv,
)
from swa_jax.models.decoder.paged_attention import Attend, attend_pages
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

    def init_kv(self, pool: PoolConfig) -> KVPool:
        """KV of zeros for these pools."""
        return init_kv(self.config, pool, jnp.dtype(self.kv_dtype))

    def forward(self, params: Tree, kv: KVPool, batch: PagedBatch) -> tuple[jax.Array, KVPool]:
        """float[R, Q, H] hidden states of the new tokens, and the KV with them written."""
        return forward_paged(self.config, params, kv, batch, attend=self.attend)

    def unembed(self, params: Tree, hidden: jax.Array) -> jax.Array:
        """float32[..., V] logits of float[..., H] hidden states."""
        return unembed(self.config, params, hidden)

    def move_kv(self, kv: KVPool, old: MovedSlots, new: MovedSlots) -> KVPool:
        """Copies KV of int32[M] slots to other slots, all reading before any writing."""

        def move(layer: jax.Array, old: jax.Array, new: jax.Array) -> jax.Array:
            rows = layer.reshape(-1, *layer.shape[2:]).at[old].get(mode="fill", fill_value=0)
            to = jnp.where(old > 0, new, 0)
            return write_kv(layer, to, rows[:, 0::2], rows[:, 1::2])

        return KVPool(
            full=tuple(move(layer, old.full, new.full) for layer in kv.full),
            swa=tuple(move(layer, old.swa, new.swa) for layer in kv.swa),
        )


def as_model(model: ServingModel | DecoderConfig) -> ServingModel:
    """The model as the loop takes it: a decoder's configuration alone will do."""
    return Decoder(model) if isinstance(model, DecoderConfig) else model
