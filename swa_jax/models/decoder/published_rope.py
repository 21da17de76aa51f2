"""Rope settings as config.json has them."""

import math
from typing import Any

from swa_jax.models.decoder.published_values import Json, boolean, number, positive
from swa_jax.models.decoder.rope import Rope
from swa_jax.replay.trace_lines import show

_TYPES = {"default": "none", "linear": "linear", "yarn": "yarn"}
_TYPE_NAMES = {scaling: name for name, scaling in _TYPES.items()}
_HERE = " in rope settings"


def read_rope(published: Json, max_context: int) -> Rope:
    """Reads one set of rope settings.

    Args:
      published: `rope_theta`, and `rope_type` (`type` in older files) with what it needs.
      max_context: tokens; yarn takes it for an `original_max_position_embeddings` left out.

    Raises:
      ValueError: a type other than default, linear and yarn, or a setting that is not supported.
    """
    name = published.get("rope_type", published.get("type", "default"))
    if not isinstance(name, str) or name not in _TYPES:
        raise ValueError(f"rope_type must be one of {list(_TYPES)}, got {show(name)}")
    if published.get("partial_rotary_factor") not in (None, 1, 1.0):
        factor = published["partial_rotary_factor"]
        raise ValueError(f"partial_rotary_factor is not supported, got {show(factor)}")
    theta, scaling = number(published, "rope_theta", _HERE), _TYPES[name]
    if scaling == "none":
        return Rope(theta)
    if scaling == "linear":
        return Rope(theta, scaling, number(published, "factor", _HERE))
    return _read_yarn(published, theta, max_context)


def _read_yarn(published: Json, theta: float, max_context: int) -> Rope:
    for key in ("mscale", "mscale_all_dim"):
        if published.get(key) is not None:
            raise ValueError(f"{key} is not supported in rope settings, got {show(published[key])}")
    if theta <= 1:
        raise ValueError(f"rope_theta must be above 1 for yarn, got {theta!r}")
    usual = {"original_max_position_embeddings": max_context, "beta_fast": 32, "beta_slow": 1}
    values = usual | {"truncate": True} | _given(published)
    original = positive(values, "original_max_position_embeddings", _HERE)
    factor = number({"factor": max_context / original} | values, "factor", _HERE)
    grows = 0.1 * math.log(factor) + 1.0 if factor > 1 else 1.0
    return Rope(
        theta,
        "yarn",
        factor,
        original_context=original,
        beta_fast=number(values, "beta_fast", _HERE),
        beta_slow=number(values, "beta_slow", _HERE),
        truncate=boolean(values, "truncate", _HERE),
        amplitude=number({"attention_factor": grows} | values, "attention_factor", _HERE),
    )


def _given(published: Json) -> dict[str, Any]:
    """What is said; a null is the absence of a setting."""
    return {key: value for key, value in published.items() if value is not None}


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
