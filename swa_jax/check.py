"""The laws as predicates of a state: on the device, and loud on the host."""

from collections.abc import Callable
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np

from swa_jax.counts import absent_pages
from swa_jax.grant import Grant
from swa_jax.paging import look_up, page_of
from swa_jax.pool import holders_of, is_held
from swa_jax.state import NOBODY, PAD_PAGE, UNMAPPED, AllocatorState, PagePool, init, must_be_state


class InvariantError(AssertionError):
    """A state breaks a law. The message names the law, the pages and the counts."""


def invariants(state: AllocatorState) -> dict[str, jax.Array]:
    """Checks every law that one state can show. Pure; works under jit, scan and vmap.

    Args:
      state: any state, also in an open group.

    Returns:
      bool[] by name, True where the law holds: padding_page (1), one_owner, shares and
      conservation (3),
      within_size (4), whole_pages (5), group_queue (6), no_stale_mapping (7), one_to_one (8),
      int32_only (9), scratch_clean (10); with owner tags owners_agree (3 and 8). Laws about a step
      are in `step_invariants`.
    """
    must_be_state(state)
    return _invariants(state)


@jax.jit
def _invariants(state: AllocatorState) -> dict[str, jax.Array]:
    laws = LAWS if state.owner_tags is None else LAWS | OWNER_LAWS
    return {name: law(state) for name, law in laws.items()}


def _rings(state: AllocatorState) -> list[PagePool]:
    """Pools that grant from a ring of their own."""
    return [state.swa] if state.config.pure_swa_pool else [state.full, state.swa]


def _released(state: AllocatorState) -> list[jax.Array]:
    """int32[N+1] of each such pool: 1 for a page that is free or pending; absent ones are neither.

    A page that is absent and yet held is -1, which no ring makes good.
    """
    absent = absent_pages(state)[-len(_rings(state)) :]
    pairs = zip(_rings(state), absent, strict=True)
    return [pool.free.astype(jnp.int32) - gone.astype(jnp.int32) for pool, gone in pairs]


def _queued(pool: PagePool) -> jax.Array:
    """int32[N+1] how often the used part of the ring names each page."""
    size = pool.ring.shape[0]
    place = jnp.arange(size, dtype=jnp.int32)
    offset = jnp.where(place < pool.head, place + (size - pool.head), place - pool.head)
    used = offset < pool.num_free + pool.num_pending
    inside = (pool.ring >= 0) & (pool.ring < pool.holders.shape[0])
    page = jnp.where(used & inside, pool.ring, pool.holders.shape[0])
    named = jnp.zeros(pool.holders.shape, jnp.int32).at[page].add(1, mode="drop")
    # A place that names no page at all must not go unseen.
    return named.at[PAD_PAGE].add(jnp.sum(used & ~inside, dtype=jnp.int32), mode="drop")


def _padding_page(state: AllocatorState) -> jax.Array:
    """Law 1: the padding page is never released, queued or mapped."""
    ok = ~state.full.free[PAD_PAGE] & ~state.swa.free[PAD_PAGE]
    for pool in _rings(state):
        ok = ok & (_queued(pool)[PAD_PAGE] == 0)
    return ok & (state.full_to_swa[PAD_PAGE] == UNMAPPED)


def _one_owner(state: AllocatorState) -> jax.Array:
    """Law 3: a page is in the ring once if it is released, not at all if it is held or absent."""
    ok = jnp.ones((), bool)
    for pool, released in zip(_rings(state), _released(state), strict=True):
        ok = ok & jnp.all(_queued(pool) == released)
    if state.config.pure_swa_pool:  # what its owner gave back has left the window too
        ok = ok & jnp.all(~state.full.free | state.swa.free)
    return ok


def _shares(state: AllocatorState) -> jax.Array:
    """Law 3 with counts: no count is below 0, and nobody holds an SWA side without its page."""
    ok = jnp.all(state.full.holders >= 0) & jnp.all(state.swa.holders >= 0)
    ok = ok & (state.full.holders[PAD_PAGE] == 1) & (state.swa.holders[PAD_PAGE] == 1)
    of_swa = holders_of(state.swa, jnp.maximum(state.full_to_swa, 0))
    has = state.full_to_swa != UNMAPPED
    return ok & jnp.all(~has | (of_swa <= state.full.holders))


def _conservation(state: AllocatorState) -> jax.Array:
    """Law 3: available + pending + held = size."""
    ok = jnp.ones((), bool)
    for pool, released in zip(_rings(state), _released(state), strict=True):
        ok = ok & (jnp.sum(released, dtype=jnp.int32) == pool.num_free + pool.num_pending)
    return ok


def _within_size(state: AllocatorState) -> jax.Array:
    """Law 4: counts stay between nothing and the size of the pool."""
    ok = jnp.ones((), bool)
    for pool in _rings(state):
        size = pool.ring.shape[0]
        ok = ok & (pool.num_free >= 0) & (pool.num_free <= size)
        ok = ok & (pool.num_pending >= 0) & (pool.num_pending <= size - pool.num_free)
        ok = ok & (pool.head >= 0) & (pool.head < size)
    return ok


def _whole_pages(state: AllocatorState) -> jax.Array:
    """Law 5: a mapping is an SWA page, so it covers every token of its full page or none."""
    pages = state.swa.holders.shape[0]
    return jnp.all((state.full_to_swa >= UNMAPPED) & (state.full_to_swa < pages))


def _group_queue(state: AllocatorState) -> jax.Array:
    """Law 6: what is pending is settled: held by nobody, mapped by nobody."""
    mapped = _mapped(state)
    ok = jnp.ones((), bool)
    for pool in _rings(state):
        size = pool.ring.shape[0]
        place = jnp.arange(size, dtype=jnp.int32)
        offset = jnp.where(place < pool.head, place + (size - pool.head), place - pool.head)
        waits = (offset >= pool.num_free) & (offset < pool.num_free + pool.num_pending)
        ok = ok & jnp.all(~waits | (look_up(pool.holders, jnp.maximum(pool.ring, 0), 1) == 0))
        if pool is state.swa:
            ok = ok & jnp.all(~waits | ~look_up(mapped, jnp.maximum(pool.ring, 0), True))
    return ok


def _mapped(state: AllocatorState) -> jax.Array:
    """bool[S+1] SWA pages that some full page maps to."""
    target = jnp.maximum(state.full_to_swa, 0)
    return (
        jnp.zeros(state.swa.holders.shape, bool)
        .at[target]
        .set(True, mode="drop")
        .at[0]
        .set(False, mode="drop")
    )


def _no_stale_mapping(state: AllocatorState) -> jax.Array:
    """Laws 7 and 8: only held full pages map, and only to held SWA pages."""
    has = state.full_to_swa != UNMAPPED
    target = holders_of(state.swa, jnp.maximum(state.full_to_swa, 0))
    if state.config.has_rings:  # a ring is its request's and no page's
        return ~jnp.any(has)
    return jnp.all(~has | ((state.full.holders > 0) & (target > 0)))


def _one_to_one(state: AllocatorState) -> jax.Array:
    """Law 8: no two full pages map to one SWA page (a pure SWA page maps to itself)."""
    has = state.full_to_swa != UNMAPPED
    target = jnp.where(has, jnp.maximum(state.full_to_swa, 0), state.swa.holders.shape[0])
    count = jnp.zeros(state.swa.holders.shape, jnp.int32).at[target].add(1, mode="drop")
    ok = jnp.all(count <= 1)
    if state.config.pure_swa_pool:
        own = jnp.arange(state.full_to_swa.shape[0], dtype=jnp.int32)
        live = ~state.swa.free & (own != PAD_PAGE)
        ok = ok & jnp.all(jnp.where(live, state.full_to_swa == own, ~has))
    return ok


def _int32_only(state: AllocatorState) -> jax.Array:
    """Law 9: int32 and bool throughout, whatever the x64 setting (known before it runs)."""
    leaves = jax.tree.leaves(state)
    return jnp.asarray(all(leaf.dtype in (jnp.int32, jnp.bool_) for leaf in leaves))


def _scratch_clean(state: AllocatorState) -> jax.Array:
    """Law 10: nothing of one call is left for the next to see."""
    return jnp.all(state.scratch == jnp.int32(NOBODY))


def _owners_agree(state: AllocatorState) -> jax.Array:
    """Laws 3 and 8 with owner tags: a page and its SWA side have one owner."""
    tags = state.owner_tags
    if tags is None:
        return jnp.ones((), bool)
    sides = look_up(tags.swa, jnp.maximum(state.full_to_swa, 0), 0)
    return jnp.all((state.full_to_swa == UNMAPPED) | (sides == tags.full))


LAWS: dict[str, Callable[[AllocatorState], jax.Array]] = {
    "padding_page": _padding_page,
    "one_owner": _one_owner,
    "shares": _shares,
    "conservation": _conservation,
    "within_size": _within_size,
    "whole_pages": _whole_pages,
    "group_queue": _group_queue,
    "no_stale_mapping": _no_stale_mapping,
    "one_to_one": _one_to_one,
    "int32_only": _int32_only,
    "scratch_clean": _scratch_clean,
}
OWNER_LAWS: dict[str, Callable[[AllocatorState], jax.Array]] = {"owners_agree": _owners_agree}


def step_invariants(
    before: AllocatorState, after: AllocatorState, grant: Grant
) -> dict[str, jax.Array]:
    """Checks the laws that only a grant shows: what it did, not where it got to.

    Args:
      before: the allocator before one grant.
      after: the allocator after it.
      grant: its answer.

    Returns:
      bool[] by name: all_or_nothing (law 2: a refusal leaves the state bit for bit, counters
      aside), padding_never_granted (1), granted_was_free (3: a granted slot lies in a page that
      was grantable, or held already), enough_said (a refusal for want of pages says how many).
    """
    same = same_but_counters(before, after)
    size = before.config.page_size
    page = page_of(grant.slots, size)
    taken = ~is_held(after.full, page)
    counted = jnp.any(after.faults != before.faults)
    if before.owner_tags is not None and after.owner_tags is not None:
        counted = counted | (after.owner_tags.foreign != before.owner_tags.foreign)
    short = (grant.full_short > 0) | (grant.swa_short > 0)
    return {
        "all_or_nothing": grant.ok | same,
        "padding_never_granted": jnp.all((grant.slots == 0) | (page != PAD_PAGE)),
        "granted_was_free": jnp.all((grant.slots == 0) | ~taken),
        "enough_said": jnp.where(grant.ok, ~short & ~counted, short | counted),
    }


def law_says(name: str) -> str:
    """What a law of `invariants` says."""
    return ((LAWS | OWNER_LAWS)[name].__doc__ or "").strip().rstrip(".")


def same_but_counters(before: AllocatorState, after: AllocatorState) -> jax.Array:
    """bool[] two states are the same bit for bit, but for what they count of misuse."""
    pairs = zip(
        *(jax.tree.leaves(_without_counters(state)) for state in (before, after)), strict=True
    )
    return jnp.all(jnp.stack([jnp.array_equal(old, new) for old, new in pairs]))


def _without_counters(state: AllocatorState) -> AllocatorState:
    zero, tags = jnp.zeros_like(state.faults), state.owner_tags
    if tags is not None:
        tags = replace(tags, foreign=jnp.zeros_like(tags.foreign))
    return replace(state, faults=zero, owner_tags=tags)


def check(state: AllocatorState) -> None:
    """Raises if a state breaks a law. On the host: waits for the device.

    Args:
      state: any state. One with leading batch axes (from `vmap`) is checked entry by entry.

    Raises:
      InvariantError: names each broken law, the pages concerned and the counts.
    """
    must_be_state(state)
    _check_structure(state)
    if state.full.head.ndim:
        batch = jax.device_get(state)  # however it is laid out over devices
        for index in range(batch.full.head.shape[0]):
            check(jax.tree.map(lambda leaf, at=index: leaf[at], batch))
        return
    broken = [name for name, holds in jax.device_get(invariants(state)).items() if not holds]
    if broken:
        laws = "; ".join(f"{name} ({law_says(name)}.)" for name in broken)
        raise InvariantError(f"broken: {laws}. {describe(state)}")


def _check_structure(state: AllocatorState) -> None:
    """Every array has the shape and type that its configuration gives it."""
    right = jax.eval_shape(lambda: init(state.config))
    batch = jnp.shape(state.full.head)
    wanted = jax.tree_util.tree_leaves_with_path(right)
    found = jax.tree.leaves(state)
    if jax.tree.structure(state) != jax.tree.structure(right):
        raise InvariantError(f"broken: the state has {len(found)} arrays, not {len(wanted)}")
    for (path, want), leaf in zip(wanted, found, strict=True):
        if jnp.shape(leaf) != batch + want.shape or leaf.dtype != want.dtype:
            name = jax.tree_util.keystr(path)
            raise InvariantError(
                f"broken: {name} is {leaf.dtype}{list(jnp.shape(leaf))}, its configuration makes "
                f"it {want.dtype}{list(batch + want.shape)}"
            )


def describe(state: AllocatorState, most: int = 8) -> str:
    """Counts of both pools and the pages that look wrong, for an error message."""
    host = jax.device_get(state)
    return "; ".join(_pool_lines(state, host) + _mapping_lines(host, most))


def _pool_lines(state: AllocatorState, host: AllocatorState) -> list[str]:
    lines, away = [], [np.asarray(absent) for absent in absent_pages(state)]
    for (name, pool), absent in zip((("full", host.full), ("swa", host.swa)), away, strict=True):
        size = pool.holders.shape[0] - 1
        released = int(np.sum(pool.free))
        text = f"{name}: {size} pages, {size - released} held, {released} released"
        text += f", {absent.sum()} absent" if absent.any() else ""
        if not (state.config.pure_swa_pool and name == "full"):
            text += f", {int(pool.num_free)} free + {int(pool.num_pending)} pending in the ring"
            queued = np.asarray(_queued(getattr(state, name)))
            wrong = np.flatnonzero(queued != np.asarray(pool.free).astype(np.int32) - absent)
            if wrong.size:
                text += f", ring and holders disagree on pages {wrong[:8].tolist()}"
        lines.append(text)
    return lines


def _mapping_lines(host: AllocatorState, most: int) -> list[str]:
    mapping = np.asarray(host.full_to_swa)
    pages = np.flatnonzero(mapping)
    targets = mapping[pages]
    known = (targets > 0) & (targets < host.swa.holders.shape[0])
    dead = np.asarray(host.full.free)[pages] | ~known
    dead |= np.asarray(host.swa.free)[np.where(known, targets, 0)]
    values, counts = np.unique(targets, return_counts=True)
    shared = np.isin(targets, values[counts > 1])
    lines = [f"{pages.size} full pages mapped"]
    for text, wrong in (("stale", dead), ("shared", shared)):
        if wrong.any():
            some = zip(pages[wrong][:most].tolist(), targets[wrong][:most].tolist(), strict=True)
            lines.append(f"{text} mappings " + ", ".join(f"{f}->{s}" for f, s in some))
    return lines
