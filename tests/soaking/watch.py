"""Laws looked at on the device after every step, and the first that broke."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

INTACT = -1


class Watch(NamedTuple):
    """What a loop carries along. int32[]."""

    steps: jax.Array  # steps looked at so far
    looks: jax.Array  # laws looked at in this block
    broken: jax.Array  # the first law that broke, by its place among the sorted names; INTACT
    at: jax.Array  # step at which it broke


def new_watch() -> Watch:
    """Nothing looked at."""
    zero = jnp.int32(0)
    return Watch(zero, zero, jnp.int32(INTACT), jnp.int32(INTACT))


def look(watch: Watch, laws: dict[str, jax.Array]) -> Watch:
    """One step more, after which bool[] laws hold or do not."""
    holds = jnp.stack([laws[name] for name in sorted(laws)])
    bad = (watch.broken == INTACT) & ~jnp.all(holds)
    first = jnp.argmin(holds).astype(jnp.int32)
    return Watch(
        steps=watch.steps + 1,
        looks=watch.looks + holds.shape[0],
        broken=jnp.where(bad, first, watch.broken),
        at=jnp.where(bad, watch.steps, watch.at),
    )


def is_intact(watch: Watch) -> jax.Array:
    """bool[] no law has broken."""
    return watch.broken == INTACT


class BrokenLawError(AssertionError):
    """A law broke. Says which, in which part, and at which step."""

    def __init__(self, part: str, law: str, step: int, more: str = "") -> None:
        self.part, self.law, self.step = part, law, step
        super().__init__(f"{part}: broken after step {step}: {law}{more and '; ' + more}")


def raise_if_broken(part: str, names: list[str], watch: Watch, more: str = "") -> None:
    """On the host: raises `BrokenLawError` for the first law that did not hold."""
    broken, at = int(watch.broken), int(watch.at)
    if broken != INTACT:
        raise BrokenLawError(part, sorted(names)[broken], at, more)
