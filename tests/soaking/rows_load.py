"""Rows of an allocator: what is carried along, and how a grant gets into them.

Legend: R rows, T most tokens of one, F full pages, P page_size.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

import swa_jax as swa
from swa_jax.config import PoolConfig
from swa_jax.state import UNMAPPED, AllocatorState

from .counting import added
from .watch import Watch, new_watch

_PATIENCE = 10_000  # steps in which no request may end

COUNTS = (
    "ended",
    "prefills",
    "chunks",
    "decodes",
    "drafts_accepted",
    "drafts_refused",
    "transferred",
    "forks",
    "pages_copied",
    "retractions",
    "aborts",
    "groups",
    "pages_freed_in_groups",
    "windows_left",
    "refusals",
    "steps_at_99.9_percent",
)


class Rows(NamedTuple):
    """What a scheduler knows, and the allocator."""

    state: AllocatorState
    table: jax.Array  # int32[R, T] full slots
    committed: jax.Array  # int32[R] tokens that stay
    reserved: jax.Array  # int32[R] tokens that have a slot, at least as many
    evicted: jax.Array  # int32[R] tokens whose SWA side the row has given up
    memory: jax.Array  # int32[F+1] the SWA page that each full page had last
    seed: jax.Array  # uint32[]
    idle: jax.Array  # int32[] steps since a request ended
    watch: Watch
    counts: dict[str, jax.Array]  # int32[] by name, of this block

    @property
    def config(self) -> PoolConfig:
        """Of the allocator."""
        return self.state.config

    @property
    def width(self) -> int:
        """T."""
        return self.table.shape[1]


def new_rows(config: PoolConfig, rows: int, width: int, seed: int) -> Rows:
    """Nothing is held."""
    none, state = jnp.zeros(rows, jnp.int32), swa.init(config)
    made = Rows(
        state=state,
        table=jnp.zeros((rows, width), jnp.int32),
        committed=none,
        reserved=none,
        evicted=none,
        memory=jnp.zeros_like(state.full_to_swa),
        seed=jnp.uint32(seed),
        idle=jnp.int32(0),
        watch=new_watch(),
        counts=dict.fromkeys(COUNTS, jnp.int32(0)),
    )
    return jax.tree.map(jnp.array, made)  # each its own buffer: all are given away


def add(rows: Rows, **more: jax.Array | int) -> Rows:
    """Counts; bool[...] and int32[...] are summed."""
    return rows._replace(counts=added(rows.counts, **more))


def ceil_page(rows: Rows, tokens: jax.Array) -> jax.Array:
    """int32 tokens of the pages that hold so many."""
    size = rows.config.page_size
    return (tokens + size - 1) // size * size


def last_loc(rows: Rows, row: jax.Array) -> jax.Array:
    """int32[] full slot of the row's last token, -1 for none."""
    count = rows.reserved[row]
    return jnp.where(count > 0, rows.table[row, jnp.maximum(count - 1, 0)], -1)


def grow(rows: Rows, row: jax.Array, end: jax.Array, granted: tuple) -> Rows:
    """Writes a grant behind the tokens that the row has; `committed` stays."""
    state, grant = granted
    column = jnp.arange(rows.width, dtype=jnp.int32)
    place = column - rows.reserved[row]
    new = grant.slots.at[jnp.maximum(place, 0)].get(mode="fill", fill_value=0)
    new = jnp.where((place >= 0) & (column < end), new, rows.table[row])
    ok = grant.ok
    rows = rows._replace(
        state=state,
        table=rows.table.at[row].set(jnp.where(ok, new, rows.table[row])),
        reserved=rows.reserved.at[row].set(jnp.where(ok, end, rows.reserved[row])),
    )
    return add(rows, refusals=~ok)


def commit(rows: Rows, row: jax.Array) -> Rows:
    """What is reserved stays."""
    return rows._replace(committed=rows.committed.at[row].set(rows.reserved[row]))


def unshare(rows: Rows, active: jax.Array) -> tuple[Rows, jax.Array]:
    """A page of its own for each of bool[R] rows that would write into a shared one.

    Also bool[] whether there was room for that: if not, they must not write.
    """
    at = jnp.arange(rows.table.shape[0], dtype=jnp.int32)
    end = jnp.maximum(rows.reserved - 1, 0)
    last = jnp.where(rows.reserved > 0, rows.table[at, end], -1)
    state, copies = swa.copy_on_write(rows.state, rows.reserved, last, active)
    size = rows.config.page_size
    column = end[:, None] // size * size + jnp.arange(size, dtype=jnp.int32)[None, :]
    column = jnp.where(copies.target > 0, column, rows.width)
    table = rows.table.at[at[:, None], column].set(copies.target, mode="drop")
    rows = add(rows, pages_copied=jnp.any(copies.target > 0, axis=1), refusals=~copies.ok)
    return rows._replace(state=state, table=table), copies.ok


def row_laws(rows: Rows) -> dict[str, jax.Array]:
    """bool[] by name: the allocator's laws, and that each page has its owners and no more."""
    state, size = rows.state, rows.config.page_size
    laws = {f"allocator.{name}": holds for name, holds in swa.invariants(state).items()}
    laws["no_faults"] = jnp.sum(state.faults, dtype=jnp.int32) == 0
    first = jnp.arange(0, rows.width, size, dtype=jnp.int32)[None, :]
    pages = rows.table[:, ::size] // size
    has = first < rows.reserved[:, None]
    nowhere = state.full.holders.shape[0]

    def owners(marks: jax.Array) -> jax.Array:
        at = jnp.where(marks, pages, nowhere).reshape(-1)
        return jnp.zeros(nowhere, jnp.int32).at[at].add(1, mode="drop")

    live = owners(has & (first >= rows.evicted[:, None]))
    of_swa = state.swa.holders[state.full_to_swa]
    is_mapped = state.full_to_swa != UNMAPPED
    laws["every_page_has_its_owners"] = jnp.all(owners(has)[1:] == state.full.holders[1:])
    laws["it_goes_on"] = rows.idle < _PATIENCE
    laws["windows_are_kept"] = jnp.all(~is_mapped | (live <= of_swa))
    return laws
