"""Rotary position embeddings: the angles of a position, and turning heads by them."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np

ROPE_SCALINGS = ("none", "linear", "yarn")


@dataclasses.dataclass(frozen=True)
class Rope:
    """How one kind of layer turns its heads. Hashable.

    Args:
      theta: base of the wavelengths.
      scaling: "none"; "linear" (every position divided by `factor`, Gemma 3's full layers);
        "yarn" (long wavelengths divided by `factor`, short ones kept, gpt-oss).
      factor: how far the context was stretched.
      original_context: yarn, tokens of the context before stretching.
      beta_fast: yarn, turns within `original_context` from which a wavelength is kept.
      beta_slow: yarn, turns down to which a wavelength is divided.
      truncate: yarn, whether the two bounds are widened to whole dimensions.
      amplitude: yarn, what sines and cosines are multiplied by ("attention factor").

    Raises:
      ValueError: an unknown scaling or a number that is not positive.
    """

    theta: float
    scaling: str = "none"
    factor: float = 1.0
    original_context: int = 0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    amplitude: float = 1.0

    def __post_init__(self) -> None:
        if self.scaling not in ROPE_SCALINGS:
            raise ValueError(f"rope scaling must be one of {ROPE_SCALINGS}, got {self.scaling!r}")
        names = ["theta", "factor", "beta_fast", "beta_slow", "amplitude"]
        for name in names + ["original_context"] * (self.scaling == "yarn"):
            if not getattr(self, name) > 0:
                raise ValueError(f"rope {name} must be positive, got {getattr(self, name)!r}")


def inverse_wavelengths(rope: Rope, head_dim: int) -> np.ndarray:
    """float32[head_dim / 2] radians that each pair of dimensions turns by from token to token."""
    pairs = np.arange(0, head_dim, 2, dtype=np.float64)
    turns = rope.theta ** (-pairs / head_dim)
    if rope.scaling == "linear":
        turns = turns / rope.factor
    if rope.scaling == "yarn":
        keep = _kept_share(rope, head_dim)
        turns = turns * keep + turns / rope.factor * (1.0 - keep)
    return turns.astype(np.float32)


def _kept_share(rope: Rope, head_dim: int) -> np.ndarray:
    """How much of each pair's wavelength yarn leaves as it was: 1 for fast pairs, 0 for slow.

    YaRN, https://arxiv.org/abs/2309.00071, section 3.2.
    """
    low = _pair_with_turns(rope, head_dim, rope.beta_fast)
    high = _pair_with_turns(rope, head_dim, rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    width = high - low if high != low else 0.001  # one step where both bounds are one pair
    ramp = (np.arange(head_dim // 2, dtype=np.float64) - low) / width
    return 1.0 - np.clip(ramp, 0.0, 1.0)


def _pair_with_turns(rope: Rope, head_dim: int, turns: float) -> float:
    """The (fractional) pair that turns round `turns` times within the original context."""
    stretch = math.log(rope.original_context / (turns * 2 * math.pi))
    return head_dim * stretch / (2 * math.log(rope.theta))


def rope_angles(rope: Rope, positions: jax.Array, head_dim: int) -> tuple[jax.Array, jax.Array]:
    """Cosines and sines for some places in the text.

    Args:
      rope: of the kind of layer.
      positions: int32[...] places.
      head_dim: D, size of a head.

    Returns:
      float32[..., D/2] cosines and float32[..., D/2] sines, both times the amplitude.
    """
    turns = jnp.asarray(inverse_wavelengths(rope, head_dim))
    # Broadcast by hand: a dot product could be computed with fewer bits on an accelerator.
    angles = positions.astype(jnp.float32)[..., None] * jnp.expand_dims(
        turns, tuple(range(positions.ndim))
    )
    amplitude = jnp.float32(rope.amplitude)
    return jnp.cos(angles) * amplitude, jnp.sin(angles) * amplitude


def rotate(heads: jax.Array, cosines: jax.Array, sines: jax.Array) -> jax.Array:
    """Turns heads by the angles of their tokens; dimension i is paired with i + D/2.

    Args:
      heads: float[..., h, D].
      cosines: float32[..., D/2] of the tokens.
      sines: float32[..., D/2].

    Returns:
      float[..., h, D] of the same dtype; computed in float32.
    """
    first, second = jnp.split(heads.astype(jnp.float32), 2, axis=-1)
    cos, sin = cosines[..., None, :], sines[..., None, :]
    turned = (first * cos - second * sin, second * cos + first * sin)
    return jnp.concatenate(turned, axis=-1).astype(heads.dtype)
