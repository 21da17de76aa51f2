"""Which drafts are right: those that the model gives itself, from the last known token on.

K drafts as a tree over nodes 1 .. K; node 0 is the row's last known token.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np


@dataclass(frozen=True)
class DraftTree:
    """A tree of drafts, on the host and static."""

    parents: tuple[int, ...]  # of node i + 1: a node, 0 for the last known token

    @classmethod
    def of(cls, parents: tuple[int, ...]) -> "DraftTree":
        """From the parents of drafts 0 .. K - 1, -1 for the last known token.

        Raises:
          ValueError: a draft that continues itself or a later one.
        """
        for place, parent in enumerate(parents):
            if not -1 <= parent < place:
                raise ValueError(
                    f"draft {place} must continue an earlier draft or -1, got {parent}"
                )
        return cls(tuple(parent + 1 for parent in parents))

    @property
    def depths(self) -> np.ndarray:
        """int32[1 + K] tokens after the last known one."""
        depths = [0]
        for parent in self.parents:
            depths.append(depths[parent] + 1)
        return np.array(depths, np.int32)

    @property
    def mask(self) -> np.ndarray:
        """bool[1 + K, 1 + K] node i sees node j: itself and what it continues."""
        count = len(self.parents) + 1
        mask = np.eye(count, dtype=bool)
        for node, parent in enumerate(self.parents, 1):
            mask[node] |= mask[parent]
        return mask

    @property
    def is_chain(self) -> bool:
        """Every draft continues the one before."""
        return self.parents == tuple(range(len(self.parents)))


@dataclass(frozen=True)
class Verified:
    """The path of each row through its tree. D is the deepest draft."""

    nodes: jax.Array  # int32[R, 1 + D] nodes on the path, 0 first; past `count` meaningless
    tokens: jax.Array  # int32[R, 1 + D] what the model gives after each of them
    count: jax.Array  # int32[R] tokens that it gives: 1 and one for each right draft


def verify(tree: DraftTree, drafts: jax.Array, has_drafts: jax.Array, given: jax.Array) -> Verified:
    """Follows the model's own choice down the tree as far as it was drafted.

    Args:
      tree: static.
      drafts: int32[R, K] tokens.
      has_drafts: bool[R] rows whose drafts mean anything.
      given: int32[R, 1 + K] the token that the model gives after each node.
    """
    rows = given.shape[0]
    node, alive = jnp.zeros(rows, jnp.int32), jnp.ones(rows, bool)
    nodes, count = [node], jnp.ones(rows, jnp.int32)
    parents = jnp.array(tree.parents, jnp.int32)
    for _ in range(int(tree.depths.max())):
        wanted = jnp.take_along_axis(given, node[:, None], axis=1, mode="clip")
        right = (parents[None, :] == node[:, None]) & (drafts == wanted)
        alive = alive & has_drafts & jnp.any(right, axis=1)
        node = jnp.where(alive, jnp.argmax(right, axis=1).astype(jnp.int32) + 1, node)
        count = count + alive.astype(jnp.int32)
        nodes.append(node)
    path = jnp.stack(nodes, axis=1)
    return Verified(path, jnp.take_along_axis(given, path, axis=1, mode="clip"), count)


def cut(
    verified: Verified,
    room: jax.Array,
    eos: tuple[int, ...],
    ignore_eos: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """Where each row's new tokens end.

    Args:
      verified: the tokens.
      room: int32[R] tokens that the row may still give, at least 1.
      eos: tokens that end a text.
      ignore_eos: bool[R].

    Returns:
      int32[R] tokens that count, an end token included; bool[R] whether the last of them ends it.
    """
    place = jnp.arange(verified.tokens.shape[1], dtype=jnp.int32)[None, :]
    ends = jnp.zeros(verified.tokens.shape, bool)
    for token in eos:
        ends = ends | (verified.tokens == token)
    ends = ends & ~ignore_eos[:, None]
    count = jnp.minimum(verified.count, room)
    first = jnp.min(jnp.where(ends, place, verified.tokens.shape[1]), axis=1)
    stops = first < count
    return jnp.where(stops, first + 1, count), stops
