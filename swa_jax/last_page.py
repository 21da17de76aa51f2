"""Rows that go on in the page of their last token: checked before any page is granted."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from swa_jax.owners import is_foreign
from swa_jax.paging import first_places, look_up, offset_of, page_of
from swa_jax.pool import holders_of, nowhere
from swa_jax.state import UNMAPPED, AllocatorState


@dataclass(frozen=True)
class LastPage:
    """The page that each row fills first."""

    goes_on: jax.Array  # bool[B] the row's first new token goes into the page of last_loc
    page: jax.Array  # int32[B] that page; one past the end for other rows
    filled: jax.Array  # int32[B] tokens that are in it
    has_swa: jax.Array  # bool[B] the page has an SWA side
    absent: jax.Array  # bool[B] pure SWA: the last token was kept nowhere, there is no page yet
    lost: jax.Array  # bool[B] counts out_of_range
    crooked: jax.Array  # bool[B] counts misaligned
    shared: jax.Array  # bool[B] counts still_mapped
    foreign: jax.Array | None  # bool[B] counts foreign; None without owner tags
    scratch: jax.Array


def look_at_last_page(
    state: AllocatorState,
    prefix_lens: jax.Array,
    last_loc: jax.Array,
    grows: jax.Array,
    by: jax.Array | None = None,
) -> LastPage:
    """Finds and checks the partly filled page of each row that grows.

    A row whose `last_loc` names no held page counts `out_of_range`. One that stands at another
    place of its page than its length says, or that goes on in the page of an earlier row (both
    would be handed the same slots: a copy of the last page was forgotten), counts `misaligned`.
    One whose page others hold too counts `still_mapped`: it must get a page of its own first
    (`copy_on_write`), or its token would overwrite theirs. One whose page has another owner's tag
    counts `foreign`.

    Args:
      state: allocator before the call.
      prefix_lens: int32[B] tokens held; read where `grows` only.
      last_loc: int32[B] full slot of token prefix_lens - 1.
      grows: bool[B].
      by: int32[B] owner of each row, None without owner tags.
    """
    config = state.config
    size, outside = config.page_size, jnp.int32(nowhere(state.full))
    filled = offset_of(jnp.where(grows, prefix_lens, 0), size)
    goes_on = grows & (filled > 0)
    if size == 1:  # a page of one token is never partly filled
        off = jnp.zeros_like(goes_on)
        nothing = jnp.full_like(last_loc, outside)
        foreign = None if by is None else off
        return LastPage(off, nothing, filled, off, off, off, off, off, foreign, state.scratch)

    end = jnp.int32(config.full_tokens + size)
    inside = goes_on & (last_loc >= jnp.int32(size)) & (last_loc < end)
    slot = jnp.where(inside, last_loc, 0)
    page = jnp.where(inside, page_of(slot, size), outside)
    has_swa = inside & (look_up(state.full_to_swa, page, UNMAPPED) != UNMAPPED)
    holders = jnp.where(inside, holders_of(state.full, page), 0)
    held = holders > 0
    absent = jnp.zeros_like(held)
    if config.pure_swa_pool:
        held = held & has_swa  # the one side there is must be live
        # A token before an SWA tail has slot 0, and so the row's next page starts half-way.
        absent = goes_on & (last_loc >= 0) & (last_loc < jnp.int32(size))
    lost = goes_on & ~held & ~absent
    foreign = None
    if by is not None and state.owner_tags is not None:
        foreign = held & is_foreign(state.owner_tags, page, holders, by)
        held = held & ~foreign
    straight = held & (offset_of(slot, size) == filled - 1)
    page = jnp.where(straight, page, outside)
    first, _, scratch = first_places(state.scratch, page)
    shared = straight & (holders > 1)
    crooked = held & ~(straight & first) & ~shared
    return LastPage(goes_on, page, filled, has_swa, absent, lost, crooked, shared, foreign, scratch)
