"""Slot and page arithmetic, and taking each page once. Slots are int32 token places."""

import jax
import jax.numpy as jnp

from swa_jax.state import NOBODY


def page_of(slots: jax.Array, page_size: int) -> jax.Array:
    """Page ids of slots; meaningful for slots >= 0 only."""
    if page_size & (page_size - 1) == 0:  # a division would look at signs first
        return jax.lax.shift_right_logical(slots, jnp.int32(page_size.bit_length() - 1))
    return jax.lax.div(slots, jnp.int32(page_size))


def offset_of(slots: jax.Array, page_size: int) -> jax.Array:
    """Places of slots in their pages; meaningful for slots >= 0 only."""
    if page_size & (page_size - 1) == 0:
        return slots & jnp.int32(page_size - 1)
    return jax.lax.rem(slots, jnp.int32(page_size))


def pages_for(tokens: jax.Array, page_size: int) -> jax.Array:
    """Pages that hold `tokens` >= 0 tokens: the quotient rounded up, without overflow."""
    if page_size == 1:
        return tokens
    return page_of(tokens, page_size) + (offset_of(tokens, page_size) > 0).astype(jnp.int32)


def floor_to_page(tokens: jax.Array, page_size: int) -> jax.Array:
    """`tokens` >= 0 rounded down to a page boundary."""
    return tokens - offset_of(tokens, page_size)


_SCATTER = jax.lax.ScatterDimensionNumbers(
    update_window_dims=(), inserted_window_dims=(0,), scatter_dims_to_operand_dims=(0,)
)


def look_up(table: jax.Array, index: jax.Array, absent: int | bool) -> jax.Array:
    """table[index], and `absent` for an index past the end or below 0.

    (`table.at[index]` would first look for negative indices and wrap them round to the end.)
    """
    return _gather(table, index, mode="fill", fill_value=absent)


def fetch(table: jax.Array, index: jax.Array) -> jax.Array:
    """table[index], and the nearer end for an index that is outside: the least work."""
    return _gather(table, index, mode="clip")


def _gather(
    table: jax.Array, index: jax.Array, mode: str, fill_value: int | bool | None = None
) -> jax.Array:
    row = table.shape[1:]
    dimensions = jax.lax.GatherDimensionNumbers(
        offset_dims=tuple(range(index.ndim, index.ndim + len(row))),
        collapsed_slice_dims=(0,),
        start_index_map=(0,),
    )
    return jax.lax.gather(
        table, index[..., None], dimensions, (1, *row), mode=mode, fill_value=fill_value
    )


def put(table: jax.Array, index: jax.Array, values: jax.Array) -> jax.Array:
    """The table with `values` (or a lone value) at int32[K] `index`; past the end is nowhere."""
    if index.shape[0] == 1:  # a lone write is compiled to one that copies the table first
        index = jnp.concatenate([index, jnp.full(1, table.shape[0], jnp.int32)])
    values = jnp.broadcast_to(values, index.shape)
    return jax.lax.scatter(table, index[:, None], values, _SCATTER, mode="drop")


def not_alone(places: jax.Array, step: int = 1) -> jax.Array:
    """The places with an empty one more to look at, where there is one alone.

    What looks up a lone index and writes there is compiled to copies of the tables.

    Args:
      places: [T] slots, lengths or marks; 0 or False is an unused place.
      step: static, every so many-th place is looked at.
    """
    return jnp.pad(places, (0, step)) if 0 < places.shape[0] <= step else places


def first_places(scratch: jax.Array, pages: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Finds for each page of a list the first place that names it. Cost: the list, not the pool.

    Args:
      scratch: int32[N+1], NOBODY everywhere.
      pages: int32[T] page ids; N+1 (one past the end) for a place that names none.

    Returns:
      bool[T]: this place is the first that names its page;
      int32[T]: the first place that names this place's page (T where it names none);
      scratch, NOBODY everywhere again.
    """
    count = pages.shape[0]
    if count == 1:
        names = pages < scratch.shape[0]
        return names, jnp.where(names, 0, count), scratch
    places = jnp.arange(count, dtype=jnp.int32)
    marked = jax.lax.scatter_min(scratch, pages[:, None], places, _SCATTER, mode="drop")
    first = look_up(marked, pages, count)
    is_first = first == places
    # Only first places reset their page: the reset then depends on what was read, so the
    # compiler can order it after the reading and needs no copy of the whole array.
    reset = jnp.where(is_first, pages, scratch.shape[0])
    return is_first, first, put(marked, reset, jnp.int32(NOBODY))


def sum_exceeds(values: jax.Array, limit: int) -> jax.Array:
    """bool[]: the sum of int32[B] values >= 0 is above `limit`, right even where it passes int32.

    Two halves of 15 bits and the rest are summed apart (B up to 32,767 rows).
    """
    low_mask = jnp.int32(0x7FFF)
    low = jnp.sum(values & low_mask, dtype=jnp.int32)
    high = jnp.sum(values >> jnp.int32(15), dtype=jnp.int32) + (low >> jnp.int32(15))
    limit_high, limit_low = limit >> 15, limit & 0x7FFF
    return (high > limit_high) | ((high == limit_high) & ((low & low_mask) > limit_low))
