"""The same transition for every rank: by `vmap` on one device, by `shard_map` over a mesh."""

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from swa_jax.inputs import whole_number

T = TypeVar("T")


def new_ranks(
    make: Callable[[], T], ranks: int, *, mesh: Mesh | None = None, axis: str = "data"
) -> T:
    """One fresh pytree a rank, as one pytree whose leaves have a leading axis.

    Args:
      make: makes it for one rank, `lambda: swa.init(config)` say.
      ranks: R, a multiple of the devices along `axis` where there is a mesh.
      mesh: devices to spread the ranks over; none: they stay together.
      axis: the mesh's axis. Along its other axes every device has a copy.

    Returns:
      What `make` makes, leaves [R, ...].

    Raises:
      ValueError: no ranks, no such axis, or ranks that do not fit it.
    """
    count = whole_number("ranks", ranks, 1)
    spread = None if mesh is None else _sharding(mesh, axis, count)
    made = jax.jit(lambda: jax.vmap(lambda _: make())(jnp.arange(count)), out_shardings=spread)
    return made()


def each_rank(
    call: Callable[..., Any],
    *,
    mesh: Mesh | None = None,
    axis: str = "data",
    same: int = 0,
    one_by_one: bool = False,
) -> Callable[..., Any]:
    """`call` for every rank: each of its arguments and results gains a leading axis [R].

    Over a mesh each device works on its own ranks and hears of no other: the compiled program has
    no collective in it. Compile it as any other function (`jax.jit(..., donate_argnums=0)`), call
    it in a loop of your own, or nest it in one.

    Args:
      call: a transition, or several, of one rank. Static arguments belong inside it.
      mesh: as for `new_ranks`.
      axis: as for `new_ranks`.
      same: how many of its first arguments are the same for all ranks: they get no axis.
      one_by_one: the ranks of one device take turns, by `lax.map`. Batched by `vmap`, a loop goes
        on until the last rank is done and keeps the others' arrays by copying them: on a CPU, whole
        replays are several times slower that way.

    Raises:
      ValueError: the mesh has no such axis.
    """

    def of_device(*given: Any) -> Any:  # noqa: ANN401 - any pytrees
        ranks = given[same:]
        if not jax.tree.leaves(ranks):
            raise ValueError(
                f"no argument is left that has an axis of ranks: got {len(given)} arguments, the "
                f"first {same} of them the same for all"
            )
        one = functools.partial(call, *given[:same])
        if all(leaf.shape[:1] == (1,) for leaf in jax.tree.leaves(ranks)):
            # A rank alone needs no batching, which would make a copy of what a branch leaves alone.
            return jax.tree.map(lambda leaf: leaf[None], one(*one_rank(ranks, 0)))
        if one_by_one:
            return jax.lax.map(lambda rank: one(*rank), ranks)
        return jax.vmap(one)(*ranks)

    if mesh is None:
        return of_device
    to = _sharding(mesh, axis, 0)

    def over_mesh(*given: Any) -> Any:  # noqa: ANN401 - any pytrees
        specs = (PartitionSpec(),) * same + (to.spec,) * (len(given) - same)
        # Loops of a transition carry constants beside what differs by rank: nothing to check there.
        return jax.shard_map(
            of_device, mesh=to.mesh, in_specs=specs, out_specs=to.spec, check_vma=False
        )(*given)

    return over_mesh


def one_rank(ranks: T, rank: int) -> T:
    """The pytree of one rank, to look at: leaves lose their leading axis.

    Args:
      ranks: leaves [R, ...].
      rank: 0 .. R - 1, static.

    Raises:
      ValueError: no such rank.
    """
    least = min(leaf.shape[0] for leaf in jax.tree.leaves(ranks))
    rank = whole_number("rank", rank, 0, least - 1)
    return jax.tree.map(lambda leaf: leaf[rank], ranks)


def _sharding(mesh: Mesh, axis: str, ranks: int) -> NamedSharding:
    if axis not in mesh.axis_names:
        raise ValueError(f"axis must be one of the mesh's {mesh.axis_names}, got {axis!r}")
    devices = mesh.shape[axis]
    if ranks % devices:
        raise ValueError(
            f"ranks must be a multiple of the {devices} devices along {axis!r}, got {ranks}"
        )
    # Placed, not typed: what is computed from a state elsewhere may lie as the compiler likes.
    return NamedSharding(Mesh(mesh.devices, mesh.axis_names), PartitionSpec(axis))
