"""What is read of a request: its tokens, and which texts it shares blocks with."""

from collections.abc import Hashable
from typing import Any, TypeAlias

import numpy as np

from swa_jax.compat.common.errors import MisuseError

Request: TypeAlias = Any  # with `request_id`, `all_token_ids` and what else is named here


def tokens_of(request: Request, begin: int, end: int) -> np.ndarray:
    """int32[end - begin] tokens of a request.

    Raises:
      MisuseError: it has fewer than `end`, or something that is no int32.
    """
    if end <= begin:
        return np.zeros(0, np.int32)
    name = getattr(request, "request_id", None)
    part = request.all_token_ids[begin:end]
    if len(part) < end - begin:
        have = len(request.all_token_ids)
        raise MisuseError(f"request {name!r} has {have} tokens, {end} are needed")
    try:
        row = np.asarray(part)
    except (ValueError, TypeError):  # rows of unequal length and the like
        row = np.empty(0, object)
    limits = np.iinfo(np.int32)
    whole = row.ndim == 1 and row.dtype.kind in "iu" and row.size > 0
    if not whole or row.min() < limits.min or row.max() > limits.max:
        raise MisuseError(
            f"all_token_ids of request {name!r} must be integers that fit int32, got "
            f"{list(part[:8])!r} from token {begin} on"
        )
    return row.astype(np.int32)


def namespace_of(request: Request) -> Hashable:
    """Texts with another salt, adapter or other pictures never share a block."""
    adapter = getattr(request, "lora_request", None)
    name = getattr(adapter, "lora_name", adapter)
    pictures = tuple(
        (feature.identifier, feature.mm_position.offset)
        for feature in getattr(request, "mm_features", None) or ()
    )
    key = (getattr(request, "cache_salt", None), name, pictures)
    return () if key == (None, None, ()) else key
