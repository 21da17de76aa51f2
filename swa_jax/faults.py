"""Misuse is data: one saturating counter on the device for each kind."""

import jax
import jax.numpy as jnp

FAULT_KINDS = (
    "double_free",  # freeing a page that is free or pending already
    "out_of_range",  # an index that names no held page of the pool
    "unmapped",  # freeing the SWA side of a held page that has none
    "still_mapped",  # taking from a page what is still in use: its SWA side, or by other holders
    "nested_group",  # free_group_begin while a group is open
    "misaligned",  # a slot, length or row that does not stand where a page needs it
    "bad_length",  # negative or shrinking lengths, or more tokens than the call's capacity
)
FOREIGN = "foreign"  # with owner tags: naming a page of somebody else; counted beside the tags
_MOST = 2**31 - 1
_ROWS = 64
_MANY = 4096


def zero_faults() -> jax.Array:
    """Counters as new: int32[7] in the order of FAULT_KINDS."""
    return jnp.zeros(len(FAULT_KINDS), jnp.int32)


def fault_counts(**counts: jax.Array) -> jax.Array:
    """int32[7] from scalars, or from bool arrays whose True places are counted, by kind."""
    unknown = set(counts) - set(FAULT_KINDS)
    if unknown:
        raise ValueError(f"no such fault kind: {sorted(unknown)}; known: {FAULT_KINDS}")
    totals: dict[str, jax.Array] = dict.fromkeys(FAULT_KINDS, jnp.zeros((), jnp.int32))
    few = [kind for kind, count in counts.items() if count.ndim > 0 and count.size < _MANY]
    if few:  # one pass over all of them
        marks = jnp.stack([counts[kind] for kind in few])
        totals.update(zip(few, jnp.sum(marks, axis=1, dtype=jnp.int32), strict=True))
    more = {kind: _count(count) for kind, count in counts.items() if kind not in few}
    return jnp.stack(list((totals | more).values()))


def _count(marks: jax.Array) -> jax.Array:
    """int32[] True places of many; a scalar is its own count.

    They are first added in bytes, 64 to one, which keeps whole vectors of them busy.
    """
    if not marks.ndim:
        return marks.astype(jnp.int32)
    whole = marks.size // _ROWS * _ROWS
    rows = marks[:whole].reshape(_ROWS, -1).astype(jnp.int8)
    in_rows = jnp.sum(rows, axis=0, dtype=jnp.int8)
    rest = jnp.sum(marks[whole:], dtype=jnp.int32)
    return jnp.sum(in_rows, dtype=jnp.int32) + rest


def add_faults(faults: jax.Array, more: jax.Array) -> jax.Array:
    """Adds non-negative counts and stays at the int32 maximum instead of wrapping."""
    return jnp.where(more > _MOST - faults, jnp.int32(_MOST), faults + more)
