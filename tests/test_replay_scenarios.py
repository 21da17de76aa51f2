"""Public reports on admission, long prompts and retraction, as the replay has to handle them.

`a/b` is what is free after a step: tokens of the full pool / tokens of the SWA pool.
"""

from dataclasses import replace

import jax.numpy as jnp
import pytest
from oracle import Sizes
from replay_checks import check_world
from replay_record import History, Load, Shape, recorder

import swa_jax as swa
from swa_jax.replay import world as worlds
from swa_jax.replay.admit import admit, promised_pages
from swa_jax.replay.grow import decode_demand, grow, plan_growth
from swa_jax.window import most_swa_pages


def free_after_steps(shape: Shape, history: History) -> list[tuple[int, int]]:
    size = shape.sizes.page_size
    pools = history.worlds.allocator
    counts = zip(pools.full.num_free, pools.swa.num_free, strict=True)
    return [(int(full) * size, int(swa) * size) for full, swa in counts][: len(history)]


def check_all(shape: Shape, history: History) -> None:
    assert history.ended
    for index in range(len(history)):
        check_world(shape, history.at(index))


def test_b49_pool_below_a_window_and_a_page_is_refused():
    with pytest.raises(ValueError, match="swa_tokens=8 cannot hold one window of 4 tokens"):
        swa.PoolConfig(128, 8, page_size=8, sliding_window=4)


def test_b49_the_smallest_pool_decodes_for_long():
    shape = Shape(Sizes(128, 16, 8, 4), 2, 2, 8, 101)
    history = recorder(shape, 240)(Load([1, 1], [101, 101]))
    check_all(shape, history)
    assert int(history.last.tally.completed) == 2
    assert int(history.last.tally.peak_swa) * 8 == 16


def test_b50_a_prompt_longer_than_the_swa_pool_is_served():
    shape = Shape(Sizes(64, 16, 4, 4), 1, 1, 8, 40)
    history = recorder(shape, 20)(Load([40], [1]))
    check_all(shape, history)
    assert history.lengths == [{0: 8}, {0: 16}, {0: 24}, {0: 32}, {0: 40}, {}]
    assert int(history.last.tally.peak_swa) * 4 == 12
    # The eviction that would lead from 24/4 to 24/12 belongs to the step that ends the request.
    held = [(56, 8), (48, 4), (40, 4), (32, 4), (24, 4)]
    assert free_after_steps(shape, history) == [*held, (64, 16)]
    assert free_after_steps(shape, recorder(shape, 20)(Load([40], [2])))[4:6] == [(24, 4), (20, 8)]


def test_b51_sizing_and_admission_use_one_bound():
    """Two long prompts at once: each is charged a window and a page, never its length."""
    shape = Shape(Sizes(256, 24, 4, 8), 2, 2, 8, 100)
    one = recorder(shape, 120)(Load([100, 1], [1, 1], frozenset({1})))
    check_all(shape, one)
    assert int(one.last.tally.peak_swa) * 4 == 16
    assert int(most_swa_pages(shape.config.pool, jnp.int32(100))) * 4 == 12
    assert one.lengths[:-1] == [{0: min(8 * step, 100)} for step in range(1, 14)]
    both = recorder(shape, 120)(Load([100, 100], [1, 1]))
    check_all(shape, both)
    assert int(both.last.tally.completed) == 2


def test_b52_windows_are_emptied_before_anyone_is_retracted():
    shape = Shape(Sizes(32, 16, 4, 4), 2, 2, 16, 14)
    history = recorder(shape, 20)(Load([12, 4], [2, 1]))
    check_all(shape, history)
    assert history.lengths[:2] == [{0: 12, 1: 4}, {0: 13}]
    assert free_after_steps(shape, history)[0] == (16, 0)
    # The second request ends in this step; with it there, 12/4 less its own page would be left.
    assert free_after_steps(shape, history)[1] == (16, 8)
    assert int(history.last.tally.retracted) == 0
    stays = recorder(shape, 20)(Load([12, 4], [2, 2]))
    check_all(shape, stays)
    assert stays.lengths[1] == {0: 13, 1: 5}
    assert free_after_steps(shape, stays)[1] == (8, 0)
    assert int(stays.last.tally.retracted) == 0


def small_world(
    pool: swa.PoolConfig, prompts: list[int], rows: int = 2, chunk: int = 16
) -> tuple[worlds.LoopConfig, worlds.World]:
    config = worlds.LoopConfig(pool, rows, chunk, 16)
    lens = jnp.asarray(prompts, jnp.int32)
    return config, worlds.new_world(config, worlds.Load(lens, lens), jnp.ones(len(prompts), bool))


def extend(config: worlds.LoopConfig, world: worlds.World, tokens: list[int]) -> worlds.World:
    return grow(config, world, jnp.asarray(tokens, jnp.int32))


@pytest.mark.parametrize("prompts", [[5, 5], [5]])
def test_b47_the_budget_is_counted_in_pages(prompts):
    """Two prompts of 5 tokens are 4 pages of 4, not 10 of 12 tokens; either alone fits."""
    config, world = small_world(swa.PoolConfig(64, 12, page_size=4), prompts)
    assert admit(config, world).rows.request.tolist() == [0, -1]


def test_b47_a_pool_filled_to_the_last_page():
    config, world = small_world(swa.PoolConfig(64, 20, page_size=4), [20, 1])
    world = extend(config, admit(config, world), [7, 0])
    plan = plan_growth(config, world, decode_demand(config, world))
    assert plan.tolist() == [13, 0]
    world = extend(config, world, [13, 0])
    assert int(world.allocator.swa.num_free) == 0
    assert int(world.tally.refused) == 0
    # No budget left: nothing is admitted, and who waits is left as it was.
    after = admit(config, world)
    assert after.rows.request.tolist() == [0, -1]
    assert after.waiting.tolist() == [False, True]
    assert after.progress.tolist() == [20, 1]


def test_b48_what_a_request_holds_is_not_charged_again():
    """8 tokens of its window are live already: one page more is promised, not a window more."""
    config, world = small_world(swa.PoolConfig(64, 16, page_size=4, sliding_window=8), [12, 4])
    world = extend(config, admit(config, world), [8, 0])
    assert [int(pages) for pages in promised_pages(config, world.rows)] == [1, 1]
    config, world = small_world(swa.PoolConfig(64, 20, page_size=4, sliding_window=8), [12, 4])
    rows = replace(world.rows, request=jnp.int32([0, -1]), prefill=jnp.int32([12, 0]))
    world = replace(world, rows=rows, waiting=jnp.asarray([False, True]))
    # 5 pages, 2 held, 1 promised, 1 to grow into: the request of one page comes in.
    assert admit(config, extend(config, world, [8, 0])).rows.request.tolist() == [0, 1]


def test_many_long_prompts_share_one_large_chunk():
    """4,097 prompts of 2^20 tokens: the tokens before the last ones pass int32."""
    rows, tokens = 4097, 2**20
    config = worlds.LoopConfig(swa.PoolConfig.pure_swa(2**24, 256, 4095), rows, tokens, 1)
    world = worlds.new_world(
        config, worlds.Load(jnp.zeros(1, jnp.int32), jnp.zeros(1, jnp.int32)), jnp.zeros(1, bool)
    )
    number = jnp.arange(rows, dtype=jnp.int32)
    prefill = jnp.full(rows, tokens, jnp.int32)
    world = replace(world, rows=replace(world.rows, request=number, prefill=prefill))
    plan = plan_growth(config, world, decode_demand(config, world))
    assert plan.tolist() == [tokens] + [0] * (rows - 1)
