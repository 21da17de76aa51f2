"""What a grant hands out, and the one place that writes a granted plan into the state."""

import functools
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp

from swa_jax.faults import add_faults
from swa_jax.owners import count_foreign
from swa_jax.paging import put
from swa_jax.pool import count_holders, nowhere, take
from swa_jax.state import AllocatorState


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["slots", "count", "ok", "full_short", "swa_short"],
    meta_fields=[],
)
@dataclass(frozen=True)
class Grant:
    """The answer of an allocation. A refusal is a normal answer: read `ok` first."""

    slots: jax.Array  # int32[capacity] full slots, 0 in unused places and when refused
    count: jax.Array  # int32[] slots granted, 0 when refused
    ok: jax.Array  # bool[]
    full_short: jax.Array  # int32[] full pages missing, 0 where granted or ill-formed
    swa_short: jax.Array  # int32[] SWA pages missing, likewise


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["takes", "pages", "swa_pages"],
    meta_fields=[],
)
@dataclass(frozen=True)
class Revived:
    """Pages that rows go on in, where they get the SWA side that they lack."""

    takes: jax.Array  # bool[B]
    pages: jax.Array  # int32[B] full page; in a pure SWA pool it is new, too
    swa_pages: jax.Array  # int32[B]


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=[
        "grant",
        "full_pages",
        "swa_pages",
        "map_pages",
        "map_values",
        "revived",
        "num_full",
        "num_swa",
        "faults",
        "foreign",
        "scratch",
    ],
    meta_fields=[],
)
@dataclass(frozen=True)
class GrantPlan:
    """Who gets which page. One past the end where a place moves none; all so when refused."""

    grant: Grant
    full_pages: jax.Array  # int32[K] leave the full pool
    swa_pages: jax.Array  # int32[K] leave the SWA pool
    map_pages: jax.Array  # int32[K] full pages whose mapping this grant decides
    map_values: jax.Array  # int32[K] their SWA page, 0 = none
    revived: Revived | None  # these as well
    num_full: jax.Array  # int32[] pages taken, 0 when refused
    num_swa: jax.Array  # int32[] pages taken, 0 when refused
    faults: jax.Array  # int32[7] to add
    foreign: jax.Array | None  # int32[] to add; None without owner tags
    scratch: jax.Array


@dataclass(frozen=True)
class Verdict:
    """Whether a request for pages can be met, and what is missing."""

    ok: jax.Array
    full_short: jax.Array
    swa_short: jax.Array


def judge(
    state: AllocatorState,
    well_formed: jax.Array,
    num_full: jax.Array,
    num_swa: jax.Array,
    foreign: jax.Array | None = None,
) -> Verdict:
    """Asks both pools before either changes (law 2). A row in a `foreign` page is ill-formed."""
    if foreign is not None:
        well_formed = well_formed & ~jnp.any(foreign)
    swa_short = jnp.maximum(num_swa - state.swa.num_free, 0)
    if state.config.has_rings:
        swa_short = jnp.int32(0)
    if state.config.pure_swa_pool:  # one pool: what is missing is missing on both sides
        full_short = swa_short
    else:
        full_short = jnp.maximum(num_full - state.full.num_free, 0)
    fits = (full_short == 0) & (swa_short == 0)
    zero = jnp.int32(0)
    return Verdict(
        ok=well_formed & fits,
        full_short=jnp.where(well_formed, full_short, zero),
        swa_short=jnp.where(well_formed, swa_short, zero),
    )


def make_plan(
    state: AllocatorState,
    verdict: Verdict,
    *,
    slots: jax.Array,
    count: jax.Array,
    new_pages: jax.Array,
    takes_full: jax.Array,
    swa_pages: jax.Array,
    takes_swa: jax.Array,
    map_pages: jax.Array,
    num_full: jax.Array,
    num_swa: jax.Array,
    faults: jax.Array,
    scratch: jax.Array,
    foreign: jax.Array | None = None,
    revived: Revived | None = None,
    slots_are_gated: bool = False,
) -> GrantPlan:
    """Gates a plan by its one `ok`.

    Args (places of one list of pages, K long):
      slots: int32[T] what the caller gets; 0 in unused places.
      new_pages, takes_full: full page ids and whether this place takes one from the pool.
      swa_pages, takes_swa: SWA page ids and whether this place takes one from the pool.
      map_pages: full page whose mapping this place decides, where it takes a page on any side.
      foreign: bool[B] rows in a page of somebody else.
      revived: pages that are not in the list.
      slots_are_gated: the slots are 0 already where the verdict is no.
    """
    ok, zero = verdict.ok, jnp.int32(0)
    if state.config.has_rings:  # the SWA side is there since the request got its ring
        takes_swa, num_swa = jnp.zeros_like(takes_swa), zero
    no_full, no_swa = jnp.int32(nowhere(state.full)), jnp.int32(nowhere(state.swa))
    takes_full, takes_swa = takes_full & ok, takes_swa & ok
    if revived is not None:
        takes = revived.takes & ok
        pages = jnp.where(takes, revived.pages, no_full)
        revived = Revived(takes, pages, jnp.where(takes, revived.swa_pages, no_swa))
    return GrantPlan(
        grant=Grant(
            slots=slots if slots_are_gated else jnp.where(ok, slots, zero),
            count=jnp.where(ok, count, zero),
            ok=ok,
            full_short=verdict.full_short,
            swa_short=verdict.swa_short,
        ),
        full_pages=jnp.where(takes_full, new_pages, no_full),
        swa_pages=jnp.where(takes_swa, swa_pages, no_swa),
        map_pages=jnp.where(takes_full | takes_swa, map_pages, no_full),
        map_values=jnp.where(takes_swa, swa_pages, zero),
        revived=revived,
        num_full=jnp.where(ok, num_full, zero),
        num_swa=jnp.where(ok, num_swa, zero),
        faults=faults,
        foreign=None if foreign is None else jnp.sum(foreign, dtype=jnp.int32),
        scratch=scratch,
    )


def commit_grant(state: AllocatorState, plan: GrantPlan) -> tuple[AllocatorState, Grant]:
    """Writes a plan: one scatter for each array, none of which lands when it was refused.

    The mapping of every granted full page is written, also where it is "none": a recycled page
    keeps nothing of its last owner (law 7, public report B02).
    """
    one, revived = jnp.int32(1), plan.revived
    if state.config.has_rings:  # no page has a side of its own
        revived = None
    if state.config.pure_swa_pool:
        full = count_holders(state.full, plan.full_pages, one)
        if revived is not None:
            full = count_holders(full, revived.pages, one)
    else:
        full = take(state.full, plan.full_pages, plan.num_full)
    swa, mapping = state.swa, state.full_to_swa
    if not state.config.has_rings:
        swa = take(swa, plan.swa_pages, plan.num_swa)
        mapping = put(mapping, plan.map_pages, plan.map_values)
    if revived is not None:
        swa = count_holders(swa, revived.swa_pages, one)
        mapping = put(mapping, revived.pages, revived.swa_pages)
    after = replace(
        state,
        full=full,
        swa=swa,
        full_to_swa=mapping,
        faults=add_faults(state.faults, plan.faults),
        scratch=plan.scratch,
        owner_tags=count_foreign(state.owner_tags, plan.foreign),
    )
    return after, plan.grant
