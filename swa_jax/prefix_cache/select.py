"""Choosing the k least of many by several keys, without sorting them."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from swa_jax.paging import look_up
from swa_jax.rank import read_marks

_BLOCK = 1024


def least_k(marks: jax.Array, keys: Sequence[jax.Array], k: jax.Array) -> jax.Array:
    """bool[N]: the k marked entries that come first by int32[N] keys, compared in turn.

    The value that splits each key is found by halving its range: some thirty passes over the
    entries for a key, whatever k is. Keys must lie within -2^30 .. 2^30; entries that all keys
    leave equal count as one, so let the last key be unique.
    """
    return jax.lax.cond(k > 0, lambda: _first_of(marks, keys, k), lambda: jnp.zeros_like(marks))


def _first_of(marks: jax.Array, keys: Sequence[jax.Array], k: jax.Array) -> jax.Array:
    chosen = jnp.zeros_like(marks)
    left, tied = k, marks
    for key in keys:
        split = _split(tied, key, left)  # takes all or nothing without a pass where it can
        below = tied & (key < split)
        chosen = chosen | below
        left = left - jnp.sum(below, dtype=jnp.int32)
        tied = tied & (key == split)
    return chosen | (tied & (left > 0))


def _split(marks: jax.Array, key: jax.Array, k: jax.Array) -> jax.Array:
    """int32[] the least value with at least k marked entries up to it; the largest if k is more."""
    most = jnp.int32(2**30)
    low = jnp.min(jnp.where(marks, key, most), initial=2**30)
    high = jnp.max(jnp.where(marks, key, -most), initial=-(2**30))

    # All or none: no need to look for the value that splits.
    marked = jnp.sum(marks, dtype=jnp.int32)
    low = jnp.where(marked <= k, high, low)
    high = jnp.where(k <= 0, low, high)

    def halve(bounds: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        low, high = bounds
        middle = (low & high) + ((low ^ high) >> 1)  # high - low could pass int32
        enough = jnp.sum(marks & (key <= middle), dtype=jnp.int32) >= k
        return jnp.where(enough, low, middle + 1), jnp.where(enough, middle, high)

    return jax.lax.while_loop(lambda bounds: bounds[0] < bounds[1], halve, (low, high))[0]


def up_from(marks: jax.Array, parent: jax.Array, levels: int) -> jax.Array:
    """bool[N]: marked, or less than `levels` (static, few) above a marked node; not the root.

    Block by block: marks are few beside nodes.
    """
    nodes = marks.shape[0]
    width = min(_BLOCK, nodes)
    starts = read_marks(marks)

    def block(carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        reached, done = carry

        def up(_: int, both: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            reached, node = both
            above = look_up(parent, node, 0)
            return reached.at[node].set(True, mode="drop"), jnp.where(above > 0, above, nodes)

        node = starts.read(done + jnp.arange(width, dtype=jnp.int32))
        return jax.lax.fori_loop(0, levels, up, (reached, node))[0], done + width

    start = (jnp.zeros(nodes, bool), jnp.int32(0))
    return jax.lax.while_loop(lambda carry: carry[1] < starts.count, block, start)[0]


def sum_over_subtrees(parent: jax.Array, values: jax.Array, reach: jax.Array) -> jax.Array:
    """int32[N]: the sum of `values` over each node and what is below it; none for the root.

    Args:
      parent: int32[N]; the root is its own parent.
      values: int32[N].
      reach: int32[] levels to look down.
    """

    def look(carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        values, above, distance = carry
        # At first the nodes less than `distance` below are in, then those less than twice that.
        values = values.at[above].add(values, mode="drop").at[0].set(0, mode="drop")
        return values, look_up(above, above, 0), distance * 2

    start = (values.at[0].set(0, mode="drop"), parent, jnp.int32(1))
    return jax.lax.while_loop(lambda carry: carry[2] <= reach, look, start)[0]


def over_subtrees(
    parent: jax.Array, values: jax.Array, reach: jax.Array, step: int, *, least: bool = False
) -> jax.Array:
    """int32[N]: the largest (or least) of `values` over each node and what is below it.

    By doubling: each round looks twice as far down, so a chain of n nodes takes log2(n) rounds.

    Args:
      parent: int32[N]; the root is its own parent.
      values: int32[N].
      reach: int32[] levels to look down.
      step: added to a value for each level that it comes up.
      least: the least instead of the largest.
    """

    def look(carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        values, above, distance = carry
        raised = values + distance * step
        at = values.at[above]
        values = at.min(raised, mode="drop") if least else at.max(raised, mode="drop")
        return values, look_up(above, above, 0), distance * 2

    start = (values, parent, jnp.int32(1))
    return jax.lax.while_loop(lambda carry: carry[2] <= reach, look, start)[0]
