"""What the serving loop is given: refused with what was wrong, what would be right, what came."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ledger_model import Ledger

import swa_jax as swa
from swa_jax.serving import (
    DraftHead,
    DraftModel,
    NGramDraft,
    ServingConfig,
    cancel,
    make_requests,
    new_world,
    outputs,
    release,
    run_steps,
    submit,
)

MODEL = Ledger(6)
POOL = swa.PoolConfig(32, 16, 4, 5)
CONFIG = ServingConfig(POOL, 20, max_running=2)


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        ([], "at least one prompt, got none"),
        ([[1], []], "prompt 1 has no tokens"),
        ([[-1]], r"prompt 0 has a token below 0, got \[-1\]"),
        ([[1.5, 2]], "prompt 0 must hold integers"),
        ([[2**31]], "prompt 0 must fit int32"),
        (["12"], "prompt 0 must be a list of token ids, got '12'"),
        ([[[1, 2], [3, 4]]], r"prompt 0 must be an array of 1 dimension\(s\), got shape \(2, 2\)"),
        ([1, 2], "prompt 0 must be a list of token ids, got 1"),
        ([None], "prompt 0 must be a list of token ids, got None"),
    ],
)
def test_prompts(prompts, message):
    with pytest.raises(ValueError, match=message):
        make_requests(prompts)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("max_new_tokens", -1, "from 0 to 2147483647, got -1"),
        ("max_new_tokens", 1.5, "must hold integers, got 1.5"),
        ("max_new_tokens", None, "must hold integers, got None"),
        ("max_new_tokens", [1, 2], r"one value or 1 \(one a request\), got shape \(2,\)"),
        ("top_k", 0.5, "must hold integers, got 0.5"),
        ("top_p", 0.0, "from 1e-06 to 1.0, got 0.0"),
        ("top_p", "1", "must hold numbers, got '1'"),
        ("temperature", float("nan"), "got nan"),
        ("temperature", 1e-60, "too close to 0 for float32, got 1e-60"),
        ("seed", 2**31, "got 2147483648"),
        ("namespace", 3.5, "must hold integers, got 3.5"),
        ("ignore_eos", 1, "must hold True or False, got 1"),
        ("prompt_columns", 1, "prompt_columns=1 is less than a prompt of 2 tokens"),
        ("prompt_columns", 2.5, "prompt_columns must be an integer from 1 to 2147483647, got 2.5"),
    ],
)
def test_what_is_asked_for(name, value, message):
    with pytest.raises(ValueError, match=message):
        make_requests([[1, 2]], **{name: value})


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("max_running", 0, "max_running must be an integer from 1 to 2147483647, got 0"),
        ("max_context", 2**31, "max_context must be an integer from 1"),
        ("chunk_tokens", True, "got True"),
        ("max_new_tokens", 1.5, "got 1.5"),
        ("pool", None, "pool must be a PoolConfig, got None"),
        ("pool", swa.PoolConfig.pure_swa(32, 4, 5), "models with full and sliding-window layers"),
        ("prefix_cache", "no", "prefix_cache must be True or False, got 'no'"),
        ("policy", "mru", "policy must be one of lru, .*, got 'mru'"),
        ("rollback", "none", "rollback must be one of page, snapshot, got 'none'"),
        ("draft", 4, r"draft must be a source of drafts, such as NGramDraft\(4\), or None, got 4"),
        ("draft", NGramDraft, "draft must be a source of drafts"),
    ],
)
def test_configuration(field, value, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(CONFIG, **{field: value})


def test_configuration_takes_any_integer():
    assert dataclasses.replace(CONFIG, max_running=np.int64(3)).max_running == 3


@pytest.mark.parametrize(
    ("make", "numbers"),
    [
        (NGramDraft, {"num_drafts": 0}),
        (NGramDraft, {"num_drafts": 1.5}),
        (NGramDraft, {"num_drafts": True}),
        (DraftModel, {"model": MODEL}),
        (DraftModel, {"model": MODEL, "branches": (2, 1.5)}),
        (DraftHead, {"config": None, "num_drafts": 0}),
    ],
)
def test_sources_of_drafts(make, numbers):
    with pytest.raises(ValueError, match="must be an integer from 1 to 1024"):
        make(**numbers)


def test_branches_may_be_a_list():
    given: dict = {"branches": [2, 2]}
    draft = DraftModel(MODEL, **given)
    assert draft.num_drafts == 6
    assert hash(draft) == hash(DraftModel(MODEL, branches=(2, 2)))


def test_what_can_never_be_served_is_rejected_alone():
    # Longer than the context, and a token that the model does not know.
    prompts = [[1] * 25, [2, 97], [3, 96], [1, 2]]
    world = new_world(MODEL, CONFIG, 6)
    world, places = submit(CONFIG, world, make_requests(prompts, max_new_tokens=2))
    assert np.asarray(places).tolist() == [0, 1, 2, 3]
    assert np.asarray(world.queue.reason)[:4].tolist() == [3, 3, 0, 0]
    assert np.asarray(world.queue.status).tolist() == [3, 3, 1, 1, 0, 0]


def test_a_padded_batch_takes_no_more_places_than_it_has_requests():
    requests = make_requests([[1, 2], [3]])
    requests = dataclasses.replace(requests, prompt_lens=jnp.array([0, 1], jnp.int32))
    world, places = submit(CONFIG, new_world(MODEL, CONFIG, 2), requests)
    assert np.asarray(places).tolist() == [-1, 0]
    assert np.asarray(world.queue.status).tolist() == [1, 0]


def test_places_may_be_lists_and_unknown_ones_are_nobody():
    world = new_world(MODEL, CONFIG, 3)
    world, _ = submit(CONFIG, world, make_requests([[1], [2]]))
    world = cancel(world, [1, 1, -1, 9])
    assert np.asarray(world.queue.status).tolist() == [1, 3, 0]
    assert np.asarray(outputs(CONFIG, world, [0, -1, 9])[1]).tolist() == [0, 0, 0]
    world = release(world, [0, 1, 1, -1, 9])
    assert np.asarray(world.queue.status).tolist() == [1, 0, 0]
    for call in (cancel, release):
        with pytest.raises(ValueError, match="places must be"):
            call(world, 1)


def test_a_world_of_another_configuration_is_refused():
    world = new_world(MODEL, CONFIG, 2)
    for change in ({"max_running": 3}, {"max_context": 21}, {"prefix_cache": False}):
        other = dataclasses.replace(CONFIG, **change)
        with pytest.raises(ValueError, match=f"its {next(iter(change))} is"):
            run_steps(MODEL, None, other, world, 1)
    with pytest.raises(ValueError, match="places must be an integer from 1"):
        new_world(MODEL, CONFIG, 0)
    with pytest.raises(ValueError, match="steps must hold integers"):
        run_steps(MODEL, None, CONFIG, world, steps=1.5)


def test_a_bound_of_steps_may_be_as_large_as_can_be():
    # Found by an adversary: a sum of steps ran over and nothing ran at all.
    world = new_world(MODEL, CONFIG, 2)
    world, _ = submit(CONFIG, world, make_requests([[1, 2]], max_new_tokens=2))
    world = run_steps(MODEL, None, CONFIG, world, 1)
    world = run_steps(MODEL, None, CONFIG, world, 2**31 - 1)
    assert int(world.stats.finished) == 1
    assert jax.tree.leaves(world)


def test_logits_of_another_width_are_refused():
    class Narrow(Ledger):
        def unembed(self, params, hidden):
            return super().unembed(params, hidden)[..., :7]

    model = Narrow(6)
    world = new_world(model, CONFIG, 2)
    with pytest.raises(ValueError, match=r"logits of shape \(2, 1, 97\), got \(2, 1, 7\)"):
        run_steps(model, None, CONFIG, world, 1)
