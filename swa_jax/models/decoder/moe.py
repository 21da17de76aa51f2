"""A layer of experts: each token is sent to the k experts that its router likes best.

Legend: M tokens, H hidden size, E experts, k experts a token, I width of an expert.
"""

import jax
import jax.numpy as jnp

from swa_jax.models.decoder.config import DecoderConfig
from swa_jax.models.decoder.params import Weights


def moe_mlp(config: DecoderConfig, weights: Weights, hidden: jax.Array) -> jax.Array:
    """The weighted sum of what each token's experts give.

    The M * k pairs of a token and an expert are sorted by expert, so that each expert multiplies
    one run of rows: only chosen experts are read, and nothing is dropped however uneven they are.

    Args:
      config: the number of experts and their activation.
      weights: `router` float[H, E], `router_bias` float[E], `gate_up` float[E, H, 2I] with gate
        and input columns taking turns, `gate_up_bias` float[E, 2I], `down` float[E, I, H],
        `down_bias` float[E, H].
      hidden: float[..., H].

    Returns:
      float[..., H].
    """
    rows = hidden.reshape(-1, hidden.shape[-1])
    experts, shares = choose_experts(config, weights, rows)
    pairs = experts.reshape(-1)
    order = jnp.argsort(pairs, stable=True)
    expert = pairs.at[order].get(mode="clip")
    token = jax.lax.div(order.astype(jnp.int32), jnp.int32(config.experts_per_token))
    sizes = jnp.zeros(config.num_experts, jnp.int32).at[pairs].add(1, mode="drop")

    inputs = rows.at[token].get(mode="clip")
    gates = _by_expert(inputs, weights["gate_up"], weights["gate_up_bias"], expert, sizes)
    outputs = _by_expert(
        clamped_swiglu(config, gates), weights["down"], weights["down_bias"], expert, sizes
    )
    share = shares.reshape(-1).at[order].get(mode="clip")
    # Put back in the order of the tokens, so that a token's experts are added in one order always.
    ordered = jnp.zeros_like(outputs).at[order].set(outputs * share[:, None], mode="drop")
    summed = jnp.sum(ordered.reshape(*experts.shape, -1), axis=1)
    return summed.astype(hidden.dtype).reshape(hidden.shape)


def choose_experts(
    config: DecoderConfig, weights: Weights, rows: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """int32[M, k] experts of each token, best first, and their float32[M, k] shares (sum 1)."""
    scores = jnp.dot(rows, weights["router"], preferred_element_type=jnp.float32)
    scores = scores + weights["router_bias"].astype(jnp.float32)[None, :]
    best, experts = jax.lax.top_k(scores, config.experts_per_token)
    return experts.astype(jnp.int32), jax.nn.softmax(best, axis=-1)


def clamped_swiglu(config: DecoderConfig, gates: jax.Array) -> jax.Array:
    """The experts' activation: (up + 1) * gate * sigmoid(alpha * gate), both clamped.

    Args:
      config: `swiglu_limit` and `swiglu_alpha`.
      gates: float32[..., 2I], gate and up taking turns.

    Returns:
      float32[..., I].
    """
    limit, alpha = jnp.float32(config.swiglu_limit), jnp.float32(config.swiglu_alpha)
    gate = jnp.minimum(gates[..., ::2], limit)
    up = jnp.clip(gates[..., 1::2], -limit, limit)
    return (up + jnp.float32(1)) * gate * jax.nn.sigmoid(alpha * gate)


def _by_expert(
    rows: jax.Array, weight: jax.Array, bias: jax.Array, expert: jax.Array, sizes: jax.Array
) -> jax.Array:
    """float32[M * k, out]: each row times its expert's matrix, plus its bias; rows are sorted."""
    product = jax.lax.ragged_dot(
        rows.astype(weight.dtype), weight, sizes, preferred_element_type=jnp.float32
    )
    return product + bias.at[expert].get(mode="clip").astype(jnp.float32)
