"""Servers simulated by counts: against the plain scheduler, and counted by hand."""

import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import Sizes
from plan_loads import (
    REQUESTS,
    ROWS,
    SERVERS,
    expected,
    limits_of,
    load_of,
    random_requests,
    run,
    shape_of,
)

from swa_jax.planner import SimShape, deal, simulate, stack_limits
from swa_jax.planner.limits import cost_of, holds, most_of_both, one_budget
from swa_jax.wide import wide_add, wide_value, wide_zero

# (sizes, chunk, longest request); those of a group run in one program, side by side.
GROUPS = {
    "sliding": [
        (Sizes(56, 32, 4, 8), 12, 40),
        (Sizes(40, 12, 4, 8), 16, 40),
        (Sizes(40, 40, 4, 8, pure=True), 12, 60),
        (Sizes(48, 28, 4, 8), 9, 44),
    ],
    "chunked": [
        (Sizes(56, 20, 4, 6, chunked=True), 10, 40),
        (Sizes(44, 12, 4, 6, chunked=True), 20, 40),
    ],
}


def assert_same(figures, server, sizes, chunk, requests):
    wanted = expected(sizes, chunk, requests)
    assert {name: int(getattr(figures, name)[server]) for name in wanted} == wanted


@pytest.mark.parametrize("name", GROUPS)
@settings(max_examples=8)
@given(seed=st.integers(0, 2**32 - 1))
def test_agrees_with_the_plain_scheduler(name, seed):
    source, group = random.Random(seed), GROUPS[name]
    cases = [group[number % len(group)] for number in range(SERVERS)]
    servers = [random_requests(source, longest) for _, _, longest in cases]
    limits = [limits_of(sizes, chunk) for sizes, chunk, _ in cases]
    figures = run(group[0][0], limits, servers)
    for server, (sizes, chunk, _) in enumerate(cases):
        assert_same(figures, server, sizes, chunk, servers[server])


def test_more_is_admitted_than_can_stay():
    cases = GROUPS["sliding"]
    busy = [(1 + number % 5, 40) for number in range(REQUESTS)]
    figures = run(cases[0][0], [limits_of(s, chunk) for s, chunk, _ in cases], [busy] * len(cases))
    for server, (sizes, chunk, _) in enumerate(cases):
        assert_same(figures, server, sizes, chunk, busy)
    assert figures.retracted[0] > 1


def test_a_request_by_hand():
    """18 tokens of prompt, 20 in the end; pages of 4, a window of 8, chunks of 12."""
    sizes, chunk, _ = GROUPS["sliding"][0]
    figures = run(sizes, [limits_of(sizes, chunk)], [[(18, 20)]])
    # After the steps: 12, 18, 19, 20 tokens, then it leaves.
    assert figures.of(0)["steps"] == 5
    assert figures.sum_full_pages[0] == 3 + 5 + 5 + 5
    # At 12 tokens page 0 (tokens 0 to 3) is dead; at 18 pages 0 and 1, at 19 the same.
    assert figures.sum_swa_pages[0] == 3 + (5 - 1) + (5 - 2) + (5 - 2)
    # The step that writes 12 to 17 reads from 12 - 8 on, that of token 18 from 18 - 8 on.
    assert figures.sum_swa_tokens[0] == 12 + (18 - 4) + (19 - 10) + (20 - 11)
    assert figures.peak_pair[0].tolist() == [5, 4]
    assert figures.peak_running[0] == figures.completed[0] == 1


def test_chunks_by_hand():
    """Chunks of 6 tokens in pages of 4: page 1 holds tokens of two chunks, so it stays longer."""
    sizes, chunk, _ = GROUPS["chunked"][0]
    figures = run(sizes, [limits_of(sizes, chunk)], [[(10, 13)]])
    # After the steps: 10, 11, 12, 13 tokens. At 10 and 11 the chunk began at 6: page 0 is dead.
    # At 12 the next chunk begins: pages 0, 1 and 2 are dead.
    assert figures.sum_full_pages[0] == 3 + 3 + 3 + 4
    assert figures.sum_swa_pages[0] == 3 + (3 - 1) + (3 - 1) + (4 - 3)
    assert figures.sum_swa_tokens[0] == 10 + (11 - 6) + (12 - 6) + (13 - 12)


def test_a_retraction_by_hand():
    """Two requests of 4 tokens that grow to 9, and 5 full pages of 4 for both."""
    sizes = Sizes(20, 32, 4, 8)
    figures = run(sizes, [limits_of(sizes, 12)], [[(4, 9), (4, 9)]])
    # 4 + 4, then 5 + 5 in 2 pages each, to 8 + 8. For 9 + 9 one page is left: the newer goes, with
    # 8 tokens; the older is done. Then the newer prefills 8, takes the ninth, and is done.
    assert figures.retracted[0] == 1
    assert figures.recomputed[0] == 8
    assert figures.steps[0] == 1 + 4 + 1 + 1 + 1 + 1
    assert figures.peak_full[0] == 4


def test_nobody_is_waited_for_longer_than_it_takes():
    """Three of 4 tokens that come in steps 0, 0 and 50, each done at once."""
    sizes, chunk, _ = GROUPS["sliding"][0]
    load = load_of([[(4, 4)] * 3] * SERVERS, arrivals=[0, 0, 50])
    figures = simulate(shape_of(sizes), stack_limits([limits_of(sizes, chunk)] * SERVERS), load)
    assert figures.peak_running[0] == 2
    # Both are in, then out; the clock goes to 50, where the third is in, then out.
    assert (figures.steps[0], figures.clock[0]) == (4, 52)
    assert figures.longest_wait[0] == 0


def test_waiting_is_counted_from_the_arrival():
    sizes, chunk, _ = GROUPS["sliding"][0]
    load = load_of([[(4, 8)] * (ROWS + 1)] * SERVERS, arrivals=[0] * ROWS + [2])
    figures = simulate(shape_of(sizes), stack_limits([limits_of(sizes, chunk)] * SERVERS), load)
    # 16 tokens in chunks of 12: the first three have 8 tokens after steps 0 to 4 and leave in the
    # next one, number 5, where the last comes in.
    assert figures.longest_wait[0] == 5 - 2


def test_what_has_not_ended_can_be_left():
    sizes, chunk, _ = GROUPS["sliding"][0]
    load = load_of([[(4, 8)] * 3] * SERVERS)
    every = stack_limits([limits_of(sizes, chunk)] * SERVERS)
    seen = []
    figures = simulate(
        shape_of(sizes), every, load, lambda *so_far: seen.append(so_far), lambda *_: True
    )
    assert seen == [(3 * SERVERS, 3 * SERVERS)]
    assert figures.completed.tolist() == [3] * SERVERS


def test_one_budget_is_counted_in_groups():
    limits = stack_limits([one_budget(10, (3, 2), (1, 1), 8, (0.5, 0.5))])
    limits = jax.tree.map(lambda leaf: leaf[0], limits)

    @jax.jit
    def look(full, swa, more):
        room = most_of_both(limits, full, swa, jnp.int32(9), True)
        return cost_of(limits, full, swa), holds(limits, full, swa + more), room

    cost, fits, room = look(jnp.int32(4), jnp.int32(3), jnp.int32(3))
    # 4 full pages are two groups; beside 4 and 3 two more of each are 2 groups and 5.
    assert (int(cost), bool(fits), int(room)) == (2 * 2 + 3, True, 2)
    assert not bool(look(jnp.int32(4), jnp.int32(3), jnp.int32(4))[1])
    with pytest.raises(ValueError, match="at most 2\\^30"):
        one_budget(2**31, (1, 1), (1, 1), 8, (0.5, 0.5))


def test_sums_pass_int32():
    add, total = jax.jit(wide_add), wide_zero()
    for _ in range(5):
        total = add(total, jnp.int32(2**31 - 2**20))
    assert int(wide_value(np.asarray(total))) == 5 * (2**31 - 2**20)


def test_requests_are_dealt():
    prompts, finals = np.array([5, 1, 1, 1, 7]), np.array([9, 2, 3, 1, 8])
    load, rank = deal(prompts, finals, np.arange(5), 2, "round-robin")
    assert rank.tolist() == [0, 1, 0, 1, 0]
    assert load.prompt_lens.tolist() == [[5, 1, 7], [1, 1, 0]]
    assert load.arrivals.tolist() == [[0, 2, 4], [1, 3, 0]]
    assert load.count.tolist() == [3, 2]
    load, rank = deal(prompts, finals, np.arange(5), 2, "least-loaded")
    assert rank.tolist() == [0, 1, 1, 1, 1]
    with pytest.raises(ValueError, match="round-robin, least-loaded, got 'best'"):
        deal(prompts, finals, np.arange(5), 2, "best")
    with pytest.raises(ValueError, match="at least 1, got 0"):
        deal(prompts, finals, np.arange(5), 0, "round-robin")


def test_a_shape_is_a_rule():
    shape = SimShape(4, 16, 127)
    assert (shape.rule.page_size, shape.rule.sliding_window) == (16, 127)
    assert shape.token_rule.page_size == 1
