"""Public reports on admission, retraction, speculation and work in flight, as the loop has them.

`a/b` is what is free: tokens of the full pool / tokens of the SWA pool. The steps are the loop's
own pieces, called one by one.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ledger_model import Ledger
from serving_checks import assert_only_the_cache_holds

import swa_jax as swa
from swa_jax import prefix_cache, serving
from swa_jax.serving import NGramDraft, ServingConfig
from swa_jax.serving.admit import promise_fits
from swa_jax.serving.queue import DONE, RUNNING, WAITING
from swa_jax.serving.room import is_stuck, newest_row, retract
from swa_jax.serving.world import running

jitted = functools.partial(jax.jit, static_argnums=(0, 1))
STEP = {
    "decode": jitted(serving.decode_step),
    "prefill": jitted(serving.prefill_step),
    "step": jitted(serving.step),
}


class Table:
    """A loop on the table: its pieces, one at a time."""

    def __init__(self, full, of_swa, page, window, *, draft=None, cache=False, **sizes):
        self.model = Ledger(window + 1)
        pool = swa.PoolConfig(full, of_swa, page, window)
        sizes = {"max_context": full, "max_running": 2, "chunk_tokens": 8, **sizes}
        self.config = ServingConfig(pool, prefix_cache=cache, draft=draft, **sizes)
        self.world = serving.new_world(self.model, self.config, 4)

    def ask(self, *prompts, new: int | list[int] = 8):
        requests = serving.make_requests(prompts, max_new_tokens=new)
        self.world, places = serving.submit(self.config, self.world, requests)
        return np.asarray(places).tolist()

    def do(self, *names):
        for name in names:
            if name in STEP:
                self.world = STEP[name](self.model, self.config, None, None, self.world)
            else:
                self.world = getattr(serving, name)(self.config, self.world)
        return self.free

    def finish(self, place):
        """Steps until a request is done; 60 are far more than any here needs."""
        for _ in range(60):
            if self.status[place] == DONE:
                return
            self.do("step")
        raise AssertionError(f"request {place} is not done")

    @property
    def free(self):
        state = self.world.allocator
        return int(swa.full_available_size(state)), int(swa.swa_available_size(state))

    @property
    def status(self):
        return np.asarray(self.world.queue.status).tolist()

    @property
    def lengths(self):
        rows = self.world.rows
        return np.asarray(rows.length)[np.asarray(running(rows))].tolist()

    def known(self, place=0):
        return int(self.world.queue.known[place])


def prompt(length, first=1):
    return [(first + place * 7) % 97 for place in range(length)]


def test_b06_a_decode_batch_that_does_not_fit_is_settled_before_it_is_dispatched():
    table = Table(32, 12, 4, 4)
    table.ask(prompt(4), prompt(4, 2))
    table.do("admit", "prefill", "admit", "prefill", "decode")
    assert (table.lengths, table.free) == ([4, 4], (24, 4))
    # Both would need a new page and there is one: the newer request waits, nobody fails.
    assert bool(is_stuck(table.config, table.world))
    assert table.do("make_room", "decode") == (24, 4)
    assert table.status[:2] == [RUNNING, WAITING]
    assert (table.lengths, int(table.world.stats.refused)) == ([5], 0)


@pytest.mark.parametrize("rollback", ["page", "snapshot"])
def test_b14_b15_what_drafts_reserve_comes_back_to_the_last_page(rollback):
    table = Table(32, 32, 4, 15, draft=NGramDraft(3, 1), cache=True, rollback=rollback)
    table.ask([5, 5, 5, 5, 5, 5, 5], new=9)
    table.do("admit", "prefill", "finish")
    assert (table.lengths, table.free) == ([6], (24, 24))
    for _ in range(20):
        before, length = table.free[0], table.lengths[0]
        table.do("decode")
        grown = table.lengths[0]
        assert table.known() == grown + 1
        # No page past the committed length stays reserved.
        assert before - table.free[0] == (-(-grown // 4) - -(-length // 4)) * 4
        if int(table.world.queue.reason[0]):
            break
    assert table.known() == 16
    assert table.do("finish") == (20, 20)  # 15 committed: three whole pages are the tree's
    assert table.world.cache is not None
    assert int(prefix_cache.full_evictable_size(table.world.cache)) == 12
    assert_only_the_cache_holds(table.world.allocator, table.world.cache)


def test_b14_without_a_cache_everything_comes_back():
    table = Table(32, 32, 4, 15, draft=NGramDraft(3, 1))
    table.ask([5, 5, 5, 5, 5, 5, 5], new=9)
    table.do("admit", "prefill")
    while not int(table.world.queue.reason[0]):
        table.do("decode")
    assert table.do("finish") == (32, 32)


def test_b17_a_retracted_request_leaves_nothing_behind_and_resumes():
    table = Table(32, 32, 4, 15)
    table.ask(prompt(10), new=6)
    table.do("admit", "prefill", "prefill", "decode", "decode", "decode")
    assert (table.lengths, table.free) == ([12], (20, 20))
    table.world = retract(table.config, table.world, newest_row(table.world))
    assert (table.status[0], table.free) == (WAITING, (32, 32))
    assert table.known() == 13  # what it has generated it keeps
    table.do("admit", "prefill", "prefill", "decode", "decode", "decode", "finish")
    assert (table.status[0], table.free) == (DONE, (32, 32))
    tokens = np.asarray(table.world.queue.tokens[0])[10:16].tolist()
    assert tokens == table.model.continuation(prompt(10), 6)


def test_b18_a_row_is_wide_enough_for_drafts_past_the_longest_request():
    table = Table(32, 32, 4, 15, draft=NGramDraft(8, 1), max_context=16)
    assert table.config.table_pages * 4 >= 16 + 8
    table.ask([5] * 13, new=3)
    table.do("admit", "prefill", "prefill")
    assert table.lengths == [12]
    table.do("decode")
    while not int(table.world.queue.reason[0]):
        table.do("decode")
    assert table.do("finish") == (32, 32)  # never 28


def test_b21_pages_stay_fenced_while_a_step_is_under_way():
    table = Table(12, 12, 4, 3, max_context=8, max_running=3)
    table.ask(prompt(4), prompt(4, 2), new=1)
    table.do("admit", "prefill", "prefill", "decode")
    assert (table.lengths, table.free) == ([4, 4], (4, 4))
    # Both are over, but the step after this one was dispatched with them.
    table.world = serving.raise_fence(table.world)
    assert table.do("finish") == (4, 4)
    assert (table.status[:2], table.lengths) == ([DONE, DONE], [])  # their rows are gone at once
    _, grant = swa.alloc(table.world.allocator, 8, capacity=8)
    assert not bool(grant.ok)
    table.world = serving.lift_fence(table.world)
    assert table.free == (12, 12)
    _, grant = swa.alloc(table.world.allocator, 8, capacity=8)
    assert bool(grant.ok)


def test_b47_a_chunk_that_is_admitted_can_be_allocated():
    # Two requests of 5 tokens want 16 tokens of an SWA pool of 12: one waits.
    table = Table(64, 12, 4, 8)
    table.ask(prompt(5), prompt(5, 2))
    table.do("admit")
    assert table.status[:2] == [RUNNING, WAITING]
    # In four full pages there is no room for two and two, and for the step of the one that runs.
    table = Table(16, 64, 4, 8)
    table.ask(prompt(5), prompt(5, 2))
    table.do("admit")
    assert table.status[:2] == [RUNNING, WAITING]
    # From 7 to 20 tokens in a pool of 20 are exactly three pages.
    table = Table(64, 20, 4, 16, chunk_tokens=13)
    table.ask(prompt(21))
    table.do("admit")
    first = dataclasses.replace(table.config, chunk_tokens=7)
    table.world = STEP["prefill"](table.model, first, None, None, table.world)
    assert table.lengths == [7]
    assert table.do("prefill") == (44, 0)
    assert table.lengths == [20]


def test_b48_a_cached_prefix_pays_for_its_window():
    table = Table(64, 16, 4, 8, cache=True)
    table.ask(prompt(9), new=1)
    table.finish(0)
    assert table.free == (56, 8)
    table.ask([*prompt(9), 5], new=3)
    fits = promise_fits(table.config, table.world, jnp.int32(10), jnp.int32(8))
    assert bool(fits)
    table.do("admit")
    assert table.lengths == [8]


def test_b50_b51_a_long_prompt_is_charged_a_window_and_a_page():
    table = Table(64, 16, 4, 4, max_context=64)
    table.ask(prompt(41), new=1)
    table.do("admit")
    assert table.lengths == [0]
    for chunk in range(1, 6):
        table.do("leave", "make_room", "prefill")
        assert table.lengths == [8 * chunk]
    assert int(table.world.stats.retracted) == 0
    assert table.do("leave") == (24, 12)


def test_b52_windows_are_left_before_anybody_is_retracted():
    table = Table(32, 16, 4, 4, max_running=2)
    table.ask(prompt(13), prompt(4, 2), new=4)
    table.do("admit", "prefill", "prefill", "prefill")
    held = table.free
    table.do("leave", "make_room", "decode")
    assert int(table.world.stats.retracted) == 0
    assert len(table.lengths) == 2
    assert table.free[1] >= held[1]


def test_b46_both_shortages_reach_the_cache():
    table = Table(32, 12, 4, 4, cache=True, max_context=32)
    table.ask(prompt(13), new=1)
    table.finish(0)
    full, of_swa = table.free
    assert full >= 16
    assert of_swa < 12
    table.ask(prompt(9, 3), new=1)
    table.finish(1)
    assert int(table.world.stats.evicted_swa) > 0
    assert int(table.world.stats.evicted_full) == 0
    assert_only_the_cache_holds(table.world.allocator, table.world.cache)


def test_the_oldest_makes_progress_while_newer_ones_come_and_go():
    table = Table(24, 20, 4, 4, max_running=2, max_context=24)
    table.ask(prompt(8), prompt(9, 2), prompt(10, 3), new=12)
    newest_done = []
    for _ in range(120):
        table.do("step")
        newest_done += [p for p in range(3) if table.status[p] == DONE and p not in newest_done]
        if len(newest_done) == 3:
            break
    assert newest_done == [0, 1, 2]
    assert int(table.world.stats.retracted) > 0
    assert_only_the_cache_holds(table.world.allocator, None)


@pytest.mark.parametrize("page", [1, 4])
def test_a_newer_request_does_not_live_on_the_pages_that_the_oldest_waits_for(page):
    # Found by an adversary: the newer row decoded on what its own window gave back, step by step.
    window = 4 * page
    table = Table(
        200 * page, 9 * page, page, window, max_context=180, chunk_tokens=page, max_running=2
    )
    table.ask([7, 8, 9] * 20, [5], new=[1, 100])
    reached = 0
    for _ in range(70 // page + 4):
        table.do("step")
        if table.status[0] == DONE:
            break
        assert table.lengths[0] > reached
        reached = table.lengths[0]
    assert table.status[0] == DONE


class Pairs(NGramDraft):
    """Drafts whose KV depends on the next token, as a draft head's does."""

    is_bigram = True


@pytest.mark.parametrize(("page", "window"), [(8, 8), (8, 9), (1, 4)])
def test_pages_cached_by_pairs_need_one_page_more(page, window):
    # Found by an adversary: at the allocator's own minimum the loop never ended.
    least = swa.PoolConfig(64, 64, page, window).min_swa_pages * page
    with pytest.raises(ValueError, match=f"need at least {least + page} tokens"):
        Table(64, least, page, window, draft=Pairs(2, 1), cache=True)
    Table(64, least, page, window, draft=Pairs(2, 1))  # without a cache nothing waits for a pair


def test_pages_cached_by_pairs_serve_at_their_minimum():
    table = Table(64, 24, 8, 8, draft=Pairs(2, 1), cache=True, max_context=48, max_running=1)
    table.ask([3, 5], new=40)
    for _ in range(60):
        table.do("step")
        if table.status[0] == DONE:
            break
    assert (table.status[0], table.known()) == (DONE, 42)
    assert int(table.world.stats.refused) == 0
    assert_only_the_cache_holds(table.world.allocator, table.world.cache)


def test_behind_a_fence_who_does_not_fit_waits_and_nobody_is_retracted():
    # Found by an adversary: eviction and retraction free nothing behind a fence, so the loop went
    # on until one row was left.
    table = Table(32, 12, 4, 4, max_running=3)
    table.ask(prompt(4), prompt(4, 2), new=9)
    table.do("admit", "prefill", "admit", "prefill", "decode")
    assert (table.lengths, table.free) == ([4, 4], (24, 4))
    table.world = serving.raise_fence(table.world)
    table.do("make_room", "decode")
    assert (table.lengths, table.free) == ([5, 4], (20, 0))  # the older one has the page
    table.do("make_room", "decode")
    stats = table.world.stats
    assert (int(stats.retracted), int(stats.refused)) == (0, 0)
    assert table.lengths == [6, 4]
    table.world = serving.lift_fence(table.world)
    for _ in range(60):
        table.do("step")
    assert table.status[:2] == [DONE, DONE]
    assert_only_the_cache_holds(table.world.allocator, None)
