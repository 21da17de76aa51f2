"""Ten thousand requests against one allocator, in one compiled loop.

Sixteen rows are filled, grown, rolled back, trimmed to their window, retracted and finished in
random order. After every step the loop counts pages on the device: nothing may be lost, and
nothing may be there twice.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

import swa_jax as swa

ROWS, WIDTH = 16, 64  # requests at a time, and the most tokens of one
CONFIG = swa.PoolConfig(384, 208, page_size=4, sliding_window=16)
PAGE = CONFIG.page_size


class Load(NamedTuple):
    """What the scheduler knows, and the allocator."""

    state: Any
    key: jax.Array
    table: jax.Array  # int32[ROWS, WIDTH] full slots
    committed: jax.Array  # int32[ROWS] tokens that stay
    reserved: jax.Array  # int32[ROWS] tokens that have a slot, >= committed
    evicted: jax.Array  # int32[ROWS]
    started: jax.Array
    finished: jax.Array
    refused: jax.Array
    steps: jax.Array
    broken: jax.Array  # bool: a count did not add up
    memory: jax.Array  # int32[pages+1] the last SWA page each full page had, for the old bug


def start(seed: int) -> Load:
    zero, rows = jnp.int32(0), jnp.zeros(ROWS, jnp.int32)
    state = swa.init(CONFIG)
    return Load(
        state=state,
        key=jax.random.key(seed),
        table=jnp.zeros((ROWS, WIDTH), jnp.int32),
        committed=rows,
        reserved=rows,
        evicted=rows,
        started=zero,
        finished=zero,
        refused=zero,
        steps=zero,
        broken=jnp.bool_(False),
        memory=jnp.zeros_like(state.full_to_swa),
    )


def ceil_page(tokens):
    return (tokens + PAGE - 1) // PAGE * PAGE


def pick(key, low: int, high: int):
    return jax.random.randint(key, (), low, high, jnp.int32)


# ---- what can happen to a row ---------------------------------------------------------------


def grow(load: Load, row, seq, granted) -> Load:
    """Writes a grant behind the tokens that the row has."""
    state, grant = granted
    column = jnp.arange(WIDTH, dtype=jnp.int32)
    place = column - load.reserved[row]
    new = grant.slots.at[place].get(mode="fill", fill_value=0)
    new = jnp.where((place >= 0) & (column < seq), new, load.table[row])
    ok = grant.ok
    return load._replace(
        state=state,
        table=load.table.at[row].set(jnp.where(ok, new, load.table[row])),
        reserved=load.reserved.at[row].set(jnp.where(ok, seq, load.reserved[row])),
        refused=load.refused + (~ok).astype(jnp.int32),
    )


def last_loc(load: Load, row):
    n = load.reserved[row]
    return jnp.where(n > 0, load.table[row, jnp.maximum(n - 1, 0)], -1)


def commit_all(load: Load, row) -> Load:
    return load._replace(committed=load.committed.at[row].set(load.reserved[row]))


def begin(load: Load, row, key, granted, seq) -> Load:
    after = commit_all(grow(load, row, seq, granted), row)
    return after._replace(
        started=load.started + (after.reserved[row] > 0).astype(jnp.int32),
        evicted=load.evicted.at[row].set(0),
    )


def prefill(load: Load, row, key, stale_tail: bool) -> Load:
    seq = pick(key, 1, 41)
    zero, nowhere = jnp.zeros(1, jnp.int32), jnp.full(1, -1, jnp.int32)
    grant = swa.alloc_extend(load.state, zero, seq[None], nowhere, capacity=WIDTH)
    return begin(load, row, key, grant, seq)


def whole_pages(load: Load, row, key, stale_tail: bool) -> Load:
    seq = pick(key, 1, 9) * PAGE
    return begin(load, row, key, swa.alloc(load.state, seq, capacity=WIDTH), seq)


def transferred(load: Load, row, key, stale_tail: bool) -> Load:
    """A prefill whose KV comes from elsewhere: SWA only for the tail, which may be empty."""
    first, second = jax.random.split(key)
    seq = pick(first, 1, 49)
    tail = jnp.minimum(pick(second, 0, 21), seq)
    zero, nowhere = jnp.zeros(1, jnp.int32), jnp.full(1, -1, jnp.int32)
    state, grant = swa.alloc_extend_swa_tail(
        load.state, zero, seq[None], nowhere, tail[None], capacity=WIDTH
    )
    if stale_tail:
        state = keep_stale_mapping(load, state)
    return begin(load, row, key, (state, grant), seq)


def keep_stale_mapping(load: Load, state):
    """The old bug: pages before the tail keep the mapping of the request that had them before."""
    before_tail = load.state.full.free & ~state.full.free & (state.full_to_swa == 0)
    stale = jnp.where(before_tail, load.memory, state.full_to_swa)
    return dataclasses.replace(state, full_to_swa=stale)


def chunk(load: Load, row, key, stale_tail: bool) -> Load:
    """The next chunk of a prompt."""
    load = commit_all(load, row)
    prefix = load.reserved[row]
    seq = jnp.minimum(prefix + pick(key, 1, 13), WIDTH)
    grant = swa.alloc_extend(
        load.state, prefix[None], seq[None], last_loc(load, row)[None], capacity=WIDTH
    )
    return commit_all(grow(load, row, seq, grant), row)


def reserve(load: Load, row, key, stale_tail: bool) -> Load:
    """Room for draft tokens, which are not committed yet."""
    prefix = load.reserved[row]
    seq = jnp.minimum(jnp.maximum(load.committed[row] + pick(key, 1, 9), prefix), WIDTH)
    grant = swa.alloc_extend(
        load.state, prefix[None], seq[None], last_loc(load, row)[None], capacity=WIDTH
    )
    return grow(load, row, seq, grant)


def accept(load: Load, row, key, stale_tail: bool) -> Load:
    """Some drafts are accepted; pages wholly past them are given back."""
    n = load.committed[row] + pick(key, 0, 6)
    n = jnp.minimum(n, load.reserved[row])
    column = jnp.arange(WIDTH, dtype=jnp.int32)
    past = (column >= ceil_page(n)) & (column < load.reserved[row])
    return load._replace(
        state=swa.free(load.state, jnp.where(past, load.table[row], 0)),
        committed=load.committed.at[row].set(n),
        reserved=load.reserved.at[row].set(n),
    )


def decode(load: Load, row, key, stale_tail: bool) -> Load:
    """One token for every row that has no drafts open."""
    rows = jnp.arange(ROWS, dtype=jnp.int32)
    active = (load.committed == load.reserved) & (load.reserved > 0) & (load.reserved < WIDTH)
    seq = load.reserved + 1
    last = load.table.at[rows, load.reserved - 1].get(mode="fill", fill_value=0)
    state, grant = swa.alloc_decode(load.state, seq, last, active)
    written = active & grant.ok
    column = jnp.where(written, load.reserved, WIDTH)
    return load._replace(
        state=state,
        table=load.table.at[rows, column].set(grant.slots, mode="drop"),
        reserved=jnp.where(written, seq, load.reserved),
        committed=jnp.where(written, seq, load.committed),
        refused=load.refused + (~grant.ok).astype(jnp.int32),
    )


def leave_window(load: Load, row, key, stale_tail: bool) -> Load:
    state, evicted = swa.free_out_of_window(
        load.state, load.table, load.committed, load.evicted, active=load.reserved > 0
    )
    return load._replace(state=state, evicted=evicted)


def group(load: Load, row, key, stale_tail: bool) -> Load:
    """Frees wait for a step in flight; the group ends a few steps later."""
    state = jax.lax.cond(
        load.state.group_open, swa.free_group_end, swa.free_group_begin, load.state
    )
    return load._replace(state=state)


def give_up(load: Load, row) -> Load:
    column = jnp.arange(WIDTH, dtype=jnp.int32)
    held = jnp.where(column < load.reserved[row], load.table[row], 0)
    return load._replace(
        state=swa.free(load.state, held),
        committed=load.committed.at[row].set(0),
        reserved=load.reserved.at[row].set(0),
        evicted=load.evicted.at[row].set(0),
    )


def retract(load: Load, row, key, stale_tail: bool) -> Load:
    return give_up(load, row)


def finish(load: Load, row, key, stale_tail: bool) -> Load:
    load = give_up(load, row)
    return load._replace(finished=load.finished + 1)


TO_EMPTY_ROWS = (prefill, whole_pages, transferred, transferred, group)
TO_LIVE_ROWS = (chunk, reserve, accept, decode, leave_window, group, retract, finish, finish)


# ---- the loop -------------------------------------------------------------------------------


def step(load: Load, stale_tail: bool) -> Load:
    key, which_row, which_op, inside = jax.random.split(load.key, 4)
    row = pick(which_row, 0, ROWS)
    empty = load.reserved[row] == 0
    branch = jnp.where(
        empty,
        pick(which_op, 0, len(TO_EMPTY_ROWS)),
        len(TO_EMPTY_ROWS) + pick(which_op, 0, len(TO_LIVE_ROWS)),
    )
    ops = [functools.partial(op, stale_tail=stale_tail) for op in TO_EMPTY_ROWS + TO_LIVE_ROWS]
    load = jax.lax.switch(branch, ops, load._replace(key=key), row, inside)
    mapped = load.state.full_to_swa
    return load._replace(
        steps=load.steps + 1,
        broken=load.broken | ~adds_up(load),
        memory=jnp.where(mapped > 0, mapped, load.memory),
    )


def adds_up(load: Load):
    """Counted from the rows, not from the allocator."""
    state = load.state
    full, swa_pages = CONFIG.full_tokens // PAGE, CONFIG.swa_tokens // PAGE
    held = jnp.sum(ceil_page(load.reserved), dtype=jnp.int32) // PAGE
    mapped = jnp.sum((state.full_to_swa > 0).astype(jnp.int32), dtype=jnp.int32)
    return (
        (swa.full_available_size(state) <= CONFIG.full_tokens)
        & (swa.swa_available_size(state) <= CONFIG.swa_tokens)
        & (state.full.num_free + state.full.num_pending + held == full)
        & (state.swa.num_free + state.swa.num_pending + mapped == swa_pages)
        & (jnp.sum(state.faults, dtype=jnp.int32) == 0)
        & lawful_now_and_then(load)
    )


def lawful_now_and_then(load: Load):
    def all_hold(state):
        return jnp.all(jnp.stack(list(swa.invariants(state).values())))

    return jax.lax.cond(load.steps % 16 == 0, all_hold, lambda _: jnp.bool_(True), load.state)


def run(load: Load, requests: int, *, stale_tail: bool = False) -> Load:
    """Until that many requests have finished; then every row is given up."""

    def unfinished(load: Load):
        return (load.finished < requests) & ~load.broken

    load = jax.lax.while_loop(unfinished, lambda load: step(load, stale_tail), load)
    load = jax.lax.fori_loop(0, ROWS, lambda row, load: give_up(load, row), load)
    return load._replace(state=swa.free_group_end(load.state))
