"""What a loop counts of what happened."""

import jax
import jax.numpy as jnp


def added(counts: dict[str, jax.Array], **more: jax.Array | int) -> dict[str, jax.Array]:
    """int32[] counts by name, with more of some; bool[...] and int32[...] are summed."""
    sums = {name: jnp.sum(jnp.asarray(part), dtype=jnp.int32) for name, part in more.items()}
    return counts | {name: counts[name] + part for name, part in sums.items()}
