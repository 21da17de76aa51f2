"""KV of all layers: one array a layer, addressed by the slots that the allocator grants."""

import functools
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp

from swa_jax.models.model_config import FULL
from swa_jax.state import PAD_SLOT


@functools.partial(jax.tree_util.register_dataclass, data_fields=["full", "swa"], meta_fields=[])
@dataclass(frozen=True)
class KVPool:
    """The KV of every layer. Donate it to the step that writes it.

    A layer is float[pages + 1, page_size, 2 * kv_heads, head_dim], the K of head h at 2h and its V
    at 2h + 1: what JAX's ragged paged attention kernel reads. Page 0 is padding and stays 0.
    """

    full: tuple[jax.Array, ...]  # full layers in order, by full slot
    swa: tuple[jax.Array, ...]  # SWA layers in order, by SWA slot

    def open_layer(
        self, kind: str, place: int, slots: jax.Array, pages: jax.Array
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """The array that holds a layer, and where in it slots and pages of the layer lie.

        Args:
          kind: "F" or "S", static.
          place: which layer of that kind, static.
          slots: int32[...] slots of that kind.
          pages: int32[R, N] pages of that kind.
        """
        return (self.full if kind == FULL else self.swa)[place], slots, pages

    def close_layer(self, kind: str, place: int, layer: jax.Array) -> "KVPool":
        """The KV with a layer written to."""
        name = "full" if kind == FULL else "swa"
        layers = getattr(self, name)
        return replace(self, **{name: (*layers[:place], layer, *layers[place + 1 :])})


def write_kv(layer: jax.Array, slots: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """Writes the KV of some tokens.

    Args:
      layer: float[pages + 1, page_size, 2 * kv_heads, head_dim].
      slots: int32[...] where each token goes, page * page_size + offset; a token whose slot is 0
        or below goes nowhere, so that the padding page never holds anything.
      k: float[..., kv_heads, head_dim].
      v: float[..., kv_heads, head_dim].

    Returns:
      The layer after the call, in its own dtype.
    """
    rows = layer.reshape(-1, *layer.shape[2:])
    both = jnp.stack([k, v], axis=-2).astype(layer.dtype).reshape(-1, *layer.shape[2:])
    nowhere = jnp.int32(rows.shape[0])
    places = jnp.where(slots > PAD_SLOT, slots, nowhere).reshape(-1)
    return rows.at[places].set(both, mode="drop").reshape(layer.shape)
