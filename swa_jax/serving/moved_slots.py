"""Places of tokens whose KV is copied elsewhere."""

import functools
from dataclasses import dataclass

import jax


@functools.partial(jax.tree_util.register_dataclass, data_fields=["full", "swa"], meta_fields=[])
@dataclass(frozen=True)
class MovedSlots:
    """Slots of M tokens in both pools; 0 for a token that is not copied."""

    full: jax.Array  # int32[M]
    swa: jax.Array  # int32[M]
