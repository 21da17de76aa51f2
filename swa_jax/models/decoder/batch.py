"""What one step of the model computes: some new tokens of each row, and where their KV goes.

Legend: R rows (requests), Q new tokens a row (padded), N pages a row (padded).
"""

import functools
from dataclasses import dataclass

import jax


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=[
        "tokens",
        "positions",
        "q_lens",
        "kv_lens",
        "full_slots",
        "swa_slots",
        "full_pages",
        "swa_pages",
        "tree_mask",
    ],
    meta_fields=[],
)
@dataclass(frozen=True)
class PagedBatch:
    """New tokens of R rows, for one pass of the model over paged KV.

    New token i of row r is token `kv_lens[r] - q_lens[r] + i` of its row, in the order in which KV
    is kept. Tokens before the new ones stand at that place in the text too; the new ones stand
    where `positions` says, since branches of a draft tree share positions.

    A query sees every token before the new ones, and of the new ones those up to itself, or those
    that `tree_mask` names. In an SWA layer it sees a key only if its position minus the key's is
    less than the model's sliding window (as published: the query itself counts).

    What masked queries (i >= q_lens[r]) give is finite and means nothing.
    """

    tokens: jax.Array  # int32[R, Q]
    positions: jax.Array  # int32[R, Q] place in the text, for rope and the window
    q_lens: jax.Array  # int32[R] new tokens, 0: the row is off
    kv_lens: jax.Array  # int32[R] tokens held, the new ones included
    full_slots: jax.Array  # int32[R, Q] where full layers write each new token; 0: padding page
    swa_slots: jax.Array  # int32[R, Q] the same for SWA layers
    full_pages: jax.Array  # int32[R, N] the row's pages in token order; past its end not read
    swa_pages: jax.Array  # int32[R, N] the same; 0 where the page has left the window
    tree_mask: jax.Array | None = None  # bool[R, Q, Q]: new token i sees new token j; None: causal
