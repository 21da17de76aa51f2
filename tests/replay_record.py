"""Runs the replay's own step and keeps the whole world after each one, on the host."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from compare import config_of
from oracle import Sizes
from replay_oracle import Scheduler

import swa_jax as swa
from swa_jax.replay import step as steps
from swa_jax.replay import world as worlds
from swa_jax.replay.trace import Trace


@dataclasses.dataclass(frozen=True)
class Shape:
    """What a compiled replay is made for."""

    sizes: Sizes
    requests: int
    max_running: int
    chunk_tokens: int
    longest: int  # tokens of KV of one request

    @property
    def config(self) -> worlds.LoopConfig:
        pages = -(-self.longest // self.sizes.page_size) + 1
        return worlds.LoopConfig(config_of(self.sizes), self.max_running, self.chunk_tokens, pages)


@dataclasses.dataclass(frozen=True)
class Load:
    """The requests of one run, as prompt and output lengths; `rejected` are never admitted."""

    prompts: list[int]
    outputs: list[int]
    rejected: frozenset[int] = frozenset()

    @property
    def finals(self) -> list[int]:
        """The last token that is generated is never read, so it has no KV."""
        pairs = zip(self.prompts, self.outputs, strict=True)
        return [prompt + max(output - 1, 0) for prompt, output in pairs]


def trace_of(prompts: list[int], outputs: list[int]) -> Trace:
    return Trace(
        name="made up",
        source_format="azure",
        arrival_ms=np.arange(len(prompts), dtype=np.int64),
        prompt_lens=np.asarray(prompts, np.int32),
        output_lens=np.asarray(outputs, np.int32),
        hash_ids=None,
        block_tokens=None,
    )


@dataclasses.dataclass(frozen=True)
class History:
    """The worlds after step 1, 2, ... (leaves with a leading axis), and the last one."""

    worlds: Any
    laws: dict[str, np.ndarray]
    last: Any
    ended: bool

    def __len__(self) -> int:
        return int(self.last.tally.steps)

    def at(self, index: int) -> Any:
        return jax.tree.map(lambda leaf: leaf[index], self.worlds)

    @property
    def lengths(self) -> list[dict[int, int]]:
        """Tokens of each running request, after each step."""
        rows = self.worlds.rows
        pairs = zip(rows.request[: len(self)], rows.length[: len(self)], strict=True)
        return [
            {int(r): int(n) for r, n in zip(request, length, strict=True) if r >= 0}
            for request, length in pairs
        ]


class Recorder:
    """A compiled replay of one shape. It traces when made, so patches in force then stay in it."""

    def __init__(self, shape: Shape, most_steps: int) -> None:
        self.shape, self.most_steps = shape, most_steps
        config = shape.config
        weight = jnp.ones(2, jnp.int32)

        def one(load: worlds.Load, world: worlds.World) -> tuple[worlds.World, tuple]:
            world = jax.lax.cond(
                steps.unfinished(world),
                lambda w: steps.step(config, load, weight, w),
                lambda w: w,
                world,
            )
            return world, (world, swa.invariants(world.allocator))

        def run(prompts: jax.Array, finals: jax.Array, accepted: jax.Array) -> tuple:
            load = worlds.Load(prompts, finals)
            world = worlds.new_world(config, load, accepted)
            return jax.lax.scan(lambda w, _: one(load, w), world, None, length=most_steps)

        ints = jax.ShapeDtypeStruct((shape.requests,), jnp.int32)
        marks = jax.ShapeDtypeStruct((shape.requests,), jnp.bool_)
        lowered = jax.jit(run).lower(ints, ints, marks)
        # Small programs that run for milliseconds: optimizing them would take seconds.
        self.program = lowered.compile({"xla_backend_optimization_level": "0"})

    def __call__(self, load: Load) -> History:
        lens = (jnp.asarray(values, jnp.int32) for values in (load.prompts, load.finals))
        accepted = [number not in load.rejected for number in range(len(load.prompts))]
        last, (every, laws) = jax.device_get(self.program(*lens, jnp.asarray(accepted)))
        ended = not (last.waiting.any() or (last.rows.request >= 0).any())
        return History(every, laws, last, ended)

    def expect(self, load: Load) -> Scheduler:
        """The plain scheduler before its first step on the same load."""
        shape = self.shape
        return Scheduler(
            shape.sizes,
            shape.max_running,
            shape.chunk_tokens,
            load.prompts,
            load.finals,
            load.rejected,
        )


@functools.cache
def recorder(shape: Shape, most_steps: int = 1200) -> Recorder:
    """One compilation a shape for all tests. Not for code that is patched."""
    return Recorder(shape, most_steps)
