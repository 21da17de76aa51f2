"""The tables of many columns: whole on a terminal of 80 columns."""

import dataclasses
import io

import pytest
from replays import RESULT, made_up_run
from rich.console import Console

from swa_jax.replay.ranks import RankSettings, RanksResult
from swa_jax.replay.ranks_report import RanksRun, rank_table

LARGE = dataclasses.replace(
    RESULT,
    completed=1_000_000,
    steps=7_654_321,
    prompt_tokens=1_234_567_890,
    peak_full_pages=1_720_784,
    leaked_full_pages=0,
    leaked_swa_pages=0,
)


def shown(*ranks):
    result = RanksResult(ranks[0], ranks, RankSettings(len(ranks)), 1)
    stream = io.StringIO()
    console = Console(file=stream, width=80, force_terminal=True, color_system=None)
    console.print(rank_table(RanksRun(made_up_run(), result)))
    return stream.getvalue()


def test_no_figure_is_cut():
    text = shown(LARGE, LARGE)
    for figure in ("1,000,000", "7,654,321", "1,234,567,890", "1,720,784"):
        assert text.count(figure) == 2, text
    assert "none leaked, no faults" in text
    assert max(map(len, text.splitlines())) <= 80


@pytest.mark.parametrize("trouble", [{"leaked_swa_pages": 7}, {"faults": {"unmapped": 7}}])
def test_what_went_wrong_has_a_column(trouble):
    text = shown(LARGE, dataclasses.replace(LARGE, **trouble))
    assert "none leaked" not in text
    assert text.splitlines()[-1].split()[0] == "1"
    assert " 7" in text.splitlines()[-1]
