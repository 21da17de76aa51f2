"""Figures as ratios, as goals met or missed, and as tables.

A ratio is a peer's median over ours, in the same run: how many times faster ours is. Engines are
named apart from the plain-Python list, which is no engine's: it has no tensors to give and take.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from swa_jax.bench import cases, scans
from swa_jax.bench.baseline import FreeListAllocator
from swa_jax.bench.ours import OwnCalls
from swa_jax.bench.run import Row

Where: TypeAlias = tuple[int | None, ...]  # a row's sizes, in the order of SIZES

LOOP, CALL, PLAIN = scans.NAME, OwnCalls.name, FreeListAllocator.name
OURS = (LOOP, CALL)
SIZES = ("pool_tokens", "page_size", "batch", "rows", "row_tokens")
FLAT = 1.3  # a step in the largest pool over one in the smallest, at most
FEW_SETS = 4  # of a loop that frees fewer batches, dispatch is too large a part to judge by


@dataclass(frozen=True)
class Goal:
    """How many times faster than the fastest engine a case should be."""

    case: str
    side: str
    at_least: float


GOALS = (
    Goal(cases.DECODE.name, LOOP, 20.0),
    Goal(cases.EXTEND.name, LOOP, 80.0),
    Goal(cases.FREE.name, LOOP, 8.0),
    Goal(cases.FREE_SWA.name, LOOP, 8.0),
    Goal(cases.FREE_SEGMENT.name, LOOP, 60.0),
    Goal(cases.FREE_SWA_SEGMENT.name, LOOP, 60.0),
    *(Goal(case.name, CALL, 1.0) for case in (cases.DECODE, cases.EXTEND, *cases.FREES)),
)


def where(row: Row) -> Where:
    """The sizes at which a row was timed."""
    return tuple(row.get(size) for size in SIZES)


def together(rows: Iterable[Row]) -> dict[tuple[str, Where], dict[str, Row]]:
    """What was timed of one case at one point, by side."""
    found: dict[tuple[str, Where], dict[str, Row]] = {}
    for row in rows:
        found.setdefault((row["case"], where(row)), {})[row["side"]] = row
    return found


def fastest(timed: dict[str, Row], *, plain: bool = False) -> Row | None:
    """The fastest that is not ours; the plain-Python list only with `plain`."""
    others = [row for side, row in timed.items() if side not in OURS and (plain or side != PLAIN)]
    return min(others, key=lambda row: row["median_us"], default=None)


def ratios(rows: Sequence[Row], main: dict[str, int]) -> list[dict[str, Any]]:
    """At the main point: each case of ours beside the fastest engine, and the fastest of all.

    Args:
      rows: of one run.
      main: the sizes of the main point, by the names of SIZES.

    Returns:
      A dictionary for each case and each way to call ours; None where there is nothing to
      compare with.
    """
    return [
        {
            "case": case,
            "side": side,
            "us": timed[side]["median_us"],
            **_beside("engine", timed[side], fastest(timed)),
            **_beside("of_all", timed[side], fastest(timed, plain=True)),
        }
        for (case, sizes), timed in together(rows).items()
        if _is_at(sizes, main) and timed.keys() - set(OURS)
        for side in OURS
        if side in timed
    ]


def _beside(name: str, own: Row, other: Row | None) -> dict[str, Any]:
    if other is None:
        return {name: None, f"{name}_us": None, f"{name}_ratio": None}
    ratio = other["median_us"] / own["median_us"]
    return {name: other["side"], f"{name}_us": other["median_us"], f"{name}_ratio": ratio}


def _is_at(sizes: Where, main: dict[str, int]) -> bool:
    return all(size in (None, main[name]) for name, size in zip(SIZES, sizes, strict=True))


def speed_goals(found: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Each goal with its figure; `met` is None where no engine was timed.

    Args:
      found: of `ratios`.
    """
    by_case = {(row["case"], row["side"]): row for row in found}
    judged = []
    for goal in GOALS:
        row = by_case.get((goal.case, goal.side))
        if row is not None:
            figures = [row["engine_ratio"], row["of_all_ratio"]]
            met = [None if figure is None else figure >= goal.at_least for figure in figures]
            judged.append({**row, "goal": goal.at_least, "met": met[0], "met_of_all": met[1]})
    return judged


def flat_goals(rows: Sequence[Row], main: dict[str, int]) -> list[dict[str, Any]]:
    """For each loop: a step in the largest pool over one in the smallest.

    Pools of which a loop frees fewer than `FEW_SETS` batches are left out.
    """
    judged = []
    for case in dict.fromkeys(row["case"] for row in rows):
        loops = [
            row
            for row in rows
            if (row["case"], row["side"]) == (case, LOOP)
            and row["steps"] >= FEW_SETS
            and _is_at(where({**row, "pool_tokens": None}), main)
        ]
        loops.sort(key=lambda row: row["pool_tokens"])
        if len(loops) > 1:
            growth = {
                key: loops[-1][f"{key}_us"] / loops[0][f"{key}_us"] for key in ("median", "min")
            }
            judged.append(
                {
                    "case": case,
                    "smallest": loops[0]["pool_tokens"],
                    "largest": loops[-1]["pool_tokens"],
                    "growth": growth["median"],
                    "growth_of_minima": growth["min"],
                    "goal": FLAT,
                    "met": growth["median"] <= FLAT,
                }
            )
    return judged


def verdicts(judged: dict[str, list[dict[str, Any]]]) -> str:
    """The goals as two Markdown tables.

    Args:
      judged: "speed" of `speed_goals`, "flat" of `flat_goals`.
    """
    speed = [
        [
            f"{row['case']}, {row['side'].partition(', ')[2]}",
            us(row["us"]),
            _named(row, "engine"),
            _times(row["engine_ratio"]),
            f"{row['goal']:.0f}x",
            _word(row["met"]),
            _named(row, "of_all"),
            _times(row["of_all_ratio"]),
            _word(row["met_of_all"]),
        ]
        for row in judged["speed"]
    ]
    flat = [
        [
            row["case"],
            f"{_power(row['smallest'])} to {_power(row['largest'])}",
            f"{row['growth']:.2f}",
            f"{row['growth_of_minima']:.2f}",
            f"{row['goal']}",
            _word(row["met"]),
        ]
        for row in judged["flat"]
    ]
    head = ["", "ours, us", "fastest engine", "ours is faster", "goal", ""]
    return "\n".join(
        [
            *_table([*head, "fastest incl. plain Python", "ours is faster", ""], speed),
            "",
            *_table(["in a loop", "pools", "growth", "of minima", "goal", ""], flat),
        ]
    )


def _named(row: dict[str, Any], key: str) -> str:
    return "none timed" if row[key] is None else f"{row[key]}, {us(row[f'{key}_us'])}"


def _times(ratio: float | None) -> str:
    return "" if ratio is None else f"{ratio:.{0 if ratio >= 100 else 1 if ratio >= 10 else 2}f}x"


def _word(met: bool | None) -> str:
    return "not judged" if met is None else "met" if met else "**missed**"


def _power(tokens: int) -> str:
    """2^n where it is a power of two."""
    exact = tokens & (tokens - 1) == 0
    return f"2^{tokens.bit_length() - 1}" if exact else f"{tokens:,}"


def figures(rows: Sequence[Row], main: dict[str, int], axis: Sequence[str]) -> str:
    """A Markdown table of the points that differ from the main one in `axis` alone.

    Args:
      rows: of one run.
      main: the sizes of the main point.
      axis: names of SIZES; none for the main point itself.

    Returns:
      Cases and sizes down, allocators across: median (quartiles) microseconds.
    """
    others = {name: size for name, size in main.items() if name not in axis}
    shown = [row for row in rows if _agrees(row, others) and all(name in row for name in axis)]
    sides = list(dict.fromkeys(row["side"] for row in rows))
    lines = [
        [case, *(f"{row_sizes[SIZES.index(name)]:,}" for name in axis)]
        + [_cell(timed.get(side)) for side in sides]
        for (case, row_sizes), timed in sorted(
            together(shown).items(), key=lambda item: _order(shown, item[0])
        )
    ]
    return "\n".join(_table(["", *(name.replace("_", " ") for name in axis), *sides], lines))


def _agrees(row: Row, sizes: dict[str, int]) -> bool:
    return all(row.get(name, size) == size for name, size in sizes.items())


def _order(rows: Sequence[Row], key: tuple[str, Where]) -> tuple[int, list[int]]:
    names = list(dict.fromkeys(row["case"] for row in rows))
    return names.index(key[0]), [size or 0 for size in key[1]]


def _table(head: list[str], lines: list[list[str]]) -> list[str]:
    rule = ["---", *("---:" for _ in head[1:])]
    return ["| " + " | ".join(cells) + " |" for cells in (head, rule, *lines)]


def _cell(row: Row | None) -> str:
    if row is None:
        return ""
    return f"{us(row['median_us'])} ({us(row['q1_us'])} to {us(row['q3_us'])})"


def us(value: float) -> str:
    """Microseconds, three digits or more."""
    return f"{value:,.2f}" if value < 10 else f"{value:,.1f}" if value < 100 else f"{value:,.0f}"


def page(result: dict[str, Any], *, pictures: bool) -> str:
    """The whole Markdown page of a run.

    Args:
      result: what is written as JSON.
      pictures: link to those that are drawn beside the page.
    """
    main, rows = result["workload"]["main"], result["results"]
    place = {name: value for name, value in result["environment"].items() if value is not None}
    compiled = result["compile_seconds"]["programs"]
    longest = [
        [name, f"{each['times']}", f"{each['most']:.2f}", f"{each['seconds']:.1f}"]
        for name, each in compiled.items()
        if each["most"] >= 0.1
    ]
    sections = [
        ("# Transitions, side by side", _HEAD),
        ("", ", ".join(f"{name} {value}" for name, value in place.items())),
        ("", "\n".join(_peer_line(*item) for item in result["peers"].items())),
        ("## Goals", "tiny sizes: not judged" if result["smoke"] else verdicts(result["goals"])),
        ("", _PLOTS if pictures else ""),
        (f"## {_sizes(main)}", figures(rows, main, ())),
        ("## Pools", figures(rows, main, ("pool_tokens",))),
        ("## Pages", figures(rows, main, ("page_size",))),
        ("## Batches that decode", figures(rows, main, ("batch",))),
        ("## Rows that are extended and freed", figures(rows, main, ("rows", "row_tokens"))),
        ("## Compilation", _COMPILATION + "\n\n" + "\n".join(_table(_COMPILED, longest))),
    ]
    return "\n\n".join(part for section in sections for part in section if part) + "\n"


def _peer_line(name: str, peer: dict[str, Any]) -> str:
    timed = "timed" if peer["timed"] else "**not timed**"
    return f"* {name}: {timed} ({peer['note']}). Differs: {peer['differs']}."


def _sizes(main: dict[str, int]) -> str:
    return (
        f"Pools of {main['pool_tokens']:,} tokens, page {main['page_size']}, {main['batch']} rows "
        f"that decode, {main['rows']} x {main['row_tokens']} tokens that are extended and freed"
    )


_HEAD = """\
Written by `make bench`. Median (quartiles) microseconds. "loop": a step of one compiled loop.
"call": one jitted call, state donated, dispatch and waiting included. Frees are of a random order
of slots ("any set"), of segments in token order. In a loop as many batches are extended or freed as
the pool holds, and what is freed was granted before; "extend + ..." frees what it has just
extended, in that order. All allocators do the same work at each point, in turns, and were compared
first: offsets of slots, pages taken, what both pools have left. All pages were granted and given
back in random order before. The process stays on one core."""
_PLOTS = """\
![Ours beside the fastest engine](transitions_ratios.png)

![Over the pool's size](transitions_pools.png)

![Over the batch, the slots and the page](transitions_sizes.png)"""
_COMPILATION = """\
XLA's seconds, none of them in the figures above. A program is compiled once for each shape and pool
size. Those with 0.1 s or more; all are in the JSON file."""
_COMPILED = ["program", "times", "longest, s", "all, s"]
