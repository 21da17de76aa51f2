"""What the simulation of a server carries: lengths of its requests, no page ids.

Legend: N requests of the load, R rows (requests that run at once), B servers.
"""

import functools
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from swa_jax.config import MAX_SLOTS, PoolConfig
from swa_jax.wide import wide_zero

NO_REQUEST = -1


@dataclass(frozen=True)
class SimShape:
    """Static sizes and rules. Hashable."""

    rows: int  # R
    page_size: int  # tokens
    window: int  # past tokens that stay live
    chunked: bool = False
    one_budget: bool = False  # some server has one budget for both kinds of page

    @property
    def rule(self) -> PoolConfig:
        """By which pages leave their window; the sizes in it mean nothing."""
        return self._rule(self.page_size)

    @property
    def token_rule(self) -> PoolConfig:
        """The same of tokens."""
        return self._rule(1)

    def _rule(self, page: int) -> PoolConfig:
        tokens = (MAX_SLOTS - page) // page * page
        return PoolConfig(tokens, tokens, page, self.window, chunked=self.chunked)


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["request", "length", "target", "final"],
    meta_fields=[],
)
@dataclass(frozen=True)
class SimRows:
    """Requests that run, or that wait again after a retraction: together never more than R.

    While one of those waits, no newer request comes in, so each keeps its row.
    """

    request: jax.Array  # int32[R] place in the load, NO_REQUEST where idle
    length: jax.Array  # int32[R] tokens whose KV is held
    target: jax.Array  # int32[R] length up to which it prefills
    final: jax.Array  # int32[R] length at which it is done


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=[
        "steps",
        "completed",
        "retracted",
        "recomputed",
        "longest_wait",
        "peak_full",
        "peak_swa",
        "peak_running",
        "peak_pair",
        "peak_cost",
        "sum_running",
        "sum_full_pages",
        "sum_swa_pages",
        "sum_full_tokens",
        "sum_swa_tokens",
        "sum_cost",
    ],
    meta_fields=[],
)
@dataclass(frozen=True)
class SimTally:
    """Figures so far. Sums are over steps, int32[2] as in `wide`; the rest is int32[]."""

    steps: jax.Array
    completed: jax.Array  # requests
    retracted: jax.Array  # retractions
    recomputed: jax.Array  # int32[2] tokens that retractions threw away
    longest_wait: jax.Array  # steps from a request's arrival to when it came in first
    peak_full: jax.Array  # pages
    peak_swa: jax.Array  # pages
    peak_running: jax.Array  # requests
    peak_pair: jax.Array  # int32[2] full and SWA pages when their bytes together were most
    peak_cost: jax.Array  # of one budget
    sum_running: jax.Array  # requests
    sum_full_pages: jax.Array
    sum_swa_pages: jax.Array
    sum_full_tokens: jax.Array  # tokens in those pages
    sum_swa_tokens: jax.Array  # tokens that the step writes, or reads in SWA layers
    sum_cost: jax.Array


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["rows", "newest", "bound", "fill", "clock", "tally"],
    meta_fields=[],
)
@dataclass(frozen=True)
class SimWorld:
    """A server.

    Requests come in, and are sent back, in an order that three numbers say all about: below
    `bound` they run, from there on they wait; below `fill` they decode, from there on they prefill.
    """

    rows: SimRows
    newest: jax.Array  # int32[] place in the load of the next request that was never in
    bound: jax.Array  # int32[]
    fill: jax.Array  # int32[]
    clock: jax.Array  # int32[] steps, those in which there was nothing to do included
    tally: SimTally


def new_sim_world(shape: SimShape) -> SimWorld:
    """Nothing runs. Leaves of one server."""
    zero = jnp.zeros((), jnp.int32)
    empty = jnp.zeros(shape.rows, jnp.int32)
    rows = SimRows(jnp.full(shape.rows, NO_REQUEST, jnp.int32), empty, empty, empty)
    wide = wide_zero()
    sums = {name: wide for name in SimTally.__dataclass_fields__ if name.startswith("sum_")}
    tally = SimTally(
        zero, zero, zero, wide, zero, zero, zero, zero, jnp.zeros(2, jnp.int32), zero, **sums
    )
    return SimWorld(rows, zero, zero, zero, zero, tally)
