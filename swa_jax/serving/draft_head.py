"""Drafts by a head on the served model: one layer that goes on from the model's hidden states.

The head looks at token i by what the model made of it and by the token after it, and says what
comes after that: with h(i) the model's hidden state and t(i) the tokens,

    g(i) = layer(project([norm(h(i)), norm(embed(t(i + 1)))])),    t(i + 2) ~ unembed(g(i)).

For the drafts themselves h is not known yet; g stands in for it. Their KV is only as good as that,
and is written again from the model's own hidden states once they are committed.
"""

import functools
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from swa_jax.config import PoolConfig
from swa_jax.models.decoder.batch import PagedBatch
from swa_jax.models.decoder.config import DecoderConfig
from swa_jax.models.decoder.kv_pool import KVPool, write_kv
from swa_jax.models.decoder.layer import embed, norm, run_layer, unembed
from swa_jax.models.decoder.new_kv import init_layers
from swa_jax.models.decoder.paged_attention import Attend, attend_pages
from swa_jax.models.decoder.params import random_params
from swa_jax.models.decoder.rope import rope_angles
from swa_jax.models.model_config import FULL
from swa_jax.paging import offset_of, page_of
from swa_jax.serving.draft import DraftView
from swa_jax.serving.draft_levels import (
    Levels,
    draft_batch,
    likeliest,
    tokens_at,
)
from swa_jax.serving.extend_rows import last_of
from swa_jax.serving.moved_slots import MovedSlots
from swa_jax.serving.trees import Tree
from swa_jax.serving.verify import DraftTree
from swa_jax.state import PAD_SLOT


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["kv", "hidden", "slot", "length", "following"],
    meta_fields=[],
)
@dataclass(frozen=True)
class HeadState:
    """The head's KV, and g of the last token of texts, from which their first draft comes.

    2R texts: those of the R rows, then those whose chunk was computed last. A source is not told
    which request a row has, and needs not know: a text is known again by the slot of its last
    token, its length, and the token that follows. Should all three agree by chance, a draft is
    wrong, no more.
    """

    kv: jax.Array  # float[pages + 1, P, 2 * Hkv, D] by full slot, see `KVPool`
    hidden: jax.Array  # float32[2R, H] g of token length - 1
    slot: jax.Array  # int32[2R] full slot of that token, 0 for no text
    length: jax.Array  # int32[2R] tokens
    following: jax.Array  # int32[2R] token `length`


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["hidden", "known"], meta_fields=[]
)
@dataclass(frozen=True)
class HeadText:
    """What the head goes on from after one text, wherever its KV is."""

    hidden: jax.Array  # float32[H] g of its last token
    known: jax.Array  # bool[] whether there is one


def random_head_params(
    config: DecoderConfig, key: jax.Array, dtype: DTypeLike = jnp.float32
) -> Tree:
    """Random parameters of a head, scaled as `random_params` does.

    Args:
      config: of the served model.
      key: a PRNG key.
      dtype: of every array, the model's.

    Returns:
      {"hidden_norm": [H], "embed_norm": [H], "project": [2H, H], "layer": the weights of one
      layer, "final_norm": [H]}. `project` takes the hidden state's half first.
    """
    outer, inner = jax.random.split(key)
    size, plain = config.hidden_size, 1.0 - config.norm_offset
    one_layer = replace(config, layer_kinds=FULL, vocab_size=1, tie_embeddings=True)
    noise = jax.random.normal(outer, (2 * size, size), jnp.float32)
    norms = ("hidden_norm", "embed_norm", "final_norm")
    return {
        **{name: jnp.full(size, plain, dtype) for name in norms},
        "project": (noise * jnp.float32((2 * size) ** -0.5)).astype(dtype),
        "layer": random_params(one_layer, inner, dtype)["layers"][0],
    }


@dataclass(frozen=True)
class DraftHead(Levels):
    """A layer behind the served model, in the way of MTP and EAGLE.

    `draft_params` are {"head": as `random_head_params` makes them, "model": the served model's}:
    the head embeds and unembeds with the model's own arrays.

    Its layer is one of the model's family, attends to everything, and has its KV at the row's full
    slots. That of token i depends on token i + 1, so pages are cached by pairs (`is_bigram`).

    A row whose text came from the cache whole has no g to go on from: its first step has no drafts.

    Args:
      config: of the served model; static.
      num_drafts: K of a chain; a tree says it by its branches.
      branches: a tree: each node of level d is continued by its branches[d] likeliest tokens.
      kv_dtype: of the KV, a name.
      attend: attention over pages, as `swa_jax.models.decoder.choose_attention` picks it.

    Raises:
      ValueError: a number below 1, a K that the branches do not make.
    """

    config: DecoderConfig
    num_drafts: int = 0
    branches: tuple[int, ...] = ()
    kv_dtype: str = "float32"
    attend: Attend = attend_pages

    is_bigram = True

    def init(self, pool: PoolConfig, rows: int) -> HeadState:
        """KV of zeros, and no texts."""
        one_layer = replace(self.config, layer_kinds=FULL)

        def none() -> jax.Array:
            return jnp.zeros(2 * rows, jnp.int32)

        return HeadState(
            kv=init_layers(one_layer, pool, jnp.dtype(self.kv_dtype)).full[0],
            hidden=jnp.zeros((2 * rows, self.config.hidden_size), jnp.float32),
            slot=none(),
            length=none(),
            following=none(),
        )

    def prefill(
        self,
        params: Tree,
        state: HeadState,
        batch: PagedBatch,
        hidden: jax.Array,
        following: jax.Array,
    ) -> HeadState:
        """Computes the chunk's KV, and keeps where each of its texts ends."""
        made, kv = self._run(params, state.kv, replace(batch, tokens=following), hidden)
        rows = state.slot.shape[0] // 2
        return _keep(
            replace(state, kv=kv),
            rows,
            made,
            batch.q_lens,
            batch.full_slots,
            batch.kv_lens,
            following,
        )

    def propose(
        self, params: Tree, state: HeadState, view: DraftView
    ) -> tuple[HeadState, jax.Array, jax.Array]:
        """int32[R, K] drafts, and which rows have a text that is known here."""
        hidden, found = _find(state, view)
        wanted = view.active & found
        view = replace(view, slots=jnp.where(wanted[:, None], view.slots, PAD_SLOT))
        grow = self._grow_tree if self.branches else self._grow_chain
        kv, drafts = grow(params, state.kv, view, hidden[:, None])
        return replace(state, kv=kv), drafts, wanted

    def _grow_chain(
        self, params: Tree, kv: jax.Array, view: DraftView, hidden: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        def one(
            depth: jax.Array, carry: tuple[jax.Array, jax.Array, jax.Array, jax.Array]
        ) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
            kv, made, token, drafts = carry
            slot = jax.lax.dynamic_slice_in_dim(view.slots, depth - 1, 1, axis=1)
            batch = draft_batch(view, view.length + depth - 1, slot, token)
            made, kv = self._run(params, kv, batch, made)
            token = self._likeliest(params, made, 1)
            drafts = jax.lax.dynamic_update_slice_in_dim(drafts, token, depth, axis=1)
            return kv, made.astype(jnp.float32), token, drafts

        first = self._likeliest(params, hidden, 1)
        drafts = jnp.pad(first, ((0, 0), (0, self.num_drafts - 1)))
        carry = (kv, hidden, first, drafts)
        kv, _, _, drafts = jax.lax.fori_loop(jnp.int32(1), jnp.int32(self.num_drafts), one, carry)
        return kv, drafts

    def _grow_tree(
        self, params: Tree, kv: jax.Array, view: DraftView, hidden: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """Level by level; each pass computes all drafts so far, since branches hide one another."""
        tree = DraftTree.of(self.parents)
        made = hidden  # [R, 1 + n, H] g of the last known token, and of the drafts
        drafts = self._likeliest(params, hidden, self.branches[0])
        newest = drafts.shape[1]
        for branch in self.branches[1:]:
            width = drafts.shape[1]
            # A draft is seen by what came of the token before it, so it stands one place earlier.
            batch = draft_batch(
                view,
                view.length,
                view.slots[:, :width],
                drafts,
                depths=jnp.array(tree.depths[1 : 1 + width] - 1),
                tree_mask=jnp.array(tree.mask[1 : 1 + width, 1 : 1 + width]),
            )
            before = made[:, jnp.array(tree.parents[:width])]
            after, kv = self._run(params, kv, batch, before)
            made = jnp.concatenate([hidden, after.astype(jnp.float32)], axis=1)
            level = self._likeliest(params, made[:, 1 + width - newest :], branch)
            drafts, newest = jnp.concatenate([drafts, level], axis=1), level.shape[1]
        return kv, drafts

    def observe(
        self,
        params: Tree,
        state: HeadState,
        view: DraftView,
        hidden: jax.Array,
        kept: jax.Array,
    ) -> HeadState:
        """Computes the KV of the committed tokens from their real hidden states, and keeps g."""
        width = hidden.shape[1]
        within = jnp.arange(width, dtype=jnp.int32)[None, :]
        slots = jnp.where(within < kept[:, None], view.slots[:, :width], PAD_SLOT)
        following = tokens_at(view, view.length[:, None] + 1 + within)
        batch = draft_batch(view, view.length, slots, following)
        made, kv = self._run(params, state.kv, batch, hidden)
        state = replace(state, kv=kv)
        return _keep(state, 0, made, kept, slots, view.length + kept, following)

    def move(self, state: HeadState, old: MovedSlots, new: MovedSlots) -> HeadState:
        """Nothing: `observe` computes all that is kept again, at its new slots."""
        return state

    def pools(self, state: HeadState) -> KVPool:
        """Its KV: one layer by full slot."""
        return KVPool(full=(state.kv,), swa=())

    def with_pools(self, state: HeadState, pools: KVPool) -> HeadState:
        """The same state with other KV."""
        return replace(state, kv=pools.full[0])

    def text_of(
        self, state: HeadState, slot: jax.Array, length: jax.Array, following: jax.Array
    ) -> HeadText:
        """What the text's last token gave, if it is known here."""
        same = (state.slot == slot) & (state.length == length) & (state.following == following)
        same = same & (slot > PAD_SLOT)
        return HeadText(state.hidden[jnp.argmax(same)], jnp.any(same))

    def enter_text(
        self,
        state: HeadState,
        row: jax.Array,
        slot: jax.Array,
        length: jax.Array,
        following: jax.Array,
        text: HeadText,
    ) -> HeadState:
        """Has the row's first drafts come from g; an unknown text ends what the row had."""
        rows = state.slot.shape[0] // 2
        at = jnp.where(row < rows, row, 2 * rows)

        def put(old: jax.Array, new: jax.Array) -> jax.Array:
            return old.at[at].set(new, mode="drop")

        return replace(
            state,
            hidden=put(state.hidden, text.hidden),
            slot=put(state.slot, jnp.where(text.known, slot, PAD_SLOT)),
            length=put(state.length, length),
            following=put(state.following, following),
        )

    def _likeliest(self, params: Tree, made: jax.Array, count: int) -> jax.Array:
        return likeliest(unembed(self.config, params["model"], made), count)

    def _run(
        self, params: Tree, kv: jax.Array, batch: PagedBatch, hidden: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """float[R, Q, H] g of tokens; `batch` has the token after each, at the place of each."""
        config, head = self.config, params["head"]
        text = embed(config, params["model"], batch.tokens)
        seen = norm(config, head["hidden_norm"], hidden.astype(text.dtype))
        text = norm(config, head["embed_norm"], text)
        both = jnp.concatenate([seen, text], axis=-1) @ head["project"]
        angles = rope_angles(config.full_rope, batch.positions, config.head_dim)
        mix = functools.partial(self._mix, head["layer"], kv, batch)
        made, kv = run_layer(config, head["layer"], both, angles, mix)
        return norm(config, head["final_norm"], made), kv

    def _mix(
        self,
        weights: dict[str, jax.Array],
        kv: jax.Array,
        batch: PagedBatch,
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
    ) -> tuple[jax.Array, jax.Array]:
        kv = write_kv(kv, batch.full_slots, k, v)
        mixed = self.attend(
            q,
            kv,
            batch.full_pages,
            batch,
            scale=self.config.attention_scale,
            softcap=self.config.attn_softcap,
            sinks=weights.get("sinks"),
        )
        return mixed, kv


def _keep(
    state: HeadState,
    start: int,
    made: jax.Array,
    counts: jax.Array,
    slots: jax.Array,
    length: jax.Array,
    following: jax.Array,
) -> HeadState:
    """Enters the ends of some texts from place `start` on; a row with no new tokens ends none.

    Args:
      state: before.
      start: static.
      made: float[S, Q, H] g of the new tokens.
      counts: int32[S] new tokens.
      slots: int32[S, Q] where they are.
      length: int32[S] tokens with them.
      following: int32[S, Q] the token after each.
    """
    last = jnp.maximum(counts - 1, 0)[:, None]
    hidden = jnp.take_along_axis(made, last[..., None], axis=1, mode="clip")[:, 0]
    none = jnp.zeros_like(counts)

    def put(old: jax.Array, new: jax.Array) -> jax.Array:
        return jax.lax.dynamic_update_slice_in_dim(old, new, start, axis=0)

    return replace(
        state,
        hidden=put(state.hidden, hidden.astype(jnp.float32)),
        slot=put(state.slot, last_of(slots, counts, none)),
        length=put(state.length, length),
        following=put(state.following, last_of(following, counts, none)),
    )


def _find(state: HeadState, view: DraftView) -> tuple[jax.Array, jax.Array]:
    """float32[R, H] g of the last token of each row, and bool[R] rows that have one."""
    size = view.allocator.config.page_size
    place = jnp.maximum(view.length - 1, 0)
    first = jnp.take_along_axis(view.table, page_of(place, size)[:, None], axis=1, mode="clip")
    slot = jnp.where(view.length > 0, first[:, 0] + offset_of(place, size), PAD_SLOT)
    following = tokens_at(view, view.length[:, None])[:, 0]
    same = (state.slot[None, :] == slot[:, None]) & (slot > PAD_SLOT)[:, None]
    same = same & (state.length[None, :] == view.length[:, None])
    same = same & (state.following[None, :] == following[:, None])
    which = jnp.argmax(same, axis=1).astype(jnp.int32)
    return state.hidden[which], jnp.any(same, axis=1)
