"""What one server's KV memory can hold, by counts of pages: two pools, or one budget for both.

Everything is a number in an array, so that servers with different splits run in one program.
"""

import functools
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from swa_jax.heavier import page_weight
from swa_jax.paging import pages_for

PLENTY = 2**30  # a limit that no load of int32 tokens reaches


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=[
        "full_pages",
        "swa_pages",
        "chunk_tokens",
        "weight",
        "full_group",
        "swa_group",
        "full_cost",
        "swa_cost",
        "budget",
    ],
    meta_fields=[],
)
@dataclass(frozen=True)
class Limits:
    """The memory of a server; leaves [...] or, for B servers at once, [B, ...].

    f full pages and s SWA pages fit where f <= full_pages, s <= swa_pages and
    ceil(f / full_group) * full_cost + ceil(s / swa_group) * swa_cost <= budget.
    """

    full_pages: jax.Array  # int32[]
    swa_pages: jax.Array  # int32[]
    chunk_tokens: jax.Array  # int32[] prompt tokens of a step, over all requests
    weight: jax.Array  # int32[2] bytes of a full and of an SWA page, see `page_weight`
    full_group: jax.Array  # int32[] full pages that are taken from the budget together
    swa_group: jax.Array  # int32[]
    full_cost: jax.Array  # int32[] of such a group; 0: pages do not share a budget
    swa_cost: jax.Array  # int32[]
    budget: jax.Array  # int32[]


def two_pools(
    full_pages: int, swa_pages: int, chunk_tokens: int, weight: tuple[float, float]
) -> Limits:
    """Pools of fixed sizes. A pure SWA pool has `PLENTY` of full pages.

    Args:
      full_pages: that can be granted.
      swa_pages: likewise.
      chunk_tokens: prompt tokens of a step.
      weight: of a full and of an SWA page.
    """
    return one_budget(0, (1, 0), (1, 0), chunk_tokens, weight, pages=(full_pages, swa_pages))


def one_budget(
    budget: int,
    full: tuple[int, int],
    swa: tuple[int, int],
    chunk_tokens: int,
    weight: tuple[float, float],
    pages: tuple[int, int] = (PLENTY, PLENTY),
) -> Limits:
    """Both kinds of page out of one budget.

    Args:
      budget: in any unit, up to 2^30; costs likewise.
      full: how many full pages are taken together, and what they cost in that unit.
      swa: the same of SWA pages.
      chunk_tokens: prompt tokens of a step.
      weight: of a full and of an SWA page.
      pages: the most of either kind.
    """
    most = max(budget, *full, *swa, *pages, chunk_tokens)
    if most > PLENTY:
        raise ValueError(f"limits must be at most 2^30, got {most}")
    (full_group, full_cost), (swa_group, swa_cost) = full, swa
    numbers = (*pages, chunk_tokens, full_group, swa_group, full_cost, swa_cost, budget)
    arrays = [np.int32(number) for number in numbers]
    return Limits(*arrays[:3], np.asarray(page_weight(*weight), np.int32), *arrays[3:])  # type: ignore[arg-type]


def stack_limits(limits: list[Limits]) -> Limits:
    """Leaves [B, ...] of B servers."""
    return jax.tree.map(lambda *leaves: jnp.asarray(np.stack(leaves)), *limits)


def cost_of(limits: Limits, full: jax.Array, swa: jax.Array) -> jax.Array:
    """int32[] what so many pages take of the budget, one more than it has where they do not fit.

    0 where there are two pools.
    """
    too_much = limits.budget + 1  # stands for all above it, whose products could pass int32

    def cost(pages: jax.Array, size: jax.Array, each: jax.Array) -> jax.Array:
        groups = jax.lax.div(pages + size - 1, size)
        fits = groups <= jax.lax.div(limits.budget, jnp.maximum(each, 1))
        return jnp.where(each > 0, jnp.where(fits, groups * each, too_much), 0)

    of_full = cost(full, limits.full_group, limits.full_cost)
    of_swa = cost(swa, limits.swa_group, limits.swa_cost)
    return of_full + jnp.minimum(of_swa, too_much - of_full)


def holds(limits: Limits, full: jax.Array, swa: jax.Array) -> jax.Array:
    """bool[] so many full and SWA pages, int32[], fit together."""
    pools = (full <= limits.full_pages) & (swa <= limits.swa_pages)
    return pools & (cost_of(limits, full, swa) <= limits.budget)


def most_of_both(
    limits: Limits, full: jax.Array, swa: jax.Array, most: jax.Array, shared: bool
) -> jax.Array:
    """int32[] the most pages of either kind, up to `most`, beside those held.

    Args:
      limits: of the server.
      full: int32[] full pages held.
      swa: int32[] SWA pages held.
      most: int32[] pages.
      shared: some server has one budget for both, static; without it there are only pools.
    """
    in_pools = jnp.minimum(limits.full_pages - full, limits.swa_pages - swa)
    most = jnp.clip(in_pools, 0, jnp.maximum(most, 0))
    if not shared:
        return most

    def halve(bounds: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        low, high = bounds
        middle = low + pages_for(high - low, 2)
        fits = holds(limits, full + middle, swa + middle)
        return jnp.where(fits, middle, low), jnp.where(fits, high, middle - 1)

    start = (jnp.zeros_like(most), most)
    return jax.lax.while_loop(lambda bounds: bounds[0] < bounds[1], halve, start)[0]
