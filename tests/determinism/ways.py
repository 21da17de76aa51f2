"""Ways of running one program. All must give the digests of all others."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from swa_jax.data_parallel import each_rank, one_rank

from .digest import digest
from .program import RANKS, Driven, Program, Tree

Trail = list[str]  # the digest of the inputs, then one for each `every` steps


class _Looks:
    """Collects the digests of one rank."""

    def __init__(self, program: Program, rank: int) -> None:
        self.trail: Trail = [digest(program.inputs(rank))]
        self._watch = None if program.watch is None else program.watch()

    def look(self, carry: Tree, answers: Tree) -> None:
        seen = {"carry": carry, "answers": answers}
        if self._watch is not None:
            seen["watch"] = self._watch(carry)
        self.trail.append(digest(seen))


def _of_ranks(make: Callable[[int], Tree], ranks: int) -> Tree:
    return jax.tree.map(lambda *leaves: np.stack(leaves), *map(make, range(ranks)))


def _own_buffers(tree: Tree) -> Tree:
    """Nothing donated twice."""
    return jax.tree.map(jnp.array, tree)


def scanned(program: Program, *, donate: bool, ranks: int = RANKS) -> list[Trail]:
    """`lax.scan` over the steps between two digests, one rank after the other."""

    def some_steps(carry: Tree, inputs: Tree) -> tuple[Tree, Tree]:
        return jax.lax.scan(program.step, carry, inputs)

    advance = jax.jit(some_steps, donate_argnums=0 if donate else ())
    trails = []
    for rank in range(ranks):
        looks, carry = _Looks(program, rank), _own_buffers(program.start(rank))
        for part in program.parts(program.inputs(rank)):
            before = carry
            carry, answers = advance(before, part)
            assert not donate or any(leaf.is_deleted() for leaf in jax.tree.leaves(before))
            looks.look(carry, answers)
        trails.append(looks.trail)
    return trails


def stepped(program: Program, *, donate: bool) -> list[Trail]:
    """One compiled call a step; of the first rank alone."""
    step = jax.jit(program.step, donate_argnums=0 if donate else ())
    return [_step_by_step(program, step)]


def eager(program: Program) -> list[Trail]:
    """Without `jit`, operation by operation, up to the first digest."""
    with jax.disable_jit():
        return [_step_by_step(program, program.step, digests=1)]


def _step_by_step(program: Program, step: Callable[..., Any], digests: int | None = None) -> Trail:
    looks, carry = _Looks(program, 0), _own_buffers(program.start(0))
    for part in list(program.parts(program.inputs(0)))[:digests]:
        answers = []
        for at in range(program.every):
            carry, answer = step(carry, jax.tree.map(lambda leaf, at=at: leaf[at], part))
            answers.append(jax.device_get(answer))
        looks.look(carry, jax.tree.map(lambda *leaves: np.stack(leaves), *answers))
    return looks.trail


def batched(program: Program, *, mesh: jax.sharding.Mesh | None = None) -> list[Trail]:
    """All ranks side by side: by `vmap`, or over the devices of a mesh by `shard_map`."""

    def some_steps(carry: Tree, inputs: Tree) -> tuple[Tree, Tree]:
        return jax.lax.scan(program.step, carry, inputs)

    advance = jax.jit(each_rank(some_steps, mesh=mesh), donate_argnums=0)
    carry, inputs = _of_ranks(program.start, RANKS), _of_ranks(program.inputs, RANKS)
    carry = _own_buffers(carry)
    if mesh is not None:
        spread = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
        carry = jax.device_put(carry, spread)
    looks = [_Looks(program, rank) for rank in range(RANKS)]
    for part in program.parts(inputs, axis=1):
        carry, answers = advance(carry, part)
        if mesh is not None:
            assert all(len(leaf.sharding.device_set) == RANKS for leaf in jax.tree.leaves(carry))
        on_host = jax.device_get((carry, answers))
        for rank, look in enumerate(looks):
            look.look(*one_rank(on_host, rank))
    return [look.trail for look in looks]


def driven(program: Driven, devices: Sequence[Any]) -> list[Trail]:
    """The host's loop."""
    return [[digest(tree) for tree in program.run(list(devices))]]


def _over_devices(program: Program) -> list[Trail]:
    return batched(program, mesh=jax.make_mesh((RANKS,), ("data",)))


WAYS: dict[str, Callable[[Program], list[Trail]]] = {
    "scan": lambda program: scanned(program, donate=False),
    "scan, donated": lambda program: scanned(program, donate=True),
    "steps": lambda program: stepped(program, donate=False),
    "steps, donated": lambda program: stepped(program, donate=True),
    "vmap": batched,
    "devices": _over_devices,
    "eager": eager,
}
# Ways that run only the first seeds, and only up to some digest: seeds, and length of a trail.
PARTS: dict[str, tuple[int, int | None]] = {
    "steps": (1, None),
    "steps, donated": (1, None),
    "eager": (1, 2),
}
