"""The model over paged KV: new tokens of many rows, each behind what its pages hold."""

import functools
from collections import Counter
from typing import TypeVar

import jax

from swa_jax.models.decoder.batch import PagedBatch
from swa_jax.models.decoder.config import DecoderConfig
from swa_jax.models.decoder.kv_pool import KVPool, write_kv
from swa_jax.models.decoder.layer import angles_by_kind, embed, norm, run_layer
from swa_jax.models.decoder.paged_attention import Attend, attend_pages
from swa_jax.models.decoder.params import Params, Weights
from swa_jax.models.decoder.unified_kv import UnifiedKV
from swa_jax.models.model_config import FULL

KV = TypeVar("KV", KVPool, UnifiedKV)


def forward_paged(
    config: DecoderConfig,
    params: Params,
    kv: KV,
    batch: PagedBatch,
    *,
    attend: Attend = attend_pages,
) -> tuple[jax.Array, KV]:
    """Computes new tokens, and writes their KV where the batch says.

    Args:
      config: the model, static.
      params: its parameters.
      kv: holds the KV of every earlier token that a new one sees.
      batch: the new tokens, R rows of up to Q.
      attend: attention over pages, static.

    Returns:
      float[R, Q, H] hidden states after the final norm, for `unembed`; finite but meaningless for
      masked queries. And the KV after the call.
    """
    hidden = embed(config, params, batch.tokens)
    angles = angles_by_kind(config, batch.positions)
    places = Counter[str]()
    for kind, weights in zip(config.layer_kinds, params["layers"], strict=True):
        mix = functools.partial(_mix, config, weights, kind, places[kind], kv, batch, attend)
        hidden, kv = run_layer(config, weights, hidden, angles[kind], mix)
        places[kind] += 1
    hidden = norm(config, params["final_norm"], hidden)
    return hidden, kv


def _mix(
    config: DecoderConfig,
    weights: Weights,
    kind: str,
    place: int,
    kv: KV,
    batch: PagedBatch,
    attend: Attend,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
) -> tuple[jax.Array, KV]:
    """Attention of one layer over pages that hold the new tokens too, and the KV with them."""
    full = kind == FULL
    slots = batch.full_slots if full else batch.swa_slots
    pages = batch.full_pages if full else batch.swa_pages
    layer, slots, pages = kv.open_layer(kind, place, slots, pages)
    layer = write_kv(layer, slots, k, v)
    mixed = attend(
        q,
        layer,
        pages,
        batch,
        scale=config.attention_scale,
        window=config.window(kind),
        softcap=config.attn_softcap,
        sinks=weights.get("sinks"),
    )
    return mixed, kv.close_layer(kind, place, layer)
