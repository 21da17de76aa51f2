"""What a step of the model reads of the page table."""

import functools
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from swa_jax.compat.levanter.ids import INVALID, is_valid
from swa_jax.paging import offset_of, page_of


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=[
        "slot_ids",
        "page_indices",
        "seq_lens",
        "cu_q_lens",
        "num_seqs",
        "new_token_dests",
        "swa_page_indices",
        "new_swa_token_dests",
        "ok",
    ],
    meta_fields=["page_size"],
)
@dataclass(frozen=True)
class PageBatchInfo:
    """Pages, lengths and places of the sequences of one batch, in the order in which they come.

    S sequences, N pages a sequence, T tokens of the batch. Rows past `num_seqs` are `INVALID`.
    """

    slot_ids: jax.Array  # int32[S] which sequence of the table each row is
    page_indices: jax.Array  # int32[S, N]
    seq_lens: jax.Array  # int32[S] tokens, those of this batch included
    cu_q_lens: jax.Array  # int32[S + 1] tokens of this batch in the rows before
    num_seqs: jax.Array  # int32[]
    new_token_dests: jax.Array  # int32[T] page * page_size + place in it; INVALID for no place
    page_size: int
    # What only a table with a window, or one that can be refused, needs.
    swa_page_indices: jax.Array | None = None  # int32[S, N] INVALID where left behind
    new_swa_token_dests: jax.Array | None = None  # int32[T]
    ok: jax.Array | None = None  # bool[] False: memory was short, and nothing was granted

    def pages_and_slots(self) -> tuple[jax.Array, jax.Array]:
        """int32[T] page and int32[T] place in it of each token, `INVALID` for none."""
        return split_dests(self.new_token_dests, self.page_size)

    def swa_pages_and_slots(self) -> tuple[jax.Array, jax.Array]:
        """The same in the window layers' pool."""
        if self.new_swa_token_dests is None:
            return self.pages_and_slots()
        return split_dests(self.new_swa_token_dests, self.page_size)


def split_dests(dests: jax.Array, page_size: int) -> tuple[jax.Array, jax.Array]:
    """Pages and places in them of int32[T] places in the whole pool."""
    real, none = is_valid(dests), jnp.int32(INVALID)
    known = jnp.where(real, dests, 0)
    page, offset = page_of(known, page_size), offset_of(known, page_size)
    return jnp.where(real, page, none), jnp.where(real, offset, none)
