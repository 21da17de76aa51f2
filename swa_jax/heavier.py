"""Which of two pairs of full and SWA pages takes more bytes, exactly.

Bytes pass int32, and a sum of float32 products comes out one way or the other where two pairs weigh
the same: whether a compiler fuses the product into the sum depends on the loop that it stands in.
"""

from fractions import Fraction

import jax
import jax.numpy as jnp

MOST_WEIGHT = 2**14 - 1  # so that no product below passes int32
_HALF = 16


def page_weight(full_bytes: float, swa_bytes: float) -> tuple[int, int]:
    """What a full and an SWA page weigh, as small whole numbers. On the host.

    Args:
      full_bytes: of a page or a token in all full layers, 0 where there are none.
      swa_bytes: likewise in SWA layers. Any unit, and fractions of it, for both.

    Returns:
      Two numbers up to `MOST_WEIGHT` in the same ratio, or where that needs larger ones, nearly so.
    """
    most = max(full_bytes, swa_bytes)
    if most <= 0:
        return 0, 0
    part = Fraction(min(full_bytes, swa_bytes)) / Fraction(most)
    small, large = part.limit_denominator(MOST_WEIGHT).as_integer_ratio()
    return (small, large) if swa_bytes == most else (large, small)


def heavier(pair: jax.Array, other: jax.Array, weight: jax.Array) -> jax.Array:
    """bool[] whether int32[2] `pair` takes more than int32[2] `other`; False where they are equal.

    Args:
      pair: full and SWA pages, 0 or more.
      other: likewise.
      weight: int32[2] of `page_weight`.
    """
    more = pair - other
    high = jnp.sum((more >> _HALF) * weight, dtype=jnp.int32)
    low = jnp.sum((more & jnp.int32(2**_HALF - 1)) * weight, dtype=jnp.int32)
    high, low = high + (low >> _HALF), low & jnp.int32(2**_HALF - 1)
    return (high > 0) | ((high == 0) & (low > 0))
