"""The loop's scheduling, with a model whose KV is the text, so that any wrong page shows."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ledger_model import Ledger
from serving_checks import assert_only_the_cache_holds, figures, generated, reasons

import swa_jax as swa
from swa_jax.counts import held_pages
from swa_jax.serving import (
    NGramDraft,
    ServingConfig,
    cancel,
    finish_reasons,
    make_requests,
    new_world,
    outputs,
    release,
    run_steps,
    serve,
    submit,
)

WINDOW, PAGE, PLACES = 6, 4, 12
MODEL = Ledger(WINDOW)
POOL = swa.PoolConfig(72, 24, PAGE, WINDOW - 1)
CONFIG = ServingConfig(POOL, 40, max_running=3, chunk_tokens=8, prefill_rows=2, max_new_tokens=12)


def changed(**fields):
    """The loop with other fields."""
    return dataclasses.replace(CONFIG, **fields)


ONE_ROW = changed(max_running=1, prefill_rows=1)
CONFIGS = {
    "cache": CONFIG,
    "ngram": CONFIG.with_draft(NGramDraft(3, 1)),
    "snapshot": ServingConfig(
        **{**vars(CONFIG.with_draft(NGramDraft(3, 1))), "rollback": "snapshot"}
    ),
}


def padded(prompts, places=PLACES, *, max_new_tokens, **wanted):
    """Always as many requests, since each number of them is a program: the last want nothing."""
    more = places - len(prompts)

    def column(value, rest):
        return [*value, *[rest] * more] if isinstance(value, list) else value

    new = max_new_tokens if isinstance(max_new_tokens, list) else [max_new_tokens] * len(prompts)
    wanted = {
        name: column(value, type(value[0])(0) if isinstance(value, list) else 0)
        for name, value in wanted.items()
    }
    return make_requests(
        [*prompts, *[[0]] * more], prompt_columns=40, max_new_tokens=column(new, 0), **wanted
    )


def texts_of(served, prompts):
    return generated(served)[: len(prompts)]


def expected(prompts, new, model=MODEL):
    return [model.continuation(p, n) for p, n in zip(prompts, new, strict=True)]


prompt_lists = st.lists(
    st.lists(st.integers(0, 4), min_size=1, max_size=28), min_size=PLACES, max_size=PLACES
)
news = st.lists(st.integers(1, 12), min_size=PLACES, max_size=PLACES)


@pytest.mark.parametrize("name", CONFIGS)
@settings(max_examples=25)
@given(prompts=prompt_lists, new=news)
def test_every_request_gets_its_own_text(name, prompts, new):
    served = serve(MODEL, None, padded(prompts, max_new_tokens=new), CONFIGS[name])
    assert texts_of(served, prompts) == expected(prompts, new)
    assert_only_the_cache_holds(served.state, served.cache)
    seen = figures(served)
    assert seen["refused"] == 0
    assert seen["finished"] == PLACES


def same_prompts(length, count=PLACES):
    rng = np.random.default_rng(length)
    return [rng.integers(0, 97, length).tolist() for _ in range(count)]


def test_memory_for_one_serves_many_and_the_oldest_are_never_sent_back():
    prompts = same_prompts(26)
    served = serve(MODEL, None, padded(prompts, max_new_tokens=12), CONFIG)
    assert texts_of(served, prompts) == expected(prompts, [12] * PLACES)
    assert_only_the_cache_holds(served.state, served.cache)


def test_a_prompt_longer_than_the_swa_pool_runs():  # public report B50
    prompt = same_prompts(36, 1)[0]
    assert len(prompt) > POOL.swa_tokens
    served = serve(MODEL, None, padded([prompt], max_new_tokens=4), CONFIG)
    assert texts_of(served, [prompt]) == expected([prompt], [4])
    assert figures(served)["peak_swa"] <= POOL.swa_pages


def test_what_can_never_fit_is_rejected_and_harms_nobody():
    prompts = [[1] * 39, [2, 3], [4] * 30]
    served = serve(MODEL, None, padded(prompts, max_new_tokens=[2, 5, 12]), CONFIG)
    assert reasons(served)[:3] == ["rejected", "length", "rejected"]
    assert texts_of(served, prompts) == [[], MODEL.continuation([2, 3], 5), []]
    assert_only_the_cache_holds(served.state, served.cache)


def test_no_tokens_wanted_is_no_work():
    served = serve(MODEL, None, padded([[1, 2]], max_new_tokens=0), CONFIG)
    assert set(reasons(served)) == {"length"}
    assert generated(served) == [[]] * PLACES


def test_an_end_token_ends_a_text_unless_it_is_to_be_ignored():
    prompts = same_prompts(9, 8)
    free = expected(prompts, [12] * 8)
    ends = Ledger(WINDOW, eos_token_ids=(free[0][3], free[1][0]))
    requests = padded(prompts, max_new_tokens=12, ignore_eos=[False, True] * 4)
    for config in (CONFIG, CONFIGS["ngram"]):
        served = serve(ends, None, requests, config)
        for index, (prompt, text) in enumerate(
            zip(prompts, texts_of(served, prompts), strict=True)
        ):
            model = MODEL if index % 2 else ends
            assert text == model.continuation(prompt, 12)
            stopped = not index % 2 and text[-1] in ends.eos_token_ids
            assert reasons(served)[index] == ("stop" if stopped else "length")
        assert_only_the_cache_holds(served.state, served.cache)
    assert reasons(served)[0] == "stop"


def test_namespaces_do_not_share_and_equal_ones_do():
    prompt = same_prompts(10, 1)[0]
    requests = padded([prompt] * 3, max_new_tokens=1, namespace=[1, 2, 1])
    served = serve(MODEL, None, requests, ONE_ROW)
    assert np.asarray(served.cached).tolist()[:3] == [0, 0, 8]
    assert texts_of(served, [prompt] * 3) == expected([prompt] * 3, [1] * 3)


def test_drafts_are_accepted_where_the_text_repeats_itself():
    class Periodic(Ledger):
        def forward(self, params, kv, batch):
            kv = super().forward(params, kv, batch)[1]
            period = jax.lax.rem(batch.positions, jnp.int32(3)).astype(jnp.float32)
            return period[..., None], kv

    served = serve(
        Periodic(WINDOW), None, padded([[0, 1, 2, 0, 1]], max_new_tokens=12), CONFIGS["ngram"]
    )
    assert generated(served)[0] == [1, 2, 0] * 4
    assert figures(served)["accepted"] >= 6
    assert figures(served)["decode_steps"] <= 5


# ---- sampling -------------------------------------------------------------------------------


def sampled(prompts, config, **wanted):
    requests = padded(prompts, max_new_tokens=10, temperature=0.7, **wanted)
    served = serve(MODEL, None, requests, config)
    assert_only_the_cache_holds(served.state, served.cache)
    return texts_of(served, prompts)


def test_a_request_draws_the_same_in_any_company():
    prompts = same_prompts(7, 6)
    seeds = [3, 4, 5, 6, 7, 8]
    together = sampled(prompts, CONFIG, seed=seeds)
    assert together[2:3] + together[5:] == sampled(
        [prompts[2], prompts[5]], CONFIG, seed=[seeds[2], seeds[5]]
    )
    assert together == sampled(prompts, CONFIGS["ngram"], seed=seeds)
    assert together == sampled(prompts, CONFIGS["snapshot"], seed=seeds)
    assert together != sampled(prompts, CONFIG, seed=99)


def test_top_k_and_top_p_of_one_are_greedy():
    prompts = same_prompts(7, 6)
    greedy = expected(prompts, [10] * 6)
    assert sampled(prompts, CONFIG, top_k=1) == greedy
    assert sampled(prompts, CONFIG, top_p=1e-6) == greedy


# ---- between the calls ----------------------------------------------------------------------

enter = jax.jit(submit, static_argnums=0)


def stream(config, waves, *, steps=2, cancelled=()):
    """Submits wave after wave with a few steps in between; texts by (wave, index)."""
    world = new_world(MODEL, config, PLACES)
    where, texts = {}, {}
    for number in range(200):
        if number < len(waves):
            world, places = enter(config, world, padded(waves[number], 4, max_new_tokens=8))
            for index, place in enumerate(np.asarray(places).tolist()):
                assert place >= 0
                where[place] = (number, index)
        world = run_steps(MODEL, None, config, world, steps)
        gone = [place for place, key in where.items() if key in cancelled]
        if gone and number == 1:
            world = cancel(world, jnp.asarray(gone, jnp.int32))
        world = collect(config, world, where, texts)
        if not where and number >= len(waves):
            return world, texts
    raise AssertionError(f"not done: {where}")


def collect(config, world, where, texts):
    ended, why = (np.asarray(part) for part in finish_reasons(world, list(range(PLACES))))
    done = [place for place in where if ended[place]]
    assert all((why[place] != 0) == ended[place] for place in where)
    if done:
        tokens, lengths = outputs(config, world, jnp.asarray(done, jnp.int32))
        for place, row, length in zip(done, np.asarray(tokens), np.asarray(lengths), strict=True):
            texts[where.pop(place)] = row[:length].tolist()
        world = release(world, jnp.asarray(done, jnp.int32))
    return world


@pytest.mark.parametrize("name", ["cache", "ngram"])
def test_requests_added_between_calls_get_the_same_text(name):
    waves = [same_prompts(5 + wave, 4) for wave in range(3)]
    world, texts = stream(CONFIGS[name], waves)
    for wave, prompts in enumerate(waves):
        assert [texts[wave, index] for index in range(4)] == expected(prompts, [8] * 4)
    assert_only_the_cache_holds(world.allocator, world.cache)


def test_cancelled_requests_give_their_pages_back_and_harm_nobody():
    waves = [same_prompts(20, 4), same_prompts(6, 4)]
    gone = {(0, 0), (0, 3), (1, 1)}
    world, texts = stream(CONFIG, waves, cancelled=gone)
    for wave, prompts in enumerate(waves):
        for index, text in enumerate(expected(prompts, [8] * 4)):
            mine = texts[wave, index]
            assert mine == text[: len(mine)]
            assert len(mine) == 8 or (wave, index) in gone
    assert_only_the_cache_holds(world.allocator, world.cache)
    assert any(len(texts[key]) < 8 for key in gone)


def test_a_full_queue_says_so_and_release_makes_room():
    world = new_world(MODEL, CONFIG, 2)
    world, places = submit(CONFIG, world, padded([[1], [2], [3]], 3, max_new_tokens=1))
    assert np.asarray(places).tolist() == [0, 1, -1]
    world = release(world, jnp.asarray([0, 1, -1, 7], jnp.int32))  # none is done yet
    assert np.asarray(world.queue.status).tolist() == [1, 1]
    world = run_steps(MODEL, None, CONFIG, world, 50)
    world = release(world, jnp.asarray([0], jnp.int32))
    world, places = submit(CONFIG, world, padded([[3]], 1, max_new_tokens=1))
    assert np.asarray(places).tolist() == [0]


def test_the_queue_is_served_in_the_order_of_arrival():
    world = new_world(MODEL, ONE_ROW, PLACES)
    world, _ = submit(ONE_ROW, world, padded(same_prompts(12, 3), 3, max_new_tokens=3))
    ended = []
    for _ in range(40):
        world = run_steps(MODEL, None, ONE_ROW, world, 1)
        ended += [p for p in np.flatnonzero(np.asarray(world.queue.status) == 3) if p not in ended]
    assert ended == [0, 1, 2]


def test_run_steps_takes_the_world_over_and_another_count_compiles_nothing():
    world = new_world(MODEL, CONFIG, PLACES)
    world, _ = submit(CONFIG, world, padded(same_prompts(5, 2), 2, max_new_tokens=3))
    before = world.rows.length
    world = run_steps(MODEL, None, CONFIG, world, 1)
    assert before.is_deleted()
    with jax.log_compiles(False):
        world = run_steps(MODEL, None, CONFIG, world, 7)
    assert int(world.stats.finished) == 2


def test_memory_is_back_after_everybody_left_without_a_cache():
    config = changed(prefix_cache=False)
    prompts = same_prompts(22)
    served = serve(MODEL, None, padded(prompts, max_new_tokens=9), config)
    assert texts_of(served, prompts) == expected(prompts, [9] * PLACES)
    assert [int(p) for p in held_pages(served.state)] == [0, 0]
    assert served.cache is None


def test_the_loop_has_no_host_call_and_is_one_program():
    text = str(
        jax.make_jaxpr(functools.partial(serve, MODEL, None, config=CONFIG))(
            requests=padded([[1, 2]], max_new_tokens=2)
        )
    )
    assert "callback" not in text
    assert "while" in text
