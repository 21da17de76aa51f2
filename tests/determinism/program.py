"""A fixed program: where it starts, what each step is given, and what a step does."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

RANKS = 8  # seeds of each program: rank r of a batch runs what seed r runs alone

Tree = Any
Watch = Callable[[Tree], Tree]


@dataclass(frozen=True)
class Program:
    """Steps that a compiler sees.

    Args:
      name: in the record and in messages.
      start: the carry before the first step, of a rank.
      inputs: of a rank, NumPy arrays [N, ...] for N steps.
      step: carry and one step's inputs to carry and answer; every way of running traces it.
      every: steps for one digest; N is a multiple.
      watch: makes what looks at each digest's carry from the host; what it says is digested too.
      exact: whether its bits are promised for every backend; where floats choose, they are not.
    """

    name: str
    start: Callable[[int], Tree]
    inputs: Callable[[int], Tree]
    step: Callable[[Tree, Tree], tuple[Tree, Tree]]
    every: int
    watch: Callable[[], Watch] | None = None
    exact: bool = True

    def parts(self, inputs: Tree, *, axis: int = 0) -> Iterator[Tree]:
        """The inputs of `every` steps at a time, along the axis of steps."""
        steps = jax.tree.leaves(inputs)[0].shape[axis]
        assert steps % self.every == 0, f"{self.name}: {steps} steps, a digest each {self.every}"
        for first in range(0, steps, self.every):
            yield jax.tree.map(lambda leaf, at=first: _cut(leaf, at, self.every, axis), inputs)


@dataclass(frozen=True)
class Driven:
    """A program whose loop is the host's: it gives a pytree for each digest.

    Args:
      name: in the record and in messages.
      run: yields what is digested; `devices` are those it may use.
      every: what lies between two digests, in words.
    """

    name: str
    run: Callable[[list[Any]], Iterator[Tree]]
    every: str
    exact: bool = True


def _cut(leaf: np.ndarray, first: int, count: int, axis: int) -> np.ndarray:
    return leaf[(slice(None),) * axis + (slice(first, first + count),)]
