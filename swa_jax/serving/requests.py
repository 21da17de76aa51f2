"""Requests as arrays: prompts, how much is wanted, how it is sampled.

Legend: N requests, T most prompt tokens.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from swa_jax.inputs import as_int32, whole_number

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
    rows = [_prompt(place, prompt) for place, prompt in enumerate(prompts)]
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
    column = functools.partial(_column, count)
    return Requests(
        tokens=jnp.asarray(tokens),
        prompt_lens=jnp.asarray(np.array([row.size for row in rows], np.int32)),
        max_new_tokens=column("max_new_tokens", max_new_tokens, np.int32, 0, 2**31 - 1),
        sampling=Sampling(
            temperature=column("temperature", temperature, np.float32, 0.0, 1e6),
            top_k=column("top_k", top_k, np.int32, 0, 2**31 - 1),
            top_p=column("top_p", top_p, np.float32, 1e-6, 1.0),
            seed=column("seed", seed, np.int32, -(2**31), 2**31 - 1),
        ),
        namespace=column("namespace", namespace, np.int32, -(2**31), 2**31 - 1),
        ignore_eos=column("ignore_eos", ignore_eos, np.bool_, False, True),
    )


def _prompt(place: int, prompt: object) -> np.ndarray:
    """One prompt as int32 token ids."""
    name = f"prompt {place}"
    if isinstance(prompt, str | bytes) or not isinstance(prompt, Sequence | np.ndarray | jax.Array):
        raise ValueError(f"{name} must be a list of token ids, got {prompt!r}")
    row = np.asarray(as_int32(name, prompt, 1))  # type: ignore[arg-type]
    if row.size == 0:
        raise ValueError(f"{name} has no tokens; at least one is needed")
    if row.min() < 0:
        raise ValueError(f"{name} has a token below 0, got {row.tolist()[:8]}")
    return row


def _column(
    count: int, name: str, value: object, dtype: type, least: float, most: float
) -> jax.Array:
    """One value for all requests, or one for each."""
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
    return jnp.asarray(kept)
