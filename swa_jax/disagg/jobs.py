"""Requests as the shells on the host pass them on, and what became of them."""

from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import jax.numpy as jnp
import numpy as np

from swa_jax.inputs import whole_number
from swa_jax.serving.requests import (
    REQUEST_VALUES,
    Requests,
    Sampling,
    checked_prompt,
    checked_values,
)

T = TypeVar("T")


@dataclass(frozen=True)
class Job:
    """One request. Can be pickled.

    Args:
      name: a whole number chosen by the caller, of this job alone while it is open.
      prompt: token ids, at least one.
      max_new_tokens: most tokens to generate; this and all that follow as in `make_requests`.
      temperature: 0 takes the likeliest token.
      top_k: sample among the k likeliest; 0: among all.
      top_p: sample among the likeliest that add up to this.
      seed: chooses among samples.
      namespace: no prefix is shared with another.
      ignore_eos: go on after an end-of-text token.

    Raises:
      ValueError: what cannot be served, as `make_requests`; the message names the job.
    """

    name: int
    prompt: tuple[int, ...]
    max_new_tokens: int = 16
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    namespace: int = 0
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        whole_number("name", self.name, -(2**63), 2**63 - 1)
        row = checked_prompt(f"the prompt of job {self.name}", self.prompt)
        object.__setattr__(self, "prompt", tuple(row.tolist()))
        for name in REQUEST_VALUES:
            object.__setattr__(self, name, self._one(name))

    def _one(self, name: str) -> float:
        value = np.asarray(getattr(self, name))
        if value.ndim:
            raise ValueError(f"{name} of job {self.name} must be one value, got {value.tolist()}")
        try:
            checked_values(name, value, 1)
        except ValueError as error:
            raise ValueError(f"job {self.name}: {error}") from None
        return value.item()  # for float32 as it was given, so that a job equals its copies


@dataclass(frozen=True)
class Outcome:
    """What became of a job."""

    name: int
    tokens: tuple[int, ...]  # generated
    reason: str  # of `FINISH_REASONS`; "lost" where its KV never arrived: it may be tried again
    cached: int = 0  # prompt tokens that the decode side had already


LOST = "lost"


def requests_of(jobs: Sequence[Job], rows: int, columns: int) -> Requests:
    """At most `rows` jobs as a batch of just as many, so that one program does for all.

    Args:
      jobs: with prompts of at most `columns` tokens; a longer one is cut, and so is refused.
      rows: M; those past the jobs have no tokens, so they are no requests.
      columns: T, tokens of the longest prompt.

    Raises:
      ValueError: more jobs than rows.
    """
    if len(jobs) > rows:
        raise ValueError(f"at most {rows} jobs at once (BundleSize.pieces), got {len(jobs)}")
    tokens = np.zeros((rows, columns), np.int32)
    lens = np.zeros(rows, np.int32)
    for row, job in enumerate(jobs):
        shown = job.prompt[:columns]
        tokens[row, : len(shown)] = shown
        lens[row] = len(job.prompt)

    def column(name: str, dtype: type, otherwise: float) -> jnp.ndarray:
        values = np.full(rows, otherwise, dtype)
        values[: len(jobs)] = [getattr(job, name) for job in jobs]
        return jnp.asarray(values)

    return Requests(
        tokens=jnp.asarray(tokens),
        prompt_lens=jnp.asarray(lens),
        max_new_tokens=column("max_new_tokens", np.int32, 0),
        sampling=Sampling(
            temperature=column("temperature", np.float32, 0),
            top_k=column("top_k", np.int32, 0),
            top_p=column("top_p", np.float32, 1),
            seed=column("seed", np.int32, 0),
        ),
        namespace=column("namespace", np.int32, 0),
        ignore_eos=column("ignore_eos", np.bool_, False),
    )


def padded(values: Sequence[int], count: int, otherwise: int) -> jnp.ndarray:
    """int32[count] the values, then `otherwise`."""
    row = np.full(count, otherwise, np.int32)
    row[: len(values)] = values
    return jnp.asarray(row)


def check_new(jobs: Sequence[Job], taken: Container[int]) -> None:
    """Refuses jobs before any of them is taken.

    Args:
      jobs: that come in together.
      taken: names that are open.

    Raises:
      ValueError: something else than a Job, or a name that is open or comes twice.
    """
    seen = set()
    for job in jobs:
        if not isinstance(job, Job):
            raise ValueError(f"expected a Job, got {job!r}")
        if job.name in taken or job.name in seen:
            where = "open already" if job.name in taken else "among these twice"
            raise ValueError(f"a job named {job.name} is {where}")
        seen.add(job.name)


def in_parts(values: Sequence[T], count: int) -> Iterator[Sequence[T]]:
    """At most `count` of the values at a time: what one program takes."""
    for start in range(0, len(values), count):
        yield values[start : start + count]


def places_in_parts(
    places: Mapping[int, int], names: Iterable[int], count: int
) -> Iterator[jnp.ndarray]:
    """int32[count] places of the names that have one, each once, then -1, as often as it takes."""
    known = [places[name] for name in dict.fromkeys(names) if name in places]
    for part in in_parts(known, count):
        yield padded(part, count, -1)
