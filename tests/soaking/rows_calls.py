"""What can happen to a row of an allocator, one function each: (rows, row, seed, plant) -> rows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import jax
import jax.numpy as jnp

import swa_jax as swa

from .dice import roll
from .planted import DOUBLE_FREE, LEAK, STALE_MAPPING, Plant
from .rows_load import Rows, add, ceil_page, commit, grow, last_loc, unshare

Call = Callable[[Rows, jax.Array, jax.Array, jax.Array], Rows]
_NOWHERE = -1


def _one(value: jax.Array | int) -> jax.Array:
    return jnp.asarray(value, jnp.int32)[None]


def _extend(rows: Rows, row: jax.Array, end: jax.Array) -> Rows:
    rows, may_write = unshare(rows, jnp.arange(rows.table.shape[0], dtype=jnp.int32) == row)
    start, last = rows.reserved[row], last_loc(rows, row)
    end = jnp.where(may_write, end, start)
    grant = swa.alloc_extend(rows.state, _one(start), _one(end), _one(last), capacity=rows.width)
    return grow(rows, row, end, grant)


def prefill(rows: Rows, row: jax.Array, seed: jax.Array, wrong: jax.Array) -> Rows:
    """A prompt, or as much of it as fits, one token at least."""
    after = commit(_extend(rows, row, roll(seed, 1, 1, rows.width * 2 // 3)), row)
    return add(after, prefills=after.reserved[row] > 0)


def prefill_one_token(rows: Rows, row: jax.Array, seed: jax.Array, wrong: jax.Array) -> Rows:
    """A prompt of one token."""
    after = commit(_extend(rows, row, jnp.int32(1)), row)
    return add(after, prefills=after.reserved[row] > 0)


def whole_pages(rows: Rows, row: jax.Array, seed: jax.Array, wrong: jax.Array) -> Rows:
    """A prompt of whole pages."""
    size = rows.config.page_size
    end = roll(seed, 2, 1, rows.width // size) * size
    after = commit(grow(rows, row, end, swa.alloc(rows.state, end, capacity=rows.width)), row)
    return add(after, prefills=after.reserved[row] > 0)


def transferred(rows: Rows, row: jax.Array, seed: jax.Array, wrong: jax.Array) -> Rows:
    """A prompt whose KV comes from elsewhere: SWA only for its tail, which may be empty."""
    end = roll(seed, 3, 1, rows.width * 3 // 4)
    tail = jnp.minimum(roll(seed, 4, 0, 21), end)
    before = rows.state
    state, grant = swa.alloc_extend_swa_tail(
        before, _one(0), _one(end), _one(_NOWHERE), _one(tail), capacity=rows.width
    )
    # A known bug: pages before the tail keep the mapping of the request that had them before.
    bare = before.full.free & ~state.full.free & (state.full_to_swa == 0)
    stale = jnp.where(bare & (wrong == STALE_MAPPING), rows.memory, state.full_to_swa)
    state = replace(state, full_to_swa=stale)
    after = commit(grow(rows, row, end, (state, grant)), row)
    return add(after, transferred=after.reserved[row] > 0)


def fork(rows: Rows, row: jax.Array, seed: jax.Array, wrong: jax.Array) -> Rows:
    """The longest row becomes two."""
    parent = jnp.argmax(rows.committed).astype(jnp.int32)
    count, done = rows.committed[parent], rows.evicted[parent]
    column = jnp.arange(rows.width, dtype=jnp.int32)
    slots = jnp.where(column < count, rows.table[parent], 0)
    rows = rows._replace(
        state=swa.share(rows.state, slots, column >= done),
        table=rows.table.at[row].set(slots),
        committed=rows.committed.at[row].set(count),
        reserved=rows.reserved.at[row].set(count),
        evicted=rows.evicted.at[row].set(done),
    )
    return add(rows, forks=count > 0)


def chunk(rows: Rows, row: jax.Array, seed: jax.Array, wrong: jax.Array) -> Rows:
    """The next chunk of a prompt."""
    rows = commit(rows, row)
    start = rows.reserved[row]
    after = _extend(rows, row, jnp.minimum(start + roll(seed, 5, 1, 13), rows.width))
    return add(commit(after, row), chunks=after.reserved[row] > start)


def fill(rows: Rows, row: jax.Array, seed: jax.Array, wrong: jax.Array) -> Rows:
    """As many tokens as the pool has left."""
    rows = commit(rows, row)
    left = jnp.minimum(swa.full_available_size(rows.state), swa.swa_available_size(rows.state))
    end = jnp.minimum(rows.reserved[row] + jnp.maximum(left, 1), rows.width)
    after = _extend(rows, row, end)
    return add(commit(after, row), chunks=after.reserved[row] > rows.reserved[row])


def reserve(rows: Rows, row: jax.Array, seed: jax.Array, wrong: jax.Array) -> Rows:
    """Room for drafts, which are not committed yet."""
    end = jnp.maximum(rows.committed[row] + roll(seed, 6, 1, 9), rows.reserved[row])
    return _extend(rows, row, jnp.minimum(end, rows.width))


def accept(rows: Rows, row: jax.Array, seed: jax.Array, wrong: jax.Array) -> Rows:
    """Some drafts are right; pages wholly past them are given back."""
    had = rows.reserved[row] - rows.committed[row]
    right = jnp.minimum(roll(seed, 7, 0, 6), had)
    end = rows.committed[row] + right
    column = jnp.arange(rows.width, dtype=jnp.int32)
    past = (column >= ceil_page(rows, end)) & (column < rows.reserved[row])
    rows = rows._replace(
        state=swa.free(rows.state, jnp.where(past, rows.table[row], 0)),
        committed=rows.committed.at[row].set(end),
        reserved=rows.reserved.at[row].set(end),
    )
    return add(rows, drafts_accepted=right, drafts_refused=had - right)


def decode(rows: Rows, row: jax.Array, seed: jax.Array, wrong: jax.Array) -> Rows:
    """One token for every row without drafts."""
    active = (rows.committed == rows.reserved) & (rows.reserved > 0)
    active = active & (rows.reserved < rows.width)
    rows, may_write = unshare(rows, active)
    active = active & may_write
    at = jnp.arange(rows.table.shape[0], dtype=jnp.int32)
    end = rows.reserved + 1
    last = rows.table[at, jnp.maximum(rows.reserved - 1, 0)]
    state, grant = swa.alloc_decode(rows.state, end, last, active)
    written = active & grant.ok
    column = jnp.where(written, rows.reserved, rows.width)
    rows = rows._replace(
        state=state,
        table=rows.table.at[at, column].set(grant.slots, mode="drop"),
        reserved=jnp.where(written, end, rows.reserved),
        committed=jnp.where(written, end, rows.committed),
    )
    return add(rows, decodes=written, refusals=~grant.ok)


def leave_window(rows: Rows, row: jax.Array, seed: jax.Array, wrong: jax.Array) -> Rows:
    """Every row gives up what has left its window."""
    state, evicted = swa.free_out_of_window(
        rows.state, rows.table, rows.committed, rows.evicted, active=rows.reserved > 0
    )
    left = evicted - rows.evicted
    return add(rows._replace(state=state, evicted=evicted), windows_left=left > 0)


def group(rows: Rows, row: jax.Array, seed: jax.Array, wrong: jax.Array) -> Rows:
    """Frees wait for a step under way; the group ends a few steps later."""
    state = rows.state
    is_open = state.group_open
    waits = jnp.where(is_open, state.full.num_pending + state.swa.num_pending, 0)
    after = jax.lax.cond(is_open, swa.free_group_end, swa.free_group_begin, state)
    return add(rows._replace(state=after), groups=~is_open, pages_freed_in_groups=waits)


def give_up(rows: Rows, row: jax.Array, wrong: jax.Array) -> Rows:
    """All of a row's pages go back."""
    column = jnp.arange(rows.width, dtype=jnp.int32)
    held = jnp.where(column < rows.reserved[row], rows.table[row], 0)
    forgets = (wrong == LEAK) & (column // rows.config.page_size == 0)
    state = swa.free(rows.state, jnp.where(forgets, 0, held))
    # Twice: by the time of the second call, and in it.
    state = swa.free(state, jnp.where(wrong == DOUBLE_FREE, held, 0))
    return rows._replace(
        state=state,
        committed=rows.committed.at[row].set(0),
        reserved=rows.reserved.at[row].set(0),
        evicted=rows.evicted.at[row].set(0),
    )


def retract(rows: Rows, row: jax.Array, seed: jax.Array, wrong: jax.Array) -> Rows:
    """The request will begin again."""
    return add(give_up(rows, row, wrong), retractions=1)


def abort(rows: Rows, row: jax.Array, seed: jax.Array, wrong: jax.Array) -> Rows:
    """It is over before its end."""
    return add(give_up(rows, row, wrong), aborts=1, ended=1)


def finish(rows: Rows, row: jax.Array, seed: jax.Array, wrong: jax.Array) -> Rows:
    """It is done."""
    return add(give_up(rows, row, wrong), ended=1)


# `group` is in both: where all pages wait for its end, no row can begin.
TO_EMPTY_ROWS: tuple[Call, ...] = (
    prefill,
    prefill_one_token,
    whole_pages,
    transferred,
    fork,
    group,
)
TO_LIVE_ROWS: tuple[Call, ...] = (
    chunk,
    reserve,
    accept,
    decode,
    leave_window,
    group,
    fill,
    retract,
    abort,
    finish,
)


def wrong_now(plant: Plant, step: jax.Array) -> jax.Array:
    """int32[] which mistake is made in this step."""
    return jnp.where(step >= plant.step, plant.kind, 0)
