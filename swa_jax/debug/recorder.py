"""Writes down the calls that are made, while they are made."""

import contextlib
import inspect
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from difflib import get_close_matches
from typing import Any, TypeAlias

import numpy as np
from jax.core import Tracer

import swa_jax as swa
from swa_jax.config import PoolConfig
from swa_jax.debug.calls import CALLS, CAN_BE_GIVEN, DAMAGE, Kind
from swa_jax.debug.outcomes import outcome_of
from swa_jax.debug.owners import Owners, slots_by_name
from swa_jax.debug.play import Answers, handed_out, perform
from swa_jax.debug.program import Call, Program, check_owner
from swa_jax.debug.values import Given, Item, Value, compress
from swa_jax.inputs import as_bool, as_int32, check_capacity, whole_number
from swa_jax.state import AllocatorState

_Named: TypeAlias = Mapping[str, Mapping[int, Given]]  # by kind and number: who handed it out


class Recorder:
    """An allocator on the host whose calls become a program.

    Every transition of `swa_jax` is a method here, with the same arguments but for the state, and
    with what it gives beside the state: `alloc_extend` gives the `Grant`, `free` nothing. The
    state is kept here. `owner="request 3"` with any call, or `with recorder.owner("request 3"):`,
    says who gets the pages, for whoever reads on.

    Slots are written down as what an earlier call handed out, wherever one did, so that a program
    still says the same when a call before is left out (`shrink`), or pages are granted in another
    order. For tests and notebooks: it waits for the device and looks at each array.
    """

    def __init__(self, config: PoolConfig, about: str = "") -> None:
        """Starts with a new state.

        Args:
          config: of the pools.
          about: what the program shows, for whoever reads it.
        """
        self.state = swa.init(config)
        self._program = Program(config, (), about)
        self._calls: list[Call] = []
        self._answers, self._owners = Answers(), Owners()
        self._given: dict[str, dict[int, Given]] = {"slots": {}, "swa": {}, "rings": {}}
        self._names: list[str | None] = [None]
        self._states = [weakref.ref(self.state)]

    @property
    def program(self) -> Program:
        """What was called so far, with what came of it."""
        return replace(self._program, calls=tuple(self._calls))

    @property
    def owners(self) -> dict[str, np.ndarray]:
        """int32[T] full slots of each holder, by name; "call 7" where a call named nobody."""
        return slots_by_name(self.state.config, self._owners)

    @contextlib.contextmanager
    def owner(self, name: str) -> Iterator[None]:
        """Calls in here are `name`'s, unless they say otherwise."""
        self._names.append(name)
        try:
            yield
        finally:
            self._names.pop()

    def snapshot(self) -> AllocatorState:
        """The state as it is, to be given to `free_swa` as `owner` later on."""
        return self.state

    def __dir__(self) -> list[str]:
        """The calls are methods too."""
        return [*super().__dir__(), *CALLS]

    def __getattr__(self, name: str) -> Callable[..., Any]:
        """The method that makes a call and writes it down."""
        if name not in CALLS:
            near = get_close_matches(name, CALLS, 1)
            hint = f"did you mean {near[0]}?" if near else f"known are {', '.join(CALLS)}"
            raise AttributeError(f"no such call: {name!r}; {hint}")
        signature = _signature(name)

        def call(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
            name_of = kwargs.pop("owner") if isinstance(kwargs.get("owner"), str) else None
            bound = signature.bind(*args, **kwargs)
            return self._make(name, bound.arguments, name_of or self._names[-1])

        call.__name__, call.__doc__ = name, getattr(getattr(swa, name, None), "__doc__", None)
        call.__signature__ = signature  # type: ignore[attr-defined]
        return call

    def _make(self, name: str, arguments: Mapping[str, Any], owner: str | None) -> Any:  # noqa: ANN401
        number = len(self._calls) + 1
        check_owner(owner)
        call = Call(name, self._written(name, arguments), owner)
        states = {i: state for i, ref in enumerate(self._states) if (state := ref()) is not None}
        step = perform(number, call, self.state, self._answers, states)
        self.state = step.after
        self._states.append(weakref.ref(self.state))
        self._calls.append(replace(call, outcome=outcome_of(step)))
        self._owners = self._owners.after(step)
        self._answers.add(number, call, step.after, step.answer)
        self._note(number, call, step.answer)
        return step.answer

    def _note(self, number: int, call: Call, answer: object) -> None:
        """Who handed out a slot last, for calls that will name it."""
        given = handed_out(call, answer)
        if given is None:
            return
        kind = "rings" if call.kind.gives == "rings" else "slots"
        for place in np.flatnonzero(given).tolist():
            self._given[kind][int(given[place])] = Given(number, place)
        if kind == "slots":
            of_swa = self._answers.look_up([Given(number, i, swa=True) for i in range(given.size)])
            for place in np.flatnonzero(of_swa).tolist():
                self._given["swa"][int(of_swa[place])] = Given(number, place, swa=True)

    def _written(self, call: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """The arguments as a program has them. Damage is done by number: nobody handed it out."""
        kind, given = CALLS[call], {} if call == DAMAGE else self._given
        names = {new: old for old, new in kind.renamed}
        written = {}
        for name, value in arguments.items():
            own = names.get(name, name)
            if value is not None:
                if isinstance(value, Tracer):
                    raise ValueError(
                        f"{name} must be known: a recorder works on the host, not under jit"
                    )
                written[own] = self._argument(own, kind.arguments[own], value, given)
        return {name: written[name] for name in kind.arguments if name in written}

    def _argument(self, name: str, kind: Kind, value: Any, given: _Named) -> Any:  # noqa: ANN401
        if kind is Kind.STATE:
            return self._number_of(value)
        if kind is Kind.STATIC:
            if name == "capacity":
                return check_capacity(value)
            return whole_number(name, value, 1)
        if kind is Kind.MARKS:
            return np.asarray(as_bool(name, value)).tolist()
        dimensions = {Kind.NUMBER: 0, Kind.TABLE: 2}.get(kind, 1)
        if kind is Kind.OWNERS and np.ndim(value) == 0:
            dimensions = 0
        array = np.asarray(as_int32(name, value, dimensions))
        if kind is Kind.TABLE and not len(array):
            raise ValueError(f"{name} must have at least one row, got shape {array.shape}")
        numbers = array.tolist()
        if kind is Kind.TABLE:
            return [_items(kind, row, given) for row in numbers]
        return numbers if dimensions == 0 else _items(kind, numbers, given)

    def _number_of(self, state: object) -> int:
        for number, ref in enumerate(self._states):
            if ref() is state:
                return number
        raise ValueError(
            "owner must be an earlier state of this recorder, as recorder.state or "
            "recorder.snapshot() gave it, or a text that names who holds the pages"
        )


def _items(kind: Kind, numbers: list[int], given: Mapping[str, Mapping[int, Given]]) -> list[Item]:
    """Numbers as items, and as what handed them out where something did."""
    if kind not in CAN_BE_GIVEN:
        return compress(numbers)
    of_kind = given.get({Kind.SWA_SLOTS: "swa", Kind.RINGS: "rings"}.get(kind, "slots"), {})
    values: list[Value] = [of_kind.get(number, number) for number in numbers]
    return compress(values)


def _signature(name: str) -> inspect.Signature:
    """The arguments of a transition, the state left out."""
    if name == DAMAGE:
        kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
        return inspect.Signature([inspect.Parameter(n, kind) for n in CALLS[name].arguments])
    signature = inspect.signature(getattr(swa, name))
    return signature.replace(parameters=list(signature.parameters.values())[1:])
