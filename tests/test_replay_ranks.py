"""The replay on data-parallel ranks: each is a replay of its own, and prefixes find their rank."""

import dataclasses
import json

import jax.numpy as jnp
import numpy as np
import pytest
from compare import config_of
from data_parallel_child import COLLECTIVES
from oracle import Sizes
from replay_record import trace_of

import swa_jax as swa
from swa_jax.cli import main
from swa_jax.models import ModelConfig
from swa_jax.replay import rank_loop, ranks, ranks_session
from swa_jax.replay.content import content_of
from swa_jax.replay.driver import ReplaySettings, run_replay
from swa_jax.replay.rank_placer import common_tokens
from swa_jax.replay.ranks import RankSettings, RanksResult, part_of, run_ranks
from swa_jax.replay.trace import Trace

MODEL = ModelConfig("hybrid", 4, 3, 1, kv_heads=1, head_dim=1, sliding_window=8)
POOL = swa.PoolConfig(512, 512, 4, 8)
SETTINGS = ReplaySettings(max_running=8, chunk_tokens=16)
RANKS, SESSIONS, TURNS, BLOCK = 4, 7, 4, 8
COUNT = SESSIONS * TURNS
TIMES = ("wall_s", "compile_s", "timeline")


def trace_with(prompts, outputs, ids):
    ids = tuple(np.asarray(blocks, np.int64) for blocks in ids)
    trace = trace_of(list(prompts), list(outputs))
    return dataclasses.replace(trace, hash_ids=ids, block_tokens=BLOCK)


def sessions():
    """Each turn says all that its session said before, and a block more. Turns take turns."""
    turns = [(turn, session) for turn in range(TURNS) for session in range(SESSIONS)]
    ids = [[100 * session + block for block in range(1 + turn)] for turn, session in turns]
    return trace_with([len(blocks) * BLOCK for blocks in ids], [3] * (COUNT - 1) + [54], ids)


def crowd():
    """More than the pools hold, of prompts that begin alike in threes. Shaped like `sessions`."""
    ids = [[n // 3, 100 + n // 3, 1000 + n, 2000 + n] for n in range(COUNT)]
    return trace_with([TURNS * BLOCK - n % 3 for n in range(COUNT)], [54] * COUNT, ids)


def figures(result):
    return {k: v for k, v in dataclasses.asdict(result).items() if k not in TIMES}


def only(trace, ranks, rank):
    """The requests of one rank where they are dealt in turn; the others are longer than the pool.

    So the program is the same for every part.
    """
    others = np.arange(len(trace)) % ranks != rank
    lengths = np.where(others, 10_000, trace.prompt_lens).tolist()
    part = trace_of(lengths, trace.output_lens.tolist())
    if trace.hash_ids is None:
        return part
    ids = [[] if other else blocks for other, blocks in zip(others, trace.hash_ids, strict=True)]
    return trace_with(part.prompt_lens, part.output_lens, ids)


def check_dealt(result, trace, alone, rank):
    """A rank's figures are those of `alone`, a replay of its part of a trace."""
    ranks = result.settings.ranks
    count = len(range(rank, len(trace), ranks))
    served = {"requests": result.ranks[rank].requests, "rejected": 0, "rejected_reasons": {}}
    assert figures(result.ranks[rank]) == figures(alone) | served
    assert alone.completed == result.ranks[rank].completed <= count


LOOPS: list[rank_loop.RankLoop] = []


class NotedLoop(rank_loop.RankLoop):
    def __init__(self, *arguments):
        super().__init__(*arguments)
        LOOPS.append(self)


@pytest.fixture(scope="module")
def kept_together():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ranks, "RankLoop", NotedLoop)
        return run_ranks(sessions(), MODEL, POOL, SETTINGS, RankSettings(RANKS))


def test_nothing_crosses_between_ranks(kept_together):
    (loop,) = LOOPS
    assert loop.devices == kept_together.devices == 2
    assert COLLECTIVES.search(loop.program.as_text() or "") is None


def test_sessions_stay_together(kept_together):
    trace, total = sessions(), kept_together.total
    again = sum(int(length) - BLOCK for length in trace.prompt_lens[SESSIONS:])
    assert total.completed == COUNT
    assert total.reuse.hit_tokens == again
    assert kept_together.hit_rate_one_rank == total.hit_rate == again / total.prompt_tokens
    assert kept_together.hit_rate_in_turn < total.hit_rate / 2
    assert kept_together.balance()["requests"] <= 2  # 2 of 7 sessions is what a rank should get
    assert sum(rank.requests for rank in kept_together.ranks) == COUNT
    assert all(rank.completed == rank.requests > 0 for rank in kept_together.ranks)
    assert [rank.leaked_full_pages for rank in kept_together.ranks] == [0] * RANKS


def plain() -> tuple[Trace, ModelConfig, swa.PoolConfig, ReplaySettings]:
    """A trace without ids, pools, settings. The longest of both halves are alike: one program."""
    prompts = [30, 1, 49, 12, 5, 20, 3, 40, 9, 17, 2, 60]
    trace = trace_of(prompts, [18, 46, 1, 0, 25, 29, 46, 9, 20, 31, 46, 1])
    pool = config_of(Sizes(48, 28, 4, 8))
    return trace, MODEL, pool, ReplaySettings(4, 12, slice_steps=10_000)


def test_one_rank_is_a_replay():
    alone, result = run_replay(*plain()), run_ranks(*plain(), RankSettings(1))
    assert alone.rejected > 0
    assert alone.retracted > 0
    assert figures(result.total) == figures(alone)
    assert result.total.timeline == alone.timeline
    assert result.devices == 1
    assert set(result.balance().values()) == {1.0}


@pytest.mark.long
def test_dealt_in_turn_each_rank_is_a_replay_of_its_part():
    trace, model, pool, settings = plain()
    in_turn = run_ranks(*plain(), RankSettings(2, "round-robin"))
    for rank in range(2):
        check_dealt(in_turn, trace, run_replay(only(trace, 2, rank), model, pool, settings), rank)
    assert sum(rank.retracted for rank in in_turn.ranks) == in_turn.total.retracted > 0
    assert max(rank.steps for rank in in_turn.ranks) == in_turn.total.steps
    assert in_turn.total.requests == len(trace)
    assert in_turn.hit_rate_in_turn is in_turn.hit_rate_one_rank is None


@pytest.mark.long
def test_without_a_cache_requests_go_where_there_is_least_to_do():
    result = run_ranks(*plain(), RankSettings(2))
    assert result.total.completed == result.total.requests - result.total.rejected
    assert result.total.leaked_full_pages == result.total.leaked_swa_pages == 0
    assert all(rank.requests > 0 for rank in result.ranks)
    assert result.hit_rate_one_rank is None


@pytest.mark.long
def test_dealt_in_turn_each_rank_has_a_cache_of_its_own():
    trace = crowd()
    spread = RankSettings(RANKS, "round-robin", compare=False)
    result = run_ranks(trace, MODEL, POOL, SETTINGS, spread)
    assert result.hit_rate_in_turn is result.hit_rate_one_rank is None
    assert result.total.completed == COUNT
    for rank in range(RANKS):
        alone = run_replay(only(trace, RANKS, rank), MODEL, POOL, SETTINGS)
        assert alone.reuse.evicted_full_pages > 0
        check_dealt(result, trace, alone, rank)


@pytest.mark.long
def test_one_rank_is_a_replay_with_a_cache_too():
    trace = crowd()
    alone = run_replay(trace, MODEL, POOL, SETTINGS)
    result = run_ranks(trace, MODEL, POOL, SETTINGS, RankSettings(1))
    assert alone.reuse.hit_tokens > 0
    assert figures(result.total) == figures(alone)
    assert result.total.timeline == alone.timeline
    assert result.hit_rate_one_rank == result.hit_rate_in_turn == alone.hit_rate


def test_prompts_have_in_common_what_they_begin_with():
    content = content_of(
        trace_with([20, 20, 11, 24], [1] * 4, [[0, 1, 2], [0, 1, 3], [0, 5], [6] * 3])
    )
    assert content is not None
    others = jnp.arange(5)
    assert common_tokens(content, jnp.int32(0), others).tolist() == [20, 16, 8, 0, 0]
    assert common_tokens(content, jnp.int32(2), others).tolist() == [8, 8, 11, 0, 0]


def test_a_part_of_a_trace():
    part = part_of(crowd(), np.array([2, 5]))
    assert len(part) == 2
    assert part.hash_ids is not None
    assert [int(blocks[2]) for blocks in part.hash_ids] == [1002, 1005]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ((0,), "ranks must be at least 1, got 0"),
        ((2, "best"), "placement must be one of prefix, round-robin, got 'best'"),
        ((2, "prefix", True, 0), "devices must be at least 1, got 0"),
    ],
)
def test_ranks_that_cannot_be(values, message):
    with pytest.raises(ValueError, match=message):
        RankSettings(*values)


def test_ranks_have_no_host_tier():
    settings = dataclasses.replace(SETTINGS, host_bytes=1)
    with pytest.raises(ValueError, match="ranks have no host tier"):
        run_ranks(sessions(), MODEL, POOL, settings, RankSettings(2))


COMMAND = ["replay", "mooncake-conversation", "--limit", "4"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--dp", "2", "--host-gib", "1"], "--host-gib looks at one allocator and cache"),
        (["--dp", "2", "--events", "a.jsonl"], "leave one of the two out; got --events a.jsonl"),
        (["--dp", "2", "--plot", "a.png"], "--dp 2 has one a rank"),
        (["--placement", "prefix"], "give --dp too"),
        (["--no-compare"], "give --dp too"),
        (["--dp", "0"], "must be an integer from 1 to 4096, got '0'"),
        (["--dp", "2", "--placement", "x"], "must be one of prefix, round-robin, got 'x'"),
    ],
)
def test_options_that_do_not_go_together(options, message, capsys):
    assert main([*COMMAND, *options]) == 2
    assert message in capsys.readouterr().err


@pytest.fixture
def replayed(monkeypatch, kept_together):
    """The command gets this result, or a changed one, instead of replaying."""

    def answer(**changes) -> list[RankSettings]:
        asked: list[RankSettings] = []

        def fake(_trace, _model, _pool, _settings, spread, _progress) -> RanksResult:
            asked.append(spread)
            return dataclasses.replace(kept_together, **changes)

        monkeypatch.setattr(ranks_session, "run_ranks", fake)
        return asked

    return answer


def test_the_command_tells_every_rank(replayed, kept_together, capsys):
    asked = replayed()
    assert main([*COMMAND, "--dp", "4", "--no-compare", "--json", "-"]) == 0
    assert asked == [RankSettings(4, compare=False)]
    out, shown = capsys.readouterr()
    told = json.loads(out)
    assert (told["ok"], told["dp"], told["placement"]) == (True, 4, "prefix")
    assert told["completed"] == sum(rank["completed"] for rank in told["ranks"]) == COUNT
    assert told["hit_rate_one_rank"] == kept_together.hit_rate_one_rank
    assert told["balance"] == kept_together.balance()
    steps = [rank.steps for rank in kept_together.ranks]
    assert [rank["steps"] for rank in told["ranks"]] == steps
    for text in ("4 on 2 devices", "all on one rank", "dealt in turn", "faults", f"{steps[3]:,}"):
        assert text in shown


def test_a_leak_on_one_rank_is_a_failure(replayed, kept_together, capsys):
    ranks = list(kept_together.ranks)
    ranks[2] = dataclasses.replace(ranks[2], leaked_swa_pages=3)
    ranks[0] = dataclasses.replace(ranks[0], faults=ranks[0].faults | {"double_free": 1})
    replayed(ranks=tuple(ranks))
    assert main([*COMMAND, "--dp", "4", "-q"]) == 1
    line = capsys.readouterr().err
    assert "rank 0: faults: double_free: 1; rank 2: leaked 0 full and 3 SWA pages" in line
