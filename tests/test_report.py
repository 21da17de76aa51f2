"""What is said about a replay: the dict for JSON, the table, the verdict, the notes."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from replays import GIB, REUSED, made_up_run, made_up_trace, with_ids

from swa_jax.prefix_cache import POLICIES
from swa_jax.replay.report import as_dict, as_table, notes, problems, sections, verdict

ROOT = Path(__file__).parent.parent
KEYS = """
    requests completed rejected rejected_reasons retracted prompt_tokens output_tokens
    recomputed_tokens peak_full_pages peak_swa_pages leaked_full_pages leaked_swa_pages faults
    kv_bytes_peak kv_bytes_peak_full_only kv_bytes_pool wall_s compile_s steps peak_running ok
    trace trace_format model page_size full_tokens swa_tokens pure_swa sliding_window chunked
    max_running chunk_tokens max_context versions prefix_cache policy prompt_blocks hit_rate
    hit_tokens hit_blocks evicted_full_pages evicted_swa_pages tombstones cached_full_pages
    cached_swa_pages
"""


def test_the_dict_has_all_figures_and_survives_json():
    figures = as_dict(made_up_run())
    assert set(figures) >= set(KEYS.split())
    assert json.loads(json.dumps(figures, allow_nan=False)) == figures
    assert figures["sliding_window"] == 127
    assert figures["ok"] is True
    assert set(figures["versions"]) == {"swa_jax", "jax", "jaxlib", "numpy", "python", "device"}  # type: ignore[arg-type]


def test_verdict_of_a_good_replay():
    assert verdict(made_up_run()) == (
        "3 of 4 requests completed, 1 rejected (longer than the full pool: 1), nothing leaked, "
        "no faults; SWA saved 75 % of the KV memory (1 GiB at the peak instead of 4 GiB)"
    )


def reused_run(**changes):
    return made_up_run(trace=with_ids(made_up_trace()), **(REUSED | changes))


def rows_of(run, heading):
    return dict(dict(sections(run))[heading])


def test_figures_of_a_prefix_cache():
    figures = as_dict(reused_run(policy="cost"))
    assert figures["prefix_cache"] is True
    assert figures["policy"] == "cost"
    assert (figures["hit_tokens"], figures["hit_rate"], figures["tombstones"]) == (600, 0.4, 30)
    assert json.loads(json.dumps(figures, allow_nan=False)) == figures
    assert rows_of(reused_run(), "prefix cache") == {
        "leaves first": "lru, the least recently used",
        "hit tokens": "600 of 1,500 (40.0 %)",
        "hit blocks": "2 of 8 (25.0 %)",
        "evicted full pages": "1,234",
        "evicted SWA pages": "2,345",
        "cached full pages": "45 at the end",
        "cached SWA pages": "15 at the end",
        "tombstones": "30 at the end",
    }


@pytest.mark.parametrize("policy", POLICIES)
def test_every_policy_is_explained(policy):
    row = rows_of(reused_run(policy=policy), "prefix cache")["leaves first"]
    assert row.startswith(f"{policy}, ")


def test_no_saving_is_claimed_where_the_peak_holds_cached_pages():
    run = reused_run()
    assert verdict(run).endswith(
        "nothing leaked, no faults; 40.0 % of the prompt tokens came from the prefix cache (1 GiB "
        "at the peak with what the cache keeps)"
    )
    assert "SWA saved" not in verdict(run)
    memory = rows_of(run, "memory")
    assert memory["peak KV"] == "1 GiB, with what the cache keeps"
    assert memory["running, no SWA or reuse"] == "4 GiB"
    assert "peak KV without SWA" not in memory
    nothing = reused_run(prompt_tokens=0, completed=0, rejected=4, hit_rate=0.0)
    assert verdict(nothing).endswith("no faults")


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"turned_off": True}, "turned off"),
        ({}, "the trace does not say which prompts are equal"),
        ({"trace": with_ids(made_up_trace()), "model": "mistral-7b-v0.1"}, "no full layers"),
    ],
)
def test_why_there_is_no_cache(options, reason):
    run = made_up_run(**options)
    assert reason in rows_of(run, "prefix cache")["cache"]
    assert as_dict(run)["policy"] is None


@pytest.mark.parametrize(
    ("figures", "said"),
    [
        ({"leaked_swa_pages": 2}, "leaked 0 full and 2 SWA pages"),
        ({"leaked_full_pages": 1}, "leaked 1 full and 0 SWA pages"),
        ({"faults": {"unmapped": 3, "misaligned": 0}}, "faults: unmapped: 3"),
        ({"completed": 2}, "neither completed nor rejected: 1"),
    ],
)
def test_verdict_of_a_bad_replay(figures, said):
    run = made_up_run(**figures)
    assert problems(run) == [said]
    assert verdict(run).startswith("FAILED: ")
    assert verdict(run).endswith(said)
    assert as_dict(run)["ok"] is False


def test_rejected_requests_are_no_problem():
    everything = made_up_run(
        completed=0, rejected=4, rejected_reasons={"too long": 4}, kv_bytes_peak_full_only=0
    )
    assert problems(everything) == []
    assert verdict(everything) == (
        "0 of 4 requests completed, 4 rejected (too long: 4), nothing leaked, no faults"
    )


@pytest.mark.parametrize("used", [4 * GIB, 5 * GIB])
def test_no_saving_is_not_called_one(used):
    assert "SWA saved no KV memory" in verdict(made_up_run(kv_bytes_peak=used))


@pytest.mark.parametrize(
    ("lengths", "max_context", "longer"),
    [
        ((100, 131_071), None, 0),  # with its one output token just as long as the context
        ((100, 131_072), None, 1),
        ((200_000, 131_072), 150_000, 1),  # the other is rejected
        ((200_000, 131_072), 131_072, 0),
        ((2**31 - 1,), None, 1),  # the sum passes int32
    ],
)
def test_note_on_requests_longer_than_the_context(lengths, max_context, longer):
    said = notes(made_up_run(trace=made_up_trace(lengths), max_context=max_context))
    assert len(said) == (longer > 0)
    if longer:
        assert f"{longer} of {len(lengths)} requests are longer than the 131,072 tokens" in said[0]
        assert "--max-context 131072" in said[0]


def test_no_note_where_the_context_is_not_known():
    assert notes(made_up_run("gemma-3-270m", trace=made_up_trace((10**6,)))) == []


def test_sections_show_every_figure():
    text = "\n".join(
        f"{label}: {value}" for _, rows in sections(made_up_run()) for label, value in rows
    )
    for line in (
        "trace: made-up (azure, 4 requests)",
        "full pool: 1,600 tokens, 100 pages",
        "completed: 3 of 4",
        "  longer than the full pool: 1",
        "retracted: 2 times",
        "recomputed tokens: 70",
        "peak full pages: 64 of 100 (64.0 %)",
        "peak SWA pages: 22 of 100 (22.0 %)",
        "cache: none: the trace does not say which prompts are equal",
        "peak KV without SWA: 4 GiB",
        "faults: none",
        "compilation: 1.25 s",
    ):
        assert line in text


def test_a_model_without_full_layers_has_one_pool():
    labels = [label for _, rows in sections(made_up_run("mistral-7b-v0.1")) for label, _ in rows]
    assert "SWA pool" in labels
    assert not {"full pool", "peak full pages"} & set(labels)


def test_a_name_is_not_read_as_markup_and_cannot_steer_the_terminal(capsys):
    from rich.console import Console

    Console(width=100).print(as_table(made_up_run(trace=made_up_trace(name="[red]\x1b[31m"))))
    shown = capsys.readouterr().out
    assert r"'[red]\x1b[31m'" in shown
    assert "\x1b" not in shown


def test_the_dict_needs_no_rich():
    code = (
        "import sys; sys.modules['rich'] = sys.modules['matplotlib'] = None;"
        "import swa_jax.replay.session"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, timeout=120)
