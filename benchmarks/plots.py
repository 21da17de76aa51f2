"""Figures of a run as three pictures. Needs matplotlib."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.report import CALL, GOALS, LOOP, OURS, PLAIN
from swa_jax.bench import cases
from swa_jax.bench.run import Row

# Okabe and Ito's colours, told apart with any colour vision; markers tell them apart in grey, too.
_STYLES = {
    LOOP: ("#0072B2", "o", "-"),
    CALL: ("#56B4E9", "s", "-"),
    "sglang": ("#D55E00", "^", "--"),
    "sglang-jax": ("#E69F00", "v", "--"),
    "vLLM": ("#009E73", "D", "--"),
    "vLLM, pool": ("#009E73", "d", ":"),
    "Levanter": ("#CC79A7", "P", "--"),
    PLAIN: ("#000000", "x", ":"),
}
_OTHER = ("#999999", ".", "-.")
_SHOWN = (
    cases.DECODE,
    cases.EXTEND,
    cases.FREE,
    cases.FREE_SWA,
    cases.FREE_SEGMENT,
    cases.FREE_SWA_SEGMENT,
)
_BY_SLOTS = (cases.EXTEND, cases.FREE, cases.FREE_SWA, cases.FREE_SEGMENT)
Chosen = Callable[[Row], float | None]  # where a row stands on the axis, None where it does not


def draw(result: dict[str, Any], folder: Path) -> None:
    """Draws what `transitions` wrote.

    Args:
      result: as it is in the JSON file.
      folder: for `transitions_ratios.png`, `transitions_pools.png` and `transitions_sizes.png`.
    """
    for name, figure in figures(result).items():
        file = folder / f"transitions_{name}.png"
        figure.savefig(file, dpi=90, metadata={"Software": None})


def figures(result: dict[str, Any]) -> dict[str, Any]:
    """The pictures by name, as matplotlib has them."""
    main, rows = result["workload"]["main"], result["results"]
    return {
        "ratios": _bars(result["ratios"]),
        "pools": _lines([(rows, case.name, _varied(main, "pool_tokens")) for case in _SHOWN]),
        "sizes": _lines(
            [
                (rows, cases.DECODE.name, _varied(main, "batch")),
                *((rows, case.name, _slots(main)) for case in _BY_SLOTS),
                *((rows, case.name, _varied(main, "page_size")) for case in _SHOWN[:4]),
            ]
        ),
    }


def _bars(ratios: Sequence[dict[str, Any]]) -> Any:  # noqa: ANN401
    """How many times faster ours is than the fastest engine, case by case."""
    from matplotlib.figure import Figure

    shown = [row for row in ratios if row["engine_ratio"] is not None]
    names = list(dict.fromkeys(row["case"] for row in shown))[::-1]
    figure = Figure(figsize=(9, 1 + 0.45 * max(1, len(names))), layout="constrained")
    axes = figure.subplots()
    for side, shift in zip(OURS, (0.2, -0.2), strict=True):
        bars = [row for row in shown if row["side"] == side]
        places = [names.index(row["case"]) + shift for row in bars]
        lengths = [row["engine_ratio"] - 1 for row in bars]  # what is slower goes to the left of 1
        axes.barh(places, lengths, 0.38, left=1, color=_STYLES[side][0], label=side)
        for place, row in zip(places, bars, strict=True):
            label = f"  {row['engine_ratio']:.3g}x {row['engine']}"
            axes.text(max(1, row["engine_ratio"]), place, label, fontsize=8, va="center")
    goals = [goal for goal in GOALS if goal.side == LOOP and goal.case in names]
    axes.scatter(
        [goal.at_least for goal in goals],
        [names.index(goal.case) + 0.2 for goal in goals],
        marker="|",
        s=160,
        color="#D55E00",
        label="goal of the loop",
        zorder=3,
    )
    axes.axvline(1, color="#000000", linewidth=0.8)
    axes.set_xscale("log")
    axes.margins(x=0.3)
    axes.set_yticks(range(len(names)), names)
    axes.set_xlabel("times faster than the fastest engine that was timed")
    axes.legend(loc="upper left", bbox_to_anchor=(1, 1), frameon=False)
    return figure


def _lines(panels: Sequence[tuple[Sequence[Row], str, tuple[str, Chosen]]]) -> Any:  # noqa: ANN401
    """A panel for each case: medians over a size, with quartiles, by side."""
    from matplotlib.figure import Figure

    columns = 3
    height = -(-len(panels) // columns)
    figure = Figure(figsize=(11, 2.9 * height + 0.6), layout="constrained")
    grid = figure.subplots(height, columns, squeeze=False).reshape(-1)
    labelled = {}
    for axes, (rows, case, (label, chosen)) in zip(grid, panels, strict=False):
        axes.set_title(case, fontsize=10)
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xlabel(label, fontsize=9)
        axes.grid(visible=True, which="major", color="#dddddd", linewidth=0.6)
        for side in dict.fromkeys(row["side"] for row in rows):
            labelled |= _line(axes, side, [row for row in rows if row["case"] == case], chosen)
    for axes in grid[len(panels) :]:
        axes.set_visible(False)
    for axes in grid[::columns]:
        axes.set_ylabel("us", fontsize=9)
    figure.legend(labelled.values(), labelled.keys(), loc="outside upper center", ncols=4)
    return figure


def _line(axes: Any, side: str, rows: Sequence[Row], chosen: Chosen) -> dict[str, Any]:  # noqa: ANN401
    found = [(chosen(row), row) for row in rows if row["side"] == side]
    points = sorted(
        ((place, row) for place, row in found if place is not None), key=lambda item: item[0]
    )
    if not points:
        return {}
    places = [place for place, _ in points]
    color, marker, style = _STYLES.get(side, _OTHER)
    low, high = ([row[key] for _, row in points] for key in ("q1_us", "q3_us"))
    axes.fill_between(places, low, high, color=color, alpha=0.15, linewidth=0)
    (line,) = axes.plot(
        places,
        [row["median_us"] for _, row in points],
        color=color,
        marker=marker,
        linestyle=style,
        markersize=5,
        linewidth=1.4,
    )
    return {side: line}


def _varied(main: dict[str, int], name: str) -> tuple[str, Chosen]:
    """The points that differ from the main one in one size."""
    others = {other: size for other, size in main.items() if other != name}

    def chosen(row: Row) -> float | None:
        agrees = all(row.get(other, size) == size for other, size in others.items())
        return row.get(name) if agrees else None

    return name.replace("_", " "), chosen


def _slots(main: dict[str, int]) -> tuple[str, Chosen]:
    """The points that differ from the main one in the number of rows."""
    _, rows_of = _varied(main, "rows")

    def chosen(row: Row) -> float | None:
        rows = rows_of(row)
        return None if rows is None else rows * row["row_tokens"]

    return "slots", chosen
