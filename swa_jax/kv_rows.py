"""Reading and writing the KV of single tokens, whatever a layer keeps for one.

A layer is an array [pages + 1, page_size, ...] of any dtype, addressed by slots: page * page_size +
offset. The padding page, page 0, is nowhere: it reads as zeros and is never written.
"""

import jax
import jax.numpy as jnp

from swa_jax.inputs import Ints, as_int32


def read_rows(layers: tuple[jax.Array, ...], slots: Ints) -> tuple[jax.Array, ...]:
    """The KV of some tokens in every layer.

    Args:
      layers: [pages + 1, page_size, ...] each, of any dtype.
      slots: int32[M] slots. One in the padding page, below 0 or past the layer reads as zeros.

    Returns:
      [M, ...] for each layer, in its dtype.

    Raises:
      ValueError: a layer without pages and a page size, or slots that are no int32[M].
    """
    slots = as_int32("slots", slots, 1)

    def read(layer: jax.Array) -> jax.Array:
        rows = _by_slot(layer)
        return rows.at[_places(layer, slots)].get(mode="fill", fill_value=0)

    return tuple(read(layer) for layer in layers)


def write_rows(
    layers: tuple[jax.Array, ...], slots: Ints, rows: tuple[jax.Array, ...]
) -> tuple[jax.Array, ...]:
    """Writes the KV of some tokens in every layer.

    Args:
      layers: [pages + 1, page_size, ...] each, of any dtype.
      slots: int32[M] where each token goes, no slot twice. A token whose slot lies in the padding
        page, below 0 or past the layer goes nowhere.
      rows: [M, ...] for each layer, in its dtype, as `read_rows` gives them.

    Returns:
      The layers after the call.

    Raises:
      ValueError: another number of layers, or rows of another shape or dtype than a layer's.
    """
    slots = as_int32("slots", slots, 1)
    if len(rows) != len(layers):
        raise ValueError(
            f"rows must be given for each of the {len(layers)} layers, got {len(rows)}"
        )

    def write(layer: jax.Array, row: jax.Array) -> jax.Array:
        by_slot = _by_slot(layer)
        wanted = (slots.shape[0], *layer.shape[2:])
        if row.shape != wanted or row.dtype != layer.dtype:
            raise ValueError(
                f"rows of a layer of {layer.dtype}{list(layer.shape)} must be {layer.dtype}"
                f"{list(wanted)}, got {row.dtype}{list(row.shape)}"
            )
        written = by_slot.at[_places(layer, slots)].set(row, mode="drop")
        return written.reshape(layer.shape)

    return tuple(write(layer, row) for layer, row in zip(layers, rows, strict=True))


def _by_slot(layer: jax.Array) -> jax.Array:
    if layer.ndim < 2:
        raise ValueError(
            f"a layer must be [pages + 1, page_size, ...], got {layer.dtype}{list(layer.shape)}"
        )
    return layer.reshape(-1, *layer.shape[2:])


def _places(layer: jax.Array, slots: jax.Array) -> jax.Array:
    """int32[M] rows of the layer by slot, one past the end for a slot that is nowhere."""
    pages, size = layer.shape[:2]
    nowhere = jnp.int32(pages * size)
    return jnp.where((slots >= jnp.int32(size)) & (slots < nowhere), slots, nowhere)
