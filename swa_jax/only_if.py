"""Doing something or nothing, or as long as there is something to do, on the device.

The compiler moves what is the same in every turn of a loop out of it, and does so even where there
may be no turn at all: whole passes over a tree were made in every step for nothing. The barrier
ties all that a turn reads to what the loop looks at, which is not the same in every turn.
"""

from collections.abc import Callable
from typing import TypeVar

import jax
import jax.numpy as jnp

T = TypeVar("T")


def only_if(wanted: jax.Array, change: Callable[[T], T], carry: T) -> T:
    """`change(carry)` if bool[] `wanted`, else `carry` as it is.

    A loop that runs once or not at all: a branch would copy the arrays on their way through.
    """

    def once(both: tuple[T, jax.Array]) -> tuple[T, jax.Array]:
        return change(jax.lax.optimization_barrier(both)[0]), jnp.zeros((), bool)

    return jax.lax.while_loop(lambda both: both[1], once, (carry, wanted))[0]


def while_any(wanted: Callable[[T], jax.Array], change: Callable[[T], T], carry: T) -> T:
    """`change`, again and again, as long as `wanted(carry)`, bool[], says so."""

    def turn(both: tuple[T, jax.Array]) -> tuple[T, jax.Array]:
        after = change(jax.lax.optimization_barrier(both)[0])
        return after, wanted(after)

    return jax.lax.while_loop(lambda both: both[1], turn, (carry, wanted(carry)))[0]
