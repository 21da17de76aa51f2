"""Known bugs of serving loops, put back one at a time: the checks of the loop must see each."""

import dataclasses
import importlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ledger_model import Ledger
from serving_checks import assert_only_the_cache_holds, figures, generated

import swa_jax as swa
from swa_jax.serving import (
    NGramDraft,
    ServingConfig,
    make_requests,
    new_world,
    outputs,
    release,
    run_steps,
    serve,
    submit,
)

# The package gives some of its modules' names to their functions.
admit, decode, rollback, room, row_pages, step = (
    importlib.import_module(f"swa_jax.serving.{name}")
    for name in ("admit", "decode", "rollback", "room", "row_pages", "step")
)

MODEL = Ledger(6)
CONFIG = ServingConfig(
    swa.PoolConfig(96, 24, 4, 5),
    40,
    max_running=3,
    chunk_tokens=8,
    prefill_rows=2,
    max_new_tokens=12,
    draft=NGramDraft(3, 1),
)


def workload():
    rng = np.random.default_rng(5)
    prompts = [rng.integers(0, 4, rng.integers(1, 28)).tolist() for _ in range(12)]
    # Later ones leave earlier ones in the middle, where the windows of the cache are gone.
    prompts[6:] = [
        a[: 2 * len(a) // 3] + b[:9] for a, b in zip(prompts[:6], prompts[6:], strict=True)
    ]
    return prompts, [int(n) for n in rng.integers(3, 13, 12)]


def run():
    """Serves, and checks everything that can be checked."""
    jax.clear_caches()
    prompts, new = workload()
    served = serve(MODEL, None, make_requests(prompts, max_new_tokens=new), CONFIG)
    assert_only_the_cache_holds(served.state, served.cache)
    assert figures(served)["refused"] == 0
    texts = [MODEL.continuation(p, n) for p, n in zip(prompts, new, strict=True)]
    assert generated(served) == texts


def free_nothing(allocator, slots):
    del slots
    return allocator


def no_unlock(cache, receipt):
    del receipt
    return cache


def a_page_too_early(config, world):
    """As if every row were a page longer than it is."""
    length = world.rows.length
    longer = dataclasses.replace(world.rows, length=length + jnp.int32(config.pool.page_size))
    left = LEAVE(config, dataclasses.replace(world, rows=longer))
    return dataclasses.replace(left, rows=dataclasses.replace(left.rows, length=length))


LEAVE = step.leave
MATCH = admit.match_prefix
DECODE_TOKENS = room.decode_tokens


def matches_more_than_is_live(cache, state, tokens, length, *, namespace=0):
    """As if the window had not to be live (R9)."""
    everything = dataclasses.replace(
        state, full_to_swa=jnp.where(state.full_to_swa == 0, jnp.int32(1), state.full_to_swa)
    )
    return MATCH(cache, everything, tokens, length, namespace=namespace)


def never_stuck(config, world):
    del config, world
    return jnp.zeros((), bool)


MUTANTS = {
    "refused drafts keep their pages (B14, B15)": (rollback, "free", free_nothing),
    "a row that ends keeps its own pages (B17)": (row_pages, "free", free_nothing),
    "a row that ends keeps its lock": (row_pages, "unlock", no_unlock),
    "windows are left a page too early (B24)": (step, "leave", a_page_too_early),
    "nobody is ever retracted": (room, "is_stuck", never_stuck),
    "drafts reserve nothing": (
        decode,
        "decode_tokens",
        lambda config, world, drafts: jnp.minimum(DECODE_TOKENS(config, world, drafts), 1) * 2,
    ),
}


def test_the_workload_passes_without_a_mutant():
    run()


def end_after_many_steps(monkeypatch):
    """A mutant that never ends is stopped, and the checks see what is left."""
    original = serve.__globals__["_run"]

    def bounded(model, config, params, draft_params, world, steps):
        del steps
        return original(model, config, params, draft_params, world, jnp.int32(400))

    monkeypatch.setitem(serve.__globals__, "_run", bounded)


@pytest.mark.parametrize("name", MUTANTS)
def test_mutant_is_seen(name, monkeypatch):
    module, attribute, wrong = MUTANTS[name]
    monkeypatch.setattr(module, attribute, wrong)
    end_after_many_steps(monkeypatch)
    with pytest.raises((AssertionError, swa.InvariantError)):
        run()
    jax.clear_caches()


def serve_one_by_one(prompts):
    """Each when the one before is done, so that what is cached is plain."""
    jax.clear_caches()
    world = new_world(MODEL, CONFIG, 4)
    for prompt in prompts:
        requests = make_requests([prompt], max_new_tokens=2, prompt_columns=40)
        world, places = submit(CONFIG, world, requests)
        world = run_steps(MODEL, None, CONFIG, world, 100)
        tokens, lengths = outputs(CONFIG, world, places)
        assert np.asarray(tokens[0])[: int(lengths[0])].tolist() == MODEL.continuation(prompt, 2)
        world = release(world, places)


def test_a_match_across_a_tombstone_is_seen(monkeypatch):  # public report B36
    # The first leaves six pages of which the second drives the SWA sides of the first ones out;
    # the third leaves the first in the middle.
    first = [(place * 5) % 31 for place in range(24)]
    second = [(place * 3 + 7) % 29 for place in range(20)]
    prompts = [first, second, [*first[:13], 40, 41]]
    serve_one_by_one(prompts)
    monkeypatch.setattr(admit, "match_prefix", matches_more_than_is_live)
    with pytest.raises(AssertionError):
        serve_one_by_one(prompts)
    jax.clear_caches()
