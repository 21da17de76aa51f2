"""The ledger model with its KV in one budget: layers of both kinds in one array.

A page that both pools held would be written by both, and show in the next token.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp

from swa_jax.config import PoolConfig
from swa_jax.models.decoder.batch import PagedBatch
from swa_jax.models.decoder.unified_kv import UnifiedKV
from swa_jax.models.model_config import FULL, SWA
from swa_jax.serving import MovedSlots
from tests.ledger_model import Ledger

_LAYERS = (SWA, FULL, SWA)
_SPOILED = 10_007  # no token


@dataclass(frozen=True)
class OneBufferLedger(Ledger):
    """Every layer of a kind keeps the ids; where two of one kind differ, no text comes out right.

    It says what a token of it takes, so a `PoolConfig.unified` can be made for it.
    """

    kv_heads = head_dim = 1

    @property
    def past_window(self) -> int:
        """Without the token itself."""
        return self.window - 1

    @property
    def full_layers(self) -> tuple[int, ...]:
        """Places of the full layers."""
        return _places(FULL)

    @property
    def swa_layers(self) -> tuple[int, ...]:
        """Places of the SWA layers."""
        return _places(SWA)

    def init_kv(self, pool: PoolConfig) -> Any:
        """`UnifiedKV` of int32[U, P] units, nothing written."""
        layout = pool.unified_layout
        assert layout is not None
        return UnifiedKV(jnp.full((layout.units, pool.page_size), -1, jnp.int32), layout)

    def forward(self, params: None, kv: UnifiedKV, batch: PagedBatch) -> tuple[jax.Array, Any]:
        """As the ledger itself, over a copy of the pages that the rows have."""
        for kind, slots in ((FULL, batch.full_slots), (SWA, batch.swa_slots)):
            for place in range(len(_places(kind))):
                kv = _write(kv, kind, place, slots, batch.tokens)
        full, of_swa = _read(kv, FULL, batch.full_pages), _read(kv, SWA, batch.swa_pages)
        rows, columns = batch.full_pages.shape
        here = jnp.arange(rows * columns, dtype=jnp.int32).reshape(rows, columns)
        nowhere = jnp.zeros_like(batch.full_slots)  # all is written
        seen = replace(
            batch, full_slots=nowhere, swa_slots=nowhere, full_pages=here, swa_pages=here
        )
        return super().forward(params, (full, of_swa), seen)[0], kv

    def move_kv(self, kv: UnifiedKV, old: MovedSlots, new: MovedSlots) -> Any:
        """Copies ids between slots."""
        for kind, before, after in ((FULL, old.full, new.full), (SWA, old.swa, new.swa)):
            for place in range(len(_places(kind))):
                ids = kv.units.reshape(-1)[kv.slots_of(kind, place, before)]
                kv = _write(kv, kind, place, jnp.where(before > 0, after, 0), ids)
        return kv


def _places(kind: str) -> tuple[int, ...]:
    return tuple(place for place, each in enumerate(_LAYERS) if each == kind)


def _write(kv: UnifiedKV, kind: str, place: int, slots: jax.Array, ids: jax.Array) -> UnifiedKV:
    at = kv.slots_of(kind, place, slots)
    at = jnp.where(at > 0, at, kv.units.size)
    written = kv.units.reshape(-1).at[at].set(ids, mode="drop")
    return replace(kv, units=written.reshape(kv.units.shape))


def _read(kv: UnifiedKV, kind: str, pages: jax.Array) -> jax.Array:
    """int32[R * N, P] the ids of int32[R, N] pages, as all layers of a kind have them."""
    first, *others = (
        kv.units[kv.pages_of(kind, place, pages)] for place in range(len(_places(kind)))
    )
    for other in others:
        first = jnp.where(first == other, first, _SPOILED)
    return first.reshape(-1, kv.units.shape[1])
