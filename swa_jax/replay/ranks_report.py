"""What a replay on ranks found: as a dict for JSON, as tables, and in one line."""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from swa_jax.replay.ranks import RanksResult
from swa_jax.replay.report import Run, as_dict, problems, sections, verdict

if TYPE_CHECKING:
    from rich.table import Table

    from swa_jax.replay.driver import ReplayResult


@dataclass(frozen=True, eq=False)
class RanksRun:
    """A replay on ranks that was done: the run, with the totals as its result, and the ranks."""

    run: Run
    result: RanksResult


def ranks_dict(done: RanksRun) -> dict[str, object]:
    """All figures, and what they depend on, ready for JSON."""
    result = done.result
    return as_dict(done.run) | {
        "ok": not ranks_problems(done),
        "dp": result.settings.ranks,
        "devices": result.devices,
        "placement": result.settings.placement,
        "balance": result.balance(),
        "hit_rate_in_turn": result.hit_rate_in_turn,
        "hit_rate_one_rank": result.hit_rate_one_rank,
        "ranks": [_rank_dict(rank) for rank in result.ranks],
    }


def _rank_dict(rank: "ReplayResult") -> dict[str, object]:
    """What differs by rank: neither times, which they share, nor what was rejected for all."""
    figures = rank.to_dict()
    for name in ("wall_s", "compile_s", "rejected", "rejected_reasons", "prefix_cache"):
        del figures[name]
    return figures


def ranks_problems(done: RanksRun) -> list[str]:
    """What is wrong, rank by rank; empty if nothing is."""
    found = []
    for number, rank in enumerate(done.result.ranks):
        found += [f"rank {number}: {what}" for what in problems(replace(done.run, result=rank))]
    total = done.result.total
    lost = total.requests - total.rejected - sum(rank.requests for rank in done.result.ranks)
    if lost:
        found.append(f"sent to no rank: {lost}")
    return found


def ranks_verdict(done: RanksRun) -> str:
    """The outcome in one line."""
    found = ranks_problems(done)
    if found:
        total = done.result.total
        line = f"{total.completed} of {total.requests} requests completed"
        return f"FAILED: {line}; {'; '.join(found)}"
    return verdict(done.run)


def ranks_sections(done: RanksRun) -> list[tuple[str, list[tuple[str, str]]]]:
    """The totals by heading, as (label, text)."""
    result, settings = done.result, done.result.settings
    balance = ", ".join(
        f"{name.replace('_', ' ')} {value:.2f}" for name, value in result.balance().items()
    )
    devices = f"{result.devices} device" + ("" if result.devices == 1 else "s")
    rows = [
        ("ranks", f"{settings.ranks:,} on {devices}"),
        ("", "counts are sums; steps, pools and peaks are the largest of a rank"),
        ("placement", _PLACEMENT_TEXTS[settings.placement]),
        ("largest over mean", balance),
    ]
    if done.run.result.prefix_cache:
        rows.append(("hit rate", _percent(result.total.hit_rate)))
    if result.hit_rate_in_turn is not None:
        rows.append(("  dealt in turn", _percent(result.hit_rate_in_turn)))
    if result.hit_rate_one_rank is not None:
        one = f"{_percent(result.hit_rate_one_rank)}, with the pools of one"
        rows.append(("  all on one rank", one))
    first, *rest = sections(done.run)
    return [first, ("ranks", rows), *rest]


_PLACEMENT_TEXTS = {
    "prefix": "where the longest prefix is, unless that rank is too busy",
    "round-robin": "in turn",
}
COLUMNS = (
    "rank",
    "requests",
    "steps",
    "prompt tokens",
    "hit tokens",
    "retracted",
    "full pages",
    "SWA pages",
    "leaked",
    "faults",
)
_TROUBLES = {"leaked", "faults"}


def rank_rows(done: RanksRun) -> list[tuple[str, ...]]:
    """A row a rank, as `COLUMNS` has it; pages are those of its peaks."""
    rows = []
    for number, rank in enumerate(done.result.ranks):
        figures = (
            rank.completed,
            rank.steps,
            rank.prompt_tokens,
            rank.reuse.hit_tokens,
            rank.retracted,
            rank.peak_full_pages,
            rank.peak_swa_pages,
            rank.leaked_full_pages + rank.leaked_swa_pages,
            sum(rank.faults.values()),
        )
        rows.append((str(number), *(f"{figure:,}" for figure in figures)))
    return rows


def rank_table(done: RanksRun) -> "Table":
    """The ranks for the terminal, within 80 columns; needs rich.

    What went wrong on no rank has no column.
    """
    from rich.table import Table

    rows = rank_rows(done)
    shown = [
        place
        for place, column in enumerate(COLUMNS)
        if column not in _TROUBLES or any(row[place] != "0" for row in rows)
    ]
    title = "Ranks, pages at their peaks"
    if len(shown) == len(COLUMNS) - len(_TROUBLES):
        title += "; none leaked, no faults"
    table = Table(title=title, title_justify="left", box=None, padding=(0, 1, 0, 0))
    for place in shown:
        heading = COLUMNS[place].replace(" ", "\n")
        table.add_column(heading, justify="right", overflow="fold")
    for row in rows:
        table.add_row(*(row[place] for place in shown))
    return table


def _percent(part: float) -> str:
    return f"{100 * part:.1f} %"
