"""Drafts by a small model that reads the same text."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from swa_jax.config import PoolConfig
from swa_jax.models.decoder.batch import PagedBatch
from swa_jax.models.decoder.config import DecoderConfig
from swa_jax.models.decoder.kv_pool import KVPool
from swa_jax.only_if import only_if
from swa_jax.serving.draft import DraftView, KeepsNoText
from swa_jax.serving.draft_levels import (
    Levels,
    draft_batch,
    likeliest,
    tokens_at,
)
from swa_jax.serving.model import ServingModel, as_model
from swa_jax.serving.moved_slots import MovedSlots
from swa_jax.serving.trees import Tree
from swa_jax.serving.verify import DraftTree


@dataclass(frozen=True)
class DraftModel(KeepsNoText, Levels):
    """A model of its own that says what the served one will say. `draft_params` are its own.

    Its KV is in arrays of its own, at the slots that the allocator granted to the row: full layers
    by full slot, SWA layers by SWA slot. So it needs no allocator, and what the prefix cache holds,
    it holds for both models. Both must have the same tokens.

    The KV of a token is there as soon as the served model has computed it. One exception: a draft
    that ends a path is computed only once it was accepted, in `observe`.

    Args:
      model: small; static.
      num_drafts: K of a chain; a tree says it by its branches.
      branches: a tree: each node of level d is continued by its branches[d] likeliest tokens.

    Raises:
      ValueError: a number below 1, a K that the branches do not make; in `init` a model that reads
        more past tokens than the pools keep.
    """

    model: ServingModel | DecoderConfig
    num_drafts: int = 0
    branches: tuple[int, ...] = ()

    is_bigram = False

    def init(self, pool: PoolConfig, rows: int) -> Tree:
        """Its KV, outside a budget that was cut for the served model."""
        return as_model(self.model).init_kv(pool.apart)

    def prefill(
        self, params: Tree, state: Tree, batch: PagedBatch, hidden: jax.Array, following: jax.Array
    ) -> Tree:
        """Computes the chunk's KV."""
        return as_model(self.model).forward(params, state, batch)[1]

    def propose(
        self, params: Tree, state: Tree, view: DraftView
    ) -> tuple[Tree, jax.Array, jax.Array]:
        """int32[R, K] drafts, for every row that wants some.

        Rows that decode without drafts take part in the first pass, for their KV.
        """
        grow = self._grow_tree if self.branches else self._grow_chain
        state, drafts = grow(params, state, view)
        return state, drafts, view.active

    def _grow_chain(self, params: Tree, kv: Tree, view: DraftView) -> tuple[Tree, jax.Array]:
        model = as_model(self.model)

        def one(
            depth: jax.Array, carry: tuple[Tree, jax.Array, jax.Array]
        ) -> tuple[Tree, jax.Array, jax.Array]:
            kv, token, drafts = carry
            slot = jax.lax.dynamic_slice_in_dim(view.slots, depth, 1, axis=1)
            batch = draft_batch(view, view.length + depth, slot, token)
            hidden, kv = model.forward(params, kv, batch)
            token = likeliest(model.unembed(params, hidden), 1)
            return kv, token, jax.lax.dynamic_update_slice_in_dim(drafts, token, depth, axis=1)

        root = tokens_at(view, view.length[:, None])
        drafts = jnp.zeros((root.shape[0], self.num_drafts), jnp.int32)
        carry = (kv, root, drafts)
        kv, _, drafts = jax.lax.fori_loop(jnp.int32(0), jnp.int32(self.num_drafts), one, carry)
        return kv, drafts

    def _grow_tree(self, params: Tree, kv: Tree, view: DraftView) -> tuple[Tree, jax.Array]:
        """Level by level; each pass computes all nodes so far, since branches hide one another."""
        model, tree = as_model(self.model), DraftTree.of(self.parents)
        nodes, newest = tokens_at(view, view.length[:, None]), 1
        for branch in self.levels:
            width = nodes.shape[1]
            batch = draft_batch(
                view,
                view.length,
                view.slots[:, :width],
                nodes,
                depths=jnp.array(tree.depths[:width]),
                tree_mask=jnp.array(tree.mask[:width, :width]),
            )
            hidden, kv = model.forward(params, kv, batch)
            level = likeliest(model.unembed(params, hidden[:, width - newest :]), branch)
            nodes, newest = jnp.concatenate([nodes, level], axis=1), level.shape[1]
        return kv, nodes[:, 1:]

    def observe(
        self, params: Tree, state: Tree, view: DraftView, hidden: jax.Array, kept: jax.Array
    ) -> Tree:
        """Catches up: computes the KV of a last draft that was accepted.

        Not at the next `propose`: a page that goes to the cache meanwhile would lack it for ever,
        and the window of a token before `length` may be gone by then.
        """
        model, depth = as_model(self.model), len(self.levels)
        slot = jnp.where(kept > depth, view.slots[:, depth], 0)[:, None]
        place = view.length + jnp.int32(depth)

        def catch_up(kv: Tree) -> Tree:
            batch = draft_batch(view, place, slot, tokens_at(view, place[:, None]))
            return model.forward(params, kv, batch)[1]

        return only_if(jnp.any(kept > depth), catch_up, state)

    def move(self, state: Tree, old: MovedSlots, new: MovedSlots) -> Tree:
        """Copies its KV between slots."""
        return as_model(self.model).move_kv(state, old, new)

    def pools(self, state: Tree) -> KVPool:
        """Its KV layer by layer."""
        return as_model(self.model).pools(state)

    def with_pools(self, state: Tree, pools: KVPool) -> Tree:
        """The same KV with other layers."""
        return as_model(self.model).with_pools(state, pools)
