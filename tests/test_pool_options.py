"""Pool sizes out of the options of the command line."""

import pytest

from swa_jax import PoolConfig
from swa_jax.models import get_model, plan_pools
from swa_jax.replay.pool_options import in_option_names, pool_from_options
from swa_jax.replay.trace import TraceError


def pool(model="gpt-oss-20b", hbm=None, full=None, swa=None, page=16):
    return pool_from_options(
        get_model(model),
        hbm=hbm,
        full_tokens=full,
        swa_tokens=swa,
        page_size=page,
        max_running=256,
        chunk_tokens=8192,
    )


@pytest.mark.parametrize(("given", "budget"), [(None, 40 * 2**30), ("80 GB", 80 * 10**9)])
def test_a_budget_is_planned(given, budget):
    model = get_model("gpt-oss-20b")
    sizes = plan_pools(model, budget, 16, max_running=256, chunk_tokens=8192)
    assert pool(hbm=given) == PoolConfig(sizes.full_tokens, sizes.swa_tokens, 16, 127)


def test_sizes_are_taken_as_they_are():
    assert pool(full=3200, swa=1600) == PoolConfig(3200, 1600, 16, 127)


def test_a_chunked_model_has_chunks():
    assert pool("llama-4-scout", full=32_000, swa=16_000) == PoolConfig(
        32_000, 16_000, 16, 8192, chunked=True
    )


def test_a_model_without_full_layers_has_one_pool():
    assert pool("mistral-7b-v0.1", swa=8000) == PoolConfig.pure_swa(8000, 16, 4095)
    assert pool("mistral-7b-v0.1").pure_swa_pool


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"hbm": "40GiB", "full": 160}, "not both; got --hbm 40GiB --full-tokens 160"),
        ({"hbm": "40GiB", "swa": 160}, "not both; got --hbm 40GiB --swa-tokens 160"),
        ({"full": 160}, "give both --full-tokens and --swa-tokens.*got only --full-tokens 160"),
        ({"swa": 160}, "give both --full-tokens and --swa-tokens.*got only --swa-tokens 160"),
        ({"model": "mistral-7b-v0.1", "full": 160}, "--swa-tokens alone; got --full-tokens 160"),
        ({"hbm": "0"}, "--hbm 0: a memory size must be a positive amount"),
        ({"hbm": "40 bananas"}, "--hbm 40 bananas: "),
        ({"hbm": "1KiB"}, "--hbm 1KiB: 1024 bytes .* cannot hold one window"),
        ({"full": 100, "swa": 160}, "full_tokens must be a multiple of page_size=16, got 100"),
        ({"full": 1600, "swa": 16}, "swa_tokens=16 cannot hold one window of 127"),
    ],
)
def test_refusals_say_what_is_wrong(given, said):
    with pytest.raises(ValueError, match=said):
        pool(**given)


def test_messages_name_the_options():
    assert in_option_names(ValueError("swa_tokens=1 of page_size 2")) == (
        "--swa-tokens=1 of --page-size 2"
    )
    error = TraceError("page_size.jsonl", 3, "bad")
    assert in_option_names(error) == "page_size.jsonl, line 3: bad"
