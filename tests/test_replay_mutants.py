"""Replays with one known fault put in: the checks of the other replay tests must notice it.

Every program here ends by itself after a fixed number of steps, however wrong it is.
"""

from dataclasses import replace

import jax.numpy as jnp
import pytest
from oracle import Sizes
from replay_checks import check_steps, check_world
from replay_oracle import Scheduler
from replay_record import History, Load, Recorder, Shape, trace_of

from swa_jax.models import ModelConfig
from swa_jax.replay import admit, grow, release
from swa_jax.replay import step as steps
from swa_jax.replay.driver import ReplaySettings, run_replay

SHAPE = Shape(Sizes(64, 32, 4, 8), 4, 3, 6, 40)
LONG = Load([30, 28, 20, 25], [10, 12, 8, 3])
STEPS = 200


def run_both(load: Load) -> tuple[History, Scheduler]:
    """A replay compiled now, with the patches in force, and what it should have been."""
    recorder = Recorder(SHAPE, STEPS)
    return recorder(load), recorder.expect(load).run(STEPS)


def check_rows(history: History) -> None:
    for index in range(len(history)):
        check_world(SHAPE, history.at(index))


def test_nothing_is_noticed_where_nothing_is_wrong():
    history, plain = run_both(LONG)
    assert history.ended
    assert history.lengths == plain.lengths
    check_rows(history)


def test_eviction_left_out(monkeypatch):
    monkeypatch.setattr(steps, "evict", lambda config, world: world)
    # Alone, so that admission has no say. 39 tokens are more than the 32 of the SWA pool.
    history, plain = run_both(Load([39, 1, 1, 1], [1, 1, 1, 1], frozenset({1, 2, 3})))
    assert not history.ended
    assert history.lengths != plain.lengths
    assert int(history.last.tally.peak_swa) == SHAPE.sizes.swa_pages > plain.figures.peak_swa


def test_promised_pages_are_given_away_again(monkeypatch):
    zero = jnp.zeros((), jnp.int32)
    monkeypatch.setattr(admit, "promised_pages", lambda config, rows: (zero, zero))
    history, plain = run_both(LONG)
    assert history.ended
    check_rows(history)  # it loses nothing, it only wastes work
    assert int(history.last.tally.retracted) > plain.figures.retracted
    assert int(history.last.tally.recomputed) > plain.figures.recomputed


@pytest.mark.long
def test_a_long_prompt_is_charged_whole(monkeypatch):
    """Public reports B50, B51: what stands behind such a prompt waits for nothing."""
    monkeypatch.setattr(
        admit, "most_swa_pages", lambda config, tokens: (tokens + jnp.int32(3)) // jnp.int32(4)
    )
    load = Load([36, 8, 8, 8], [1, 1, 1, 1])
    history, plain = run_both(load)
    assert history.ended
    assert [len(rows) for rows in plain.lengths[:3]] == [2, 2, 2]
    assert [len(rows) for rows in history.lengths[:3]] == [1, 1, 1]


@pytest.mark.long
def test_a_page_forgotten_at_the_end(monkeypatch):
    held_slots = release.held_slots
    monkeypatch.setattr(release, "held_slots", lambda *args: held_slots(*args).at[0].set(0))
    history, _ = run_both(Load([9, 9, 9, 9], [3, 3, 3, 3]))
    with pytest.raises(AssertionError, match="pages held by nobody"):
        check_rows(history)
    assert int(history.last.allocator.full.num_free) == SHAPE.sizes.full_pages - 4


@pytest.mark.long
def test_a_row_that_ends_keeps_its_frontier(monkeypatch):
    """The next request in that row would start with pages it believes to be gone."""
    vacate = release.vacate

    def keeps(config, world, row, *owned):
        after = vacate(config, world, row, *owned)
        return replace(after, rows=replace(after.rows, evicted=world.rows.evicted))

    monkeypatch.setattr(release, "vacate", keeps)
    history, _ = run_both(LONG)
    with pytest.raises(AssertionError):
        check_rows(history)


@pytest.mark.long
def test_younger_requests_overtake(monkeypatch):
    share = grow._share

    def youngest_first(config, rows, pages):
        turned = jnp.where(rows.request >= 0, jnp.int32(1000) - rows.request, jnp.int32(-1))
        return share(config, replace(rows, request=turned), pages)

    monkeypatch.setattr(grow, "_share", youngest_first)
    history, plain = run_both(Load([10, 10, 10, 10], [2, 2, 2, 2]))
    assert history.ended
    check_rows(history)
    assert history.lengths != plain.lengths


@pytest.mark.long
def test_the_oldest_is_sent_back(monkeypatch):
    def oldest_row(rows):
        return jnp.argmin(jnp.where(rows.request >= 0, rows.request, jnp.int32(1000)))

    monkeypatch.setattr(steps, "newest_row", oldest_row)
    load = Load([1, 2, 3, 4], [39, 38, 37, 36])
    history, plain = run_both(load)
    assert plain.figures.retracted > 0
    with pytest.raises(AssertionError):
        check_steps(load, history)


def test_a_grant_that_was_not_counted_on_ends_the_run(monkeypatch):
    """It would be refused again in each step: the driver must not wait for the end."""
    demand = steps.decode_demand

    def blind(config, world):
        return replace(demand(config, world), fits=jnp.ones((), bool))

    def still_running(sample):
        raise AssertionError(f"a run without progress goes on: {sample}")

    monkeypatch.setattr(steps, "decode_demand", blind)
    trace = trace_of([1, 2, 3, 4], [39, 38, 37, 36])
    model = ModelConfig("made up", 2, 1, 1, kv_heads=1, head_dim=1, sliding_window=8)
    settings = ReplaySettings(max_running=3, chunk_tokens=5, slice_steps=STEPS)
    with pytest.raises(RuntimeError, match="grants were refused"):
        run_replay(trace, model, SHAPE.config.pool, settings, still_running)
