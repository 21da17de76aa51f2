"""KV of a unified budget: one array for all layers, whichever pool a block of it is in.

Legend: P page_size, U units, F full pages, S SWA pages, N pages of a row, Hkv key/value heads, D
head_dim. A unit is one layer's KV of one page (`swa_jax.unified`).

A page of an allocator is a run of units, one a layer. Where the run begins is arithmetic on the
page's id, so layer l reads and writes the array at page `base + l`, with the kernels that an array
of its own would have.
"""

import functools
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp

from swa_jax.models.decoder.kv_pool import KVPool
from swa_jax.models.model_config import FULL, SWA
from swa_jax.paging import offset_of, page_of
from swa_jax.state import PAD_PAGE, PAD_SLOT
from swa_jax.unified import UnifiedLayout


@functools.partial(jax.tree_util.register_dataclass, data_fields=["units"], meta_fields=["layout"])
@dataclass(frozen=True)
class UnifiedKV:
    """The KV of every layer in one array. Donate it to the step that writes it."""

    units: jax.Array  # float[U, P, 2 * Hkv, D]; those of the padding pages stay 0
    layout: UnifiedLayout  # static

    def open_layer(
        self, kind: str, place: int, slots: jax.Array, pages: jax.Array
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """The array that holds a layer, and where in it slots and pages of the layer lie.

        Args:
          kind: "F" or "S", static.
          place: which layer of that kind, static.
          slots: int32[...] slots of that kind.
          pages: int32[R, N] pages of that kind.
        """
        return self.units, self.slots_of(kind, place, slots), self.pages_of(kind, place, pages)

    def close_layer(self, kind: str, place: int, layer: jax.Array) -> "UnifiedKV":
        """The KV with a layer written to."""
        return replace(self, units=layer)

    def pages_of(self, kind: str, place: int, pages: jax.Array) -> jax.Array:
        """int32[...] units that hold a layer of these pages; padding for pages below 1."""
        layout = self.layout
        units, count = (
            (layout.full_units, layout.full_pages)
            if kind == FULL
            else (layout.swa_units, layout.swa_pages)
        )
        from_first = jnp.maximum(pages - 1, 0)
        block, within = page_of(from_first, count), offset_of(from_first, count)
        base = jnp.int32(layout.padding_units) + block * jnp.int32(layout.block_units)
        unit = base + within * jnp.int32(units) + jnp.int32(place)
        return jnp.where(pages > PAD_PAGE, unit, jnp.int32(place))

    def slots_of(self, kind: str, place: int, slots: jax.Array) -> jax.Array:
        """int32[...] slots of the array for slots of a layer; 0 for slots of the padding page."""
        size = self.units.shape[1]
        real = slots >= jnp.int32(size)
        known = jnp.where(real, slots, PAD_SLOT)
        unit = self.pages_of(kind, place, page_of(known, size))
        return jnp.where(real, unit * jnp.int32(size) + offset_of(known, size), PAD_SLOT)

    def pools(self) -> KVPool:
        """A copy of the KV, layer by layer: float[pages + 1, P, 2 * Hkv, D].

        A page that lies in a block of the other pool shows what that pool keeps there.
        """
        full, of_swa = (
            tuple(self.units.at[unit].get(mode="fill", fill_value=0) for unit in units)
            for units in self._unit_tables()
        )
        return KVPool(full, of_swa)

    def with_pools(self, pools: KVPool) -> "UnifiedKV":
        """The same KV with the pages that differ in `pools`.

        Args:
          pools: as `pools` gave them, written to in pages that their pool holds: another page would
            write over one of the other pool. Costs a look at every page of every layer.
        """
        units = self.units
        for table, layers in zip(self._unit_tables(), (pools.full, pools.swa), strict=True):
            for unit, layer in zip(table, layers, strict=True):
                was = self.units.at[unit].get(mode="fill", fill_value=0)
                same = jnp.all(_bits(was) == _bits(layer), axis=(1, 2, 3))
                at = jnp.where(same, jnp.int32(units.shape[0]), unit)
                units = units.at[at].set(layer, mode="drop")
        return replace(self, units=units)

    def _unit_tables(self) -> tuple[list[jax.Array], list[jax.Array]]:
        """int32[F+1] and int32[S+1] the unit of every page, for each layer of either kind."""
        layout = self.layout
        tables = []
        for kind, layers, count in (
            (FULL, layout.full_units, layout.full_pages),
            (SWA, layout.swa_units, layout.swa_pages),
        ):
            pages = jnp.arange(layout.blocks * count + 1, dtype=jnp.int32)
            tables.append([self.pages_of(kind, place, pages) for place in range(layers)])
        return tables[0], tables[1]


def _bits(values: jax.Array) -> jax.Array:
    """The same numbers as bits, so that a NaN equals itself."""
    return jax.lax.bitcast_convert_type(values, jnp.dtype(f"uint{8 * values.dtype.itemsize}"))
