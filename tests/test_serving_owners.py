"""The loop on pools whose pages carry owner tags: each request is an owner, and so is the tree."""

import dataclasses
import sys

import jax.numpy as jnp
import numpy as np
import pytest
from ledger_model import Ledger
from serving_checks import assert_only_the_cache_holds, generated, reasons

import swa_jax as swa
from swa_jax import prefix_cache, serving
from swa_jax.serving import row_pages

LEDGER = Ledger(7)
LOOP = serving.ServingConfig(
    pool=swa.PoolConfig(64, 44, 4, 6, owner_tags=True),
    max_context=40,
    max_running=3,
    chunk_tokens=8,
)
DRAFTS = dataclasses.replace(LOOP, draft=serving.NGramDraft(2))
PROMPTS = [[at % 7 for at in range(9)], [*range(10, 31)], [at % 7 for at in range(17)], [3, 4]]
WANTED = [LEDGER.continuation(prompt, 9) for prompt in PROMPTS]
REQUESTS = serving.make_requests(PROMPTS, max_new_tokens=9)


@pytest.mark.parametrize(
    "config",
    [
        pytest.param(LOOP, id="plain"),
        pytest.param(DRAFTS, id="drafts", marks=pytest.mark.long),
        pytest.param(
            dataclasses.replace(DRAFTS, rollback="snapshot"), id="snapshot", marks=pytest.mark.long
        ),
    ],
)
def test_a_loop_names_nothing_of_others(config):
    served = serving.serve(LEDGER, None, REQUESTS, config)
    assert generated(served) == WANTED
    assert set(reasons(served)) == {"length"}
    assert_only_the_cache_holds(served.state, served.cache)  # and no fault was counted
    assert served.state.owner_tags is not None
    assert served.cache is not None
    tags = np.asarray(served.state.owner_tags.full)
    assert (tags[np.asarray(served.cache.in_tree)] == swa.TREE_OWNER).all()
    assert set(tags.tolist()) - {0, swa.TREE_OWNER} <= {1, 2, 3, 4}


def test_a_row_that_frees_pages_of_the_tree_is_refused(monkeypatch):
    """A row that forgets what it gave to the cache, a bug of several engines, does no harm."""
    right = row_pages.vacate

    def vacate(config, world, row):
        rows = dataclasses.replace(world.rows, owned_from=jnp.zeros_like(world.rows.owned_from))
        return right(config, dataclasses.replace(world, rows=rows), row)

    monkeypatch.setattr(sys.modules["swa_jax.serving.finish"], "vacate", vacate)
    config = dataclasses.replace(LOOP, chunk_tokens=7)  # compiled with the bug
    served = serving.serve(LEDGER, None, REQUESTS, config)
    faults = swa.faults(served.state)
    assert faults.pop("foreign") > 0
    assert not any(faults.values())
    assert served.cache is not None
    prefix_cache.check(served.cache, served.state)
    assert generated(served) == WANTED
