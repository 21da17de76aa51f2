"""Levanter's `page_table` module with our table inside, for running its own tests and engine.

Takes the place of `levanter.inference.page_table`: named arrays outside, plain ones inside. Needs
haliax and equinox, which the package does not.
"""

# pyright: reportMissingImports=false
from __future__ import annotations

import dataclasses
from typing import Any

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
from jax.core import Tracer

import swa_jax as swa
from swa_jax.compat import levanter as ours
from swa_jax.compat.levanter.batch_info import split_dests

__all__ = ["PageBatchInfo", "PageTable"]


@dataclasses.dataclass(frozen=True)
class PageBatchInfo(ours.PageBatchInfo):
    """Ours, with named arrays in its fields."""

    def pages_and_slots(self) -> Any:
        dests: Any = self.new_token_dests
        parts = split_dests(dests.array, self.page_size)
        return tuple(hax.named(part, dests.axes) for part in parts)


jax.tree_util.register_dataclass(
    PageBatchInfo,
    [f.name for f in dataclasses.fields(PageBatchInfo) if f.name != "page_size"],
    ["page_size"],
)


class PageTable(eqx.Module):
    """Ours behind named arrays, which a test may replace."""

    core: ours.PageTable
    page_indices: Any
    page_ref_counts: Any
    seq_lens: Any
    used_mask: Any
    page_size: int = eqx.field(static=True)

    @staticmethod
    def init(max_pages: int, max_seqs: int, page_size: int, max_pages_per_seq: int) -> PageTable:
        return _named(ours.PageTable.init(max_pages, max_seqs, page_size, max_pages_per_seq))

    def _plain(self) -> ours.PageTable:
        state, counts = self.core.state, self.page_ref_counts.array
        if not isinstance(counts, Tracer) and (counts != self.core.page_ref_counts).any():
            state = _held_as(self.core, counts.tolist())
        return dataclasses.replace(
            self.core,
            state=state,
            page_indices=self.page_indices.array,
            seq_lens=self.seq_lens.array,
            used_mask=self.used_mask.array,
        )

    num_pages = property(lambda self: self.core.num_pages)
    pages_per_seq = property(lambda self: self.core.pages_per_seq)
    max_seqs = property(lambda self: self.core.max_seqs)
    max_len_per_seq = property(lambda self: self.core.max_len_per_seq)
    current_num_seqs = property(lambda self: self._plain().current_num_seqs)

    def assign_seq_id_to_seq(self, seq_id: Any = None) -> Any:
        table, row = self._plain().assign_seq_id_to_seq(seq_id)
        return _named(table), row

    def allocate_for_seq(self, token_slot_ids: Any, token_pos_ids: Any) -> Any:
        table, info = self._plain().allocate_for_seq(token_slot_ids, token_pos_ids)
        axes = {
            "slot_ids": ("seq",),
            "page_indices": ("seq", "page"),
            "seq_lens": ("seq",),
            "cu_q_lens": ("seq",),
            "new_token_dests": ("position",),
        }
        fields = {f.name: getattr(info, f.name) for f in dataclasses.fields(info)}
        fields |= {name: hax.named(fields[name], names) for name, names in axes.items()}
        return _named(table), PageBatchInfo(**fields)

    def free_pages(self, seq_id: Any) -> PageTable:
        return _named(self._plain().free_pages(seq_id))

    def free_pages_for_finished(self, finished_mask: Any) -> PageTable:
        return _named(self._plain().free_pages_for_finished(finished_mask))

    def increment_ref_counts_for_pages(self, pages: Any, count: Any = 1) -> PageTable:
        return _named(self._plain().increment_ref_counts_for_pages(pages, count))

    def clone_pages_from(self, src_seq_id: Any, dst_seq_id: Any) -> PageTable:
        return _named(self._plain().clone_pages_from(src_seq_id, dst_seq_id))

    def bump_seq_len_to_next_page(self, seq_id: Any) -> PageTable:
        return _named(self._plain().bump_seq_len_to_next_page(seq_id))


def _named(table: ours.PageTable) -> PageTable:
    return PageTable(
        core=table,
        page_indices=hax.named(table.page_indices, ("seq", "page")),
        page_ref_counts=hax.named(table.page_ref_counts, ("page",)),
        seq_lens=hax.named(table.seq_lens, ("seq",)),
        used_mask=hax.named(table.used_mask, ("seq",)),
        page_size=table.page_size,
    )


def _held_as(table: ours.PageTable, counts: list[int]) -> swa.AllocatorState:
    """A state in which as many hold each page as a test wrote down by hand."""
    size, tokens = table.page_size, table.num_pages * table.page_size
    state, grant = swa.alloc(swa.init(table.state.config), tokens, capacity=tokens)
    assert grant.ok
    first = jnp.arange(1, table.num_pages + 1, dtype=jnp.int32) * size
    for times in range(1, max(counts)):
        more = jnp.array([count > times for count in counts])
        state = swa.share(state, jnp.where(more, first, 0))
    return swa.free(state, jnp.where(jnp.array(counts) > 0, 0, first))
