"""Pages of KV on their way between pools and host memory.

The *image* of a page is its KV in all layers of a pool. Layers of one shape and dtype make a group,
and an image is an array [layers of the group, page_size, ...] for each group: few large pieces to
copy, whatever the number of layers. Images of K pages are arrays [K, layers, page_size, ...].
"""

import functools
from collections.abc import Iterator, Sequence
from typing import TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

Layers: TypeAlias = tuple[jax.Array, ...]
Images: TypeAlias = tuple[jax.Array, ...]  # a group each

# Pages that are copied at once: a copy is padded to one of these, so that few are compiled.
BATCHES = (4, 16, 64)


def batches(rows: Sequence[int]) -> Iterator[slice]:
    """Cuts a list into parts that are copied at once."""
    for start in range(0, len(rows), BATCHES[-1]):
        yield slice(start, min(len(rows), start + BATCHES[-1]))


def padded(values: Sequence[int], padding: int = 0) -> np.ndarray:
    """int32[K] of the smallest batch that holds these values."""
    room = next(size for size in BATCHES if len(values) <= size)
    row = np.full(room, padding, np.int32)
    row[: len(values)] = values
    return row


def groups(layers: Layers) -> list[list[int]]:
    """Numbers of the layers of each group, in order of the first."""
    found: dict[tuple, list[int]] = {}
    for number, layer in enumerate(layers):
        if layer.ndim < 2:
            raise ValueError(
                f"a layer must be [pages + 1, page_size, ...], got {layer.dtype}{list(layer.shape)}"
            )
        found.setdefault((layer.shape[1:], jnp.dtype(layer.dtype)), []).append(number)
    return list(found.values())


@jax.jit
def gather(layers: Layers, pages: jax.Array) -> Images:
    """The images of int32[K] pages; zeros for one that is 0 or below."""
    return tuple(
        jnp.stack([_read(layers[number], pages) for number in group], axis=1)
        for group in groups(layers)
    )


def _read(layer: jax.Array, pages: jax.Array) -> jax.Array:
    return layer.at[_places(layer, pages)].get(mode="fill", fill_value=0)


def _places(layer: jax.Array, pages: jax.Array) -> jax.Array:
    return jnp.where(pages > 0, pages, jnp.int32(layer.shape[0]))


@functools.partial(jax.jit, donate_argnums=0)
def scatter(layers: Layers, of_place: jax.Array, places: jax.Array, images: Images) -> Layers:
    """Writes images into pages.

    Args:
      layers: taken over.
      of_place: int32[N] the page that each page of a prompt gets, 0 for none.
      places: int32[K] which page of the prompt each image is of; one past the end for none.
      images: of K pages.
    """
    pages = of_place.at[places].get(mode="fill", fill_value=0)
    after = list(layers)
    for group, image in zip(groups(layers), images, strict=True):
        for at, number in enumerate(group):
            layer = layers[number]
            after[number] = layer.at[_places(layer, pages)].set(image[:, at], mode="drop")
    return tuple(after)
