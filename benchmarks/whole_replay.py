"""The whole replay with a prefix cache: requests per second, beside host engines.

    python -m benchmarks.whole_replay [--requests 300] [--pages 16 64] [--repeats 3]
        [--results FOLDER] [--no-engines] [--smoke]

Requests of the bundled trace with gpt-oss-20b's KV memory, up to 256 at once, 8,192 prompt tokens a
step. Ours is `run_replay`, one compiled loop; its compilation is told apart. The others are driven
by one Python loop, `benchmarks/host_replay.py`, that makes the same decisions, with allocator and
prefix cache of each engine behind it (`replay_peers`). Ours and plain Python must agree in every
total, or nothing is reported; where an engine's own rules lead elsewhere, its totals stand beside.
All take turns, so that ratios hold on a machine that does other things, too.
"""

import argparse
import gc
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.host_replay import HostLoad, HostReplay, Totals
from benchmarks.replay_peers import StorePeer, find_stores
from benchmarks.writing import draws, progress, write_results
from swa_jax.bench.environment import environment, stay_on_one_core
from swa_jax.config import PoolConfig
from swa_jax.models import ModelConfig, get_model, parse_bytes, plan_pools
from swa_jax.replay.content import content_of, request_tokens
from swa_jax.replay.driver import ReplayResult, ReplaySettings, final_lengths, run_replay
from swa_jax.replay.trace import Trace, load_trace

OURS = "swa_jax, one compiled loop"
GOAL = 5.0  # ours over the fastest peer, in requests per second
Row = dict[str, Any]  # a side's figures at one page size


@dataclass(frozen=True)
class Work:
    """What is served, and with what."""

    trace: Trace
    model: ModelConfig
    pool: PoolConfig
    settings: ReplaySettings


def full_work(requests: int, page_size: int) -> Work:
    """The trace's first requests in 40 GiB."""
    model, settings = get_model("gpt-oss-20b"), ReplaySettings()
    sizes = plan_pools(
        model,
        parse_bytes("40GiB"),
        page_size,
        max_running=settings.max_running,
        chunk_tokens=settings.chunk_tokens,
        prefix_cache=True,
    )
    pool = PoolConfig(sizes.full_tokens, sizes.swa_tokens, page_size, model.past_window)
    return Work(load_trace("mooncake-conversation", limit=requests), model, pool, settings)


def tiny_work() -> Work:
    """Eight short prompts that share beginnings, in pools that are short of both kinds of page.

    All sizes are those of the replay in `tests/test_events.py`, whose program it then shares.
    """
    ids = ([1, 2, 3], [4, 5, 6, 7], [1, 2, 8], [4, 5, 6, 9], [1, 2, 3], [4, 5], [1, 8], [4, 5, 6])
    trace = Trace(
        name="made up",
        source_format="mooncake",
        arrival_ms=np.zeros(len(ids), np.int64),
        prompt_lens=np.array([8 * len(blocks) - 3 for blocks in ids], np.int32),
        output_lens=np.array([2, 5, 10, 6, 12, 12, 3, 12], np.int32),
        hash_ids=tuple(np.array(blocks, np.int64) for blocks in ids),
        block_tokens=8,
    )
    settings = ReplaySettings(max_running=2, chunk_tokens=16, slice_steps=1)
    return Work(trace, get_model("gpt-oss-20b"), PoolConfig(64, 48, 4, 8), settings)


def host_load(work: Work) -> HostLoad:
    """The requests with their tokens, as `run_replay` makes them up."""
    content, final = content_of(work.trace), final_lengths(work.trace)
    assert content is not None
    make = jax.jit(request_tokens, static_argnums=2)
    room = int(final.max()) + 1
    tokens = [
        np.asarray(make(content, jnp.int32(index), room))[: length + 1]
        for index, length in enumerate(final.tolist())
    ]
    return HostLoad(np.asarray(work.trace.prompt_lens, np.int64), final, tokens)


def run_host(work: Work, load: HostLoad, peer: StorePeer) -> Totals:
    """One run of the Python loop."""
    assert peer.make is not None
    rows = work.settings.max_running
    store = peer.make(work.pool, rows, int(load.final_lens.max()) + 1)
    replay = HostReplay(
        work.pool, load, store, max_running=rows, chunk_tokens=work.settings.chunk_tokens
    )
    # Engines keep the collector from going over what they hold, in one way or another.
    gc.collect()
    gc.disable()
    try:
        return replay.run()
    finally:
        gc.enable()


def our_totals(result: ReplayResult) -> Totals:
    """The same figures of ours."""
    return Totals(
        steps=result.steps,
        completed=result.completed,
        retracted=result.retracted,
        recomputed=result.recomputed_tokens,
        hit_tokens=result.reuse.hit_tokens,
        peak_full=result.peak_full_pages,
        peak_swa=result.peak_swa_pages,
        peak_running=result.peak_running,
        seconds=result.wall_s,
    )


def compare(work: Work, peers: Sequence[StorePeer], repeats: int) -> list[Row]:
    """A row for ours and each peer, timed in turns."""
    load, page = host_load(work), work.pool.page_size
    runs: dict[str, list[Totals]] = {OURS: [], **{peer.name: [] for peer in peers}}
    compile_s = []
    for turn in range(repeats):
        progress(f"page {page}, turn {turn + 1} of {repeats}")
        result = run_replay(work.trace, work.model, work.pool, work.settings)
        compile_s.append(result.compile_s)
        runs[OURS].append(our_totals(result))
        for peer in peers:
            try:
                runs[peer.name].append(run_host(work, load, peer))
            except Exception as error:
                if not peer.is_engine:
                    raise
                progress(f"{peer.name} does not get through: {error!r}")
            if not peer.is_engine:
                check_equal(runs[OURS][-1], runs[peer.name][-1])
    rows = [
        {"page_size": page, "side": side, **_figures(turns)}
        for side, turns in runs.items()
        if len(turns) == repeats
    ]
    rows[0]["compile_s"] = statistics.median(compile_s)
    return rows


def check_equal(ours: Totals, plain: Totals) -> None:
    """Both follow the same rules, so a difference is a mistake in one of them."""
    pairs = {
        name: (value, getattr(plain, name))
        for name, value in asdict(ours).items()
        if name not in ("seconds", "hashed_s")
    }
    differ = {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}
    if differ:
        raise RuntimeError(f"ours and plain Python should agree, and do not: {differ}")


def _figures(turns: Sequence[Totals]) -> Row:
    seconds = [totals.seconds for totals in turns]
    middle, least, most = statistics.median(seconds), min(seconds), max(seconds)
    totals = asdict(turns[-1])
    del totals["seconds"], totals["hashed_s"]
    return {
        "requests_per_s": totals["completed"] / middle,
        "us_per_step": 1e6 * middle / totals["steps"],
        "median_s": middle,
        "min_s": least,
        "max_s": most,
        "repeats": len(seconds),
        "hashed_s": statistics.median(each.hashed_s for each in turns),
        **totals,
    }


def judge(rows: Sequence[Row], peers: Sequence[StorePeer]) -> list[Row]:
    """For each page size: ours over the fastest engine, and over plain Python."""
    engines = {peer.name for peer in peers if peer.is_engine}
    judged = []
    for page in dict.fromkeys(row["page_size"] for row in rows):
        here = {row["side"]: row for row in rows if row["page_size"] == page}
        own = here.pop(OURS)
        for kind, names in (("engine", engines), ("plain Python", here.keys() - engines)):
            timed = [here[name] for name in names if name in here]
            if not timed:
                continue
            best = max(timed, key=lambda row: row["requests_per_s"])
            ratio = own["requests_per_s"] / best["requests_per_s"]
            judged.append(
                {
                    "page_size": page,
                    "kind": kind,
                    "fastest": best["side"],
                    "ours_per_s": own["requests_per_s"],
                    "fastest_per_s": best["requests_per_s"],
                    "ratio": ratio,
                    "goal": GOAL,
                    "met": ratio >= GOAL,
                }
            )
    return judged


def page(result: dict[str, Any], *, pictures: bool) -> str:
    """The Markdown page of a run, with links to pictures where they are drawn beside it."""
    place = {name: value for name, value in result["environment"].items() if value is not None}
    lines = [
        "# The whole replay, side by side",
        "",
        f"{result['requests']} requests with a prefix cache ({result['trace']}). {_HEAD}",
        "",
        ", ".join(f"{name} {value}" for name, value in place.items()),
        "",
        *(f"* {peer['name']} ({peer['note']}): {peer['differs']}." for peer in result["peers"]),
        "",
        "## Goal" + ("; tiny sizes, which judge nothing" if result["smoke"] else ""),
        "",
        f"Ours should serve {GOAL:.0f} times the requests per second of the fastest peer.",
        "",
        *table(
            ["page", "beside", "fastest", "its requests/s", "ours", "ours is faster", "goal"],
            [
                [
                    f"{row['page_size']}",
                    row["kind"],
                    row["fastest"],
                    f"{row['fastest_per_s']:,.0f}",
                    f"{row['ours_per_s']:,.0f}",
                    f"{row['ratio']:.2f}x",
                    ("met" if row["met"] else "**missed**")
                    if not result["smoke"]
                    else "not judged",
                ]
                for row in result["goals"]
            ],
        ),
        *(["", "![Requests per second](whole_replay.png)"] if pictures else []),
    ]
    for size in dict.fromkeys(row["page_size"] for row in result["results"]):
        lines += ["", f"## Page {size}", "", *table(_COLUMNS, _cells(result["results"], size))]
    return "\n".join(lines) + "\n"


_HEAD = (
    "They are served as fast as memory allows: what an engine does between model calls, without "
    "the model. Written by `python -m benchmarks.whole_replay`. Medians of repetitions taken in "
    "turns. What is done before the clock runs stands apart: our loop is compiled, vLLM hashes the "
    "prompts, which an engine does when they arrive. The process stays on one core."
)
_COLUMNS = [
    "",
    "requests/s",
    "us a step",
    "s (least to most)",
    "steps",
    "hit tokens",
    "retracted",
    "peak pages, full / SWA",
    "most running",
    "before, s",
]


def _cells(rows: Sequence[Row], size: int) -> list[list[str]]:
    return [
        [
            row["side"],
            f"{row['requests_per_s']:,.0f}",
            f"{row['us_per_step']:,.0f}",
            f"{row['median_s']:.3f} ({row['min_s']:.3f} to {row['max_s']:.3f})",
            f"{row['steps']:,}",
            f"{row['hit_tokens']:,}",
            f"{row['retracted']}",
            f"{row['peak_full']:,} / {row['peak_swa']:,}",
            f"{row['peak_running']}",
            f"{row['compile_s']:.1f} compiling" if "compile_s" in row else _hashing(row),
        ]
        for row in rows
        if row["page_size"] == size
    ]


def _hashing(row: Row) -> str:
    return f"{row['hashed_s']:.2f} hashing" if row["hashed_s"] else ""


def table(head: Sequence[str], lines: Sequence[Sequence[str]]) -> list[str]:
    """A Markdown table, line by line."""
    rule = ["---", *("---:" for _ in head[1:])]
    return ["| " + " | ".join(cells) + " |" for cells in (head, rule, *lines)]


def draw(result: dict[str, Any], file: Path) -> None:
    """Requests per second of each side, a panel for each page size. Needs matplotlib."""
    from matplotlib.figure import Figure  # draws into files without a backend being chosen

    rows = result["results"]
    pages = list(dict.fromkeys(row["page_size"] for row in rows))
    sides = list(dict.fromkeys(row["side"] for row in rows))
    figure = Figure(figsize=(9, 0.6 + (0.4 * len(sides) + 0.5) * len(pages)), layout="constrained")
    for axes, size in zip(figure.subplots(len(pages), 1, squeeze=False)[:, 0], pages, strict=True):
        here = [row for row in rows if row["page_size"] == size][::-1]
        speeds = [row["requests_per_s"] for row in here]
        colors = ["#0072B2" if row["side"] == OURS else "#999999" for row in here]
        axes.barh([row["side"] for row in here], speeds, color=colors)
        for place, speed in enumerate(speeds):
            axes.text(speed, place, f" {speed:,.0f}", va="center", fontsize=8)
        axes.set_xscale("log")
        axes.margins(x=0.15)
        axes.set_title(f"page {size}: requests per second", fontsize=10, loc="left")
    figure.savefig(file, dpi=90, metadata={"Software": None})


def _met(met: bool) -> str:
    return "met" if met else "**missed**"


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """Runs, prints and, if asked to, writes."""
    args = _parser().parse_args(argv)
    if not args.smoke:
        stay_on_one_core()
    peers = find_stores(engines=not args.no_engines)
    timed = [peer for peer in peers if peer.make is not None]
    if args.smoke:
        works, repeats = [tiny_work()], 1
    else:
        works = [full_work(args.requests, size) for size in args.pages]
        repeats = args.repeats
    rows = [row for work in works for row in compare(work, timed, repeats)]
    result = {
        "environment": environment(),
        "smoke": args.smoke,
        "trace": works[0].trace.name,
        "requests": len(works[0].trace),
        "peers": [
            {"name": each.name, "note": each.note, "differs": each.differs} for each in peers
        ],
        "goals": judge(rows, timed),
        "results": rows,
    }
    text = page(result, pictures=draws(args.results))
    print(text)
    if args.results is not None:
        write_results("whole_replay", result, text, draw, args.results)
    return result


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.whole_replay", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--requests", type=int, default=300, help="the first so many of the trace")
    parser.add_argument("--pages", type=int, nargs="+", default=[16, 64], help="page sizes")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--results", type=Path, help="write JSON, Markdown and a picture there")
    parser.add_argument("--no-engines", action="store_true", help="plain Python alone")
    parser.add_argument("--smoke", action="store_true", help="tiny sizes: does it run at all")
    return parser


if __name__ == "__main__":
    main()
