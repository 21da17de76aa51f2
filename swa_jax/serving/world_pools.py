"""The KV of a world layer by layer, whatever model and source of drafts it serves with.

Both sides of a transfer, and a tier below the device, see KV as this and nothing else: layers by
full slot and layers by SWA slot, the model's first, then those of the source of drafts.
"""

from dataclasses import replace

from swa_jax.models.decoder import DecoderConfig, KVPool
from swa_jax.serving.config import ServingConfig
from swa_jax.serving.model import ServingModel, as_model
from swa_jax.serving.world import World


def world_pools(model: ServingModel | DecoderConfig, config: ServingConfig, world: World) -> KVPool:
    """All KV that the world's slots address.

    Args:
      model: static.
      config: static; its source of drafts adds the layers it has.
      world: as it is.

    Returns:
      Layers of [pages + 1, page_size, ...], of any dtype and trailing shape.
    """
    pools = as_model(model).pools(world.kv)
    if config.draft is None:
        return pools
    drafts = config.draft.pools(world.draft)
    return KVPool(full=pools.full + drafts.full, swa=pools.swa + drafts.swa)


def with_world_pools(
    model: ServingModel | DecoderConfig, config: ServingConfig, world: World, pools: KVPool
) -> World:
    """The same world with other KV.

    Args:
      model: static.
      config: static.
      world: before.
      pools: as `world_pools` gave them, written to.
    """
    model = as_model(model)
    own = model.pools(world.kv)
    full, swa = len(own.full), len(own.swa)
    kv = model.with_pools(world.kv, KVPool(full=pools.full[:full], swa=pools.swa[:swa]))
    draft = world.draft
    if config.draft is not None:
        rest = KVPool(full=pools.full[full:], swa=pools.swa[swa:])
        draft = config.draft.with_pools(draft, rest)
    return replace(world, kv=kv, draft=draft)
