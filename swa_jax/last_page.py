"""Rows that go on in the page of their last token: checked before any page is granted."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from swa_jax.paging import look_up, offset_of, page_of
from swa_jax.pool import nowhere
from swa_jax.state import UNMAPPED, AllocatorState


@dataclass(frozen=True)
class LastPage:
    """The page that each row fills first."""

    goes_on: jax.Array  # bool[B] the row's first new token goes into the page of last_loc
    page: jax.Array  # int32[B] that page; one past the end for other rows
    has_swa: jax.Array  # bool[B] the page has an SWA side
    lost: jax.Array  # bool[B] counts out_of_range
    crooked: jax.Array  # bool[B] counts misaligned


def look_at_last_page(
    state: AllocatorState, prefix_lens: jax.Array, last_loc: jax.Array, grows: jax.Array
) -> LastPage:
    """Finds and checks the partly filled page of each row that grows.

    A row whose `last_loc` names no held page counts `out_of_range`. One that stands at another
    place of its page than its length says counts `misaligned`, and so does a later row that goes
    on in the same page without an SWA side: one page cannot get two of them.

    Args:
      state: allocator before the call.
      prefix_lens: int32[B] tokens held; read where `grows` only.
      last_loc: int32[B] full slot of token prefix_lens - 1.
      grows: bool[B].
    """
    config = state.config
    size, outside = config.page_size, jnp.int32(nowhere(state.full))
    filled = offset_of(jnp.where(grows, prefix_lens, 0), size)
    goes_on = grows & (filled > 0)
    if size == 1:  # a page of one token is never partly filled
        off = jnp.zeros_like(goes_on)
        return LastPage(off, jnp.full_like(last_loc, outside), off, off, off)

    end = jnp.int32(config.full_tokens + size)
    inside = goes_on & (last_loc >= jnp.int32(size)) & (last_loc < end)
    slot = jnp.where(inside, last_loc, 0)
    page = jnp.where(inside, page_of(slot, size), outside)
    has_swa = look_up(state.full_to_swa, page, UNMAPPED) != UNMAPPED
    bare = inside & ~has_swa
    if config.pure_swa_pool:  # the one side there is must be live
        lost, again = bare, jnp.zeros_like(bare)
    else:
        lost, again = _look_at_bare(state.full.free, page, bare)
    straight = offset_of(slot, size) == filled - 1
    crooked = inside & ~lost & (~straight | again)
    return LastPage(goes_on, page, has_swa, (goes_on & ~inside) | lost, crooked)


def _look_at_bare(free: jax.Array, page: jax.Array, bare: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Of the rows whose page has no SWA side: which pages are not held, which come again.

    A mapped page is held (law 8), so only these rows need the bitmap. They are rare; where a
    branch costs nothing (CPU) it spares the usual step the work, elsewhere it would cost a
    round trip to the host and the work is done always. Both give the same.
    """

    def look(free: jax.Array, page: jax.Array, bare: jax.Array) -> tuple[jax.Array, jax.Array]:
        lost = bare & look_up(free, page, True)
        return lost, _comes_again(page, bare & ~lost, free.shape[0])

    def branch(free: jax.Array, page: jax.Array, bare: jax.Array) -> tuple[jax.Array, jax.Array]:
        def skip(free: jax.Array, page: jax.Array, bare: jax.Array) -> tuple[jax.Array, jax.Array]:
            return jnp.zeros_like(bare), jnp.zeros_like(bare)

        return jax.lax.cond(jnp.any(bare), look, skip, free, page, bare)

    return jax.lax.platform_dependent(free, page, bare, cpu=branch, default=look)


def _comes_again(page: jax.Array, marks: jax.Array, outside: int) -> jax.Array:
    """bool[B]: a marked row whose page an earlier marked row names too."""
    rows = jnp.arange(page.shape[0], dtype=jnp.int32)
    key = jnp.where(marks, page, jnp.int32(outside))
    key, order = jax.lax.sort((key, rows), num_keys=2)
    same = jnp.concatenate([jnp.zeros(1, bool), key[1:] == key[:-1]]) & (key < outside)
    return jnp.zeros(page.shape, bool).at[order].set(same, mode="drop")
