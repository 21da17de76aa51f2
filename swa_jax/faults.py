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
_MOST = 2**31 - 1


def zero_faults() -> jax.Array:
    """Counters as new: int32[7] in the order of FAULT_KINDS."""
    return jnp.zeros(len(FAULT_KINDS), jnp.int32)


def fault_counts(**counts: jax.Array) -> jax.Array:
    """int32[7] from scalars, or from bool arrays whose True places are counted, by kind."""
    unknown = set(counts) - set(FAULT_KINDS)
    if unknown:
        raise ValueError(f"no such fault kind: {sorted(unknown)}; known: {FAULT_KINDS}")
    zero = jnp.zeros((), jnp.int32)
    totals: dict[str, jax.Array] = dict.fromkeys(FAULT_KINDS, zero)
    places = [kind for kind, count in counts.items() if count.ndim]
    if places:  # one pass over all of them
        marks = jnp.stack([counts[kind] for kind in places])
        sums = jnp.sum(marks, axis=1, dtype=jnp.int32)
        totals.update({kind: sums[index] for index, kind in enumerate(places)})
    scalars = [kind for kind in counts if kind not in places]
    totals.update({kind: counts[kind].astype(jnp.int32) for kind in scalars})
    return jnp.stack(list(totals.values()))


def add_faults(faults: jax.Array, more: jax.Array) -> jax.Array:
    """Adds non-negative counts and stays at the int32 maximum instead of wrapping."""
    return jnp.where(more > _MOST - faults, jnp.int32(_MOST), faults + more)
