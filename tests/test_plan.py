"""From a trace and chips to a split: what is tried, what is chosen, and what the replay says."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
from replays import made_up_trace

from swa_jax.models import get_model
from swa_jax.planner import Figures, PlanSettings, planning
from swa_jax.planner.confirm import compare_with_replay, pool_of, rank_trace, slowest_rank
from swa_jax.planner.planning import chip_part, plan_split
from swa_jax.planner.splits import (
    Outcome,
    PageBytes,
    Split,
    around,
    best_of,
    bounds,
    is_enough,
    split_with,
    spread,
)

MIB = 2**20
MODEL = get_model("gpt-oss-20b")  # 24 KiB of a token in either kind of layer, a window of 128


def outcome(swa_pages, steps, retracted, *, finished=True, fullest=1.0):
    return Outcome(
        Split(100, swa_pages), finished, steps, retracted, 10 * retracted, 2.0, 3, fullest
    )


@pytest.fixture(scope="module")
def plan():
    """Two chips with a model each, and a request that is too long for them."""
    trace = made_up_trace((400, 90, 300, 7, 500, 60, 800, 4000))
    outputs = np.array([30, 60, 9, 80, 1, 40, 20, 9], np.int32)
    trace = dataclasses.replace(trace, output_lens=outputs)
    settings = PlanSettings(
        45 * MIB, chips=2, dp=2, page_size=16, max_running=3, chunk_tokens=256, candidates=4
    )
    return plan_split(trace, MODEL, settings)


def test_the_simulation_comes_to_what_the_replay_does(plan):
    pairs = compare_with_replay(plan, slowest_rank(plan))
    assert len(pairs) == 7
    assert all(one == other for one, other in pairs.values()), pairs


def test_a_plan_says_what_was_tried_and_served(plan):
    assert plan.requests == 8
    assert plan.rejected == {"longer than any full pool": 1}
    assert plan.ranks.completed.tolist() == [4, 3]
    assert 4 < len(plan.outcomes) <= 8
    assert plan.best in plan.outcomes
    assert plan.split == plan.best.split
    tried = [o.split.swa_pages for o in plan.outcomes]
    assert tried == sorted(set(tried))
    assert plan.rule_outcome is None or plan.rule_outcome.split == plan.rule
    # What the two ranks came to is what was compared: none was left out.
    assert plan.sampled == 2
    assert int(plan.ranks.steps.sum()) == plan.best.steps
    assert (plan.ranks.peak_full <= plan.split.full_pages).all()
    assert (plan.ranks.peak_swa <= plan.split.swa_pages).all()


def test_the_pools_fill_the_memory_and_hold_the_longest_request(plan):
    pool = pool_of(plan)
    assert plan.page.total(plan.split) <= 45 * MIB
    assert plan.page.total(plan.split) > 45 * MIB - plan.page.full
    assert pool.full_pages >= -(-(800 + 19) // 16)
    assert (pool.full_pages, pool.swa_pages) == (plan.split.full_pages, plan.split.swa_pages)


def test_requests_keep_their_order_on_a_rank(plan):
    assert plan.accepted.tolist() == list(range(7))
    assert rank_trace(plan, 1).prompt_lens.tolist() == [90, 7, 60]


def test_chips_share_heads():
    four = chip_part(MODEL, 4)
    assert four.full_bytes_per_token * 4 == MODEL.full_bytes_per_token
    assert four.swa_bytes_per_token * 4 == MODEL.swa_bytes_per_token
    assert chip_part(MODEL, 16).full_bytes_per_token * 8 == MODEL.full_bytes_per_token
    mixed = chip_part(get_model("gemma-4-31b"), 8)  # 4 heads in full layers, 16 in the others
    assert (mixed.kv_heads, mixed.swa_kv_heads) == (1, 2)


def test_splits_are_between_one_window_and_the_longest_request():
    page = PageBytes.of(MODEL, 16)
    low, high = bounds(MODEL, 64 * MIB, 16, 30)
    assert low == 9  # a window of 128 and the page being filled
    assert split_with(64 * MIB, page, 16, high).full_pages >= 30
    assert page.total(split_with(64 * MIB, page, 16, low)) <= 64 * MIB
    # Never more SWA pages than full ones.
    assert bounds(MODEL, 64 * MIB, 16, 1)[1] == 64 * MIB // (page.full + page.swa) - 1
    assert spread(9, 9, 5) == [9]
    assert spread(1, 100, 3) == [1, 10, 100]
    assert around([1, 10, 100], 10, 2) == [5, 22]
    assert all(1 <= value <= 10 for value in around([1, 10, 100], 1, 4))


def test_the_best_is_of_the_fast_ones_that_which_retracts_least():
    fast, calm = outcome(10, 1000, 5), outcome(20, 1015, 1)
    slow = outcome(30, 1100, 0)
    given_up = outcome(40, 1, 0, finished=False)
    roomy = outcome(50, 1015, 1, fullest=0.5)
    assert best_of([fast, calm, slow, given_up]) == calm
    assert best_of([fast, calm, roomy]) == roomy
    assert best_of([slow, given_up]) == slow


def test_slow_splits_are_given_up():
    done = np.array([True, True, False, True])
    assert not is_enough(done, np.array([50, 50, 60, 60]), 2)
    assert is_enough(done, np.array([50, 50, 70, 60]), 2)
    assert not is_enough(np.zeros(4, bool), np.array([9, 9, 9, 9]), 2)


def test_copies_begin_at_different_places():
    trace = made_up_trace((10, 20, 30, 40))
    which, at = planning._copied(trace, np.arange(4), 2, by_time=False)
    assert sorted(which.tolist()) == [0, 0, 1, 1, 2, 2, 3, 3]
    assert which.tolist() != [0, 0, 1, 1, 2, 2, 3, 3]
    assert (np.diff(at) >= 0).all()
    same, _ = planning._copied(trace, np.array([0, 2, 3]), 1, by_time=False)
    assert same.tolist() == [0, 2, 3]


def test_arrivals_are_those_of_the_trace_or_of_a_rate():
    settings = PlanSettings(MIB, step_ms=40.0)
    assert planning._arrivals(np.array([0.0, 40.0, 41.0]), settings).tolist() == [0, 1, 2]
    rate = dataclasses.replace(settings, rate=10.0)
    assert planning._arrivals(np.zeros(3), rate).tolist() == [0, 3, 5]
    assert planning._arrivals(np.array([5.0, 9.0]), PlanSettings(MIB)).tolist() == [0, 0]
    with pytest.raises(ValueError, match="longer --step-ms"):
        planning._arrivals(np.array([1e12]), settings)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"chips": 6, "dp": 4}, "--chips must be a multiple of --dp.*try --chips 4"),
        ({"rate": 2.0}, "--rate 2 needs --step-ms"),
        ({"weights_bytes": 2 * MIB, "chips": 2}, "--weights leave nothing for KV: 1 MiB on each"),
        ({"dp": 0}, "dp must be at least 1, got 0"),
        ({"candidates": 2}, "candidates must be at least 3, got 2"),
    ],
)
def test_settings_that_cannot_work(wrong, said):
    with pytest.raises(ValueError, match=said):
        PlanSettings(MIB, **wrong)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"hbm_bytes": MIB}, "--hbm 1 MiB a chip: 1048576 bytes .* cannot hold one window of 128"),
        ({"max_context": 3}, "the shortest comes to 100 tokens.*--max-context"),
        ({"copies": 2**23}, "fewer --copies"),
    ],
)
def test_loads_that_cannot_be_served(wrong, said):
    settings = dataclasses.replace(PlanSettings(45 * MIB, max_running=3), **wrong)
    with pytest.raises(ValueError, match=said):
        plan_split(made_up_trace(), MODEL, settings)


def test_weights_are_taken_from_every_chip():
    settings = PlanSettings(10 * MIB, chips=4, dp=2, weights_bytes=7 * MIB)
    assert (settings.tp, settings.chip_bytes) == (2, 10 * MIB - 7 * MIB // 2)


def test_figures_of_ranks_are_summed():
    names = Figures.__dataclass_fields__
    figures = Figures(**{name: np.array([3, 4]) for name in names})
    summed = planning.outcome_of(Split(8, 5), figures, np.array([3, 4]), pure=False)
    assert summed == Outcome(Split(8, 5), True, 7, 7, 7, 1.0, 4, 0.8)
    assert not planning.outcome_of(Split(8, 5), figures, np.array([3, 5]), pure=False).finished
    assert jnp.asarray(figures.mean("running")).tolist() == [1.0, 1.0]
