"""Choosing tokens. What a request draws follows from its seed and the place of the token alone."""

import jax
import jax.numpy as jnp

from swa_jax.serving.requests import Sampling

_NEVER = jnp.finfo(jnp.float32).min


def sample(logits: jax.Array, sampling: Sampling, places: jax.Array) -> jax.Array:
    """The tokens that logits give.

    Args:
      logits: float32[R, Q, V].
      sampling: of each row, [R].
      places: int32[R, Q] place in the text of the token that is chosen.

    Returns:
      int32[R, Q]. With temperature 0 the likeliest; else the Gumbel trick with noise that is fixed
      for (seed, place), so the same place gives the same token in any batch, with speculation or
      without.
    """
    greedy = jnp.argmax(logits, axis=-1).astype(jnp.int32)

    def drawn() -> jax.Array:
        kept = jax.vmap(_keep_likeliest)(
            logits, sampling.temperature, sampling.top_k, sampling.top_p
        )
        noise = jax.vmap(_noise, (0, 0, None))(sampling.seed, places, logits.shape[-1])
        chosen = jnp.argmax(kept + noise, axis=-1).astype(jnp.int32)
        return jnp.where(sampling.temperature[:, None] > 0, chosen, greedy)

    return jax.lax.cond(jnp.any(sampling.temperature > 0), drawn, lambda: greedy)


def _noise(seed: jax.Array, places: jax.Array, tokens: int) -> jax.Array:
    """float32[Q, V] Gumbel noise of one request."""
    keys = jax.vmap(jax.random.fold_in, (None, 0))(jax.random.key(seed), places)
    return jax.vmap(lambda key: jax.random.gumbel(key, (tokens,), jnp.float32))(keys)


def _keep_likeliest(
    logits: jax.Array, temperature: jax.Array, top_k: jax.Array, top_p: jax.Array
) -> jax.Array:
    """float32[Q, V] logits over temperature, and far below all others what may not be drawn.

    A token stays if fewer than k are likelier, and if the likelier ones add up to less than p.
    """
    scaled = logits / jnp.maximum(temperature, jnp.float32(1e-6))
    count = scaled.shape[-1]
    ordered = -jnp.sort(-scaled, axis=-1)
    k = jnp.where(top_k > 0, jnp.minimum(top_k, count), count)
    by_k = jnp.take(ordered, k - 1, axis=-1, mode="clip")
    chances = jax.nn.softmax(ordered, axis=-1)
    before = jnp.cumsum(chances, axis=-1) - chances
    inside = jnp.sum(before < top_p, axis=-1, dtype=jnp.int32)
    inside = jnp.where(top_p >= 1, count, inside)  # rounding must not cut the last ones off
    by_p = jnp.take_along_axis(ordered, jnp.maximum(inside - 1, 0)[:, None], axis=-1, mode="clip")
    stays = (scaled >= by_k[:, None]) & (scaled >= by_p)
    return jnp.where(stays, scaled, _NEVER)
