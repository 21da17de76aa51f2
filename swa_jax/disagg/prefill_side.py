"""What a prefill worker sends: the KV of a request by its place in the queue."""

import functools
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from swa_jax.disagg.ask import Ask
from swa_jax.disagg.pack import Piece, pack
from swa_jax.inputs import as_int32
from swa_jax.models.decoder import DecoderConfig
from swa_jax.serving.config import ServingConfig
from swa_jax.serving.model import ServingModel
from swa_jax.serving.trees import Tree
from swa_jax.serving.world import World, ended, of_rows, running
from swa_jax.serving.world_pools import world_pools


@functools.partial(jax.tree_util.register_dataclass, data_fields=["piece", "text"], meta_fields=[])
@dataclass(frozen=True)
class Parcel:
    """A piece of KV, and what the source of drafts goes on from."""

    piece: Piece
    text: Tree  # of `Draft.text_of`, () without drafts; known only once the prompt is computed


def pack_request(
    model: ServingModel | DecoderConfig,
    config: ServingConfig,
    world: World,
    place: ArrayLike,
    ask: Ask,
    *,
    full_capacity: int,
    swa_capacity: int,
    full_from: ArrayLike,
    swa_from: ArrayLike,
) -> Parcel:
    """Reads a piece of a request that runs here. Changes nothing.

    Args:
      model: static.
      config: static.
      world: of a prefill worker.
      place: int32[] of the request in the queue.
      ask: what the decode side lacks of it.
      full_capacity: tokens of full layers in a piece, static.
      swa_capacity: tokens of SWA layers in a piece, static.
      full_from: int32[] the first token of this piece in full layers, of `pieces`.
      swa_from: int32[] likewise in SWA layers.

    Returns:
      The parcel; its piece is refused as by `pack`, and where no row runs this request any more.
    """
    at, rows = as_int32("place", place, 0), world.rows
    runs = running(rows) & ~ended(world) & (rows.request == at)
    row, found = jnp.argmax(runs).astype(jnp.int32), jnp.any(runs)
    length = jnp.where(found, rows.length[row], 0)
    piece = pack(
        world.allocator,
        world_pools(model, config, world),
        rows.table[row],
        length,
        ask,
        full_capacity=full_capacity,
        swa_capacity=swa_capacity,
        full_from=full_from,
        swa_from=swa_from,
    )
    piece = replace(piece, ok=piece.ok & found)
    return Parcel(piece, _text(config, world, row, length))


def _text(config: ServingConfig, world: World, row: jax.Array, length: jax.Array) -> Tree:
    if config.draft is None:
        return ()
    tokens = of_rows(world.rows, world.queue.tokens)[row]
    following = tokens[jnp.minimum(length, jnp.int32(tokens.shape[0] - 1))]
    slot = jnp.where(length > 0, world.rows.last_loc[row], 0)
    return config.draft.text_of(world.draft, slot, length, following)
