"""A recorded program as one compiled program, in checked mode.

`swa_jax.debug.run` makes each call on its own and looks at it on the host. Here all calls are one
program for XLA, which orders and fuses them as it does a serving loop.
"""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from swa_jax import checked
from swa_jax.checked import Checked
from swa_jax.debug.calls import AS_OF, DAMAGE, Kind, names_values
from swa_jax.debug.program import Call, Program, check_program
from swa_jax.debug.values import Given, Value

_Given = dict[tuple[int, bool], jax.Array]  # by call, and whether the SWA slots are meant


def run_checked(program: Program) -> Checked:
    """Compiles a program and runs it, with the laws looked at after every call on the device.

    Args:
      program: of `swa_jax.debug`. What its calls came to when it was recorded is not looked at.

    Returns:
      The state after it.

    Raises:
      InvariantError: the first call that broke a law, with its number in the program, the pages
        and who holds them.
      ValueError: a program that cannot be run, or one that damages a state.
    """
    check_program(program)
    damage = next((n for n, call in enumerate(program.calls, 1) if call.name == DAMAGE), None)
    if damage is not None:
        raise ValueError(
            f"call {damage} ({DAMAGE}) breaks laws on purpose, and every call is looked at here: "
            "use swa_jax.debug.run"
        )
    names = list(dict.fromkeys(call.owner for call in program.calls if call.owner is not None))

    def whole(state: Checked) -> Checked:
        given: _Given = {}
        states = [state]
        for number, call in enumerate(program.calls, start=1):
            state = _make(number, call, state, given, states, names)
            states.append(state)
        return state

    return checked.checking(whole, names=names)(checked.init(program.config))


def _make(
    number: int,
    call: Call,
    state: Checked,
    given: _Given,
    states: list[Checked],
    names: list[str],
) -> Checked:
    """Traces one call."""
    renamed = dict(call.kind.renamed)
    arguments = {
        renamed.get(name) or name: _argument(name, kind, call, given, states)
        for name, kind in call.kind.arguments.items()
        if name in call.arguments
    }
    if call.owner is not None and (call.kind.hands_out or call.name == "share"):
        arguments["owner"] = names.index(call.owner)
    result = getattr(checked, call.name)(state, **arguments)
    if call.kind.gives is None:
        return result
    after, answer = result
    if call.kind.hands_out:
        kept = {"slots": "slots", "rings": "rings", "copies": "target"}[call.kind.gives]
        slots = getattr(answer, kept).reshape(-1)
        given[number, False] = slots
        if call.kind.gives != "rings" and not after.state.config.has_rings:
            given[number, True] = checked.translate_full_to_swa(after, slots)
    return after


def _argument(name: str, kind: Kind, call: Call, given: _Given, states: list[Checked]) -> Any:  # noqa: ANN401
    value = call.arguments[name]
    if kind is Kind.TABLE:
        return jnp.stack([_numbers(row, given) for row in call.rows(name)])
    if names_values(kind, value):
        return _numbers(call.values(name), given)
    if kind is Kind.MARKS:
        return jnp.asarray(value, bool)
    if name == AS_OF:
        return states[value].state
    return value if kind is Kind.STATIC else jnp.int32(value)


def _numbers(values: list[Value], given: Mapping[tuple[int, bool], jax.Array]) -> jax.Array:
    """int32[N] of which some are only known when the program runs."""
    fixed = [0 if isinstance(value, Given) else value for value in values]
    numbers = jnp.asarray(np.asarray(fixed, np.int32))
    named = [(i, value) for i, value in enumerate(values) if isinstance(value, Given)]
    for source in dict.fromkeys((value.call, value.swa) for _, value in named):
        those = [(i, value.place) for i, value in named if (value.call, value.swa) == source]
        at, places = (jnp.asarray(column, jnp.int32) for column in zip(*those, strict=True))
        taken = given[source].at[places].get(mode="fill", fill_value=0)
        numbers = numbers.at[at].set(taken, mode="drop")
    return numbers
