"""Decode: the next token of every row that has all but one computed, and drafts after it."""

from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp

from swa_jax.models.decoder import DecoderConfig
from swa_jax.only_if import only_if
from swa_jax.serving.config import ServingConfig
from swa_jax.serving.draft import DraftView
from swa_jax.serving.extend_rows import Extension, batch_of, extend_rows, last_of
from swa_jax.serving.model import ServingModel, as_model
from swa_jax.serving.requests import LENGTH, STOP
from swa_jax.serving.rollback import Kept, roll_back, roll_back_to_snapshot
from swa_jax.serving.room import decode_tokens, drafts_fit, fitting_rows
from swa_jax.serving.row_owners import row_owners
from swa_jax.serving.sample import sample
from swa_jax.serving.trees import Tree
from swa_jax.serving.verify import DraftTree, Verified, cut, verify
from swa_jax.serving.world import World, add_stats, of_rows, to_compute
from swa_jax.state import AllocatorState


@dataclass(frozen=True)
class _Drafts:
    """What is speculated on. K drafts a row."""

    tokens: jax.Array  # int32[R, K]
    some: jax.Array  # bool[R] rows that have any


@dataclass(frozen=True)
class _Outcome:
    """What a pass gave."""

    verified: Verified
    count: jax.Array  # int32[R] new tokens
    stops: jax.Array  # bool[R] the last of them ends the text


def draft_tree(config: ServingConfig) -> DraftTree:
    """The tree of a step's drafts; the root alone without speculation."""
    return DraftTree.of(() if config.draft is None else config.draft.parents)


def decode_step(
    model: ServingModel | DecoderConfig,
    config: ServingConfig,
    params: Tree,
    draft_params: Tree,
    world: World,
) -> World:
    """Computes the next token of every decoding row, or several where drafts are right.

    Args:
      model: static.
      config: static.
      params: of the model.
      draft_params: of the source of drafts.
      world: before the call; there is room for a token of each decoding row (`make_room`).

    Returns:
      The world: the tokens are in the queue, and a request that ended has its reason.
    """

    def compute(world: World) -> World:
        return _decode(as_model(model), config, params, draft_params, world)

    return only_if(jnp.any(to_compute(world) == 1), compute, world)


def _decode(
    model: ServingModel, config: ServingConfig, params: Tree, draft_params: Tree, world: World
) -> World:
    rows, before = world.rows, world.allocator
    counts = fitting_rows(world, decode_tokens(config, world, drafts_fit(config, world)))
    allocator, extension = extend_rows(
        before,
        rows.length,
        counts,
        rows.last_loc,
        rows.table,
        1 + config.num_drafts,
        row_owners(world),
    )
    view = DraftView(
        allocator=allocator,
        table=extension.table,
        length=rows.length,
        tokens=of_rows(rows, world.queue.tokens),
        active=extension.counts > 1,
        slots=extension.slots,
    )
    draft, drafts = _propose(config, draft_params, world.draft, view)
    hidden, kv = _forward(model, config, params, world.kv, view, extension, drafts)
    outcome = _choose(model, config, params, world, hidden, extension, drafts)
    allocator, kept = _give_back(config, world, allocator, extension, outcome)
    if not _stays_in_place(config):
        kv = model.move_kv(kv, kept.old, kept.new)
    if config.draft is not None:
        draft = draft if _stays_in_place(config) else config.draft.move(draft, kept.old, kept.new)
        path = jnp.take_along_axis(hidden, outcome.verified.nodes[..., None], axis=1, mode="clip")
        settled = replace(view, allocator=allocator, table=kept.table, slots=kept.slots)
        settled = replace(settled, tokens=_with_new(world, outcome))
        draft = config.draft.observe(draft_params, draft, settled, path, outcome.count)
    world = replace(world, allocator=allocator, kv=kv, draft=draft)
    world = add_stats(
        world,
        decode_steps=jnp.int32(1),
        refused=(~extension.ok).astype(jnp.int32),
        generated=jnp.sum(outcome.count, dtype=jnp.int32),
        drafted=jnp.sum(drafts.some, dtype=jnp.int32) * jnp.int32(config.num_drafts),
        accepted=jnp.sum(jnp.maximum(outcome.count - 1, 0), dtype=jnp.int32),
    )
    return _note(config, world, outcome, kept)


def _stays_in_place(config: ServingConfig) -> bool:
    """A chain's KV is in order already, unless the pages are granted anew."""
    return draft_tree(config).is_chain and config.rollback == "page"


def _propose(
    config: ServingConfig, draft_params: Tree, draft: Tree, view: DraftView
) -> tuple[Tree, _Drafts]:
    if config.draft is None:
        nothing = jnp.zeros((view.length.shape[0], 0), jnp.int32)
        return draft, _Drafts(nothing, jnp.zeros(view.active.shape, bool))
    draft, tokens, some = config.draft.propose(draft_params, draft, view)
    return draft, _Drafts(tokens, some & view.active)


def _forward(
    model: ServingModel,
    config: ServingConfig,
    params: Tree,
    kv: Tree,
    view: DraftView,
    extension: Extension,
    drafts: _Drafts,
) -> tuple[jax.Array, Tree]:
    """float[R, 1 + K, H]: the last known token of each row and its drafts in one pass."""
    tree = draft_tree(config)
    at = jnp.minimum(view.length, jnp.int32(view.tokens.shape[1] - 1))[:, None]
    first = jnp.take_along_axis(view.tokens, at, axis=1, mode="clip")
    tokens = jnp.concatenate([first, drafts.tokens], axis=1)
    # A row that has no drafts computes its one token; the slots reserved for them stay unused.
    counts = jnp.where(drafts.some, extension.counts, jnp.minimum(extension.counts, 1))
    batch = batch_of(
        view.allocator,
        replace(extension, counts=counts),
        view.length,
        tokens,
        depths=jnp.array(tree.depths),
        tree_mask=None if tree.is_chain else jnp.array(tree.mask),
    )
    return model.forward(params, kv, batch)


def _choose(
    model: ServingModel,
    config: ServingConfig,
    params: Tree,
    world: World,
    hidden: jax.Array,
    extension: Extension,
    drafts: _Drafts,
) -> _Outcome:
    rows, queue, tree = world.rows, world.queue, draft_tree(config)
    places = rows.length[:, None] + 1 + jnp.array(tree.depths)[None, :]
    sampling = jax.tree.map(lambda values: of_rows(rows, values), queue.sampling)
    logits = model.unembed(params, hidden)
    if logits.shape != (*places.shape, model.vocab_size):
        raise ValueError(
            f"the model's unembed must give logits of shape {(*places.shape, model.vocab_size)}, "
            f"got {logits.shape}"
        )
    given = sample(logits, sampling, places)
    verified = verify(tree, drafts.tokens, drafts.some, given)
    room = of_rows(rows, queue.limit) - rows.length - 1
    ignore = of_rows(rows, queue.ignore_eos)
    count, stops = cut(verified, jnp.maximum(room, 1), model.eos_token_ids, ignore)
    takes_part = extension.counts > 0
    return _Outcome(verified, jnp.where(takes_part, count, 0), stops & takes_part)


def _give_back(
    config: ServingConfig,
    world: World,
    allocator: AllocatorState,
    extension: Extension,
    outcome: _Outcome,
) -> tuple[AllocatorState, Kept]:
    rows, path, by = world.rows, outcome.verified.nodes, row_owners(world)
    if config.rollback == "page":
        return roll_back(allocator, extension, rows.length, path, outcome.count, by)
    return roll_back_to_snapshot(
        world.allocator,
        allocator,
        extension,
        rows.length,
        rows.last_loc,
        rows.table,
        path,
        outcome.count,
        by,
    )


def _with_new(world: World, outcome: _Outcome) -> jax.Array:
    """int32[R, L] known tokens of the rows, the new ones entered."""
    tokens = of_rows(world.rows, world.queue.tokens)
    row, column = _places(world, outcome, jnp.arange(tokens.shape[0], dtype=jnp.int32))
    return tokens.at[row, column].set(outcome.verified.tokens, mode="drop")


def _places(world: World, outcome: _Outcome, owner: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Where each new token goes: int32[R, 1 + D] rows of `owner` and columns, or nowhere."""
    within = jnp.arange(outcome.verified.tokens.shape[1], dtype=jnp.int32)[None, :]
    column = world.rows.length[:, None] + 1 + within
    nowhere = jnp.int32(2**31 - 1)
    row = jnp.where(within < outcome.count[:, None], owner[:, None], nowhere)
    return row, column


def _note(config: ServingConfig, world: World, outcome: _Outcome, kept: Kept) -> World:
    """Writes the new tokens down, and how far each row has come."""
    rows, queue, count = world.rows, world.queue, outcome.count
    row, column = _places(world, outcome, rows.request)
    length = rows.length + count
    known = jnp.where(count > 0, length + 1, 0)
    at_limit = known >= of_rows(rows, queue.limit)
    reason = jnp.where(outcome.stops, STOP, jnp.where(at_limit, LENGTH, 0)).astype(jnp.int32)
    took_part = jnp.where(count > 0, rows.request, queue.status.shape[0])
    ends = jnp.where((count > 0) & (reason > 0), rows.request, queue.status.shape[0])
    queue = replace(
        queue,
        tokens=queue.tokens.at[row, column].set(outcome.verified.tokens, mode="drop"),
        known=queue.known.at[took_part].set(known, mode="drop"),
        reason=queue.reason.at[ends].max(reason, mode="drop"),
    )
    rows = replace(
        rows,
        length=length,
        last_loc=last_of(kept.slots, count, rows.last_loc),
        table=kept.table,
    )
    return replace(world, rows=rows, queue=queue)
