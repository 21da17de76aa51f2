"""Page and sequence numbers as Levanter writes them, and what they are in the core.

There pages count from 0 and `INVALID` stands for none; here page 0 is padding, so page p there is
page p + 1 here.
"""

from typing import Any, Protocol, TypeAlias

import jax
import jax.numpy as jnp

from swa_jax.inputs import Ints, as_int32
from swa_jax.paging import look_up
from swa_jax.state import PAD_SLOT, UNMAPPED, AllocatorState

INVALID = 2_000_000


class NamedInts(Protocol):
    """An array with named axes, of which only the array is read."""

    @property
    def array(self) -> jax.Array:
        """The values."""
        ...


Ids: TypeAlias = Ints | NamedInts


def is_valid(ids: jax.Array) -> jax.Array:
    """bool[...]: an id that is neither negative nor `INVALID`."""
    return (ids >= 0) & (ids != INVALID)


def is_invalid(ids: jax.Array) -> jax.Array:
    """bool[...]: no id."""
    return ~is_valid(ids)


def unnamed(value: object) -> Any:  # noqa: ANN401  # whatever arrays may come from
    """The array of a named array; anything else as it is."""
    return value if isinstance(value, jax.Array) else getattr(value, "array", value)


def plain(name: str, value: Ids, ndim: int) -> jax.Array:
    """int32 of `ndim` dimensions from an array, a list, or a named array."""
    return as_int32(name, unnamed(value), ndim)


def first_slots(pages: jax.Array, page_size: int) -> jax.Array:
    """int32[...] the core's slot of the first token of each page, 0 (padding) for none."""
    return jnp.where(is_valid(pages), (pages + 1) * jnp.int32(page_size), PAD_SLOT)


def from_core(pages: jax.Array) -> jax.Array:
    """int32[...] page ids of the core under Levanter's numbers; its padding page is none."""
    return jnp.where(pages > 0, pages - 1, jnp.int32(INVALID))


def at_row(table: jax.Array, row: jax.Array) -> jax.Array:
    """A row of a table; `INVALID` where there is no such row."""
    inside = (row >= 0) & (row < table.shape[0])
    return look_up(table, jnp.where(inside, row, table.shape[0]), INVALID)


def window_pages(state: AllocatorState, pages: jax.Array) -> jax.Array:
    """int32[...] the window layers' pages of full pages; `INVALID` where there is none."""
    known = jnp.where(is_valid(pages), pages + 1, 0)
    return from_core(look_up(state.full_to_swa, known, UNMAPPED))
