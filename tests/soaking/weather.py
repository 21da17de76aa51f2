"""What comes in one block of a soak: which kinds of requests, how many aborts and fences."""

from dataclasses import dataclass, field
from typing import NamedTuple

import jax
import jax.numpy as jnp

from .asking import KINDS


class Weather(NamedTuple):
    """For the device. int32."""

    weights: jax.Array  # [K] how often each kind comes
    cancel: jax.Array  # [] a request is cancelled once in so many steps, 0: never
    fence: jax.Array  # [] a fence goes up once in so many steps, 0: never


@dataclass(frozen=True)
class Block:
    """What one block brings."""

    name: str
    weights: dict[str, int] = field(default_factory=dict)
    cancel: int = 40
    fence: int = 30
    share: float = 1.0  # of the requests of a block: some loads take long

    @property
    def weather(self) -> Weather:
        """On the device."""
        weights = jnp.array([self.weights.get(kind, 0) for kind in KINDS], jnp.int32)
        return Weather(weights, jnp.int32(self.cancel), jnp.int32(self.fence))


MIXED = Block("mixed", dict.fromkeys(KINDS, 1) | {"session": 3})
# Mixed load, each trace by itself, and each load that is made to hurt, in turn.
BLOCKS = (
    MIXED,
    Block("mooncake", {"mooncake": 1}, cancel=100),
    Block("azure", {"azure": 1}, cancel=100),
    Block("one token", {"one_token": 1}, share=2.0),
    Block("conversations", {"session": 8, "mooncake": 1}),
    Block("just over a page", {"over_page": 1}),
    Block("just over a window", {"over_window": 1}),
    Block("just over a pool", {"over_pool": 1}),
    Block("cyclic prefixes", {"cyclic": 1}, share=0.8),
    Block("thrash", {"thrash": 8, "session": 1}, cancel=400, fence=0, share=0.4),
)
