"""Both pools out of one byte budget: how pages of two sizes share one buffer. Known before tracing.

A *unit* holds one layer's KV of one page, so a full page takes as many units as there are full
layers and an SWA page as many as there are SWA layers. A *block* is a run of units that holds
either full pages or SWA pages; blocks are what moves between the pools. That pages of unequal
layers fit one memory in blocks of a common multiple of their sizes is Jenga's idea (Zhang et al.,
"Jenga: Effective Memory Management for Serving LLM with Heterogeneity", SOSP 2025).

The common multiple itself is large for some models (260 units for 10 full and 52 SWA layers), and a
block moves only when nobody holds a page of it. So a block is the smallest run of units of which
neither kind of page leaves more than a 20th unused.

Page ids run over all blocks: block b (from 0) holds the full pages b * A + 1 .. b * A + A, or the
SWA pages b * C + 1 .. b * C + C. Before the first block lie the units of the padding pages.
"""

import math
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

WASTE = 20  # at most one unit in so many is left unused in a block
BUDGET_SHARE = 64  # a block is at most such a part of the budget, where it can be


@dataclass(frozen=True)
class UnifiedLayout:
    """How one buffer of units is cut. Hashable; made by `PoolConfig.unified`.

    Args:
      blocks: runs of units that move between the pools.
      block_units: units of a block.
      full_units: units of a full page: full layers, where all layers are of one size.
      swa_units: units of an SWA page.
      unit_bytes: bytes of a unit.
    """

    blocks: int
    block_units: int
    full_units: int
    swa_units: int
    unit_bytes: int

    @property
    def full_pages(self) -> int:
        """A, full pages of a block."""
        return self.block_units // self.full_units

    @property
    def swa_pages(self) -> int:
        """C, SWA pages of a block."""
        return self.block_units // self.swa_units

    @property
    def padding_units(self) -> int:
        """Units in front of the first block: the padding page of either kind."""
        return max(self.full_units, self.swa_units)

    @property
    def units(self) -> int:
        """Units of the whole buffer."""
        return self.padding_units + self.blocks * self.block_units

    @property
    def kv_bytes(self) -> int:
        """Bytes of the whole buffer."""
        return self.units * self.unit_bytes

    @property
    def first_full_blocks(self) -> int:
        """Blocks that are full at first: about as many pages of either kind, and one block each."""
        share = self.blocks * self.swa_pages // (self.full_pages + self.swa_pages)
        return min(max(share, 1), self.blocks - 1)

    def blocks_for(self, full_pages: int, window_pages: int | None) -> int:
        """Blocks with which one request that runs alone always holds so many full pages.

        Full pages are never given back meanwhile, so they lie close together. Those of a window
        are recycled and come to lie in more blocks than they fill: in at most twice as many and
        two, as long as grants fill blocks that are in use before they open others.

        Args:
          full_pages: at most.
          window_pages: SWA pages that it holds at most; None: as many as full pages.
        """
        of_full = -(-full_pages // self.full_pages)
        if window_pages is None or full_pages <= window_pages:
            return of_full + -(-full_pages // self.swa_pages)
        tight = -(-window_pages // self.swa_pages)
        loose = tight if self.swa_pages == 1 else min(window_pages, 2 * tight + 2)
        return of_full + loose

    def most_full_pages(self, window_pages: int | None) -> int:
        """The most full pages that one request can hold while it decodes, 0 if not one."""
        low, high = 0, self.blocks * self.full_pages
        while low < high:
            middle = (low + high + 1) // 2
            if self.blocks_for(middle, window_pages) <= self.blocks:
                low = middle
            else:
                high = middle - 1
        return low


@dataclass(frozen=True)
class KVSizes:
    """What one token takes, of the layers of each kind."""

    full_layers: int
    swa_layers: int
    full_layer_bytes: int  # of one full layer
    swa_layer_bytes: int  # of one SWA layer

    @property
    def unit_bytes(self) -> int:
        """Bytes of a unit for each token of a page: of a layer, where all are of one size."""
        return math.gcd(self.full_layer_bytes, self.swa_layer_bytes)

    @property
    def full_units(self) -> int:
        """Units of a full page."""
        return self.full_layers * self.full_layer_bytes // self.unit_bytes

    @property
    def swa_units(self) -> int:
        """Units of an SWA page."""
        return self.swa_layers * self.swa_layer_bytes // self.unit_bytes


class HasWindow(Protocol):
    """Some description of a model."""

    @property
    def past_window(self) -> int:
        """W, the past tokens that SWA layers read."""
        ...


@runtime_checkable
class SizedModel(HasWindow, Protocol):
    """A model by the bytes of its KV: `swa_jax.models.ModelConfig`."""

    @property
    def num_full_layers(self) -> int:
        """Layers that keep everything."""
        ...

    @property
    def num_swa_layers(self) -> int:
        """Layers that keep a window."""
        ...

    @property
    def full_bytes_per_token(self) -> int:
        """Bytes of a token in all full layers."""
        ...

    @property
    def swa_bytes_per_token(self) -> int:
        """Bytes of a token in all SWA layers."""
        ...

    @property
    def kv_bytes_per_element(self) -> int:
        """What those bytes count for an element."""
        ...


@runtime_checkable
class SizedDecoder(HasWindow, Protocol):
    """A model that computes: `swa_jax.models.DecoderConfig`."""

    @property
    def full_layers(self) -> tuple[int, ...]:
        """Places of the full layers."""
        ...

    @property
    def swa_layers(self) -> tuple[int, ...]:
        """Places of the SWA layers."""
        ...

    @property
    def kv_heads(self) -> int:
        """Key/value heads of every layer."""
        ...

    @property
    def head_dim(self) -> int:
        """Size of a head."""
        ...


def sizes_of(model: SizedModel | SizedDecoder, kv_bytes_per_element: int | None) -> KVSizes:
    """What a token of a model takes.

    Args:
      model: a `ModelConfig` or a `DecoderConfig`.
      kv_bytes_per_element: None: as the `ModelConfig` says; 4 for a `DecoderConfig`.

    Raises:
      ValueError: neither of the two, or a model without layers of one kind.
    """
    if isinstance(model, SizedModel):
        full, swa = model.num_full_layers, model.num_swa_layers
        element = kv_bytes_per_element or model.kv_bytes_per_element
        of_full = model.full_bytes_per_token // max(full, 1)
        of_full = of_full // model.kv_bytes_per_element * element
        of_swa = model.swa_bytes_per_token // swa // model.kv_bytes_per_element * element
    elif isinstance(model, SizedDecoder):
        full, swa = len(model.full_layers), len(model.swa_layers)
        of_full = of_swa = 2 * model.kv_heads * model.head_dim * (kv_bytes_per_element or 4)
    else:
        raise ValueError(f"model must be a ModelConfig or a DecoderConfig, got {model!r}")
    if not full or not swa:
        instead = "(full_tokens, swa_tokens, ...)" if full else ".pure_swa(tokens, ...)"
        raise ValueError(
            "one budget for two kinds of page needs a model with layers of both kinds, got "
            f"{full} full and {swa} SWA layers; use PoolConfig{instead}"
        )
    return KVSizes(full, swa, of_full, of_swa)


def cut_budget(budget: int, page_size: int, sizes: KVSizes, most_slots: int) -> UnifiedLayout:
    """The layout of a budget.

    Args:
      budget: bytes for all KV.
      page_size: tokens in a page.
      sizes: of a token.
      most_slots: slots that can be named; a larger budget is not used in full.

    Returns:
      As many blocks as fit; none or one where the budget is too small.
    """
    full, swa = sizes.full_units, sizes.swa_units
    unit = sizes.unit_bytes * page_size
    units = min(budget // unit, most_slots // page_size)
    block = _block_units(full, swa, units)
    blocks = max(units - max(full, swa), 0) // block
    return UnifiedLayout(blocks, block, full, swa, unit)


def _block_units(full: int, swa: int, units: int) -> int:
    """Units of a block, of `units` in all."""

    def waste(block: int) -> float:
        return max(block % full, block % swa) / block

    least, common = max(full, swa), math.lcm(full, swa)
    sizes = sorted({k * kind for kind in (full, swa) for k in range(1, common // kind + 1)})
    # The last of them, the common multiple, wastes nothing.
    block = next(size for size in sizes if size >= least and waste(size) <= 1 / WASTE)
    if block * BUDGET_SHARE <= units:
        return block
    small = [size for size in sizes if least <= size <= max(least, units // BUDGET_SHARE)]
    return min(small, key=waste)
