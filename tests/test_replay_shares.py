"""How a step's prefill is dealt to rows when pages run out."""

import jax.numpy as jnp
import pytest

from swa_jax import PoolConfig
from swa_jax.replay.grow import _share
from swa_jax.replay.world import LoopConfig, Rows

CONFIG = LoopConfig(PoolConfig(64, 64, 4, 8), max_running=3, chunk_tokens=24, table_pages=16)


@pytest.mark.parametrize(
    ("pages", "right"),
    [
        (9, [12, 7, 5]),  # the chunk ends first
        (5, [12, 7, 5]),
        (4, [12, 7, 1]),  # the token that its own last page holds
        (3, [12, 3, 0]),
        (1, [4, 0, 0]),  # nobody behind it gets any, and nobody less than none
        (0, [0, 0, 0]),
    ],
)
def test_nobody_behind_a_row_that_was_cut_short_gets_any(pages, right):
    rows = Rows(
        request=jnp.arange(3, dtype=jnp.int32),
        length=jnp.asarray([0, 1, 3], jnp.int32),
        prefill=jnp.asarray([12, 8, 9], jnp.int32),
        evicted=jnp.zeros(3, jnp.int32),
        last_loc=jnp.full(3, -1, jnp.int32),
        table=jnp.zeros((3, 16), jnp.int32),
    )
    assert _share(CONFIG, rows, jnp.int32(pages)).tolist() == right
