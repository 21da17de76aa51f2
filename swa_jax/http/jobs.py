"""What the engine is asked for, and what it answers."""

from collections.abc import Callable
from dataclasses import dataclass, field
from time import monotonic

from swa_jax.serving.requests import UNFINISHED


@dataclass(frozen=True)
class Update:
    """News of a job: the tokens since the last one."""

    tokens: tuple[int, ...] = ()
    reason: int = UNFINISHED  # why it ended, of `swa_jax.serving.requests`
    cached: int = 0  # prompt tokens that the cache had
    error: Exception | None = None  # it ended because the engine did


@dataclass(eq=False)
class Job:
    """One sequence to generate."""

    prompt: tuple[int, ...]  # token ids
    max_new_tokens: int
    temperature: float
    top_k: int
    top_p: float
    seed: int
    ignore_eos: bool
    deliver: Callable[[Update], None]  # called by the engine's thread; must not block
    place: int = -1  # in the loop's queue, -1 before it is there
    seen: int = 0  # tokens of prompt and output that were delivered
    ended: bool = False  # nothing more is delivered
    forgotten: bool = False  # its place is empty again
    counts_as: int | None = None  # the reason that is counted, if not the one that it ended for
    came: float = field(default_factory=monotonic)  # seconds
