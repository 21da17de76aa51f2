"""Each way to get sharing wrong is put in, and a check must notice it.

Run without `jit`: a function compiled before a patch would not see it.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import pytest
import test_share as checks
import test_share_cache as cached
from mutants import wrap

import swa_jax as swa
from swa_jax import plan_decode, plan_free, window
from swa_jax.paging import page_of

# `swa_jax.share` and others are the functions; these are their modules.
sharing, free, evicting, inserting = (
    importlib.import_module(f"swa_jax.{name}")
    for name in ("share", "free", "prefix_cache.evict", "prefix_cache.insert")
)
Patch = pytest.MonkeyPatch


# ---- bugs -----------------------------------------------------------------------------------


def each_slot_is_a_holder(patch: Patch) -> None:
    """A page counts once for each of its slots that a share names."""

    def share(state, slots, live, by):
        pages = page_of(jnp.maximum(slots, 0), state.config.page_size)
        of_swa = state.full_to_swa[pages]
        return replace(
            state,
            full=replace(state.full, holders=state.full.holders.at[pages].add(1)),
            swa=replace(state.swa, holders=state.swa.holders.at[of_swa].add(1)),
        )

    patch.setattr(sharing, "_share", share)


def the_first_to_free_releases(patch: Patch) -> None:
    def outer(plan, state, named):
        got = plan(state, named)
        zero = jnp.zeros_like(got.full_left)
        return replace(got, full_left=zero, swa_left=zero)

    wrap(patch, (free,), "plan_free", outer)


def one_who_leaves_unmaps(patch: Patch) -> None:
    def outer(plan, state, named, **how):
        return replace(plan(state, named, **how), unmap=named.pages)

    wrap(patch, (free, window), "plan_free_swa", outer)


def a_free_always_takes_an_swa_share(patch: Patch) -> None:
    """Also where the one who frees has left the window already, and another has not."""

    def outer(plan, state, named):
        got = plan(state, named)
        of_swa, holders = plan_free.swa_side(state, named)
        pages = jnp.where(holders > 0, of_swa, jnp.int32(2**30))
        left = jnp.maximum(holders - 1, 0)
        unmap = jnp.where((holders == 1) & (of_swa > 0), named.pages, jnp.int32(2**30))
        return replace(got, swa_pages=pages, swa_left=left, unmap=unmap)

    wrap(patch, (free,), "plan_free", outer)


def rows_of_a_window_call_count_once(patch: Patch) -> None:
    wrap(
        patch,
        (window,),
        "plan_free_swa",
        lambda plan, state, named, **_: plan(state, named, unmapped_is_fault=False),
    )


def all_rows_copy(patch: Patch) -> None:
    """The last of the holders copies, too, and the old page is nobody's."""
    patch.setattr(sharing, "_rows_before", lambda page, marks: jnp.zeros_like(page))


def copies_keep_the_old_share(patch: Patch) -> None:
    patch.setattr(sharing, "_leave", lambda state, named, moved: state)


def a_refused_copy_gives_the_share_up(patch: Patch) -> None:
    def outer(leave, state, named, moved):
        return leave(state, named, (named.pages < 2**30) & (jnp.arange(moved.shape[0]) == 0))

    wrap(patch, (sharing,), "_leave", outer)


def decode_writes_into_a_shared_page(patch: Patch) -> None:
    def outer(look, *args):
        last = look(*args)
        return replace(last, shared=jnp.zeros_like(last.shared))

    wrap(patch, (plan_decode,), "look_at_last_page", outer)


def swa_is_shared_behind_the_window(patch: Patch) -> None:
    wrap(
        patch,
        (sharing,),
        "_share",
        lambda share, state, slots, live, by: share(state, slots, None, by),
    )


def evict_takes_swa_that_others_hold(patch: Patch) -> None:
    def outer(evict, cache, state, *amounts):
        def alone(pool):
            return replace(pool, holders=jnp.minimum(pool.holders, 1))

        one = replace(state, full=alone(state.full), swa=alone(state.swa))
        return evict(cache, one, *amounts)

    wrap(patch, (evicting,), "_evict", outer)


def a_tombstone_takes_the_swa_page_of_others(patch: Patch) -> None:
    def outer(read, *args):
        own = read(*args)
        return replace(own, alone=own.usable)

    wrap(patch, (inserting,), "_read_own", outer)


def insert_goes_on_past_a_shared_page(patch: Patch) -> None:
    """The caller is led onto a tombstone in the middle of its window."""
    patch.setattr(inserting, "_end_before_shared", lambda state, chain, keys, own: (chain, keys))


def a_node_lives_by_the_share_of_others(patch: Patch) -> None:
    patch.setattr(inserting, "_take_shares", lambda state, chain, own, pages: state)


def the_second_insert_keeps_its_share(patch: Patch) -> None:
    def outer(read, cache, state, slots, keys, owned_from, by):
        return read(cache, state, slots, keys, None, by)

    wrap(patch, (inserting,), "_read_own", outer)


# ---- and who notices them -------------------------------------------------------------------


def _decode_before_a_copy() -> None:
    family = checks.siblings(checks.PAGES, 6, 2)
    last = family.owners[0].slots[-1]
    lens, last_loc = checks.rows4([7], [last])
    _, grant = swa.alloc_decode(family.state, lens, last_loc, checks.on(1))
    assert not grant.ok


def _with(check: Callable[..., None], *args: Any) -> Callable[[], None]:
    return lambda: check(*args)


LAST_WINDOW = checks.test_an_swa_page_stays_for_the_last_window_and_goes_with_it
WHO_LEFT = checks.test_who_left_its_window_does_not_take_the_swa_side_of_who_did_not
MOVES_NOT = cached.test_the_swa_page_of_a_copy_that_others_hold_does_not_move
OWN_SHARE = cached.test_a_node_that_others_keep_alive_has_a_share_of_its_own
GIVES_UP = cached.test_the_second_fork_that_inserts_gives_its_share_up

NOTICED: dict[Callable[[Patch], None], Callable[[], Any]] = {
    each_slot_is_a_holder: checks.test_one_call_is_one_holder_whatever_it_names,
    the_first_to_free_releases: WHO_LEFT,
    one_who_leaves_unmaps: _with(LAST_WINDOW, 0),
    a_free_always_takes_an_swa_share: WHO_LEFT,
    rows_of_a_window_call_count_once: checks.test_rows_of_one_call_are_holders_of_their_own,
    all_rows_copy: checks.test_of_n_holders_that_write_the_last_one_keeps_the_page,
    copies_keep_the_old_share: checks.test_a_shorter_fork_and_the_longer_one_part_at_their_page,
    a_refused_copy_gives_the_share_up: _with(checks.test_copies_are_granted_all_or_none, "swa"),
    decode_writes_into_a_shared_page: _decode_before_a_copy,
    swa_is_shared_behind_the_window: checks.test_a_fork_of_a_fork_behind_a_window_comes_back_too,
    evict_takes_swa_that_others_hold: cached.test_evicting_swa_passes_over_pages_that_others_hold,
    a_tombstone_takes_the_swa_page_of_others: MOVES_NOT,
    insert_goes_on_past_a_shared_page: MOVES_NOT,
    a_node_lives_by_the_share_of_others: OWN_SHARE,
    the_second_insert_keeps_its_share: GIVES_UP,
}


@pytest.mark.parametrize("bug", NOTICED, ids=lambda bug: bug.__name__)
def test_the_bug_is_noticed(bug, monkeypatch):
    bug(monkeypatch)
    with jax.disable_jit(), pytest.raises(AssertionError):
        NOTICED[bug]()
