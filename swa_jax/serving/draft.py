"""Speculation: what a source of drafts is to the loop.

A source proposes K tokens a row; the model computes them all in one pass and keeps those that it
would have given itself, so the output never depends on the source. The K drafts form a tree: draft
j continues draft `parents[j]`, or the row's last token where that is -1. A chain is the tree in
which each continues the one before.
"""

import functools
from dataclasses import dataclass
from typing import Protocol

import jax

from swa_jax.config import PoolConfig
from swa_jax.models.decoder.batch import PagedBatch
from swa_jax.models.decoder.kv_pool import KVPool
from swa_jax.serving.moved_slots import MovedSlots
from swa_jax.serving.trees import Tree
from swa_jax.state import AllocatorState


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["allocator", "table", "length", "tokens", "active", "slots"],
    meta_fields=[],
)
@dataclass(frozen=True)
class DraftView:
    """The rows as a source of drafts sees them, with places for K drafts reserved.

    R rows, L tokens a row (padded), C pages a row, K drafts.
    """

    allocator: AllocatorState
    table: jax.Array  # int32[R, C] first full slot of each page, the reserved ones included
    length: jax.Array  # int32[R] tokens whose KV is held; token `length` is known and comes next
    tokens: jax.Array  # int32[R, L] known tokens, 0 .. length
    active: jax.Array  # bool[R] rows that want drafts
    slots: jax.Array  # int32[R, 1 + K] full slots of token `length` and of the drafts after it


class Draft(Protocol):
    """A source of drafts: hashable, static. What changes is in the state that it makes."""

    @property
    def num_drafts(self) -> int:
        """K, drafts a row and step."""
        ...

    @property
    def parents(self) -> tuple[int, ...]:
        """For each draft the earlier draft that it continues, -1 for the row's last token."""
        ...

    @property
    def is_bigram(self) -> bool:
        """Its KV of a token depends on the next token too, so a page is cached by pairs."""
        ...

    def init(self, pool: PoolConfig, rows: int) -> Tree:
        """Its state at the start: a pytree, None where it needs none."""
        ...

    def prefill(
        self, params: Tree, state: Tree, batch: PagedBatch, hidden: jax.Array, following: jax.Array
    ) -> Tree:
        """Sees a chunk of prompt tokens.

        Args:
          params: its own parameters, and the model's.
          state: of `init`.
          batch: the chunk, as the model computed it.
          hidden: float[P, Q, H] what the model made of it.
          following: int32[P, Q] the token after each.
        """
        ...

    def propose(
        self, params: Tree, state: Tree, view: DraftView
    ) -> tuple[Tree, jax.Array, jax.Array]:
        """int32[R, K] drafts, and bool[R] rows that have any."""
        ...

    def observe(
        self, params: Tree, state: Tree, view: DraftView, hidden: jax.Array, kept: jax.Array
    ) -> Tree:
        """Sees what became of its drafts.

        Args:
          params: its own parameters, and the model's.
          state: of `propose`.
          view: after the drafts were settled: `allocator`, `table` and `tokens` hold what was
            committed, `length` is still that of `propose`, and `slots` (int32[R, 1 + D], D the
            deepest draft) are where the kept tokens stand.
          hidden: float[R, 1 + D, H] of token `length` and of those after it on the kept path.
          kept: int32[R] tokens of these that are committed now, 0 where the row took no part.
        """
        ...

    def move(self, state: Tree, old: MovedSlots, new: MovedSlots) -> Tree:
        """Copies its KV between slots, as the model's; all are read before any is written."""
        ...

    def pools(self, state: Tree) -> KVPool:
        """Its KV layer by layer, as a model's; no layers where it has none."""
        ...

    def with_pools(self, state: Tree, pools: KVPool) -> Tree:
        """The same state with other layers, as `pools` gave them."""
        ...

    def text_of(
        self, state: Tree, slot: jax.Array, length: jax.Array, following: jax.Array
    ) -> Tree:
        """What it keeps of one text beside KV, for another place: the same shapes for every text.

        Args:
          state: of `init`.
          slot: int32[] full slot of the text's last token.
          length: int32[] tokens whose KV is held.
          following: int32[] token `length`.

        Returns:
          A pytree of arrays; one without any where it keeps nothing.
        """
        ...

    def enter_text(
        self,
        state: Tree,
        row: jax.Array,
        slot: jax.Array,
        length: jax.Array,
        following: jax.Array,
        text: Tree,
    ) -> Tree:
        """Takes over what `text_of` gave, here or on another worker.

        Args:
          state: of `init`.
          row: int32[] the row that decodes next with this text; past the end: nothing happens.
          slot: int32[] full slot of its last token, on this side.
          length: int32[] tokens whose KV is held.
          following: int32[] token `length`.
          text: of `text_of`.
        """
        ...


class KeepsNoText:
    """For a source of drafts whose KV, if it has any, is all that it knows of a text."""

    def text_of(
        self, state: Tree, slot: jax.Array, length: jax.Array, following: jax.Array
    ) -> tuple[()]:
        """Nothing."""
        return ()

    def enter_text(
        self,
        state: Tree,
        row: jax.Array,
        slot: jax.Array,
        length: jax.Array,
        following: jax.Array,
        text: Tree,
    ) -> Tree:
        """Nothing to enter."""
        return state
