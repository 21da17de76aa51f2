"""The replay with a host tier: what left the device comes back for who begins with it."""

import numpy as np
import pytest

import swa_jax as swa
from swa_jax.models import get_model
from swa_jax.replay.driver import ReplaySettings, run_replay
from swa_jax.replay.report import Run, as_dict, sections
from swa_jax.replay.trace import Trace

MODEL = get_model("gpt-oss-20b")
PAGE, BLOCK = 256, 512
PROMPT = 8 * PAGE
FULL, SWA = 12 * PAGE, 8 * PAGE
ROOM = 2**30  # bytes: more than all prompts take


def rounds(order):
    """A trace in which each letter is a prompt of its own."""
    blocks = PROMPT // BLOCK
    return Trace(
        name=order,
        source_format="mooncake",
        arrival_ms=np.zeros(len(order), np.int64),
        prompt_lens=np.full(len(order), PROMPT, np.int32),
        output_lens=np.full(len(order), 2, np.int32),
        hash_ids=tuple(np.arange(blocks) + blocks * "abc".index(letter) for letter in order),
        block_tokens=BLOCK,
    )


def replay(order, host_bytes):
    pool = swa.PoolConfig(FULL, SWA, PAGE, MODEL.past_window)
    settings = ReplaySettings(1, 4 * PAGE, host_bytes=host_bytes)
    trace = rounds(order)
    return Run(trace, MODEL, pool, settings, run_replay(trace, MODEL, pool, settings))


def pages_bytes(full, of_swa):
    return PAGE * (full * MODEL.full_bytes_per_token + of_swa * MODEL.swa_bytes_per_token)


@pytest.fixture(scope="module")
def with_host():
    return replay("abcabc", ROOM)


def test_what_the_device_has_no_room_for_comes_back_from_the_host(with_host):
    without = replay("abcabc", None).result
    result = with_host.result
    assert without.reuse.hit_tokens == without.host.host_hit_tokens == 0
    usable = (PROMPT - 1) // PAGE * PAGE  # the last token is always computed
    assert result.completed == 6
    assert result.reuse.hit_tokens == 3 * usable
    assert 0 < result.host.host_hit_tokens <= 3 * usable
    assert result.steps < without.steps


def test_a_window_comes_back_and_not_the_whole_path(with_host):
    host = with_host.result.host
    pages = -(-MODEL.past_window // PAGE)
    assert 0 < host.host_swa_hit_tokens <= 3 * (pages + 1) * PAGE < host.host_hit_tokens


def test_nothing_leaks_and_the_laws_hold(with_host):
    result = with_host.result
    assert (result.leaked_full_pages, result.leaked_swa_pages) == (0, 0)
    assert not any(result.faults.values())


def test_a_host_without_room_for_a_round_helps_nobody():
    result = replay("abcabc", pages_bytes(9, 3)).result
    assert result.reuse.hit_tokens == 0
    assert result.host.host_dropped_tokens > 0


def test_the_report_tells_the_tier_from_the_device(with_host):
    rows = dict(dict(sections(with_host))["prefix cache"])
    assert rows["host memory"].startswith("1 GiB: ")
    assert rows["brought back"].startswith(f"{with_host.result.host.host_hit_tokens:,} of ")
    assert as_dict(with_host)["host_bytes"] == ROOM
    assert as_dict(with_host)["host_hit_tokens"] == with_host.result.host.host_hit_tokens


def test_there_is_no_tier_without_a_cache():
    with pytest.raises(ValueError, match="there is no prefix cache"):
        ReplaySettings(prefix_cache=False, host_bytes=ROOM)
