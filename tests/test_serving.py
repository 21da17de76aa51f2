"""The loop against a dense pass over the whole text, with models whose attention is real."""

import functools
import itertools

import numpy as np
import pytest
from served_models import DenseGreedy, params_of, tiny
from serving_checks import assert_only_the_cache_holds, figures, generated, reasons

import swa_jax as swa
from swa_jax.serving import NGramDraft, ServingConfig, make_requests, serve

# (model, page size, full tokens, SWA tokens): windows smaller and larger than the page, pools of
# about two requests.
CASES = {
    "gemma, page 1, window 6": (tiny(6, layer_kinds="SFS"), 1, 80, 32),
    "gpt-oss, page 4, window 3": (tiny(3, family="gpt_oss", layer_kinds="SFS"), 4, 80, 24),
    "gemma, page 16, window 20": (tiny(20, layer_kinds="SFS"), 16, 128, 80),
}
COUNT, LONGEST, NEW = 64, 30, 12


@functools.cache
def requests():
    """Prompts of which every second one begins like one before it."""
    rng = np.random.default_rng(11)
    prompts, new = [], []
    for index in range(COUNT):
        length = int(rng.integers(1, LONGEST + 1))
        prompt = rng.integers(0, 61, length).tolist()
        if index % 2:
            prompt = (prompts[int(rng.integers(index))] + prompt)[:LONGEST]
        prompts.append(prompt)
        new.append(int(rng.integers(1, NEW + 1)))
    return prompts, new


@functools.cache
def expected(name):
    model = CASES[name][0]
    dense = DenseGreedy(model, params_of(model), LONGEST + NEW)
    prompts, new = requests()
    return [dense(prompt, count) for prompt, count in zip(prompts, new, strict=True)]


DRAFTS = {"plain": None, "speculative": NGramDraft(3, 1)}
# Each model with and without a cache, with and without drafts; the other halves are long.
SHORT = {"page 1": "plain", "page 4": "speculative", "page 16": "speculative"}  # with a cache


def case(name, cache, draft):
    with_cache = next(SHORT[page] for page in SHORT if f"{page}," in name)
    words = f"{name}-{'cache' if cache else 'no cache'}-{draft}"
    marks = () if (draft == with_cache) == cache else pytest.mark.long
    return pytest.param(name, cache, DRAFTS[draft], id=words, marks=marks)


ALL = [case(*one) for one in itertools.product(CASES, (True, False), DRAFTS)]


@pytest.mark.parametrize(("name", "cache", "draft"), ALL)
def test_tokens_are_those_of_a_dense_pass(name, cache, draft):
    model, page, full, of_swa = CASES[name]
    prompts, new = requests()
    pool = swa.PoolConfig(full, of_swa, page, model.past_window)
    config = ServingConfig(
        pool,
        LONGEST + NEW,
        max_running=4,
        chunk_tokens=8,
        prefill_rows=2,
        max_new_tokens=NEW,
        prefix_cache=cache,
        draft=draft,
    )
    served = serve(model, params_of(model), make_requests(prompts, max_new_tokens=new), config)
    assert generated(served) == expected(name)
    assert reasons(served) == ["length"] * COUNT
    assert_only_the_cache_holds(served.state, served.cache)
    seen = figures(served)
    assert seen["refused"] == 0
    assert seen["finished"] == COUNT
    assert seen["peak_running"] > 1
    assert seen["generated"] == sum(new)
    assert (seen["cached"] > 0) == (seen["evicted_full"] > 0) == (seen["evicted_swa"] > 0) == cache
    assert (seen["accepted"] > 0) == (draft is not None)
    # Too small for everybody who was let in: somebody has to wait again.
    assert seen["retracted"] > 0 or page > 1 or cache
