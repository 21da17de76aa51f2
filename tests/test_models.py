"""Model descriptions, byte sizes, and pool sizes for a budget."""

import contextlib
import dataclasses
import itertools

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from swa_jax.config import PoolConfig
from swa_jax.models import (
    MODELS,
    ModelConfig,
    format_bytes,
    get_model,
    list_models,
    parse_bytes,
    plan_pools,
    swa_pages_needed,
    window_pages,
)
from swa_jax.models.planning import CACHED_SHARE

# (full layers, SWA layers, KV heads, head size, window), counted by hand from the sources.
EXPECTED = {
    "gemma-2-2b": (13, 13, 4, 256, 4096),
    "gemma-2-9b": (21, 21, 8, 256, 4096),
    "gemma-2-27b": (23, 23, 16, 128, 4096),
    "gemma-3-270m": (3, 15, 1, 256, 512),
    "gemma-3-1b": (4, 22, 1, 256, 512),
    "gemma-3-4b": (5, 29, 4, 256, 1024),
    "gemma-3-12b": (8, 40, 8, 256, 1024),
    "gemma-3-27b": (10, 52, 16, 128, 1024),
    "gemma-4-e2b": (3, 12, 1, 512, 512),
    "gemma-4-e4b": (4, 20, 2, 512, 512),
    "gemma-4-26b-a4b": (5, 25, 2, 512, 1024),
    "gemma-4-31b": (10, 50, 4, 512, 1024),
    "gpt-oss-20b": (12, 12, 8, 64, 128),
    "gpt-oss-120b": (18, 18, 8, 64, 128),
    "llama-4-scout": (12, 36, 8, 128, 8192),
    "llama-4-maverick": (12, 36, 8, 128, 8192),
    "olmo-3-7b": (8, 24, 32, 128, 4096),
    "olmo-3-32b": (16, 48, 8, 128, 4096),
    "command-r7b": (8, 24, 8, 128, 4096),
    "mistral-7b-v0.1": (0, 32, 8, 128, 4096),
}

SMALL = ModelConfig("small", 4, 1, 3, kv_heads=1, head_dim=4, sliding_window=8)
SMALL_CHUNKED = dataclasses.replace(SMALL, name="small-chunked", chunked=True)
SMALL_PURE = dataclasses.replace(SMALL, name="small-pure", num_full_layers=0, num_swa_layers=4)


def test_every_model_is_as_its_source_says():
    got = {
        m.name: (m.num_full_layers, m.num_swa_layers, m.kv_heads, m.head_dim, m.sliding_window)
        for m in MODELS.values()
    }
    assert got == EXPECTED
    assert list_models() == tuple(MODELS)


@pytest.mark.parametrize("model", MODELS.values(), ids=lambda model: model.name)
def test_every_model_names_its_sources_and_how_it_counts_the_window(model):
    assert all(url.startswith("https://") for url in (model.source, *model.also))
    assert len(model.window_note) > 40
    assert ("Chunked" in model.window_note) == model.chunked
    assert ("W includes the query" in model.window_note) != model.chunked
    assert model.past_window == model.sliding_window - (0 if model.chunked else 1)
    assert model.max_context is None or model.max_context > model.sliding_window


def test_bytes_per_token():
    gpt_oss = get_model("gpt-oss-120b")
    assert gpt_oss.full_bytes_per_token == 18 * 2 * 8 * 64 * 2
    assert gpt_oss.swa_bytes_per_token == gpt_oss.full_bytes_per_token
    gemma = get_model("gemma-3-27b")
    assert gemma.full_only_bytes_per_token == 62 * 2 * 16 * 128 * 2
    assert gemma.full_only_bytes_per_token == gemma.full_bytes_per_token + gemma.swa_bytes_per_token
    gemma_4 = get_model("gemma-4-31b")  # other heads in the two kinds of layer
    assert gemma_4.full_bytes_per_token == 10 * 2 * 4 * 512 * 2
    assert gemma_4.swa_bytes_per_token == 50 * 2 * 16 * 256 * 2
    in_8_bits = dataclasses.replace(gemma, kv_bytes_per_element=1)
    assert in_8_bits.full_only_bytes_per_token * 2 == gemma.full_only_bytes_per_token


def test_get_model_takes_any_case_and_suggests_a_name():
    assert get_model(" GPT-OSS-20B ") is MODELS["gpt-oss-20b"]
    with pytest.raises(ValueError, match=r"did you mean 'gpt-oss-20b'\?.*gemma-3-27b"):
        get_model("gptoss-20b")
    with pytest.raises(ValueError, match=r"unknown model 'zzz'; known models: .*gemma-3-27b"):
        get_model("zzz")
    with pytest.raises(ValueError, match="must be a string, got 3"):
        get_model(3)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="known models") as error:
        get_model("x" * 10**6)
    assert len(str(error.value)) < 1000


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_layers": 5}, "must add up to num_layers=5, got 1 \\+ 3 \\+ 0"),
        ({"num_full_layers": 4, "num_swa_layers": 0}, "num_swa_layers must be at least 1, got 0"),
        ({"sliding_window": 0}, "sliding_window must be at least 1, got 0"),
        ({"kv_bytes_per_element": 0}, "kv_bytes_per_element must be at least 1, got 0"),
        ({"layer_pattern": "SF"}, "gives \\(full, SWA\\) layers \\(2, 2\\), got \\(1, 3\\)"),
        ({"layer_pattern": "SX"}, "made of F and S"),
    ],
)
def test_a_description_that_contradicts_itself_is_refused(change, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(SMALL, **change)


# --- pool sizes ---------------------------------------------------------------------------------


def live_pages(model, page, committed, new):
    """Pages from the frontier to the last new token, by the rule of the window."""
    window = model.sliding_window
    edge = committed // window * window if model.chunked else max(0, committed - window)
    return -(-(committed + new) // page) - edge // page


@pytest.mark.parametrize("chunked", [False, True])
@pytest.mark.parametrize("page", [1, 2, 3, 4, 5, 8])
@pytest.mark.parametrize("window", [1, 3, 4, 7, 8])
def test_swa_pages_needed_is_the_worst_case_of_a_batch(window, page, chunked):
    model = dataclasses.replace(SMALL, sliding_window=window, chunked=chunked)
    worst = [
        max(live_pages(model, page, n, new) for n in range(6 * window * page)) for new in range(13)
    ]
    exact = not chunked or window % page == 0
    assert worst[1] <= window_pages(model, page)
    if exact:
        assert worst[1] == window_pages(model, page)
    for rows, chunk in itertools.product((1, 2, 3), (1, 2, 5, 11)):
        # A row that prefills nothing decodes one token.
        needed = max(
            sum(worst[max(1, part)] for part in parts)
            for parts in itertools.product(range(chunk + 1), repeat=rows)
            if sum(parts) == chunk
        )
        got = swa_pages_needed(model, page, rows, chunk)
        assert got >= needed
        if exact:
            assert got == needed


def test_the_smallest_window_fits_the_pool_configuration():
    for model, page in itertools.product((SMALL, SMALL_CHUNKED), (1, 3, 4, 16)):
        tokens = window_pages(model, page) * page
        PoolConfig(1000 * page, tokens, page, model.sliding_window, chunked=model.chunked)


@given(
    model=st.sampled_from([SMALL, SMALL_CHUNKED, SMALL_PURE, *MODELS.values()]),
    budget=st.integers(1, 2**50),
    page=st.sampled_from([1, 4, 16, 48, 64, 256]),
    running=st.integers(1, 4096),
    chunk=st.integers(1, 65_536),
    cache=st.booleans(),
)
def test_plan_pools_keeps_its_promises(model, budget, page, running, chunk, cache):
    full, swa = model.full_bytes_per_token * page, model.swa_bytes_per_token * page
    least = window_pages(model, page)
    if budget < (least + 1) * (full + swa):
        with pytest.raises(ValueError, match="cannot hold one window"):
            plan_pools(model, budget, page, max_running=running, chunk_tokens=chunk)
        return
    sizes = plan_pools(
        model, budget, page, max_running=running, chunk_tokens=chunk, prefix_cache=cache
    )
    full_pages, swa_pages = sizes.full_tokens // page, sizes.swa_tokens // page
    assert (full_pages * page, swa_pages * page) == (sizes.full_tokens, sizes.swa_tokens)
    assert full_pages >= swa_pages >= least
    assert sizes.kv_bytes <= budget
    assert sizes.kv_bytes == (full_pages + 1) * full + (swa_pages + 1) * swa
    if model.pure_swa:
        PoolConfig.pure_swa(sizes.swa_tokens, page, model.sliding_window)
    else:
        wanted = swa_pages_needed(model, page, running, chunk)
        if cache and budget > (wanted + 1) * swa:
            wanted += (budget - (wanted + 1) * swa) // CACHED_SHARE // swa
        # Short of that, the pools are even, but for full pages that fit beside no SWA page.
        assert swa_pages == wanted or full_pages - swa_pages <= -(-swa // full)
        PoolConfig(
            sizes.full_tokens, sizes.swa_tokens, page, model.sliding_window, chunked=model.chunked
        )
    assume(sizes.full_tokens + 2 * page < 2**31)
    assert budget - sizes.kv_bytes < (swa if model.pure_swa else full)  # no page left over


def test_plan_pools_by_hand():
    # A layer's K and V of a token: 2 x 4 x 2 bytes = 16. A page of 4: full 64, SWA 3 x 64 = 192.
    # W=8: a window and the page being filled are 3 pages, 6 for two requests. A step of 10 tokens
    # takes 3 more: 2 tokens in each request reach into a new page, the other 6 fill one more.
    sizes = plan_pools(SMALL, 10_000, 4, max_running=2, chunk_tokens=10)
    assert sizes.swa_tokens == 9 * 4
    assert sizes.full_tokens == ((10_000 - 10 * 192) // 64 - 1) * 4
    assert sizes.kv_bytes == 10 * 192 + (sizes.full_tokens // 4 + 1) * 64
    pure = plan_pools(SMALL_PURE, 10_000, 4, max_running=2, chunk_tokens=10)
    assert pure.full_tokens == pure.swa_tokens == (10_000 // 256 - 1) * 4
    assert pure.kv_bytes == 10_000 // 256 * 256


def test_a_prefix_cache_gets_a_share_for_its_windows():
    # As above: 9 SWA pages for running requests. A sixteenth of the other bytes is 2.6 SWA pages.
    share = (10_000 - 10 * 192) // 16 // 192
    sizes = plan_pools(SMALL, 10_000, 4, max_running=2, chunk_tokens=10, prefix_cache=True)
    assert sizes.swa_tokens == (9 + share) * 4
    assert share == 2
    assert sizes.full_tokens == ((10_000 - 12 * 192) // 64 - 1) * 4


def test_recycling_saves_most_of_the_memory():
    gemma = get_model("gemma-3-27b")
    budget = parse_bytes("40GiB")
    sizes = plan_pools(gemma, budget, 16, max_running=16, chunk_tokens=8192)
    assert sizes.full_tokens > 4 * (budget // gemma.full_only_bytes_per_token)


def test_a_budget_too_small_says_how_much_is_needed():
    with pytest.raises(ValueError, match="need at least 1024 bytes \\(1 KiB\\)"):
        plan_pools(SMALL, 1023, 4, max_running=2, chunk_tokens=10)
    sizes = plan_pools(SMALL, 1024, 4, max_running=2, chunk_tokens=10)
    assert (sizes.full_tokens, sizes.swa_tokens, sizes.kv_bytes) == (12, 12, 1024)


@pytest.mark.parametrize("name", ["hbm_bytes", "page_size", "max_running", "chunk_tokens"])
@pytest.mark.parametrize("bad", [0, -1, True, 1.5, "16", None])
def test_plan_pools_refuses_what_is_no_positive_integer(name, bad):
    sizes = {"hbm_bytes": 10_000, "page_size": 4, "max_running": 2, "chunk_tokens": 10, name: bad}
    with pytest.raises(ValueError, match=f"{name} must be a positive integer, got {bad!r}"):
        plan_pools(SMALL, **sizes)


# --- amounts of memory --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "amount"),
    [
        ("40GiB", 40 * 2**30),
        (" 80 gb ", 80 * 10**9),
        ("1.5GiB", 3 * 2**29),
        ("512MiB", 2**29),
        ("3kb", 3000),
        ("2TiB", 2**41),
        ("7B", 7),
        ("4096", 4096),
        (4096, 4096),
        ("9223372036854775807", 2**63 - 1),
        ("0.1KiB", 102),
    ],
)
def test_parse_bytes(text, amount):
    assert parse_bytes(text) == amount


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ("", "such as 40GiB"),
        ("GiB", "such as 40GiB"),
        ("-1GiB", "such as 40GiB, .*got '-1GiB'"),
        ("nan", "such as 40GiB"),
        ("infGiB", "such as 40GiB"),
        ("1e9", "such as 40GiB"),
        ("40 G", "unknown unit 'G' in '40 G'; use B, KiB"),
        ("1.5", "a whole number, got '1.5'"),
        ("0GiB", "positive amount"),
        ("0.00000000001GiB", "positive amount"),
        ("9999999999TiB", "at most 2\\^63 - 1"),
        (2**70, "at most 2\\^63 - 1"),
        (0, "positive amount"),
        (True, "positive amount"),
        (1.5, "positive amount"),
        (None, "positive amount"),
        ("9" * 100_000, "such as 40GiB"),
        ("\u0664\u0660GiB", "such as 40GiB"),
    ],
)
def test_parse_bytes_refuses(bad, message):
    with pytest.raises(ValueError, match=message) as error:
        parse_bytes(bad)
    assert len(str(error.value)) < 300


@given(st.text(max_size=12) | st.from_regex(r"[0-9.]{1,6} ?[kKmMgG]?i?[bB]?", fullmatch=True))
def test_parse_bytes_gives_a_size_or_a_value_error(text):
    with contextlib.suppress(ValueError):
        assert 1 <= parse_bytes(text) < 2**63


@given(st.integers(1, 2**60))
def test_format_bytes_is_read_back_to_within_its_two_decimals(amount):
    assert abs(parse_bytes(format_bytes(amount)) - amount) <= 0.0051 * amount + 1


def test_format_bytes():
    assert [format_bytes(n) for n in (0, 1023, 1024, 3 * 2**29, 2**50)] == [
        "0 B",
        "1023 B",
        "1 KiB",
        "1.5 GiB",
        "1024 TiB",
    ]
    for bad in (-1, True, 1.5):
        with pytest.raises(ValueError, match="non-negative integer"):
            format_bytes(bad)  # type: ignore[arg-type]
