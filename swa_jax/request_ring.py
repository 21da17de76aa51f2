"""Request rings: the SWA side as a fixed ring of slots for each running request.

Where every request runs up to its window anyway, its SWA pages come and go at the pace of one for
one. A ring says the same without any of that: a request takes one when it starts and gives it back
when it ends, and position p lives at place p mod the ring, over what has left the window by then.
The full side stays paged, and a grant asks it alone; nothing is mapped from one side to the other.
`PoolConfig.request_ring` makes such a pool and says how long a ring must be.

Only the full pages are shared and forked. A fork takes a ring of its own, and its caller copies the
window into it (from `ring_slots` of the one ring to those of the other).
"""

import functools
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from swa_jax.config import PoolConfig
from swa_jax.faults import add_faults, fault_counts
from swa_jax.inputs import Ints, as_active, as_int32, check_rows
from swa_jax.owners import as_owner, count_foreign, is_foreign_side
from swa_jax.paging import first_places, put
from swa_jax.pool import give_back, is_held, nowhere, peek, take
from swa_jax.rank import rank
from swa_jax.state import NOBODY, PAD_SLOT, AllocatorState, must_be_state

NO_RING = 0  # what a row without a ring holds; ring ids are 1 .. config.swa_units


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["rings", "ok", "short"], meta_fields=[]
)
@dataclass(frozen=True)
class RingGrant:
    """The answer of `ring_acquire`. A refusal is a normal answer: read `ok` first."""

    rings: jax.Array  # int32[B] the ring of each row; as they were where refused
    ok: jax.Array  # bool[]
    short: jax.Array  # int32[] rings missing, 0 where granted or ill-formed


def ring_acquire(
    state: AllocatorState,
    rings: Ints,
    active: ArrayLike | list[bool] | None = None,
    *,
    by: Ints | None = None,
) -> tuple[AllocatorState, RingGrant]:
    """Gives a ring to every active row that has none, or to none of them.

    Rows that have a ring keep it, so it can be called again with what it returned. What the last
    owner wrote is still there and need not be cleared: a window of the new request reads only
    places that it has written itself.

    Args:
      state: allocator before the call.
      rings: int32[B] the ring that each row has, 0 for none.
      active: bool[B] rows that take part, all by default; the others are not looked at.
      by: int32[] owner of all rows or int32[B] of each, 0 by default; only with owner tags.

    Returns:
      The allocator after the call, and `RingGrant`.

    Refused (`ok` False, the state bit for bit as it was but for the counters):
      too few free rings: `short` says how many are missing.
      out_of_range: an active row with a ring that nobody holds, once a row.
      misaligned: an active row with the ring of an earlier row, once a row.
      foreign: an active row with the ring of another owner, once a row.

    Raises:
      ValueError: a pool without request rings.

    Laws 2 and 3.
    """
    must_be_state(state)
    _needs_rings(state.config, "ring_acquire")
    held = as_int32("rings", rings, 1)
    check_rows(rings=held)
    rows = as_active(active, rings=held)
    return _acquire(state, held, rows, as_owner(state, by, rings=held))


@jax.jit
def _acquire(
    state: AllocatorState, rings: jax.Array, active: jax.Array, by: jax.Array | None
) -> tuple[AllocatorState, RingGrant]:
    has = active & (rings != NO_RING)
    state, named, well_formed = _keep_own(state, jnp.where(has, rings, NO_RING), by)
    has = named != NO_RING
    first, known = _look_at(state, named)
    faults = fault_counts(out_of_range=has & ~known, misaligned=has & known & ~first)
    wants = active & (rings == NO_RING)
    ranks, count = rank(wants)
    well_formed = well_formed & ~jnp.any(faults > 0)
    short = jnp.where(well_formed, jnp.maximum(count - state.swa.num_free, 0), 0)
    ok = well_formed & (short == 0)
    takes = wants & ok
    granted = peek(state.swa, ranks)
    pool = take(
        state.swa,
        jnp.where(takes, granted, jnp.int32(nowhere(state.swa))),
        jnp.where(ok, count, 0),
    )
    after = replace(state, swa=pool, faults=add_faults(state.faults, faults))
    after = _tag(after, jnp.where(takes, granted, NO_RING), by)
    return after, RingGrant(jnp.where(takes, granted, rings), ok, short)


def ring_release(state: AllocatorState, rings: Ints, *, by: Ints | None = None) -> AllocatorState:
    """Takes rings back. The full pages of their requests are freed by `free` or `free_full`.

    In an open free group the rings are queued like pages.

    Args:
      state: allocator before the call.
      rings: int32[B] rings; 0 in places that give none back.
      by: int32[] or int32[B] owner of the rings, 0 by default; only with owner tags.

    Returns:
      The allocator after the call.

    Refused, counted, and nothing else changed:
      double_free: a ring that is free or pending already, or named by an earlier place: once a
        place.
      out_of_range: an id below 0 or past the rings, once a place.
      foreign: a ring of another owner, once a place.

    Raises:
      ValueError: a pool without request rings.

    Laws 3, 4 and 6.
    """
    must_be_state(state)
    _needs_rings(state.config, "ring_release")
    places = as_int32("rings", rings, 1)
    return _release(state, places, as_owner(state, by, rings=places))


@jax.jit
def _release(state: AllocatorState, rings: jax.Array, by: jax.Array | None) -> AllocatorState:
    state, rings, _ = _keep_own(state, rings, by)
    first, known = _look_at(state, rings)
    outside = (rings < NO_RING) | (rings >= jnp.int32(nowhere(state.swa)))
    faults = fault_counts(
        double_free=(rings != NO_RING) & ~outside & ~(known & first), out_of_range=outside
    )
    gone = jnp.where(known & first, rings, jnp.int32(nowhere(state.swa)))
    pool = give_back(state.swa, gone, jnp.zeros_like(gone), state.group_open)
    return replace(state, swa=pool, faults=add_faults(state.faults, faults))


def _keep_own(
    state: AllocatorState, rings: jax.Array, by: jax.Array | None
) -> tuple[AllocatorState, jax.Array, jax.Array]:
    """Counts rings of other owners and takes them out; also bool[] whether there were none."""
    tags = state.owner_tags
    if by is None or tags is None:
        return state, rings, jnp.ones((), bool)
    foreign = _look_at(state, rings)[1] & is_foreign_side(tags, rings, by)
    tags = count_foreign(tags, jnp.sum(foreign, dtype=jnp.int32))
    return (
        replace(state, owner_tags=tags),
        jnp.where(foreign, NO_RING, rings),
        ~jnp.any(foreign),
    )


def _tag(state: AllocatorState, rings: jax.Array, by: jax.Array | None) -> AllocatorState:
    """Writes whose int32[B] rings are; 0 names none."""
    tags = state.owner_tags
    if by is None or tags is None:
        return state
    at = jnp.where(rings == NO_RING, jnp.int32(nowhere(state.swa)), rings)
    return replace(state, owner_tags=replace(tags, swa=put(tags.swa, at, by)))


def _look_at(state: AllocatorState, rings: jax.Array) -> tuple[jax.Array, jax.Array]:
    """bool[B] the first place that names its ring, and bool[B] a ring that somebody holds.

    Rings are few, so a table of their own costs nothing; `scratch` is as long as the full pool.
    """
    end = jnp.int32(nowhere(state.swa))
    inside = (rings > NO_RING) & (rings < end)
    named = jnp.where(inside, rings, end)
    first, _, _ = first_places(jnp.full(state.swa.holders.shape, NOBODY, jnp.int32), named)
    return first & inside, inside & is_held(state.swa, named)


def ring_slots(
    config: PoolConfig, rings: Ints, positions: Ints, lengths: Ints | None = None
) -> jax.Array:
    """The SWA slots of tokens, by the ring of their request and their place in its text.

    Of positions that are a whole page apart the slots are, too: slots of the first tokens of pages,
    divided by page_size, are what a kernel's page table lists.

    Args:
      config: of a pool with request rings.
      rings: int32[B], or of any shape; 0 for rows that have none.
      positions: int32[B, ...] tokens from the start of each row's text; the leading dimensions are
        those of `rings`.
      lengths: int32[B] tokens that each row holds after this step. Where given, positions that
        have no place any more by then, and those past the length, get slot 0: a step that writes
        more tokens than a ring is long then writes each place once, with the last of them.

    Returns:
      int32 of the shape of `positions`: SWA slots, 0 (padding) where there is none: no ring, one
      that is not the pool's, or a position below 0.

    Raises:
      ValueError: a pool without request rings, or shapes that do not belong together.
    """
    _needs_rings(config, "ring_slots")
    of_row = {"rings": as_int32("rings", rings, None)}
    places = as_int32("positions", positions, None)
    if lengths is not None:
        of_row["lengths"] = as_int32("lengths", lengths, None)
    shape = of_row["rings"].shape
    for name, values in of_row.items():
        if values.shape != shape or places.shape[: len(shape)] != shape:
            raise ValueError(
                f"{name} must be one for each row of positions, got {name}{list(values.shape)} "
                f"beside rings{list(shape)} and positions{list(places.shape)}"
            )
    rows = [values.reshape(shape + (1,) * (places.ndim - len(shape))) for values in of_row.values()]
    return _slots(config, places, *rows)


@functools.partial(jax.jit, static_argnums=0)
def _slots(
    config: PoolConfig, positions: jax.Array, rings: jax.Array, lengths: jax.Array | None = None
) -> jax.Array:
    size = jnp.int32(config.swa_unit_tokens)
    known = (rings > NO_RING) & (rings <= jnp.int32(config.swa_units))
    there = known & (positions >= 0)
    if lengths is not None:
        there = there & (positions < lengths) & (positions >= lengths - size)
    base = jnp.int32(config.page_size) + (jnp.where(known, rings, 1) - 1) * size
    place = jax.lax.rem(jnp.maximum(positions, 0), size)
    return jnp.where(there, base + place, PAD_SLOT)


def _needs_rings(config: PoolConfig, call: str) -> None:
    if not config.has_rings:
        raise ValueError(
            f"{call} needs a pool with request rings: make it with PoolConfig.request_ring("
            f"full_tokens, requests, sliding_window=...), got {config}"
        )
