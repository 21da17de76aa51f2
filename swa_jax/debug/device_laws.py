"""Laws that a call shows, looked at on the device: what it must leave, worked out with masks.

As `swa_jax.debug.effects` on the host, but for `set_full_to_swa_mapping`, `free_out_of_window`,
`share` with `live` and `free_swa` with `owner`, of which only the laws of a state are asked.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from swa_jax.check import same_but_counters
from swa_jax.grant import Grant
from swa_jax.inputs import as_int32
from swa_jax.owners import as_owner, keep_own
from swa_jax.paging import look_up
from swa_jax.share import PageCopies
from swa_jax.state import UNMAPPED, AllocatorState

AS_ASKED, GRANTED_ONCE, ALL_OR_NOTHING = "as_asked", "granted_once", "all_or_nothing"
_MOST = 2**31 - 1


class _View(NamedTuple):
    """What a call moves."""

    full: jax.Array  # int32[F+1] holders
    swa: jax.Array  # int32[S+1] holders
    mapping: jax.Array  # int32[F+1]


def call_laws(
    name: str,
    before: AllocatorState,
    after: AllocatorState,
    answer: Any,  # noqa: ANN401
    arguments: Mapping[str, Any],
) -> dict[str, jax.Array]:
    """Checks the laws of one call, beside those that `swa_jax.step_invariants` knows of a grant.

    Args:
      name: of the transition.
      before: the state before it.
      after: the state after it.
      answer: what it gave beside the state, or None.
      arguments: by name, the state left out, as the transition takes them.

    Returns:
      bool[] by name, True where the law holds.
    """
    laws: dict[str, jax.Array] = {}
    if hasattr(answer, "ok") and not isinstance(answer, Grant):
        laws[ALL_OR_NOTHING] = answer.ok | same_but_counters(before, after)
    if isinstance(answer, Grant | PageCopies):
        laws[GRANTED_ONCE] = ~answer.ok | _were_nobodys(before, answer, arguments)
    if name in ("free_group_begin", "free_group_end"):
        laws[AS_ASKED] = _group(name, before, after)
    elif name == "copy_on_write":  # shares move from page to page and are as many as before
        laws[AS_ASKED] = jnp.sum(before.full.holders) == jnp.sum(after.full.holders)
    elif name in _RULES and arguments.get("owner") is None and arguments.get("live") is None:
        wanted = _RULES[name](before, _named(name, before, arguments))
        found = _View(after.full.holders, after.swa.holders, after.full_to_swa)
        pairs = zip(wanted, found, strict=True)
        laws[AS_ASKED] = jnp.all(jnp.stack([jnp.array_equal(*pair) for pair in pairs]))
    return laws


def _pages(state: AllocatorState, slots: jax.Array) -> jax.Array:
    """bool[F+1] full pages that slots name; padding and what lies outside name none."""
    size, end = state.config.page_size, state.full.holders.shape[0]
    inside = (slots >= size) & (slots < state.config.full_tokens + size)
    page = jnp.where(inside, jax.lax.div(slots, jnp.int32(size)), end)
    return jnp.zeros(end, bool).at[page.reshape(-1)].set(True, mode="drop")


def _named(name: str, state: AllocatorState, arguments: Mapping[str, Any]) -> jax.Array:
    """bool[F+1] held full pages that a call names."""
    slots = as_int32("slots", arguments.get("slots", arguments.get("full_slots")), 1)
    by = as_owner(state, arguments.get("by"), slots=slots)
    _, slots = keep_own(state, slots, by, shares=name == "share")
    if name in ("free_segment", "free_swa_segment"):
        slots = slots[:: state.config.page_size]
        slots = jnp.where(slots % state.config.page_size == 0, slots, 0)
    return _pages(state, slots) & (state.full.holders > 0)


def _were_nobodys(
    before: AllocatorState, answer: Grant | PageCopies, arguments: Mapping[str, Any]
) -> jax.Array:
    """Granted pages were held by nobody, but for those that a row goes on in."""
    pool = before.swa if before.config.pure_swa_pool else before.full
    if isinstance(answer, PageCopies):
        return ~jnp.any(_pages(before, answer.target) & (pool.holders > 0))
    granted = _pages(before, answer.slots) & (pool.holders > 0)
    if "last_loc" in arguments:
        granted = granted & ~_pages(before, as_int32("last_loc", arguments["last_loc"], 1))
    return ~jnp.any(granted)


def _group(name: str, before: AllocatorState, after: AllocatorState) -> jax.Array:
    """A group opens and nothing else happens; it closes, and what is pending can be granted."""
    opens = name == "free_group_begin"
    holds = after.group_open == opens
    for was, now in ((before.full, after.full), (before.swa, after.swa)):
        moved = 0 if opens else was.num_pending
        holds = holds & (now.num_free == was.num_free + moved)
        holds = holds & (now.num_pending == was.num_pending - moved)
        holds = holds & jnp.array_equal(was.holders, now.holders)
    return holds & jnp.array_equal(before.full_to_swa, after.full_to_swa)


def _at_sides(state: AllocatorState, pages: jax.Array) -> jax.Array:
    """int32[F+1] SWA page of each marked page, one past the end for the others."""
    has = pages & (state.full_to_swa > UNMAPPED)
    return jnp.where(has, state.full_to_swa, state.swa.holders.shape[0])


def _free(state: AllocatorState, named: jax.Array) -> _View:
    left = state.full.holders - named.astype(jnp.int32)
    swa = state.swa.holders.at[_at_sides(state, named)].min(left, mode="drop")
    return _View(left, swa, jnp.where(named & (left == 0), UNMAPPED, state.full_to_swa))


def _free_full(state: AllocatorState, named: jax.Array) -> _View:
    sides = look_up(state.swa.holders, state.full_to_swa, 0)
    mapped = (state.full_to_swa != UNMAPPED) & (jnp.maximum(sides, 1) >= state.full.holders)
    full = state.full.holders - (named & ~mapped).astype(jnp.int32)
    return _View(full, state.swa.holders, state.full_to_swa)


def _free_swa(state: AllocatorState, named: jax.Array) -> _View:
    full, mapping = state.full.holders, state.full_to_swa
    leaves = named & (mapping != UNMAPPED)
    was = look_up(state.swa.holders, mapping, 0)
    left = jnp.maximum(was - 1, 0)
    swa = state.swa.holders.at[_at_sides(state, leaves)].set(left, mode="drop")
    if state.config.pure_swa_pool:
        full = jnp.where(leaves & (left > 0), left, full)
    return _View(full, swa, jnp.where(leaves & (left == 0), UNMAPPED, mapping))


def _share(state: AllocatorState, named: jax.Array) -> _View:
    shares = named & (state.full.holders < _MOST)
    sides = look_up(state.swa.holders, state.full_to_swa, 0)
    full = state.full.holders + shares.astype(jnp.int32)
    swa = state.swa.holders.at[_at_sides(state, shares & (sides > 0))].add(1, mode="drop")
    return _View(full, swa, state.full_to_swa)


def _clear_mapping(state: AllocatorState, named: jax.Array) -> _View:
    unmaps = named & (state.full.holders == 1)
    mapping = jnp.where(unmaps, UNMAPPED, state.full_to_swa)
    return _View(state.full.holders, state.swa.holders, mapping)


_RULES: dict[str, Callable[[AllocatorState, jax.Array], _View]] = {
    "free": _free,
    "free_segment": _free,
    "free_full": _free_full,
    "free_swa": _free_swa,
    "free_swa_segment": _free_swa,
    "free_swa_grouped": _free_swa,
    "share": _share,
    "clear_full_to_swa_mapping": _clear_mapping,
}
