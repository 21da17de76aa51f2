"""What the replay loop carries: the allocator, the running rows, the queue and the tally.

Legend: N requests of the trace, R rows (requests that run at once), C pages of a row's table.
"""

import functools
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from swa_jax.config import PoolConfig
from swa_jax.state import AllocatorState, init

NO_REQUEST = -1


@dataclass(frozen=True)
class LoopConfig:
    """Static sizes of the loop. Hashable."""

    pool: PoolConfig
    max_running: int  # R
    chunk_tokens: int  # prefill tokens of one step, over all rows
    table_pages: int  # C
    longest_output: int = 0  # most tokens that a request generates

    @property
    def given_pages(self) -> int:
        """Most pages of one row that are new to a prefix cache: a chunk's, or what it generated."""
        most = self.chunk_tokens + self.longest_output
        return min(self.table_pages, most // self.pool.page_size + 2)

    @property
    def step_pages(self) -> int:
        """Most pages of one row that one step can push out of its window."""
        return min(self.table_pages, self.chunk_tokens // self.pool.page_size + 2)


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["prompt_lens", "final_lens"],
    meta_fields=[],
)
@dataclass(frozen=True)
class Load:
    """The requests, in the order in which they are served."""

    prompt_lens: jax.Array  # int32[N] tokens
    final_lens: jax.Array  # int32[N] tokens whose KV exists when the request is done


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["request", "length", "prefill", "evicted", "last_loc", "table"],
    meta_fields=[],
)
@dataclass(frozen=True)
class Rows:
    """The requests that run now."""

    request: jax.Array  # int32[R] index into the load, NO_REQUEST where idle
    length: jax.Array  # int32[R] tokens whose KV is held
    prefill: jax.Array  # int32[R] length up to which the row prefills; beyond it, it decodes
    evicted: jax.Array  # int32[R] tokens whose SWA pages were given back
    last_loc: jax.Array  # int32[R] full slot of the last token
    table: jax.Array  # int32[R, C] first full slot of each page


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=[
        "steps",
        "completed",
        "retracted",
        "recomputed",
        "refused",
        "peak_full",
        "peak_swa",
        "peak_all_full",
        "peak_running",
        "peak_pair",
    ],
    meta_fields=[],
)
@dataclass(frozen=True)
class Tally:
    """Figures of the replay so far, int32."""

    steps: jax.Array
    completed: jax.Array  # requests
    retracted: jax.Array  # retractions
    recomputed: jax.Array  # tokens that a retraction threw away
    refused: jax.Array  # steps whose grant was refused: none, if the accounting is right
    peak_full: jax.Array  # pages
    peak_swa: jax.Array  # pages
    peak_all_full: jax.Array  # pages that the running tokens fill where nothing is evicted
    peak_running: jax.Array  # rows
    peak_pair: jax.Array  # int32[2] full and SWA pages when their bytes together were most


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["allocator", "rows", "waiting", "progress", "tally"],
    meta_fields=[],
)
@dataclass(frozen=True)
class World:
    """The whole loop carry."""

    allocator: AllocatorState
    rows: Rows
    waiting: jax.Array  # bool[N] not admitted, not done, not rejected
    progress: jax.Array  # int32[N] length to prefill up to when (re)admitted
    tally: Tally


def new_world(config: LoopConfig, load: Load, accepted: jax.Array) -> World:
    """Nothing runs; the accepted requests (bool[N]) wait."""
    count = config.max_running
    zero = jnp.zeros((), jnp.int32)
    rows = Rows(
        request=jnp.full(count, NO_REQUEST, jnp.int32),
        length=jnp.zeros(count, jnp.int32),
        prefill=jnp.zeros(count, jnp.int32),
        evicted=jnp.zeros(count, jnp.int32),
        last_loc=jnp.full(count, -1, jnp.int32),
        table=jnp.zeros((count, config.table_pages), jnp.int32),
    )
    tally = Tally(*(jnp.copy(zero) for _ in range(9)), peak_pair=jnp.zeros(2, jnp.int32))
    return World(init(config.pool), rows, accepted, jnp.copy(load.prompt_lens), tally)


def running(rows: Rows) -> jax.Array:
    """bool[R] rows that hold a request."""
    return rows.request != NO_REQUEST


def prefilling(rows: Rows) -> jax.Array:
    """bool[R] rows whose prompt is not all computed."""
    return running(rows) & (rows.length < rows.prefill)
