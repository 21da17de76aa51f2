"""Each way in which two sides can go wrong put back on purpose: a check must see it.

The checks themselves pass unharmed in their own files.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib

import jax.numpy as jnp
import pytest
import test_disagg_calls as calls
from disagg_pair import traced_anew

from swa_jax.disagg.inbox import NO_RESERVATION
from swa_jax.state import PAD_SLOT

# The calls that each module's functions are traced into.
CALLS = {
    "preallocate": ("preallocate",),
    "pack": ("pack",),
    "receive": ("receive",),
    "commit": ("commit",),
    "abort": ("abort", "abort_older"),
}


def _module(name):
    """The module itself: the package gives some functions the names of theirs."""
    return importlib.import_module(f"swa_jax.disagg.{name}")


@pytest.fixture
def damage(monkeypatch):
    """Replaces a function of a module, whose calls are traced anew for this test."""
    with contextlib.ExitStack() as stack:

        def put(of: str, name: str, mutant, where: str | None = None) -> None:
            module = _module(of)
            for inner in [f"_{call}" for call in CALLS[of]]:
                monkeypatch.setattr(module, inner, getattr(module, inner).__wrapped__)
            target = importlib.import_module(where) if where else module
            monkeypatch.setattr(target, name, mutant)
            stack.enter_context(traced_anew(*CALLS[of]))

        yield put


def _fails(check, *args) -> None:
    with pytest.raises(AssertionError):
        check(*args)


def test_a_tail_that_is_sized_without_the_insert_boundary_is_seen(damage):
    damage("preallocate", "insert_boundary", lambda cache, length: length)
    _fails(calls.test_what_was_committed_can_be_matched)


def test_swa_of_dead_tokens_that_is_asked_for_is_seen(damage):
    damage("preallocate", "frontier", lambda pool, length, kept=None: jnp.zeros_like(length))
    _fails(calls.test_b54_the_tail_begins_at_the_page_of_the_window)


def test_swa_that_nobody_asked_for_and_that_is_sent_is_seen(damage):
    right = _module("pack")._tokens

    def tokens(start, length, at, capacity):
        return right(jnp.minimum(start, 0), length, at, capacity)

    damage("pack", "_tokens", tokens)
    _fails(calls.test_nothing_is_packed_that_was_not_asked_for, (0, 11))


def test_a_refusal_that_changes_something_is_seen(damage):
    damage("preallocate", "only_if", lambda wanted, change, carry: change(carry))
    _fails(calls.test_a_reservation_does_not_evict_for_nothing)


def test_an_abort_that_frees_the_prefix_is_seen(damage):
    right = _module("abort").own_pages

    def own(inbox):
        return right(dataclasses.replace(inbox, prefix_len=jnp.zeros_like(inbox.prefix_len)))

    damage("abort", "own_pages", own)
    _fails(calls.test_an_abort_leaves_the_prefix_to_the_tree)


@pytest.mark.parametrize("name", ["unlock", "unlock_batch"])
def test_an_abort_that_forgets_the_lock_is_seen(damage, name):
    damage("abort", name, lambda cache, receipt: cache)
    _fails(calls.test_an_abort_leaves_the_prefix_to_the_tree)


def test_a_commit_with_pieces_missing_is_seen(damage):
    damage("commit", "has_arrived", lambda inbox: inbox.serial != NO_RESERVATION)
    _fails(calls.test_a_commit_waits_for_every_piece)


@pytest.mark.parametrize("module", ["abort", "commit", "receive"])
def test_a_stale_ticket_that_works_is_seen(damage, module):
    def standing(inbox, ticket):
        return inbox.serial[ticket.place] != NO_RESERVATION, ticket.place

    damage(module, "standing", standing)
    _fails(calls.test_a_spent_ticket_does_nothing)


def test_a_piece_that_is_taken_before_its_turn_is_seen(damage):
    part = _module("receive")._Part

    class Part(part):
        def fits(self, length):
            return (self.count >= 0) & (self.begin >= self.start)

    damage("receive", "_Part", Part)
    _fails(calls.test_a_piece_before_its_turn_is_refused)


def test_a_piece_that_is_written_twice_is_seen(damage):
    part = _module("receive")._Part

    class Part(part):
        def _is_new(self, length):
            places = jnp.arange(self.rows[0].shape[0], dtype=jnp.int32)
            return self.begin + places, places < self.count

    damage("receive", "_Part", Part)
    _fails(calls.test_a_piece_that_came_before_is_not_written_again)


def test_a_pack_from_pages_that_nobody_holds_is_seen(damage):
    damage("pack", "_held_slots", lambda state, slots: slots)
    _fails(calls.test_a_row_that_is_gone_cannot_be_packed)


def test_a_page_of_the_tree_that_becomes_the_requests_own_is_seen(damage):
    damage("commit", "standing", lambda cache, receipt: jnp.int32(0), "swa_jax.prefix_cache.own")
    _fails(calls.test_a_page_that_is_matched_by_its_successor_stays_the_trees)


def test_last_pages_that_are_not_freed_are_seen(damage):
    def free(state, slots):
        from swa_jax.free import free as right

        last = jnp.max(jnp.where(slots > PAD_SLOT, jnp.arange(slots.shape[0], dtype=jnp.int32), 0))
        return right(state, slots.at[last].set(PAD_SLOT, mode="drop"))

    damage("abort", "free", free)
    _fails(calls.test_old_reservations_end_and_young_ones_stay)


def test_the_harness_is_sound(damage):
    """With nothing replaced, the checks pass also while functions are traced anew."""
    damage("commit", "standing", _module("inbox").standing)
    calls.test_what_was_committed_can_be_matched()
