"""Dealing pages to rows in order."""

import jax
import jax.numpy as jnp

from swa_jax.paging import pages_for
from swa_jax.rank import exclusive_sum


def share_pages(length: jax.Array, want: jax.Array, pages: jax.Array, page_size: int) -> jax.Array:
    """int32[R] tokens that each row may add, in row order, with `pages` new pages for all.

    A row that the pages do not reach takes what they hold: its share shrinks, it is not refused.
    Rows behind one that was cut short get nothing, so that no later row overtakes an earlier one.

    Args:
      length: int32[R] tokens held.
      want: int32[R] tokens that each would add.
      pages: int32[] new pages.
      page_size: tokens in a page.
    """
    held = pages_for(length, page_size)
    need = pages_for(length + want, page_size) - held
    taken = jnp.minimum(exclusive_sum(need), pages)
    room = held * jnp.int32(page_size) - length
    most = room + jnp.minimum(pages - taken, need) * jnp.int32(page_size)
    cut = exclusive_sum((most < want).astype(jnp.int32)) > 0
    return jnp.where(cut, 0, jnp.minimum(want, most))
