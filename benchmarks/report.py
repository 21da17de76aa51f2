"""Figures as tables and as the two lines that say whether the goals are met."""

from collections.abc import Iterable
from typing import Any, TypeAlias

from benchmarks import scans

Row: TypeAlias = dict[str, Any]  # side, case, pool_tokens and a timing's summary

GROWTH_GOAL = 1.5  # decode in the largest pool over decode in the smallest, at most
SPEED_GOAL = 10.0  # sglang's decode over ours, at least


def tables(rows: list[Row], pools: Iterable[int]) -> str:
    """One Markdown table for each pool: cases down, allocators across."""
    sides = list(dict.fromkeys(row["side"] for row in rows))
    cases = list(dict.fromkeys(row["case"] for row in rows))
    found = {(row["pool_tokens"], row["case"], row["side"]): row for row in rows}
    lines: list[str] = []
    for pool in pools:
        lines += [f"Pools of {pool:,} tokens: median (min to max) microseconds", ""]
        lines += [_line(["", *sides]), _line(["---", *("---:" for _ in sides)])]
        for case in cases:
            cells = [_cell(found.get((pool, case, side))) for side in sides]
            lines.append(_line([case, *cells]))
        lines.append("")
    return "\n".join(lines)


def _line(cells: list[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def _cell(row: Row | None) -> str:
    if row is None:
        return ""
    return f"{_us(row['median_us'])} ({_us(row['min_us'])} to {_us(row['max_us'])})"


def _us(value: float) -> str:
    return f"{value:,.1f}" if value < 100 else f"{value:,.0f}"


def ratios(rows: list[Row], pools: tuple[int, ...]) -> dict[str, Any]:
    """Both goals' figures; None for sglang's where it was not timed."""
    growth = {
        key: _decode(rows, scans.NAME, max(pools))[f"{key}_us"]
        / _decode(rows, scans.NAME, min(pools))[f"{key}_us"]
        for key in ("median", "min")
    }
    if any(row["side"] == "sglang" for row in rows):
        speed = {
            key: min(
                _decode(rows, "sglang", pool)[f"{key}_us"]
                / _decode(rows, scans.NAME, pool)[f"{key}_us"]
                for pool in pools
            )
            for key in ("median", "min")
        }
    else:
        speed = None
    return {
        "decode_largest_over_smallest": growth,
        "sglang_decode_over_ours": speed,
        "growth_met": growth["median"] <= GROWTH_GOAL,
        "speed_met": None if speed is None else speed["median"] >= SPEED_GOAL,
    }


def _decode(rows: list[Row], side: str, pool: int) -> Row:
    return next(
        row
        for row in rows
        if (row["side"], row["case"], row["pool_tokens"]) == (side, "decode", pool)
    )


def verdicts(figures: dict[str, Any]) -> list[str]:
    """Two plain lines."""
    growth = figures["decode_largest_over_smallest"]
    first = (
        f"decode in the largest pool / in the smallest: {growth['median']:.2f} by medians, "
        f"{growth['min']:.2f} by minima; goal <= {GROWTH_GOAL}: {_word(figures['growth_met'])}"
    )
    speed = figures["sglang_decode_over_ours"]
    if speed is None:
        return [first, f"sglang decode / ours in scan: sglang not timed; goal >= {SPEED_GOAL:.0f}"]
    second = (
        f"sglang decode / ours in scan, worst pool: {speed['median']:.1f} by medians, "
        f"{speed['min']:.1f} by minima; goal >= {SPEED_GOAL:.0f}: {_word(figures['speed_met'])}"
    )
    return [first, second]


def _word(met: bool) -> str:
    return "met" if met else "missed"
