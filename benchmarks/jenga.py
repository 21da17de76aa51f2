"""KV memory of models with mixed layers under four ways to page it, on a whole trace.

    python -m benchmarks.jenga [TRACE] [--hbm 80GiB] [--limit N] [--results DIRECTORY]

The comparison is that of Jenga (Zhang et al., SOSP 2025, arXiv 2503.18292), whose baseline keeps
every token's KV in every layer:

* uniform: one pool, every layer keeps everything;
* two pools: of fixed sizes, as `plan_pools` chooses them and as `plan_split` does;
* unified: both kinds of page out of one budget, in the blocks of `PoolConfig.unified`;
* live: no pages, and nothing kept but tokens that a layer will read again, the least there can be.

Admission, chunks and retraction are the same for all (`swa_jax.planner.simulate`: the replay by
counts of pages, without a prefix cache). Two questions: how many requests run at once in the same
bytes, and how many bytes the same load takes. No time is measured: steps are counted.
"""

import argparse
import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks.block_placement import blocks_in_use
from swa_jax.bench.environment import environment
from swa_jax.config import PoolConfig
from swa_jax.models import ModelConfig, get_model, parse_bytes, plan_pools
from swa_jax.planner import (
    Figures,
    Limits,
    Load,
    PlanSettings,
    SimShape,
    deal,
    plan_split,
    same_for_all,
    simulate,
    stack_limits,
)
from swa_jax.planner.limits import PLENTY, one_budget, two_pools
from swa_jax.planner.splits import PageBytes, Split
from swa_jax.replay.driver import final_lengths
from swa_jax.replay.trace import Trace, load_trace

MODELS = (
    "gemma-3-27b",
    "gemma-3-12b",
    "gpt-oss-20b",
    "gpt-oss-120b",
    "llama-4-scout",
    "llama-4-maverick",
)
PAGE = 16
CHUNK = 8192
MAX_RUNNING = 512  # in the same bytes: more than fit
CANDIDATES = 12  # splits in each of the two rounds of `plan_split`
SAME_LOAD = 64  # requests at once where memory is no limit
WAYS = ("uniform", "two pools, plan_pools", "two pools, plan_split", "unified", "live")


@dataclass(frozen=True)
class Way:
    """What one way of paging came to."""

    running: float  # requests at once, in the mean of the steps
    peak_running: int
    steps: int
    retracted: int
    wasted: float  # of the bytes held, what no layer will read again
    used: float  # of the budget, live bytes in the mean
    load_bytes: int  # that `SAME_LOAD` requests at once took at the peak


@dataclass(frozen=True)
class Comparison:
    """All ways for one model."""

    model: str
    ways: dict[str, Way]
    wasted_of_requests: float  # uniform: the mean over requests, each at its end by itself
    unified_blocks: tuple[int, int]  # full pages of a block, SWA pages of a block
    scatter: float  # blocks in use for each that would do: see `benchmarks.block_placement`


def load_of(trace: Trace, copies: int) -> Load:
    """All requests for each of so many servers."""
    lengths = final_lengths(trace)
    load, _ = deal(trace.prompt_lens, lengths, np.zeros(len(trace)), 1, "round-robin")
    return same_for_all(load, copies)


def units_of(model: ModelConfig, budget: int) -> tuple[int, int, int, int]:
    """Of what measures both kinds of token: bytes, how many a token takes, and the budget."""
    full, swa = model.full_bytes_per_token, model.swa_bytes_per_token
    unit = int(np.gcd(full, swa))
    return unit, full // unit, swa // unit, budget // unit


def paged_limits(
    model: ModelConfig, budget: int | None, splits: Sequence[Split], weight: tuple[float, float]
) -> list[Limits]:
    """Uniform paging, the splits, and the unified budget; None: no limit."""
    page = PageBytes.of(model, PAGE)
    layout = PoolConfig.unified(budget or 2**40, model, PAGE).unified_layout
    assert layout is not None
    blocks = PLENTY if budget is None else layout.blocks
    uniform = PLENTY if budget is None else budget // (page.full + page.swa) - 1
    groups = (layout.full_pages, 1), (layout.swa_pages, 1)
    return [
        two_pools(uniform, PLENTY, CHUNK, weight),
        *(two_pools(split.full_pages, split.swa_pages, CHUNK, weight) for split in splits),
        one_budget(blocks, *groups, CHUNK, weight),
    ]


def shape_of(model: ModelConfig, rows: int, page: int) -> SimShape:
    """Of a model."""
    return SimShape(rows, page, model.past_window, model.chunked, one_budget=True)


def splits_of(trace: Trace, model: ModelConfig, budget: int) -> list[Split]:
    """What `plan_pools` chooses, and what simulation does."""
    sizes = plan_pools(model, budget, PAGE, max_running=MAX_RUNNING, chunk_tokens=CHUNK)
    settings = PlanSettings(
        budget, page_size=PAGE, max_running=MAX_RUNNING, chunk_tokens=CHUNK, candidates=CANDIDATES
    )
    plan = plan_split(trace, model, settings)
    return [Split(sizes.full_tokens // PAGE, sizes.swa_tokens // PAGE), plan.split]


def compare(trace: Trace, model: ModelConfig, budget: int) -> Comparison:
    """All ways for one model in one budget."""
    page = PageBytes.of(model, PAGE)
    splits, count = splits_of(trace, model, budget), len(WAYS) - 1
    unit, full, swa, units = units_of(model, budget)
    tokens = [one_budget(units, (1, full), (1, swa), CHUNK, page.weight)]
    paged = paged_limits(model, budget, splits, page.weight)
    bounded = (
        simulate(shape_of(model, MAX_RUNNING, PAGE), stack_limits(paged), load_of(trace, count)),
        simulate(shape_of(model, MAX_RUNNING, 1), stack_limits(tokens), load_of(trace, 1)),
    )
    free = [paged_limits(model, None, [], page.weight)[-1]]
    live = [one_budget(PLENTY, (1, full), (1, swa), CHUNK, page.weight)]
    rows = min(SAME_LOAD, len(trace))
    same = (
        simulate(shape_of(model, rows, PAGE), stack_limits(free), load_of(trace, 1)),
        simulate(shape_of(model, rows, 1), stack_limits(live), load_of(trace, 1)),
    )
    layout = PoolConfig.unified(budget, model, PAGE).unified_layout
    assert layout is not None
    block = layout.block_units * layout.unit_bytes
    placed = blocks_in_use(trace, model, layout, PAGE, rows, CHUNK)
    loads = load_bytes(same, page, block, unit)
    ways = {
        name: way_of(name, bounded[place // count], place % count, model, budget, block, loads)
        for place, name in enumerate(WAYS)
    }
    return Comparison(
        model=model.name,
        ways=ways,
        wasted_of_requests=wasted_of_requests(trace, model),
        unified_blocks=(layout.full_pages, layout.swa_pages),
        scatter=placed.scatter,
    )


def load_bytes(
    same: tuple[Figures, Figures], page: PageBytes, block: int, unit: int
) -> dict[str, int]:
    """Bytes at the peak of a load that has all the memory it wants."""
    paged, live = same
    full, swa = int(paged.peak_full[0]), int(paged.peak_swa[0])
    pools = full * page.full + swa * page.swa  # each pool as large as it has to be
    values = (full * (page.full + page.swa), pools, pools, int(paged.peak_cost[0]) * block)
    return dict(zip(WAYS, (*values, int(live.peak_cost[0]) * unit), strict=True))


def way_of(
    name: str,
    figures: Figures,
    place: int,
    model: ModelConfig,
    budget: int,
    block: int,
    loads: dict[str, int],
) -> Way:
    """The figures of one way."""
    full, swa = model.full_bytes_per_token, model.swa_bytes_per_token
    sums = {key: int(value[place]) for key, value in vars(figures).items() if key[:4] == "sum_"}
    live = sums["sum_full_tokens"] * full + sums["sum_swa_tokens"] * swa
    steps = int(figures.steps[place])
    return Way(
        running=sums["sum_running"] / steps,
        peak_running=int(figures.peak_running[place]),
        steps=steps,
        retracted=int(figures.retracted[place]),
        wasted=1 - live / held_bytes(name, sums, model, block),
        used=live / steps / budget,
        load_bytes=loads[name],
    )


def held_bytes(name: str, sums: dict[str, int], model: ModelConfig, block: int) -> int:
    """Bytes held, summed over the steps."""
    full, swa = model.full_bytes_per_token, model.swa_bytes_per_token
    if name == "live":
        return sums["sum_full_tokens"] * full + sums["sum_swa_tokens"] * swa
    if name == "unified":
        return sums["sum_cost"] * block
    if name == "uniform":
        return sums["sum_full_pages"] * PAGE * (full + swa)
    return PAGE * (sums["sum_full_pages"] * full + sums["sum_swa_pages"] * swa)


def wasted_of_requests(trace: Trace, model: ModelConfig) -> float:
    """Of each request alone at its end, what SWA layers keep and will not read; the mean."""
    tokens = final_lengths(trace).astype(np.float64)
    window = model.past_window
    read = np.mod(tokens, window) if model.chunked else np.minimum(tokens, window)
    share = model.swa_bytes_per_token / model.full_only_bytes_per_token
    return float(np.mean(share * (1 - read / tokens)))


def compare_all(trace: Trace, names: Sequence[str], budget: int) -> list[Comparison]:
    """Each model; those that keep the same KV are simulated once."""
    found: list[Comparison] = []
    known: dict[tuple[object, ...], Comparison] = {}
    for name in names:
        model = get_model(name)
        kept = (
            model.full_bytes_per_token,
            model.swa_bytes_per_token,
            model.past_window,
            model.chunked,
        )
        if kept not in known:
            known[kept] = compare(trace, model, budget)
        found.append(dataclasses.replace(known[kept], model=name))
        print(table(found[-1:]).splitlines()[-1], flush=True)
    return found


def table(found: Sequence[Comparison]) -> str:
    """Requests at once in the same bytes, as Markdown."""
    lines = [
        f"| model | {' | '.join(WAYS)} | unified / uniform |",
        f"|---|{'---|' * (len(WAYS) + 1)}",
    ]
    for one in found:
        cells = [f"{way.running:.1f}" for way in one.ways.values()]
        ratio = one.ways["unified"].running / one.ways["uniform"].running
        lines.append(f"| {one.model} | {' | '.join(cells)} | {ratio:.2f} |")
    return "\n".join(lines)


def bytes_table(found: Sequence[Comparison]) -> str:
    """Bytes at the peak of the same load, as Markdown."""
    names = ("uniform", "two pools, plan_split", "unified", "live")
    lines = [
        "| model | uniform | two pools | unified | live | unified, less than uniform |",
        "|---|---|---|---|---|---|",
    ]
    for one in found:
        taken = [one.ways[name].load_bytes for name in names]
        cells = [f"{value / 2**30:.2f}" for value in taken]
        less = 100 * (1 - taken[2] / taken[0])
        lines.append(f"| {one.model} | {' | '.join(cells)} | {less:.1f} % |")
    return "\n".join(lines)


def waste_table(found: Sequence[Comparison]) -> str:
    """Held and never read again, as Markdown."""
    lines = [
        "| model | uniform | uniform, by request | two pools | unified | blocks by the page |",
        "|---|---|---|---|---|---|",
    ]
    for one in found:
        shares = [one.ways["uniform"].wasted, one.wasted_of_requests]
        shares += [one.ways[name].wasted for name in ("two pools, plan_split", "unified")]
        cells = [f"{100 * share:.1f} %" for share in shares]
        lines.append(f"| {one.model} | {' | '.join(cells)} | {one.scatter:.4f} |")
    return "\n".join(lines)


def used_table(found: Sequence[Comparison]) -> str:
    """Live bytes of the budget, as Markdown."""
    lines = [f"| model | {' | '.join(WAYS)} |", f"|---|{'---|' * len(WAYS)}"]
    for one in found:
        cells = [f"{100 * way.used:.1f} %" for way in one.ways.values()]
        lines.append(f"| {one.model} | {' | '.join(cells)} |")
    return "\n".join(lines)


def steps_table(found: Sequence[Comparison]) -> str:
    """Steps to serve all, as Markdown."""
    lines = [f"| model | {' | '.join(WAYS)} |", f"|---|{'---|' * len(WAYS)}"]
    for one in found:
        cells = [f"{way.steps:,} ({way.retracted})" for way in one.ways.values()]
        lines.append(f"| {one.model} | {' | '.join(cells)} |")
    return "\n".join(lines)


def report(found: Sequence[Comparison], trace: Trace, budget: int) -> str:
    """All of it as Markdown."""
    head = (
        f"{len(trace):,} requests of {trace.name}, page {PAGE}, chunks of {CHUNK:,} tokens. By "
        "`python -m benchmarks.jenga`, which says what the ways are."
    )
    waste = (
        "Bytes held that no layer will read again, of those held, in the mean of the steps (by "
        "request: the mean over requests, each alone at its end); and blocks in use for each that "
        "would do, where pages of many requests lie side by side:"
    )
    parts = (
        "# Four ways to page KV",
        head,
        f"Requests at once in {budget / 2**30:g} GiB of KV, in the mean of the steps:",
        table(found),
        "Of the budget, bytes that some layer will read again, in the mean of the steps:",
        used_table(found),
        "Steps to serve all (retractions):",
        steps_table(found),
        waste,
        waste_table(found),
        f"GiB at the peak of {SAME_LOAD} requests at once, with no limit on memory:",
        bytes_table(found),
    )
    return "\n\n".join(parts) + "\n"


def draw(found: Sequence[Comparison], file: Path) -> None:
    """Requests at once and bytes of the same load, beside each other."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(12, 4.2), layout="constrained")
    places = np.arange(len(found))
    for number, name in enumerate(WAYS):
        at = places + 0.16 * (number - 2)
        ways = [one.ways[name] for one in found]
        base = [one.ways["uniform"] for one in found]
        pairs = list(zip(ways, base, strict=True))
        axes[0].bar(at, [w.running / b.running for w, b in pairs], 0.15, label=name)
        axes[1].bar(at, [w.load_bytes / b.load_bytes for w, b in pairs], 0.15)
    titles = ("Requests at once in the same bytes", "Bytes of the same load")
    for axis, title in zip(axes, titles, strict=True):
        axis.set_xticks(places, [one.model for one in found], rotation=20, ha="right")
        axis.set_title(f"{title}, uniform paging = 1")
    axes[0].legend(fontsize=8)
    figure.savefig(file, dpi=120)
    pyplot.close(figure)


def main(argv: Sequence[str] | None = None) -> list[Comparison]:
    """Runs from the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("trace", nargs="?", default="mooncake-conversation")
    parser.add_argument("--hbm", type=parse_bytes, default=parse_bytes("80GiB"), help="KV memory")
    parser.add_argument("--limit", type=int, help="only so many requests")
    parser.add_argument("--models", default=",".join(MODELS), help="by commas")
    parser.add_argument("--results", type=Path, help="a directory for JSON, Markdown and a plot")
    args = parser.parse_args(argv)
    trace = load_trace(args.trace, args.limit)
    found = compare_all(trace, args.models.split(","), args.hbm)
    text = report(found, trace, args.hbm)
    print(text)
    if args.results is not None:
        args.results.mkdir(parents=True, exist_ok=True)
        (args.results / "jenga.md").write_text(text, encoding="utf-8")
        figures = {
            "environment": environment(),
            "trace": trace.name,
            "requests": len(trace),
            "hbm_bytes": args.hbm,
            "same_load": SAME_LOAD,
            "models": [dataclasses.asdict(one) for one in found],
        }
        text = json.dumps(figures, indent=1) + "\n"
        (args.results / "jenga.json").write_text(text, encoding="utf-8")
        draw(found, args.results / "jenga.png")
    return found


if __name__ == "__main__":
    main()
