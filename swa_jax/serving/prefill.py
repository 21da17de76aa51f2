"""Prefill: a chunk of the oldest requests whose known tokens are not all computed.

All known tokens but the last are computed here; the last one is the first that decodes, so prefill
chooses no tokens. A chunk shrinks to the pages that there are.
"""

from dataclasses import replace

import jax
import jax.numpy as jnp

from swa_jax.counts import free_pages
from swa_jax.models.decoder import DecoderConfig
from swa_jax.only_if import only_if
from swa_jax.serving.chunk import Chunk, plan_chunk
from swa_jax.serving.config import ServingConfig
from swa_jax.serving.draft import Draft
from swa_jax.serving.extend_rows import Extension, batch_of, extend_rows, last_of
from swa_jax.serving.model import ServingModel, as_model
from swa_jax.serving.row_owners import row_owners
from swa_jax.serving.trees import Tree
from swa_jax.serving.world import World, add_stats


def prefill_step(
    model: ServingModel | DecoderConfig,
    config: ServingConfig,
    params: Tree,
    draft_params: Tree,
    world: World,
) -> World:
    """Computes a chunk of each of the oldest requests in prefill; `finish` gives it to the cache.

    Args:
      model: static.
      config: static.
      params: of the model.
      draft_params: of the source of drafts.
      world: before the call; its windows are left and there is room (`make_room`).

    Returns:
      The world. Nothing where nobody prefills.
    """
    chunk = plan_chunk(config, world, jnp.minimum(*free_pages(world.allocator)))

    def compute(world: World) -> World:
        return _compute(as_model(model), config, params, draft_params, world, chunk)

    return only_if(jnp.any(chunk.counts > 0), compute, world)


def _compute(
    model: ServingModel,
    config: ServingConfig,
    params: Tree,
    draft_params: Tree,
    world: World,
    chunk: Chunk,
) -> World:
    rows, which = world.rows, chunk.rows
    length, owners = rows.length[which], row_owners(world)
    allocator, extension = extend_rows(
        world.allocator,
        length,
        chunk.counts,
        rows.last_loc[which],
        rows.table[which],
        config.chunk_tokens,
        None if owners is None else owners[which],
    )
    known = world.queue.tokens[rows.request[which]]
    place = length[:, None] + jnp.arange(config.chunk_tokens, dtype=jnp.int32)[None, :]
    batch = batch_of(allocator, extension, length, _at(known, place))
    hidden, kv = model.forward(params, world.kv, batch)
    draft = world.draft
    if config.draft is not None:
        following = _at(known, place + 1)
        draft = config.draft.prefill(draft_params, draft, batch, hidden, following)
        if config.only_prefills:
            draft = _keep_texts(config.draft, draft, chunk, extension, length, following)
    world = replace(world, allocator=allocator, kv=kv, draft=draft)
    return _note(world, chunk, extension)


def _keep_texts(
    source: Draft,
    draft: Tree,
    chunk: Chunk,
    extension: Extension,
    length: jax.Array,
    following: jax.Array,
) -> Tree:
    """What the source needs to go on from each text stays with its row until it is sent."""
    none, nowhere = jnp.zeros_like(length), jnp.int32(2**31 - 1)
    slots = last_of(extension.slots, extension.counts, none)
    ends = length + extension.counts
    after = last_of(following, extension.counts, none)
    rows = jnp.where(extension.counts > 0, chunk.rows, nowhere)

    def one(index: jax.Array, draft: Tree) -> Tree:
        end = (slots[index], ends[index], after[index])
        return source.enter_text(draft, rows[index], *end, source.text_of(draft, *end))

    return jax.lax.fori_loop(0, length.shape[0], one, draft)


def _at(tokens: jax.Array, places: jax.Array) -> jax.Array:
    """int32[S, Q] the tokens at these places, 0 past the end."""
    count = tokens.shape[1]
    inside = jnp.minimum(places, jnp.int32(count - 1))
    found = jnp.take_along_axis(tokens, inside, axis=1, mode="clip")
    return jnp.where(places < count, found, 0)


def _note(world: World, chunk: Chunk, extension: Extension) -> World:
    rows, which = world.rows, chunk.rows
    last = last_of(extension.slots, extension.counts, rows.last_loc[which])
    rows = replace(
        rows,
        length=rows.length.at[which].add(extension.counts, mode="drop"),
        last_loc=rows.last_loc.at[which].set(last, mode="drop"),
        table=rows.table.at[which].set(extension.table, mode="drop"),
        fresh=rows.fresh.at[which].max(extension.counts > 0, mode="drop"),
    )
    return add_stats(
        replace(world, rows=rows),
        prefilled=jnp.sum(extension.counts, dtype=jnp.int32),
        refused=(~extension.ok).astype(jnp.int32),
    )
