"""Runs a program call by call, each by the public function of `swa_jax` of that name."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import swa_jax as swa
from swa_jax.config import PoolConfig
from swa_jax.debug.calls import AS_OF, DAMAGE, Kind, names_values
from swa_jax.debug.program import Call, Program, check_program
from swa_jax.debug.values import Given, Value
from swa_jax.state import UNMAPPED, AllocatorState


@dataclass(frozen=True)
class Step:
    """One call of a program that was run."""

    number: int  # from 1
    call: Call
    before: AllocatorState
    after: AllocatorState
    arguments: Mapping[str, Any]  # int32 or bool arrays, numbers, states: as the call got them
    answer: Any  # Grant, RingGrant, PageCopies or int32 evicted_lens, on the host; None


class Answers:
    """What calls handed out, for those that name it later."""

    def __init__(self) -> None:
        """Of no call yet."""
        self._given: dict[int, np.ndarray] = {}
        self._swa: dict[int, np.ndarray] = {}

    def add(self, number: int, call: Call, after: AllocatorState, answer: object) -> None:
        """Notes the answer of a call, and the SWA slots that belong to it now.

        Args:
          number: of the call.
          call: that was made.
          after: the state after it.
          answer: on the host, None where it gives none.
        """
        given = handed_out(call, answer)
        if given is None:
            return
        self._given[number] = given
        if call.kind.gives != "rings":
            self._swa[number] = swa_slots(after, given)

    def look_up(self, values: list[Value]) -> np.ndarray:
        """int32[N] numbers of values."""
        return np.asarray([self._one(v) if isinstance(v, Given) else v for v in values], np.int32)

    def _one(self, value: Given) -> int:
        return int((self._swa if value.swa else self._given)[value.call][value.place])


def handed_out(call: Call, answer: Any) -> np.ndarray | None:  # noqa: ANN401
    """int32[N] slots or rings that a call gave, place by place; 0 where it gave none.

    Args:
      call: that was made.
      answer: its answer, on the host.
    """
    if call.kind.gives == "slots":
        return np.asarray(answer.slots)
    if call.kind.gives == "rings":
        return np.asarray(answer.rings)
    return np.asarray(answer.target).reshape(-1) if call.kind.gives == "copies" else None


def swa_slots(state: AllocatorState, slots: np.ndarray) -> np.ndarray:
    """int32[N] SWA slots of full slots, 0 where there is none; on the host."""
    size = state.config.page_size
    mapping = np.asarray(state.full_to_swa)
    pages = np.where((slots >= 0) & (slots // size < mapping.size), slots // size, 0)
    to = mapping[pages]
    return np.where(to == UNMAPPED, 0, to * size + slots % size).astype(np.int32)


def play(program: Program) -> Iterator[Step]:
    """Runs a program from a new state.

    Args:
      program: any; it is checked first.

    Yields:
      `Step` for each call. Only the states of the last call, and those that a later `as_of` names,
      are kept here.

    Raises:
      ValueError: a program that cannot be run, or a call that the transition refuses as such
        (a mapping in a pool that has none, ...); names the call.
    """
    check_program(program)
    wanted = {call.arguments[AS_OF] for call in program.calls if AS_OF in call.arguments}
    state, answers = swa.init(program.config), Answers()
    kept = {0: state} if 0 in wanted else {}
    for number, call in enumerate(program.calls, start=1):
        try:
            step = perform(number, call, state, answers, kept)
        except ValueError as error:
            raise ValueError(f"call {number} ({call.name}): {error}") from None
        answers.add(number, call, step.after, step.answer)
        state = step.after
        if number in wanted:
            kept[number] = state
        yield step


def perform(
    number: int,
    call: Call,
    state: AllocatorState,
    answers: Answers,
    states: Mapping[int, AllocatorState],
) -> Step:
    """Makes one call.

    Args:
      number: of the call.
      call: whose arguments are known to be well formed.
      state: before it.
      answers: of the calls before it.
      states: those that it may name, by number.

    Raises:
      ValueError: as the transition raises it.
    """
    arguments = {}
    for name, kind in call.kind.arguments.items():
        if name in call.arguments:
            arguments[name] = _argument(name, kind, call, answers, states)
    if call.name == DAMAGE:
        return Step(number, call, state, _damage(state, **arguments), arguments, None)
    renamed = dict(call.kind.renamed)
    named = {renamed.get(name) or name: value for name, value in arguments.items()}
    result = getattr(swa, call.name)(state, **named)  # found now: it may have been replaced
    if call.kind.gives is None:
        return Step(number, call, state, result, arguments, None)
    after, answer = result
    return Step(number, call, state, after, arguments, jax.device_get(answer))


def _argument(
    name: str, kind: Kind, call: Call, answers: Answers, states: Mapping[int, AllocatorState]
) -> Any:  # noqa: ANN401
    value = call.arguments[name]
    if kind is Kind.TABLE:
        return np.stack([answers.look_up(row) for row in call.rows(name)])
    if names_values(kind, value):
        return answers.look_up(call.values(name))
    if kind is Kind.MARKS:
        return np.asarray(value, bool)
    return states[value] if kind is Kind.STATE else value


def _damage(state: AllocatorState, full_slots: np.ndarray, swa_slots: np.ndarray) -> AllocatorState:
    """Writes the mapping as no transition would. Padding among the full slots is passed over."""
    config: PoolConfig = state.config
    if full_slots.size != swa_slots.size:
        raise ValueError(
            f"full_slots and swa_slots must agree in length, got {full_slots.size} and "
            f"{swa_slots.size}"
        )
    mapping, size = np.array(state.full_to_swa), config.page_size
    for slot, to in zip(full_slots.tolist(), swa_slots.tolist(), strict=True):
        if not 0 <= slot < config.full_tokens + size or not 0 <= to < config.swa_tokens + size:
            raise ValueError(f"it must name slots of the pools, got {slot} and {to}")
        if slot >= size:
            mapping[slot // size] = to // size
    return replace(state, full_to_swa=jnp.asarray(mapping, jnp.int32))
