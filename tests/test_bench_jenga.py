"""The comparison of ways to page KV: what is held, what is live, and blocks by the page."""

import dataclasses
import random
from collections import Counter

import numpy as np
import pytest
from plan_loads import ROWS, SERVERS, load_of, random_requests
from replays import made_up_trace

from benchmarks.block_placement import Blocks, blocks_in_use
from benchmarks.jenga import WAYS, held_bytes, load_bytes, units_of, wasted_of_requests, way_of
from swa_jax import PoolConfig
from swa_jax.models import get_model
from swa_jax.planner import SimShape, simulate, stack_limits
from swa_jax.planner.limits import PLENTY, one_budget
from swa_jax.planner.splits import PageBytes

GEMMA = get_model("gemma-3-27b")  # 10 full and 52 SWA layers, of 8 KiB a token each
PAGE, WINDOW, CHUNK = 4, 8, 12
SMALL = dataclasses.replace(GEMMA, sliding_window=WINDOW + 1)


@pytest.fixture(scope="module")
def layout():
    found = PoolConfig.unified(2**30, GEMMA, 16).unified_layout
    assert found is not None
    assert (found.full_pages, found.swa_pages) == (5, 1)
    return found


@pytest.fixture(scope="module")
def served():
    """Servers with all the memory they want, and some with a small budget; their requests."""
    source = random.Random(7)
    servers = [random_requests(source, 60) for _ in range(SERVERS)]
    budgets = [PLENTY] * 4 + [40] * 4
    limits = [one_budget(budget, (5, 1), (1, 1), CHUNK, (0.5, 0.5)) for budget in budgets]
    shape = SimShape(ROWS, PAGE, WINDOW, one_budget=True)
    return simulate(shape, stack_limits(limits), load_of(servers)), servers


def trace_of(requests):
    prompts, finals = zip(*requests, strict=True)
    outputs = np.array(finals) - np.array(prompts) + 1
    return dataclasses.replace(made_up_trace(prompts), output_lens=outputs.astype(np.int32))


def test_pages_placed_one_by_one_are_as_many_as_those_counted(served, layout):
    figures, servers = served
    for server in range(4):
        placed = blocks_in_use(trace_of(servers[server]), SMALL, layout, PAGE, ROWS, CHUNK)
        assert placed.peak_least == figures.peak_cost[server]
        assert placed.peak >= placed.peak_least
        assert placed.scatter >= 1.0


def test_live_is_least_and_a_budget_is_kept(served):
    figures, servers = served
    assert figures.completed.tolist() == [len(requests) for requests in servers]
    assert (figures.peak_cost[4:] <= 40).all()
    assert (figures.sum_full_tokens <= figures.sum_full_pages * PAGE).all()
    assert (figures.sum_swa_tokens <= figures.sum_swa_pages * PAGE).all()
    assert (figures.sum_swa_pages <= figures.sum_full_pages).all()
    # A block of 5 full pages, or of 1 SWA page: never fewer than what the pages fill.
    assert (5 * figures.sum_cost >= figures.sum_full_pages + 5 * figures.sum_swa_pages).all()


def test_bytes_are_those_of_each_way(served):
    figures, _ = served
    block, place = 52 * 8192 * PAGE, 0
    sums = {name: int(value[place]) for name, value in vars(figures).items() if "sum_" in name}
    full, swa = GEMMA.full_bytes_per_token, GEMMA.swa_bytes_per_token
    held = {name: held_bytes(name, sums, GEMMA, block) for name in WAYS}
    assert held["live"] == sums["sum_full_tokens"] * full + sums["sum_swa_tokens"] * swa
    assert held["unified"] == sums["sum_cost"] * block
    loads: dict[str, int] = dict.fromkeys(WAYS, 1)
    ways = {name: way_of(name, figures, place, GEMMA, 2**40, block, loads) for name in WAYS}
    assert ways["live"].wasted == 0
    assert 0 < ways["unified"].wasted < 1
    assert ways["unified"].steps == figures.steps[place]


def test_the_same_load_takes_its_peaks(served):
    figures, _ = served
    page = PageBytes(100, 520)
    loads = load_bytes((figures, figures), page, 520, 10)
    full, swa = int(figures.peak_full[0]), int(figures.peak_swa[0])
    assert loads["uniform"] == full * 620
    assert loads["two pools, plan_split"] == full * 100 + swa * 520
    assert loads["unified"] == int(figures.peak_cost[0]) * 520
    assert loads["live"] == int(figures.peak_cost[0]) * 10


def test_units_measure_both_kinds():
    unit, full, swa, budget = units_of(GEMMA, 2**30)
    assert (unit, full, swa) == (16384, 5, 26)
    assert budget == 2**30 // 16384


def test_waste_of_requests_by_hand():
    # 52 of 62 layers keep 1,023 of 2,046 tokens, and all of 1,000.
    trace = made_up_trace((2046, 1000))
    assert wasted_of_requests(trace, GEMMA) == pytest.approx(52 / 62 * 0.5 / 2)
    # Half the layers, half of the context: the 25 % that are published for Gemma 2.
    assert wasted_of_requests(made_up_trace((8192,)), get_model("gemma-2-9b")) == pytest.approx(
        0.25, abs=1e-4
    )
    # 36 of 48 layers: 8,192 of 12,288 tokens lie in the chunk before.
    scout = get_model("llama-4-scout")
    share = wasted_of_requests(made_up_trace((12_288,)), scout)
    assert share == pytest.approx(0.75 * 8192 / 12_288)


def test_a_block_is_free_when_all_who_share_it_have_gone():
    blocks, one, other = Blocks(3), Counter[int](), Counter[int]()
    blocks.take(one, 2)
    blocks.take(other, 2)
    assert (blocks.in_use, one, other) == (2, {1: 2}, {1: 1, 2: 1})
    blocks.give(one)
    assert blocks.in_use == 2
    blocks.take(one, 3)  # the first block to its end, then the other
    assert (blocks.in_use, one) == (2, {1: 2, 2: 1})
    blocks.give(other)
    blocks.give(one)
    assert blocks.in_use == 0
