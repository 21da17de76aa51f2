"""A program that was run: every state, to step through back and forth."""

from collections.abc import Sequence

import numpy as np

import swa_jax as swa
from swa_jax.debug.difference import Difference, difference
from swa_jax.debug.limits import MOST_KEPT_BYTES
from swa_jax.debug.outcomes import outcome_of
from swa_jax.debug.owners import Owners, by_name, slots_by_name
from swa_jax.debug.play import play
from swa_jax.debug.program import Call, Outcome, Program, as_line, check_program
from swa_jax.debug.watch import Failure, Watch
from swa_jax.state import AllocatorState, state_bytes


class Timeline:
    """The states of a program: state 0 is new, state k the one after call k.

    It stands at one of them, at first the last. `step`, `back` and `goto` move it.
    """

    def __init__(
        self,
        program: Program,
        states: Sequence[AllocatorState],
        owners: Sequence[Owners],
        outcomes: Sequence[Outcome],
        failure: Failure | None,
    ) -> None:
        """Made by `run`.

        Args:
          program: that was run.
          states: one more than calls.
          owners: who holds what in each of them.
          outcomes: of each call.
          failure: the first call that broke a law.
        """
        self.program, self.states, self.failure = program, tuple(states), failure
        self._owners, self.outcomes = tuple(owners), tuple(outcomes)
        self.at = len(self.states) - 1

    def __len__(self) -> int:
        """How many states there are: one more than calls."""
        return len(self.states)

    @property
    def state(self) -> AllocatorState:
        """The state that it stands at."""
        return self.states[self.at]

    @property
    def call(self) -> Call | None:
        """The call that led here; None at the start."""
        return self.program.calls[self.at - 1] if self.at else None

    def goto(self, number: int) -> AllocatorState:
        """Goes to the state after call `number`, 0 for the new one; gives the state.

        Raises:
          IndexError: there is no such state.
          TypeError: `number` is no integer.
        """
        if not isinstance(number, int | np.integer):
            raise TypeError(f"the number of a state must be an integer, got {number!r}")
        if isinstance(number, bool) or not 0 <= number < len(self.states):
            last = len(self.states) - 1
            raise IndexError(f"there are states 0 to {last}, one after each call; got {number!r}")
        self.at = int(number)
        return self.state

    def step(self, calls: int = 1) -> AllocatorState:
        """Goes on by so many calls; gives the state.

        Raises:
          IndexError: past the end.
        """
        return self.goto(self.at + calls)

    def back(self, calls: int = 1) -> AllocatorState:
        """Goes back by so many calls; gives the state.

        Raises:
          IndexError: past the start.
        """
        if calls > self.at:
            raise IndexError(f"cannot go back {calls} calls: this is the state after {self.at}")
        return self.goto(self.at - calls)

    @property
    def owners(self) -> dict[str, np.ndarray]:
        """int32[T] full slots of each holder here, by name: as `swa_jax.viz.page_map` takes it."""
        return slots_by_name(self.program.config, self._owners[self.at])

    @property
    def rings(self) -> dict[str, np.ndarray]:
        """int32[R] rings of each holder here, by name; empty in a pool without rings."""
        if not self.program.config.has_rings:
            return {}
        found = by_name(self._owners[self.at].swa)
        return {name: np.asarray(rings, np.int32) for name, rings in found.items()}

    @property
    def changes(self) -> Difference:
        """What the call that led here did; nothing at the start."""
        return self.diff(max(self.at - 1, 0), self.at)

    def diff(self, before: int, after: int) -> Difference:
        """What happened between two states, by number, with the holders' names.

        Raises:
          IndexError: there is no such state.
        """
        at = self.at
        try:
            one, other = self.goto(before), self.goto(after)
        finally:
            self.at = at
        return difference(one, other, self._owners[before], self._owners[after])

    def __str__(self) -> str:
        """The calls, one a line, with the tokens left after each and where it stands."""
        config = self.program.config
        start = swa.init(config)
        left = int(swa.full_available_size(start)), int(swa.swa_available_size(start))
        lines = [self._line(0, "  0 a new state", f"{left[0]}/{left[1]}")]
        for number, outcome in enumerate(self.outcomes, start=1):
            text = as_line(number, self.program.calls[number - 1])
            lines.append(self._line(number, text, _in_words(outcome)))
        if self.failure is not None:
            lines.append(str(self.failure))
        return "\n".join(lines)

    def _line(self, number: int, text: str, came: str) -> str:
        broke = self.failure is not None and self.failure.call == number
        return f"{'>' if number == self.at else ' '} {text}  -> {came}{'  BROKE A LAW' * broke}"

    def __repr__(self) -> str:
        """As for people."""
        return str(self)


def _in_words(outcome: Outcome) -> str:
    left = f"{outcome.left[0]}/{outcome.left[1]}"
    refused = ", refused" if outcome.ok is False else ""
    return left + refused + "".join(f", {n} {kind}" for kind, n in outcome.faults.items())


def run(program: Program) -> Timeline:
    """Runs a program with the laws checked after every call, and keeps every state.

    It runs to the end also where a law breaks, so that what came of it can be looked at.

    Args:
      program: of `Recorder.program` or `load`, or made by hand.

    Returns:
      `Timeline`, at its last state. Its `failure` is the first call that broke a law.

    Raises:
      ValueError: a program that cannot be run, names the call; or one with more states than can
        be kept, for which there is `first_failure`.
    """
    check_program(program)
    kept = (len(program.calls) + 1) * state_bytes(program.config)
    if kept > MOST_KEPT_BYTES:
        raise ValueError(
            f"{len(program.calls)} calls on pools of this size leave states of {kept} bytes, and "
            f"{MOST_KEPT_BYTES} are kept at most: first_failure(program) keeps none"
        )
    watch, failure = Watch(), None
    states, owners, outcomes = [swa.init(program.config)], [Owners()], []
    for step in play(program):
        found = watch.look(step)
        failure = failure or found
        states.append(step.after)
        owners.append(watch.owners)
        outcomes.append(outcome_of(step))
    return Timeline(program, states, owners, outcomes, failure)
