"""Goals, tables, plots and the check, from figures that are made up."""

import json

import pytest

from benchmarks import check, plots
from benchmarks.report import CALL, LOOP, PLAIN, flat_goals, page, ratios, speed_goals, verdicts

MAIN = {"pool_tokens": 400, "page_size": 4, "batch": 8, "rows": 2, "row_tokens": 16}


def row(case, side, median, *, steps=8, **sizes):
    own = ("batch",) if case == "decode" else ("rows", "row_tokens")
    at = {name: MAIN[name] for name in ("pool_tokens", "page_size", *own)}
    spread = {"min_us": median / 2, "q1_us": median - 1, "q3_us": median + 1, "max_us": 2 * median}
    return {"case": case, "side": side, **at, **sizes, "median_us": median, **spread} | {
        "repeats": 3,
        "steps": steps,
    }


def run(*rows):
    found = ratios(rows, MAIN)
    return {
        "smoke": False,
        "environment": {"python": "3", "torch": None},
        "workload": {"main": MAIN},
        "peers": {"sglang": {"timed": False, "note": "not installed", "differs": "x"}},
        "compile_seconds": {"all": 2, "programs": {"f": {"times": 2, "seconds": 2, "most": 1}}},
        "goals": {"speed": speed_goals(found), "flat": flat_goals(rows, MAIN)},
        "ratios": found,
        "results": list(rows),
    }


DECODES = [
    row("decode", LOOP, 4.0),
    row("decode", CALL, 50.0),
    row("decode", "sglang", 100.0),
    row("decode", "vLLM", 80.0),
    row("decode", PLAIN, 20.0),
]


def test_ratios_name_the_fastest_engine_and_the_fastest_of_all():
    other_pool = row("decode", "vLLM", 1.0, pool_tokens=800)
    loop, call = ratios([*DECODES, other_pool], MAIN)
    assert loop == {
        "case": "decode",
        "side": LOOP,
        "us": 4.0,
        "engine": "vLLM",
        "engine_us": 80.0,
        "engine_ratio": 20.0,
        "of_all": PLAIN,
        "of_all_us": 20.0,
        "of_all_ratio": 5.0,
    }
    assert (call["side"], call["engine_ratio"], call["of_all_ratio"]) == (CALL, 1.6, 0.4)


def test_goals_are_judged_by_the_fastest_engine():
    loop, call = speed_goals(ratios(DECODES, MAIN))
    assert (loop["goal"], loop["met"], loop["met_of_all"]) == (20.0, True, False)
    assert (call["goal"], call["met"], call["met_of_all"]) == (1.0, True, False)
    slower = [{**each, "median_us": 79.9} if each["side"] == "vLLM" else each for each in DECODES]
    assert speed_goals(ratios(slower, MAIN))[0]["met"] is False


def test_goals_without_an_engine_are_not_judged():
    (loop,) = speed_goals(ratios([DECODES[0], DECODES[-1]], MAIN))
    assert (loop["met"], loop["engine"], loop["met_of_all"]) == (None, None, False)


@pytest.mark.parametrize(("largest", "met"), [(5.2, True), (5.3, False)])
def test_flatness_is_a_loops_own(largest, met):
    rows = [
        *DECODES,
        row("decode", LOOP, largest, pool_tokens=1600),
        row("decode", LOOP, 9.0, pool_tokens=1600, page_size=1),
        row("free", LOOP, 9.0, pool_tokens=200, steps=1),  # dispatch is all that this one is
        row("free", LOOP, 3.0),
        row("free", LOOP, 3.0, pool_tokens=1600),
    ]
    decode, free = flat_goals(rows, MAIN)
    assert (decode["case"], decode["smallest"], decode["largest"]) == ("decode", 400, 1600)
    assert decode["growth"] == pytest.approx(largest / 4)
    assert decode["met"] is met
    assert (free["smallest"], free["growth"]) == (400, 1.0)


def test_verdicts_say_what_was_met():
    lines = verdicts(run(*DECODES, row("decode", LOOP, 6.0, pool_tokens=1600))["goals"])
    assert (
        "| decode, loop | 4.00 | vLLM, 80.0 | 20.0x | 20x | met | plain Python, 20.0 | 5.00x | "
        "**missed** |"
    ) in lines
    assert "| decode | 400 to 1,600 | 1.50 | 1.50 | 1.3 | **missed** |" in lines


def test_page_has_a_table_for_each_thing_that_is_varied():
    text = page(
        run(
            *DECODES,
            row("extend", CALL, 300.0),
            row("extend", CALL, 900.0, rows=8),
            row("decode", CALL, 70.0, page_size=1),
        ),
        pictures=False,
    )
    assert "](transitions_" not in text
    assert "](transitions_pools.png)" in page(run(*DECODES), pictures=True)
    assert "python 3\n" in text
    assert "* sglang: **not timed** (not installed). Differs: x." in text
    head = "|  | swa_jax, loop | swa_jax, call | sglang | vLLM | plain Python |"
    cells = "| decode | 4.00 (3.00 to 5.00) | 50.0 (49.0 to 51.0) | 100 (99.0 to 101) |"
    assert f"{head}\n| --- | ---: | ---: | ---: | ---: | ---: |\n{cells}" in text
    assert "| extend |  | 300 (299 to 301) |" in text
    assert "| extend | 8 | 16 |  | 900 (899 to 901) |" in text
    assert "| decode | 1 |  | 70.0 (69.0 to 71.0) |" in text
    assert "| f | 2 | 1.00 | 2.0 |" in text


def test_plots_show_the_figures():
    drawn = plots.figures(run(*DECODES, row("decode", LOOP, 6.0, pool_tokens=1600)))
    assert list(drawn) == ["ratios", "pools", "sizes"]
    bars = drawn["ratios"].axes[0].patches
    assert [1 + bar.get_width() for bar in bars] == [20.0, pytest.approx(1.6)]
    texts = [text.get_text().strip() for text in drawn["ratios"].axes[0].texts]
    assert texts == ["20x vLLM", "1.6x vLLM"]
    decode = drawn["pools"].axes[0]
    assert decode.get_title() == "decode"
    loop, *others = decode.lines
    assert (loop.get_xdata().tolist(), loop.get_ydata().tolist()) == ([400, 1600], [4, 6])
    assert [line.get_ydata().tolist() for line in others] == [[50], [100], [80], [20]]


def faster_machine(rows, **slower):
    """The same run in half the time, but for the sides that are named."""
    return run(
        *({**each, "median_us": each["median_us"] * slower.get(each["side"], 0.5)} for each in rows)
    )


def test_check_lets_the_machines_speed_cancel():
    compared = check.changes(faster_machine(DECODES), run(*DECODES))
    assert [(each.case, each.side, each.factor, each.peers) for each in compared] == [
        ("decode", LOOP, 1.0, 3),
        ("decode", CALL, 1.0, 3),
    ]


def test_check_goes_by_the_median_of_the_peers():
    (worst, other) = check.changes(
        faster_machine(DECODES, **{LOOP: 0.7, "vLLM": 5.0}), run(*DECODES)
    )
    assert (worst.side, worst.factor, other.factor) == (LOOP, pytest.approx(1.4), 1.0)


@pytest.mark.parametrize(("share", "code"), [(0.59, 0), (0.61, 1)])
def test_check_exits_with_what_it_found(tmp_path, capsys, share, code):
    new, old = tmp_path / "new.json", tmp_path / "old.json"
    new.write_text(json.dumps(faster_machine(DECODES, **{CALL: share})))
    old.write_text(json.dumps(run(*DECODES)))
    assert check.main([str(new), str(old)]) == code
    said = capsys.readouterr().out
    assert "2 cases beside the same peers" in said
    line = " 1.22  swa_jax, call: decode (pool tokens 400, page size 4, batch 8; 3 peers)"
    assert (line in said) == bool(code)


def test_check_of_runs_with_nothing_in_common(tmp_path):
    new, old = tmp_path / "new.json", tmp_path / "old.json"
    new.write_text(json.dumps(run(DECODES[0], DECODES[2])))
    old.write_text(json.dumps(run(DECODES[0], DECODES[3])))
    assert check.main([str(new), str(old)]) == 2
    assert check.main([str(new), str(tmp_path / "none.json")]) == 2
