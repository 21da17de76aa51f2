"""Serving out of one budget: right tokens, and more at once than two fixed pools could hold."""

import functools
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
from pair import _QUICKLY
from served_models import DenseGreedy, params_of, tiny
from serving_checks import assert_only_the_cache_holds

import swa_jax as swa
from swa_jax import serving
from swa_jax.serving import ServingConfig, make_requests
from swa_jax.serving.queue import RUNNING, can_be_served

MODEL = tiny(6, layer_kinds="SFS")
PAGE, BLOCKS, UNIT = 2, 32, 128
POOL = swa.PoolConfig.unified((2 * BLOCKS + 2) * UNIT, MODEL, PAGE)
LAYOUT = POOL.unified_layout
CONFIG = ServingConfig(POOL, 72, max_running=8, chunk_tokens=8, prefill_rows=2)
LONG, SHORT = (36, 12), (4, 6)  # prompt and new tokens


@functools.partial(jax.jit, donate_argnums=0, compiler_options=_QUICKLY)
def _run_steps(world, params, steps):
    return serving.run_steps(MODEL, params, CONFIG, world, steps)


def run_steps(world, steps):
    return _run_steps(world, params_of(MODEL), jnp.int32(steps))


def new_world():
    return serving.new_world(MODEL, CONFIG, 48)


def submit(world, prompts, new):
    requests = make_requests(prompts, max_new_tokens=new, prompt_columns=CONFIG.max_context)
    return serving.submit(CONFIG, world, requests)


def finish(world, most=600):
    for _ in range(most // 50):
        world = run_steps(world, 50)
        if not serving.unfinished(world):
            break
    assert not serving.unfinished(world)
    return world


def assert_right(world, places, prompts, new):
    dense = DenseGreedy(MODEL, params_of(MODEL), CONFIG.max_context)
    tokens, lengths = serving.outputs(CONFIG, world, places)
    for row, length, prompt in zip(np.asarray(tokens), lengths, prompts, strict=True):
        assert row[: int(length)].tolist() == dense(prompt, new)
    assert_only_the_cache_holds(world.allocator, world.cache)
    assert not int(world.stats.refused)


@functools.cache
def served_in_turn():
    """Long prompts, many short ones, and long ones again: the stats of each load by itself."""
    rng, world, found = np.random.default_rng(5), new_world(), []
    for count, (length, new) in ((8, LONG), (48, SHORT), (4, LONG)):
        prompts = rng.integers(0, 61, (count, length))
        prompts[1::4, : length // 2] = prompts[::4, : length // 2]  # some begin like others
        prompts = prompts.tolist()
        zero = {name: jnp.int32(0) for name in ("peak_full", "peak_swa", "peak_running")}
        world = replace(world, stats=replace(world.stats, **zero))
        world, places = submit(world, prompts, new)
        world = finish(world)
        assert_right(world, places, prompts, new)
        found.append({name: int(value) for name, value in vars(world.stats).items()})
        world = serving.release(world, places)
    return found


def test_more_is_held_than_any_fixed_split_of_the_bytes_could_hold():
    """Tokens are those of a dense pass, while the split moves and the cache gives way."""
    long, short, again = served_in_turn()
    assert LAYOUT is not None
    assert (LAYOUT.blocks, LAYOUT.full_pages, LAYOUT.swa_pages) == (BLOCKS, 2, 1)
    full, of_swa = long["peak_full"] * LAYOUT.full_units, short["peak_swa"] * LAYOUT.swa_units
    assert full + of_swa > 1.3 * LAYOUT.units
    assert long["peak_running"] >= 2
    assert short["peak_running"] >= 5
    assert again["peak_full"] > 40
    assert min(again["cached"], again["evicted_full"], again["evicted_swa"]) > 0


def test_the_split_moves_before_the_cache_gives_way():
    world = new_world()
    prompts = np.random.default_rng(1).integers(0, 61, (4, 4)).tolist()
    assert world.allocator.block_is_full is not None
    blocks = int(world.allocator.block_is_full.sum())
    world, _ = submit(world, prompts[3:], 2)  # stays in the cache: something could be evicted
    world = finish(world)
    world, places = submit(world, prompts[:3], 14)
    world = finish(world)
    assert_right(world, places, prompts[:3], 14)
    assert LAYOUT is not None
    assert int(world.stats.peak_full) > blocks * LAYOUT.full_pages
    assert int(world.stats.evicted_full) == int(world.stats.evicted_swa) == 0


def test_a_request_that_lies_in_every_block_begins_again():
    """It runs alone, holds one page of every block, and none is left for its window."""
    world, pages = new_world(), 2 * BLOCKS
    prompt = np.random.default_rng(3).integers(0, 61, BLOCKS * PAGE + 1).tolist()
    world, places = submit(world, [prompt], 6)
    everything = swa.rebalance(world.allocator, pages, 0)
    zeros = jnp.zeros(1, jnp.int32)
    state, grant = swa.alloc_extend_swa_tail(
        everything, zeros, zeros + pages * PAGE, zeros - 1, zeros, capacity=pages * PAGE
    )
    assert grant.ok
    firsts = jnp.sort(grant.slots[::PAGE])
    mine, other = firsts[::2], firsts[1:2]
    state = swa.free(state, firsts[3::2])
    rows, queue = world.rows, world.queue
    rows = replace(
        rows,
        request=rows.request.at[0].set(places[0]),
        length=rows.length.at[0].set(BLOCKS * PAGE),
        evicted=rows.evicted.at[0].set(BLOCKS * PAGE),
        last_loc=rows.last_loc.at[0].set(mine[-1] + PAGE - 1),
        table=rows.table.at[0, :BLOCKS].set(mine),
    )
    queue = replace(queue, status=queue.status.at[places[0]].set(RUNNING))
    world = replace(world, allocator=state, rows=rows, queue=queue)

    # A page is somebody else's, who may give it back: the request waits for that.
    world = run_steps(world, 3)
    assert int(world.stats.retracted) == int(world.stats.generated) == 0
    world = replace(world, allocator=swa.free(world.allocator, other))
    world = finish(world)
    assert int(world.stats.retracted) == 1
    assert_right(world, places, [prompt], 6)


def test_requests_that_never_fit_are_known_at_once():
    config = replace(CONFIG, max_context=400)
    assert config.most_request_pages == (BLOCKS - 4) * 2
    lens = jnp.array([100, 102], jnp.int32)
    assert can_be_served(config, lens, lens + 13).tolist() == [True, False]
