"""Giving back what many rows have left behind, at a cost that follows the pages.

A row that decodes leaves at most one page behind in a step; a row that took a chunk leaves more.
All rows are looked at for one page, then those with more one by one, so that the cost is not rows
times chunk.
"""

import jax
import jax.numpy as jnp

from swa_jax.only_if import while_any
from swa_jax.state import AllocatorState
from swa_jax.window import free_out_of_window, frontier


def leave_windows(
    allocator: AllocatorState,
    table: jax.Array,
    lengths: jax.Array,
    evicted: jax.Array,
    active: jax.Array,
    *,
    step_pages: int,
    insert_lens: jax.Array | None = None,
    by: jax.Array | None = None,
) -> tuple[AllocatorState, jax.Array]:
    """Gives back every SWA page that has left its row's window.

    Args:
      allocator: before the call.
      table: int32[R, C] first full slot of each page of each row.
      lengths: int32[R] committed tokens.
      evicted: int32[R] tokens whose SWA pages were given back.
      active: bool[R] rows in use.
      step_pages: most pages of a row that one turn frees, static; more take more turns.
      insert_lens: int32[R] as for `frontier`.
      by: int32[R] owner of each row, None by default.

    Returns:
      The allocator, and int32[R] the new `evicted`. Nothing without a window.

    Rule R8.
    """
    config = allocator.config
    if config.sliding_window is None:
        return allocator, evicted

    def free_rows(
        carry: tuple[AllocatorState, jax.Array], which: jax.Array, rows: jax.Array, most: int
    ) -> tuple[AllocatorState, jax.Array]:
        allocator, evicted = carry
        allocator, done = free_out_of_window(
            allocator,
            rows,
            lengths[which],
            evicted[which],
            insert_lens=None if insert_lens is None else insert_lens[which],
            active=active[which],
            max_pages=most,
            stride=config.page_size,
            by=None if by is None else by[which],
        )
        return allocator, evicted.at[which].set(done, mode="drop")

    edge = frontier(config, lengths, insert_lens)

    def behind(evicted: jax.Array) -> jax.Array:
        return jnp.where(active, edge - evicted, 0)

    def one(carry: tuple[AllocatorState, jax.Array]) -> tuple[AllocatorState, jax.Array]:
        row = jnp.argmax(behind(carry[1])).astype(jnp.int32)
        columns = jax.lax.dynamic_slice_in_dim(table, row, 1)
        return free_rows(carry, row[None], columns, step_pages)

    everyone = jnp.arange(table.shape[0], dtype=jnp.int32)
    carry = free_rows((allocator, evicted), everyone, table, 1)
    page = jnp.int32(config.page_size)
    return while_any(lambda carry: jnp.max(behind(carry[1])) >= page, one, carry)
