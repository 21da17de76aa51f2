"""Requests as arrays: prompts, how much is wanted, how it is sampled.

Legend: N requests, T most prompt tokens.
"""

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import jax
import jax.numpy as jnp
import numpy as np

from swa_jax.inputs import whole_number

# Why a request ended.
UNFINISHED, STOP, LENGTH, REJECTED, CANCELLED, SENT = range(6)
FINISH_REASONS = ("unfinished", "stop", "length", "rejected", "cancelled", "sent")


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["temperature", "top_k", "top_p", "seed"],
    meta_fields=[],
)
@dataclass(frozen=True)
class Sampling:
    """How the tokens of each request are chosen."""

    temperature: jax.Array  # float32[N] 0: greedy
    top_k: jax.Array  # int32[N] only among the k likeliest; 0: all
    top_p: jax.Array  # float32[N] only among the likeliest that add up to p; 1: all
    seed: jax.Array  # int32[N] its tokens follow from this and their places alone


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=[
        "tokens",
        "prompt_lens",
        "max_new_tokens",
        "sampling",
        "namespace",
        "ignore_eos",
    ],
    meta_fields=[],
)
@dataclass(frozen=True)
class Requests:
    """What is asked for. Make one with `make_requests`."""

    tokens: jax.Array  # int32[N, T] prompts, padded
    prompt_lens: jax.Array  # int32[N] tokens
    max_new_tokens: jax.Array  # int32[N] tokens
    sampling: Sampling
    namespace: jax.Array  # int32[N] prefixes of other namespaces are not shared
    ignore_eos: jax.Array  # bool[N]


def make_requests(
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int | Sequence[int] = 16,
    temperature: float | Sequence[float] = 0.0,
    top_k: int | Sequence[int] = 0,
    top_p: float | Sequence[float] = 1.0,
    seed: int | Sequence[int] = 0,
    namespace: int | Sequence[int] = 0,
    ignore_eos: bool | Sequence[bool] = False,
    prompt_columns: int | None = None,
) -> Requests:
    """Requests from lists of token ids. On the host.

    Args:
      prompts: token ids, at least one a prompt.
      max_new_tokens: most tokens to generate, one value or one a request, as all that follow.
      temperature: 0 takes the likeliest token.
      top_k: sample among the k likeliest; 0: among all.
      top_p: sample among the likeliest that add up to this, above 0 up to 1.
      seed: chooses among samples.
      namespace: tenant, LoRA or salt: no prefix is shared with another.
      ignore_eos: go on after an end-of-text token.
      prompt_columns: T, by default the longest prompt. Equal T need no new compilation.

    Raises:
      ValueError: what cannot be served, with the request that asks for it.
    """
    rows = [checked_prompt(f"prompt {place}", prompt) for place, prompt in enumerate(prompts)]
    if not rows:
        raise ValueError("prompts must hold at least one prompt, got none")
    count, longest = len(rows), max(row.size for row in rows)
    columns = longest
    if prompt_columns is not None:
        columns = whole_number("prompt_columns", prompt_columns, 1)
    if longest > columns:
        raise ValueError(f"prompt_columns={columns} is less than a prompt of {longest} tokens")
    tokens = np.zeros((count, columns), np.int32)
    for place, row in enumerate(rows):
        tokens[place, : row.size] = row

    def column(name: str, values: object) -> jax.Array:
        return jnp.asarray(checked_values(name, values, count))

    return Requests(
        tokens=jnp.asarray(tokens),
        prompt_lens=jnp.asarray(np.array([row.size for row in rows], np.int32)),
        max_new_tokens=column("max_new_tokens", max_new_tokens),
        sampling=Sampling(
            temperature=column("temperature", temperature),
            top_k=column("top_k", top_k),
            top_p=column("top_p", top_p),
            seed=column("seed", seed),
        ),
        namespace=column("namespace", namespace),
        ignore_eos=column("ignore_eos", ignore_eos),
    )


# What is asked for beside the prompt: its dtype, the least and the most.
REQUEST_VALUES: Mapping[str, tuple[type, float, float]] = MappingProxyType(
    {
        "max_new_tokens": (np.int32, 0, 2**31 - 1),
        "temperature": (np.float32, 0.0, 1e6),
        "top_k": (np.int32, 0, 2**31 - 1),
        "top_p": (np.float32, 1e-6, 1.0),
        "seed": (np.int32, -(2**31), 2**31 - 1),
        "namespace": (np.int32, -(2**31), 2**31 - 1),
        "ignore_eos": (np.bool_, False, True),
    }
)


def checked_prompt(name: str, prompt: object) -> np.ndarray:
    """One prompt as int32 token ids. On the host.

    Args:
      name: of the prompt, for messages.
      prompt: token ids, at least one.

    Raises:
      ValueError: something else.
    """
    if isinstance(prompt, str | bytes) or not isinstance(prompt, Sequence | np.ndarray | jax.Array):
        raise ValueError(f"{name} must be a list of token ids, got {prompt!r}")
    row = np.asarray(prompt)
    if row.size == 0:
        raise ValueError(f"{name} has no tokens; at least one is needed")
    if row.dtype.kind not in "iu":
        raise ValueError(f"{name} must hold integers, got dtype {row.dtype}: {prompt!r}")
    if row.ndim != 1:
        raise ValueError(f"{name} must be an array of 1 dimension(s), got shape {row.shape}")
    if row.min() < 0:
        raise ValueError(f"{name} has a token below 0, got {row.tolist()[:8]}")
    if row.max() > 2**31 - 1:
        raise ValueError(f"{name} must fit int32 (.. 2^31 - 1), got a token {row.max()}")
    return row.astype(np.int32)


def checked_values(name: str, value: object, count: int) -> np.ndarray:
    """[count] one value for all requests, or one for each. On the host.

    Args:
      name: of `REQUEST_VALUES`, which says what is right.
      value: one, or `count` of them.
      count: requests.

    Raises:
      ValueError: a value that is of another kind or out of range.
    """
    dtype, least, most = REQUEST_VALUES[name]
    values = np.asarray(value)
    kinds = {np.bool_: "b", np.int32: "iu"}.get(dtype, "iuf")
    if values.dtype.kind not in kinds:
        words = {"b": "True or False", "iu": "integers", "iuf": "numbers"}[kinds]
        raise ValueError(f"{name} must hold {words}, got {value!r}")
    if values.shape not in ((), (count,)):
        raise ValueError(
            f"{name} must be one value or {count} (one a request), got shape {values.shape}"
        )
    bad = ~((values >= least) & (values <= most))
    if bad.any():
        seen = values[bad][0] if values.ndim else values[()]
        raise ValueError(f"{name} must be from {least} to {most}, got {seen}")
    kept = np.broadcast_to(values, (count,)).astype(dtype)
    if ((kept == 0) & (values != 0)).any():  # a temperature so low would turn into greedy
        raise ValueError(f"{name} is too close to 0 for float32, got {value!r}")
    return kept
