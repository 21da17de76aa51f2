"""What sources that run a network share: the levels of their tree of drafts, and one pass over it.

Every node of a level is continued by equally many tokens, so the tree is known before tracing; a
chain is the tree in which each level has one node. Drafts are numbered level by level, the
children of one node side by side.
"""

import jax
import jax.numpy as jnp

from swa_jax.inputs import whole_number
from swa_jax.models.decoder.batch import PagedBatch
from swa_jax.serving.draft import DraftView
from swa_jax.serving.extend_rows import Extension, batch_of


def checked_branches(num_drafts: int, branches: tuple[int, ...]) -> tuple[int, ...]:
    """How many tokens continue each node, level by level.

    Args:
      num_drafts: K of a chain; 0 where `branches` say it.
      branches: of a tree; empty for a chain.

    Raises:
      ValueError: a number below 1, or a K that the branches do not make.
    """
    if not branches:
        return (1,) * whole_number("num_drafts", num_drafts, 1, 1024)
    branches = tuple(whole_number("each of branches", branch, 1, 1024) for branch in branches)
    made = sum(level_widths(branches))
    if num_drafts not in (0, made):
        raise ValueError(
            f"branches={branches!r} make {made} drafts, got num_drafts={num_drafts!r}; leave "
            "num_drafts out"
        )
    return branches


def level_widths(branches: tuple[int, ...]) -> tuple[int, ...]:
    """Nodes of each level below the last known token."""
    widths = [1]
    for branch in branches:
        widths.append(widths[-1] * branch)
    return tuple(widths[1:])


def level_parents(branches: tuple[int, ...]) -> tuple[int, ...]:
    """For each draft the draft that it continues, -1 for the last known token."""
    parents, level = [], [-1]
    for branch in branches:
        new = [node for node in level for _ in range(branch)]
        level = list(range(len(parents), len(parents) + len(new)))
        parents += new
    return tuple(parents)


class Levels:
    """The tree of a source of drafts that is a frozen dataclass with these two fields."""

    num_drafts: int
    branches: tuple[int, ...]

    def __post_init__(self) -> None:
        """Both fields as they are meant: K, and a tuple, since a list would not be hashable."""
        levels = self.levels
        object.__setattr__(self, "num_drafts", sum(level_widths(levels)))
        if self.branches:
            object.__setattr__(self, "branches", levels)

    @property
    def parents(self) -> tuple[int, ...]:
        """For each draft the earlier one that it continues, -1 for the row's last token."""
        return level_parents(self.levels)

    @property
    def levels(self) -> tuple[int, ...]:
        """How many tokens continue each node, level by level."""
        return checked_branches(self.num_drafts, self.branches)


def likeliest(logits: jax.Array, count: int) -> jax.Array:
    """int32[R, n * count] the `count` likeliest tokens after each of n nodes.

    Args:
      logits: float32[R, n, V].
      count: at most V, static.
    """
    chosen = jax.lax.top_k(logits, count)[1].astype(jnp.int32)
    return chosen.reshape(chosen.shape[0], -1)


def draft_batch(
    view: DraftView,
    start: jax.Array,
    slots: jax.Array,
    tokens: jax.Array,
    *,
    depths: jax.Array | None = None,
    tree_mask: jax.Array | None = None,
) -> PagedBatch:
    """A pass over tokens that have places in their row.

    Args:
      view: the rows.
      start: int32[R] place of the first token.
      slots: int32[R, Q] full slots; a row takes part as far as these are not 0.
      tokens: int32[R, Q].
      depths: int32[Q] places after `start`, 0 .. Q - 1 by default.
      tree_mask: bool[Q, Q] which token sees which; all before it by default.
    """
    counts = jnp.sum(slots > 0, axis=1, dtype=jnp.int32)
    taken = Extension(jnp.ones((), bool), counts, slots, view.table)
    return batch_of(view.allocator, taken, start, tokens, depths=depths, tree_mask=tree_mask)


def tokens_at(view: DraftView, places: jax.Array) -> jax.Array:
    """int32[R, Q] known tokens at int32[R, Q] places; past the table the last one."""
    inside = jnp.minimum(places, jnp.int32(view.tokens.shape[1] - 1))
    return jnp.take_along_axis(view.tokens, inside, axis=1, mode="clip")
