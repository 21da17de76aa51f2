"""What a plan found: as a dict for JSON, as tables, and in one line."""

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from swa_jax.models import format_bytes
from swa_jax.planner.planning import Plan
from swa_jax.planner.splits import Outcome, Split
from swa_jax.replay.report import versions

if TYPE_CHECKING:
    from rich.table import Table

Rows = list[tuple[str, str]]
SHOWN = 9  # splits in the table


@dataclass(frozen=True, eq=False)
class PlanRun:
    """A plan, how long it took, and the replay beside it."""

    plan: Plan
    seconds: float
    confirmed_rank: int | None = None
    confirmed: dict[str, tuple[int, int]] | None = None  # simulated and replayed

    @property
    def differences(self) -> dict[str, tuple[int, int]]:
        """The figures in which simulation and replay differ."""
        pairs = (self.confirmed or {}).items()
        return {name: pair for name, pair in pairs if pair[0] != pair[1]}


def as_dict(run: PlanRun) -> dict[str, object]:
    """All figures, ready for JSON. Bytes and tokens of pools are those of one chip."""
    plan, settings = run.plan, run.plan.settings
    return {
        "ok": not run.differences,
        "trace": plan.trace.name,
        "model": plan.model.name,
        **dataclasses.asdict(settings),
        "tp": settings.tp,
        "kv_bytes_of_chip": settings.chip_bytes,
        "requests": plan.requests,
        "completed": int(plan.ranks.completed.sum()),
        "rejected_reasons": plan.rejected,
        "split": _split_dict(plan, plan.split),
        "rule_split": _split_dict(plan, plan.rule),
        "retracted": int(plan.ranks.retracted.sum()),
        "recomputed_tokens": int(plan.ranks.recomputed.sum()),
        "running_mean": _at_once(plan),
        "running_of_rank": _span(plan.ranks.mean("running")),
        "running_peak_of_rank": int(plan.ranks.peak_running.max()),
        "steps_of_rank": _span(plan.ranks.steps),
        "clock_of_rank": _span(plan.ranks.clock),
        "longest_wait_steps": int(plan.ranks.longest_wait.max()),
        "peak_full_pages": None if plan.pure else int(plan.ranks.peak_full.max()),
        "peak_swa_pages": int(plan.ranks.peak_swa.max()),
        "kv_bytes_peak": peak_bytes(plan),
        "kv_bytes_mean": mean_bytes(plan),
        "splits_compared_on_ranks": plan.sampled,
        "splits": [_outcome_dict(plan, outcome) for outcome in plan.outcomes],
        "confirmed_rank": run.confirmed_rank,
        "confirmed": run.confirmed,
        "seconds": run.seconds,
        "versions": versions(),
    }


def _split_dict(plan: Plan, split: Split) -> dict[str, object]:
    size = plan.settings.page_size
    return {
        "full_tokens": None if plan.pure else split.full_pages * size,
        "swa_tokens": split.swa_pages * size,
        "swa_share": swa_share(plan, split),
        "kv_bytes": plan.page.total(split),
    }


def _outcome_dict(plan: Plan, outcome: Outcome) -> dict[str, object]:
    figures = dataclasses.asdict(outcome)
    del figures["split"]
    return _split_dict(plan, outcome.split) | figures


def _span(values: np.ndarray) -> dict[str, float]:
    return {
        "least": float(values.min()),
        "mean": float(values.mean()),
        "most": float(values.max()),
    }


def swa_share(plan: Plan, split: Split) -> float:
    """The part of the bytes that the SWA pool has."""
    return (split.swa_pages + 1) * plan.page.swa / plan.page.total(split)


def peak_bytes(plan: Plan) -> int:
    """The most bytes that one chip held at once."""
    pair = plan.ranks.peak_pair
    return int((pair[:, 0] * plan.page.full + pair[:, 1] * plan.page.swa).max())


def mean_bytes(plan: Plan) -> float:
    """Bytes that one chip holds in the mean of all steps."""
    ranks = plan.ranks
    held = ranks.sum_full_pages.sum() * plan.page.full + ranks.sum_swa_pages.sum() * plan.page.swa
    return float(held / max(int(ranks.steps.sum()), 1))


def _at_once(plan: Plan) -> float:
    """Requests at once over all ranks, in the mean of their steps."""
    return float(plan.ranks.mean("running").sum())


def verdict(run: PlanRun) -> str:
    """The outcome in one line."""
    plan = run.plan
    if run.differences:
        pairs = (f"{name}: {one} and {two}" for name, (one, two) in run.differences.items())
        return f"FAILED: simulation and replay differ in {', '.join(pairs)}"
    if plan.pure:
        line = f"one pool of {_tokens(plan.split.swa_pages * plan.settings.page_size)}"
    else:
        size = plan.settings.page_size
        share = f"{100 * swa_share(plan, plan.split):.1f} %"
        line = (
            f"give the SWA pool {share} of the KV bytes: {plan.split.full_pages * size} full and "
            f"{plan.split.swa_pages * size} SWA tokens"
        )
        if plan.settings.tp == 1:  # the replay's pools are those of a chip that has the whole model
            line += (
                f" (swa-jax replay TRACE --model {plan.model.name} --page-size {size} "
                f"--full-tokens {plan.split.full_pages * size} "
                f"--swa-tokens {plan.split.swa_pages * size} --no-prefix-cache)"
            )
    line += f"; {_at_once(plan):,.1f} requests at once, retracted {_times(plan)}"
    return line if run.confirmed is None else f"{line}; the replay comes to the same figures"


def notes(run: PlanRun) -> list[str]:
    """What the reader should know, one line each."""
    plan, found = run.plan, []
    heads = plan.model.kv_heads
    if plan.settings.tp > heads:
        found.append(
            f"note: {plan.settings.tp} chips share {heads} KV heads, so several keep the same KV; "
            f"more ranks (--dp {plan.settings.chips // heads}) would keep more of it"
        )
    if plan.sampled < plan.settings.dp:
        found.append(
            f"note: splits were compared on {plan.sampled} of {plan.settings.dp:,} ranks, the best "
            "was then simulated on all"
        )
    if plan.rule_outcome is None and not plan.pure:
        found.append("note: the longest request does not fit the split that plan_pools gives")
    return found


def sections(run: PlanRun) -> list[tuple[str, Rows]]:
    """All figures by heading, as (label, text)."""
    return [
        ("input", _input_rows(run.plan)),
        ("one chip", _chip_rows(run.plan)),
        ("requests", _request_rows(run.plan)),
        ("time", _time_rows(run)),
    ]


def _input_rows(plan: Plan) -> Rows:
    settings, trace = plan.settings, plan.trace
    name = trace.name if trace.name.isprintable() else repr(trace.name)
    copies = f", {settings.copies:,} times" if settings.copies > 1 else ""
    rows = [("trace", f"{name} ({len(trace):,} requests{copies})"), ("model", plan.model.name)]
    shared = "" if settings.tp == 1 else f" of {settings.tp} chips that share a model"
    ranks = "1 rank" if settings.dp == 1 else f"{settings.dp:,} ranks"
    rows.append(("chips", f"{settings.chips:,}: {ranks}{shared}"))
    if settings.step_ms is None:
        arrive = "not waited for"
    elif settings.rate is None:
        arrive = f"as in the trace, a step taking {settings.step_ms:g} ms"
    else:
        arrive = f"{settings.rate:g} a second, a step taking {settings.step_ms:g} ms"
    return [*rows, ("arrivals", arrive)]


def _chip_rows(plan: Plan) -> Rows:
    settings, split = plan.settings, plan.split
    kv = _size(plan, settings.chip_bytes)
    if settings.weights_bytes:
        kv += f" of {_size(plan, settings.hbm_bytes)}, beside the weights"
    rows = [("memory for KV", kv)]
    if not plan.pure:
        rows.append(("full pool", _pool(plan, split.full_pages, plan.page.full)))
    rows.append(("SWA pool", _pool(plan, split.swa_pages, plan.page.swa)))
    if not plan.pure:
        rule = f"{100 * swa_share(plan, plan.rule):.1f} % by plan_pools"
        rows.append(("SWA share", f"{100 * swa_share(plan, split):.1f} % of the bytes ({rule})"))
        rows.append(("peak full pages", _part(int(plan.ranks.peak_full.max()), split.full_pages)))
    rows.append(("peak SWA pages", _part(int(plan.ranks.peak_swa.max()), split.swa_pages)))
    rows.append(("peak KV", _size(plan, peak_bytes(plan))))
    left = _size(plan, max(round(plan.page.total(split) - mean_bytes(plan)), 0))
    mean = _size(plan, round(mean_bytes(plan)))
    what = "left" if plan.pure else "left, for a prefix cache"
    return [*rows, ("mean KV", f"{mean}; {left} {what}")]


def _pool(plan: Plan, pages: int, page_bytes: int) -> str:
    size = _size(plan, (pages + 1) * page_bytes)
    return f"{_tokens(pages * plan.settings.page_size)}, {pages:,} pages, {size}"


def _size(plan: Plan, amount: int) -> str:
    """All amounts of a plan in the unit of its budget."""
    return format_bytes(amount, like=plan.settings.chip_bytes)


def _request_rows(plan: Plan) -> Rows:
    ranks = plan.ranks
    rows = [("completed", f"{int(ranks.completed.sum()):,} of {plan.requests:,}")]
    rows += [(f"  {reason}", f"{count:,}") for reason, count in plan.rejected.items()]
    rows.append(("retracted", _times(plan)))
    lost = f"{int(ranks.recomputed.sum()):,}, of retracted requests"
    rows.append(("recomputed tokens", lost))
    most = f"{int(ranks.peak_running.max()):,} of {plan.settings.max_running:,} at most"
    if plan.settings.dp == 1:
        return [*rows, ("running at once", f"{_at_once(plan):,.1f} in the mean, {most}")]
    mean = ranks.mean("running")
    span = f"{mean.min():,.1f} to {mean.max():,.1f} in the mean, {most}"
    return [
        *rows,
        ("running at once", f"{_at_once(plan):,.1f} in the mean, over all ranks"),
        ("  on a rank", span),
    ]


def _time_rows(run: PlanRun) -> Rows:
    plan, ranks = run.plan, run.plan.ranks
    rows = [("steps", f"{int(ranks.steps.max()):,}")]
    if plan.settings.dp > 1:
        rows = [("steps of a rank", f"{int(ranks.steps.min()):,} to {int(ranks.steps.max()):,}")]
    if plan.settings.step_ms is not None:
        ms = plan.settings.step_ms
        rows.append(("until the last is done", f"{ranks.clock.max() * ms / 1000:,.1f} s"))
        rows.append(("longest wait", f"{ranks.longest_wait.max() * ms / 1000:,.1f} s"))
    device = versions()["device"]
    return [*rows, ("simulated in", f"{run.seconds:.1f} s on {device}, compilation included")]


def as_table(run: PlanRun) -> "Table":
    """`sections` for the terminal; needs rich."""
    from rich.table import Table
    from rich.text import Text

    table = Table(show_header=False, title="Plan", title_justify="left")
    table.add_column(style="bold")
    table.add_column()
    table.add_column()
    for heading, rows in sections(run):
        for index, (label, text) in enumerate(rows):
            # Text, not str: a trace's name must not be read as markup.
            table.add_row(heading if index == 0 else "", Text(label), Text(text))
        table.add_section()
    return table


def splits_table(run: PlanRun) -> "Table":
    """The splits that were tried, thinned out; needs rich."""
    from rich.table import Table

    plan = run.plan
    table = Table(title="Splits", title_justify="left")
    headings = ("SWA\nshare", "full\ntokens", "SWA\ntokens", "retracted", "at once", "steps", "")
    for heading in headings:
        table.add_column(heading, justify="right" if heading else "left", overflow="fold")
    size = plan.settings.page_size
    for outcome in _thinned(plan):
        split = outcome.split
        marks = ["best"] if split == plan.split else []
        marks += ["by plan_pools"] if split == plan.rule else []
        marks += [] if outcome.finished else ["given up"]
        table.add_row(
            f"{100 * swa_share(plan, split):.1f} %",
            f"{split.full_pages * size:,}",
            f"{split.swa_pages * size:,}",
            *_came_to(outcome),
            ", ".join(marks),
        )
    return table


def _came_to(outcome: Outcome) -> tuple[str, str, str]:
    """Retractions, requests at once and steps; a split that was given up came to no result."""
    if not outcome.finished:
        return "", "", f"over {outcome.steps:,}"
    return f"{outcome.retracted:,}", f"{outcome.running:,.1f}", f"{outcome.steps:,}"


def _thinned(plan: Plan) -> list[Outcome]:
    """Some of all, with the best and that of `plan_pools`."""
    every = np.linspace(0, len(plan.outcomes) - 1, min(SHOWN, len(plan.outcomes))).round()
    places = {int(place) for place in every}
    must = (plan.split.swa_pages, plan.rule.swa_pages)
    places |= {i for i, o in enumerate(plan.outcomes) if o.split.swa_pages in must}
    return [plan.outcomes[place] for place in sorted(places)]


def _part(part: int, whole: int) -> str:
    return f"{part:,} of {whole:,} ({100 * part / whole:.1f} %)"


def _times(plan: Plan) -> str:
    count = int(plan.ranks.retracted.sum())
    return {0: "never", 1: "once"}.get(count, f"{count:,} times")


def _tokens(count: int) -> str:
    return f"{count:,} token" + ("" if count == 1 else "s")
