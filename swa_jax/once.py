"""Having the compiler compute a value once, where it would compute it anew for every user."""

import jax
import jax.numpy as jnp

_WORTH = 1024  # elements read, from which on it pays


def once(values: jax.Array, times: int = 1) -> jax.Array:
    """The same values, kept in memory for all that read them.

    XLA's CPU compiler fuses a chain of elementwise operations into each of its users, and into
    every element of a user that is wider; a user of many operations it splits over threads, which
    costs more than the work. That is right for short chains and ruinous for long ones, and
    `optimization_barrier` is gone before it fuses. A scatter is never fused; this one writes
    nowhere. (It has two indices, since a lone one is turned into something else.)

    Args:
      values: any dtype, at least one dimension. Few of them come back as they are.
      times: how often a user reads each (static).
    """
    if values.size * times < _WORTH:
        return values
    nowhere = jnp.full(2, values.shape[0], jnp.int32)
    return values.at[nowhere].set(jnp.zeros((), values.dtype), mode="drop")
