"""Windows inside a branch that are worth keeping: places at which later prompts may part from it.

A prefix can be gone on from only where the window behind it is live. In a branch that is known only
by its end, everybody who parts from it earlier finds a tombstone and computes all of it again. So
at regular depths one window stays for as long as there are other pages to give up. As many as
half of the SWA pool could hold: closer together they would push each other out.

On 1,000 requests of the Mooncake trace (gpt-oss-20b, 40 GiB, pages of 64 tokens) a cache finds
808,704 tokens with a window kept every 4,096 tokens, 561,408 with none.
"""

import jax
import jax.numpy as jnp

from swa_jax.config import PoolConfig


def window_pages(pool: PoolConfig) -> int:
    """Pages that hold one window; all there are where nothing leaves it."""
    return -(-(pool.sliding_window or pool.full_tokens) // pool.page_size)


def pages_between(pool: PoolConfig) -> int | None:
    """From one kept window's end to the next, a power of two; None without a window."""
    if pool.sliding_window is None:
        return None
    twice = 2 * window_pages(pool)
    least = max(twice, -(-twice * pool.full_pages // pool.swa_pages))
    return 1 << (least - 1).bit_length()


def in_kept_window(pool: PoolConfig, depth: jax.Array) -> jax.Array:
    """bool[N] of int32[N] pages from the root, itself included."""
    every = pages_between(pool)
    if every is None:
        return jnp.zeros(depth.shape, bool)
    return ((-depth) & jnp.int32(every - 1)) < jnp.int32(window_pages(pool))
