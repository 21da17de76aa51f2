"""Doing something or nothing, on the device."""

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
        return change(both[0]), jnp.zeros((), bool)

    return jax.lax.while_loop(lambda both: both[1], once, (carry, wanted))[0]
