"""The gated MLP of a dense layer."""

import functools
from collections.abc import Callable

import jax

from swa_jax.models.decoder.params import Weights

_ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "gelu_pytorch_tanh": functools.partial(jax.nn.gelu, approximate=True),
    "gelu": functools.partial(jax.nn.gelu, approximate=False),
    "silu": jax.nn.silu,
}


def gated_mlp(weights: Weights, hidden: jax.Array, activation: str) -> jax.Array:
    """down(activation(gate(x)) * up(x)).

    Args:
      weights: `gate` and `up` float[H, I], `down` float[I, H].
      hidden: float[..., H].
      activation: a name from `swa_jax.models.decoder.config.ACTIVATIONS`.

    Returns:
      float[..., H].
    """
    gate = _ACTIVATIONS[activation](hidden @ weights["gate"])
    return (gate * (hidden @ weights["up"])) @ weights["down"]
