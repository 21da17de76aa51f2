"""Known bugs of allocators of this kind, one function each, put back into the package.

They patch internals, so they break when those are renamed: a mutant whose target is gone fails
its test, which is wanted.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax.numpy as jnp
import pytest

import swa_jax as swa
from swa_jax import allocator, group, mapping, plan_decode, plan_extend, plan_free, pool, window
from swa_jax.faults import add_faults, fault_counts

# `swa_jax.free` is the function; this is its module.
free = importlib.import_module("swa_jax.free")

Patch = pytest.MonkeyPatch


def wrap(patch: Patch, modules: tuple[Any, ...], name: str, outer: Callable[..., Any]) -> None:
    """Replaces `name` in the modules that imported it by `outer(original, ...)`."""
    for module in modules:
        original = getattr(module, name)

        def wrapped(*args: Any, original: Any = original, **kwargs: Any) -> Any:
            return outer(original, *args, **kwargs)

        patch.setattr(module, name, wrapped)


PLANNERS = (allocator, plan_extend, plan_decode)
FREES = (free, window)


# ---- the three regressions ------------------------------------------------------------------


def stale_mapping_before_the_tail(patch: Patch) -> None:
    """Only pages that get an SWA side have their mapping written (public report B02)."""

    def outer(make_plan, state, verdict, **parts):
        plan = make_plan(state, verdict, **parts)
        none = jnp.int32(pool.nowhere(state.full))
        return replace(plan, map_pages=jnp.where(plan.map_values == 0, none, plan.map_pages))

    wrap(patch, PLANNERS, "make_plan", outer)


def page_freed_again_for_each_token(patch: Patch) -> None:
    """Freed whole, but unmapped for the named token only: the page stays mapped (B01)."""

    def keep_mapping(commit_free, state, plan, **how):
        return commit_free(state, replace(plan, unmap=jnp.full_like(plan.unmap, 2**30)), **how)

    wrap(patch, FREES, "commit_free", keep_mapping)
    wrap(
        patch,
        (plan_free,),
        "swa_side",
        lambda swa_side, *args: (swa_side(*args)[0], jnp.minimum(swa_side(*args)[0], 1)),
    )


def late_look_up_in_a_group(patch: Patch) -> None:
    """The mapping is read when the group ends, not when the free is asked for (B03).

    Keeps slots on the host, so it needs `jax.disable_jit`.
    """
    queue: list[Any] = []
    free_swa, end = swa.free_swa, swa.free_group_end

    def late_free_swa(state, slots, owner=None):
        if not state.group_open:
            return free_swa(state, slots, owner)
        queue.append(slots)
        return state

    def late_end(state):
        state = end(state)
        while queue:
            state = free_swa(state, queue.pop(0))
        return state

    patch.setattr(swa, "free_swa", late_free_swa)
    patch.setattr(swa, "free_group_end", late_end)


# ---- grants ---------------------------------------------------------------------------------


def full_pages_taken_while_swa_is_short(patch: Patch) -> None:
    """A grant that takes one pool first and asks the other afterwards (B06)."""

    def outer(make_plan, state, verdict, **parts):
        plan = make_plan(state, verdict, **parts)
        takes = parts["takes_full"] & (parts["num_full"] <= state.full.num_free)
        none = jnp.int32(pool.nowhere(state.full))
        return replace(
            plan,
            full_pages=jnp.where(takes, parts["new_pages"], none),
            num_full=jnp.where(jnp.any(takes), parts["num_full"], 0),
        )

    wrap(patch, PLANNERS, "make_plan", outer)


def refused_but_slots_handed_out(patch: Patch) -> None:
    def outer(make_plan, state, verdict, **parts):
        plan = make_plan(state, verdict, **parts)
        return replace(plan, grant=replace(plan.grant, slots=parts["slots"]))

    wrap(patch, PLANNERS, "make_plan", outer)


def pages_handed_out_but_still_free(patch: Patch) -> None:
    """The holder is not written: a second free of the old owner would be accepted."""
    patch.setattr(pool, "count_holders", lambda pages_pool, pages, holders: pages_pool)


def two_rows_share_a_last_page(patch: Patch) -> None:
    def outer(look, *args):
        last = look(*args)
        return replace(last, crooked=jnp.zeros_like(last.crooked))

    wrap(patch, (plan_extend, plan_decode), "look_at_last_page", outer)


def tokens_written_to_a_page_without_swa(patch: Patch) -> None:
    """A last page that lost its SWA side is filled up as if it had one."""

    def outer(look, *args):
        last = look(*args)
        return replace(last, has_swa=last.goes_on)

    wrap(patch, (plan_extend, plan_decode), "look_at_last_page", outer)


def capacity_not_checked(patch: Patch) -> None:
    """More tokens than the answer has room for: the row is cut short in silence (B18)."""
    patch.setattr(plan_extend, "sum_exceeds", lambda values, limit: jnp.zeros((), bool))


def ring_does_not_go_round(patch: Patch) -> None:
    def straight_on(pages_pool, offset):
        return jnp.minimum(pages_pool.head + offset, jnp.int32(pages_pool.ring.shape[0] - 1))

    patch.setattr(pool, "_place", straight_on)


# ---- frees ----------------------------------------------------------------------------------


def padding_page_freed(patch: Patch) -> None:
    """Padding in an array of slots is taken for a page."""

    def outer(name_pages, state, slots, *, segment=False):
        named = name_pages(state, slots, segment=segment)
        looked_at = slots[:: state.config.page_size] if segment else slots
        padding = (looked_at >= 0) & (looked_at < jnp.int32(state.config.page_size))
        first = padding & (jnp.cumsum(padding, dtype=jnp.int32) == 1)
        return replace(named, pages=jnp.where(padding, 0, named.pages), first=named.first | first)

    wrap(patch, (*FREES, mapping), "name_pages", outer)


def double_free_accepted(patch: Patch) -> None:
    def swa_side(state, named):
        pages = plan_free.look_up(state.full_to_swa, named.pages, 0)
        return pages, jnp.minimum(pages, 1)

    patch.setattr(plan_free, "holders_here", lambda state, named: named.first.astype(jnp.int32))
    patch.setattr(plan_free, "swa_side", swa_side)


def mapping_not_cleared_on_free(patch: Patch) -> None:
    def outer(commit_free, state, plan, **how):
        return commit_free(state, replace(plan, unmap=jnp.full_like(plan.unmap, 2**30)), **how)

    wrap(patch, FREES, "commit_free", outer)


def unmapped_page_frees_page_zero(patch: Patch) -> None:
    """A page without an SWA side "frees" SWA page 0 (B05)."""

    def outer(swa_side, state, named):
        pages, _ = swa_side(state, named)
        return pages, plan_free.holders_of(state.swa, pages)

    wrap(patch, (plan_free,), "swa_side", outer)


def free_full_of_a_mapped_page(patch: Patch) -> None:
    """The full side goes, the SWA side stays behind with nobody to free it (B08)."""

    def outer(plan_full, state, named):
        both = plan_free.plan_free(state, named)
        plan = plan_full(state, named)
        return replace(plan, full_pages=both.full_pages, full_left=both.full_left)

    wrap(patch, (free,), "plan_free_full", outer)


def each_slot_frees_its_page(patch: Patch) -> None:
    """Several tokens of one page in one call are taken for several pages."""

    def outer(first_places, scratch, pages):
        _, first, clean = first_places(scratch, pages)
        return pages < scratch.shape[0], first, clean

    wrap(patch, (plan_free,), "first_places", outer)


def scratch_left_dirty(patch: Patch) -> None:
    def outer(first_places, scratch, pages):
        is_first, first, _ = first_places(scratch, pages)
        return is_first, first, scratch.at[pages].min(0, mode="drop")

    wrap(patch, (plan_free,), "first_places", outer)


def pending_pages_overwritten(patch: Patch) -> None:
    """A free outside a group writes over what is queued behind the free pages."""

    def outer(give_back, pages_pool, pages, left, defer):
        after = give_back(replace(pages_pool, num_pending=jnp.int32(0)), pages, left, defer)
        return replace(after, num_pending=after.num_pending + pages_pool.num_pending)

    wrap(patch, (plan_free,), "give_back", outer)


def owner_does_not_ask_who_maps_now(patch: Patch) -> None:
    """A late free by snapshot takes a page that has found a new owner."""

    def outer(plan_as_of, state, owner, named):
        plan = plan_as_of(state, owner, named)
        pages, held = plan_free.swa_side(owner, named)
        again = (held > 0) & (plan_free.holders_of(state.swa, pages) > 0)
        return replace(plan, swa_pages=jnp.where(again, pages, plan.swa_pages))

    wrap(patch, (free,), "plan_free_swa_as_of", outer)


# ---- groups, mapping, window, faults --------------------------------------------------------


def nested_begin_drops_the_queue(patch: Patch) -> None:
    def begin(state):
        nested = fault_counts(nested_group=state.group_open)
        return replace(
            state,
            full=replace(state.full, num_pending=jnp.int32(0)),
            swa=replace(state.swa, num_pending=jnp.int32(0)),
            group_open=jnp.ones((), bool),
            faults=add_faults(state.faults, nested),
        )

    patch.setattr(group, "_begin", begin)


def set_does_not_move(patch: Patch) -> None:
    """Two full pages map to one SWA page after a set."""

    def set_only(state, full_slots, swa_slots, by):
        pairs = mapping.pair_pages(state, full_slots, swa_slots)
        by_page = state.full_to_swa.at[pairs.full_pages].set(pairs.swa_pages, mode="drop")
        return replace(state, full_to_swa=by_page, faults=add_faults(state.faults, pairs.faults))

    patch.setattr(mapping, "_set", set_only)


def insert_boundary_ignored(patch: Patch) -> None:
    """The frontier runs up to the boundary of a prefix that goes into a tree (B24)."""
    wrap(patch, (window,), "frontier", lambda edge, config, lens, _=None: edge(config, lens))


def window_one_token_short(patch: Patch) -> None:
    """Off by one exactly where the length reaches the window (B33)."""
    wrap(
        patch,
        (window,),
        "frontier",
        lambda edge, config, lens, insert=None: edge(config, lens + 1, insert),
    )


def frontier_inside_a_page(patch: Patch) -> None:
    patch.setattr(window, "floor_to_page", lambda tokens, page_size: tokens)


def fault_counters_wrap(patch: Patch) -> None:
    patch.setattr(plan_free, "add_faults", lambda counts, more: counts + more)
    patch.setattr(group, "add_faults", lambda counts, more: counts + more)
