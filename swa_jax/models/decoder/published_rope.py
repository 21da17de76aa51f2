"""Rope settings as config.json has them."""

import math
from collections.abc import Mapping
from typing import Any

from swa_jax.models.decoder.rope import Rope

_TYPES = {"default": "none", "linear": "linear", "yarn": "yarn"}
_TYPE_NAMES = {scaling: name for name, scaling in _TYPES.items()}


def read_rope(published: Mapping[str, Any], max_context: int) -> Rope:
    """Reads one set of rope settings.

    Args:
      published: `rope_theta`, and `rope_type` (`type` in older files) with what it needs.
      max_context: tokens; yarn takes it for an `original_max_position_embeddings` left out.

    Raises:
      ValueError: a type other than default, linear and yarn, or a setting that is not supported.
    """
    name = published.get("rope_type", published.get("type", "default"))
    if name not in _TYPES:
        raise ValueError(f"rope_type must be one of {list(_TYPES)}, got {name!r}")
    if published.get("partial_rotary_factor") not in (None, 1, 1.0):
        factor = published["partial_rotary_factor"]
        raise ValueError(f"partial_rotary_factor is not supported, got {factor!r}")
    theta, scaling = _number(published, "rope_theta"), _TYPES[name]
    if scaling == "none":
        return Rope(theta)
    if scaling == "linear":
        return Rope(theta, scaling, _number(published, "factor"))
    return _read_yarn(published, theta, max_context)


def _read_yarn(published: Mapping[str, Any], theta: float, max_context: int) -> Rope:
    for key in ("mscale", "mscale_all_dim"):
        if published.get(key) is not None:
            raise ValueError(f"{key} is not supported in rope settings, got {published[key]!r}")
    original = published.get("original_max_position_embeddings") or max_context
    factor = _number({"factor": max_context / original, **_given(published)}, "factor")
    usual = 0.1 * math.log(factor) + 1.0 if factor > 1 else 1.0
    return Rope(
        theta,
        "yarn",
        factor,
        original_context=original,
        beta_fast=float(published.get("beta_fast") or 32),
        beta_slow=float(published.get("beta_slow") or 1),
        truncate=bool(published.get("truncate", True)),
        amplitude=_number({"attention_factor": usual, **_given(published)}, "attention_factor"),
    )


def _given(published: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in published.items() if value is not None}


def _number(published: Mapping[str, Any], key: str) -> float:
    value = published.get(key)
    if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
        raise ValueError(f"{key} must be a positive number in rope settings, got {value!r}")
    return float(value)


def write_rope(rope: Rope) -> dict[str, Any]:
    """The settings that `read_rope` reads back as `rope`."""
    published: dict[str, Any] = {
        "rope_type": _TYPE_NAMES[rope.scaling],
        "rope_theta": rope.theta,
    }
    if rope.scaling != "none":
        published["factor"] = rope.factor
    if rope.scaling == "yarn":
        published |= {
            "original_max_position_embeddings": rope.original_context,
            "beta_fast": rope.beta_fast,
            "beta_slow": rope.beta_slow,
            "truncate": rope.truncate,
            "attention_factor": rope.amplitude,
        }
    return published
