"""Match, insert and evict of the prefix cache, beside host engines.

    python -m benchmarks.prefix_cache [--requests 200] [--pages 16 64] [--tokens 1048576]
        [--results FOLDER] [--no-engines] [--smoke]

First the prompts of the bundled trace, one after the other: what is cached of each is matched and
locked, pages for the rest are granted when as many have been evicted, and all of it is given to the
cache. Both pools are of one size. Ours is timed a call at a time, as an engine in Python would call
it, and in one compiled loop over all prompts. Then all are matched once more, nothing changing. At
last a prompt of 100,000 tokens is matched that is cached from end to end.

Tokens are there beforehand, in the form that each side likes best. Ours and plain Python must find
the same of every prompt; how many an engine finds otherwise is told.
"""

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

import swa_jax as swa
from benchmarks.own_cache import OwnLoop, OwnStore, World
from benchmarks.replay_peers import StorePeer, find_stores
from benchmarks.whole_replay import table
from benchmarks.writing import draws, progress, write_results
from swa_jax import prefix_cache as pc
from swa_jax.bench.environment import environment, stay_on_one_core
from swa_jax.replay.content import content_of, request_tokens
from swa_jax.replay.trace import load_trace

WINDOW = 127
LONG = 100_000  # tokens of the prompt that is cached whole
LONG_GOAL = 1000.0  # us for its match, at page 64
CALLS = ("match", "evict", "grant", "insert")
WHOLE, AGAIN, LONG_MATCH = "a prompt's life", "match again", "match 100,000 tokens"
R = TypeVar("R")
Row = dict[str, Any]


class Calls(Protocol):
    """What of a `Store` is called here, for one row."""

    name: str
    hashed_s: float

    def prepare(self, tokens: list[np.ndarray], prompts: list[int]) -> None:
        """See `Store`."""
        ...

    def match(self, row: int, request: int, length: int) -> int:
        """See `Store`."""
        ...

    def unmatch(self, row: int) -> None:
        """See `Store`."""
        ...

    def make_room(self, pages: int) -> None:
        """See `Store`."""
        ...

    def prefill(self, row: int, length: int, tokens: int) -> None:
        """See `Store`."""
        ...

    def finish(self, row: int, length: int, evicted: int) -> None:
        """See `Store`."""
        ...


@dataclass(frozen=True)
class Prompts:
    """What is served: int32[...] tokens of each prompt, and the lengths that prompts are padded to.

    A compiled call is made for each of `rooms`.
    """

    tokens: list[np.ndarray]
    rooms: tuple[int, ...]

    @property
    def lengths(self) -> list[int]:
        """Tokens of each."""
        return [len(each) for each in self.tokens]


def of_the_trace(requests: int, most: int | None = None) -> Prompts:
    """The bundled trace's prompts, cut to `most` tokens."""
    trace = load_trace("mooncake-conversation", limit=requests)
    content = content_of(trace)
    assert content is not None
    lengths = np.minimum(trace.prompt_lens, most or 2**31 - 1).tolist()
    make = jax.jit(request_tokens, static_argnums=2)
    rooms = (most,) if most else (2**13, 2**15, 2**17)
    tokens = [
        np.asarray(make(content, jnp.int32(index), rooms[-1]))[:length]
        for index, length in enumerate(lengths)
    ]
    return Prompts(tokens, rooms)


class Clock:
    """Seconds by side and call."""

    def __init__(self) -> None:
        """Nothing yet."""
        self.seconds: dict[tuple[str, str], list[float]] = {}

    def time(self, side: str, call: str, work: Callable[..., R], *args: object) -> R:
        """Runs `work` and notes how long it took."""
        start = time.perf_counter()
        result = work(*args)
        self.seconds.setdefault((side, call), []).append(time.perf_counter() - start)
        return result

    def rows(self) -> list[Row]:
        """Microseconds of each call."""
        return [
            {"side": side, "call": call, **_summary([1e6 * each for each in seconds])}
            for (side, call), seconds in self.seconds.items()
        ]


def _summary(values: Sequence[float]) -> Row:
    return {
        "median_us": statistics.median(values),
        "mean_us": statistics.fmean(values),
        "min_us": min(values),
        "max_us": max(values),
        "calls": len(values),
    }


def serve(clock: Clock, store: Calls, request: int, length: int, size: int) -> int:
    """One prompt's life. Returns the tokens found."""
    found = clock.time(store.name, "match", store.match, 0, request, length)
    need = -(-length // size) - found // size
    clock.time(store.name, "evict", store.make_room, need)
    clock.time(store.name, "grant", store.prefill, 0, found, length - found)
    clock.time(store.name, "insert", store.finish, 0, length, found)
    return found


def look(store: Calls, request: int, length: int) -> int:
    """Matches and lets go again. Returns the tokens found."""
    found = store.match(0, request, length)
    store.unmatch(0)
    return found


def compare(
    prompts: Prompts, config: swa.PoolConfig, peers: Sequence[StorePeer], repeats: int
) -> tuple[list[Row], list[Row]]:
    """Rows of times, and a row for each side of what it found."""
    loop = OwnLoop(config, prompts.rooms, prompts.tokens, prompts.lengths)
    stores: list[Calls] = [OwnStore(config, prompts.rooms)]
    longest = max(prompts.lengths) + 1
    stores += [peer.make(config, 1, longest) for peer in peers if peer.make is not None]
    for store in stores:
        store.prepare(prompts.tokens, prompts.lengths)
    _warm_up(stores[0], prompts)

    clock, found = Clock(), {store.name: [] for store in stores}
    for request, length in enumerate(prompts.lengths):
        for store in stores:
            found[store.name].append(serve(clock, store, request, length, config.page_size))
    again = {store.name: [] for store in stores}
    for request, length in enumerate(prompts.lengths):
        for store in stores:
            hit = clock.time(store.name, AGAIN, look, store, request, length)
            again[store.name].append(hit)

    world, in_loop, loop_rows = time_loop(loop, repeats)
    found = {loop.name: in_loop[0], **found}
    again[loop.name] = in_loop[1]
    for state, cache in (world, stores[0].world):  # type: ignore[attr-defined]
        swa.check(state)
        pc.check(cache, state)
    check_found(found, again)
    hashed = {store.name: 1e6 * store.hashed_s / len(prompts.tokens) for store in stores}
    return loop_rows + clock.rows() + _lives(clock), _found_rows(found, hashed)


def _warm_up(store: Calls, prompts: Prompts) -> None:
    """A first call compiles: each length once, in a world that is then made anew."""
    assert isinstance(store, OwnStore)
    state, _ = store.world
    unused = Clock()
    for room in prompts.rooms:
        fitting = [n for n, length in enumerate(prompts.lengths) if length <= room]
        request = max(fitting, key=lambda n: prompts.lengths[n], default=0)
        length = prompts.lengths[request]
        serve(unused, store, request, length, state.config.page_size)
        look(store, request, length)
    store.clear()


def time_loop(loop: OwnLoop, repeats: int) -> tuple[World, tuple[list[int], list[int]], list[Row]]:
    """The world after all prompts, what was found in both passes, and the times."""
    count, clock = len(loop.prompts[0]), Clock()
    hits: Any = []
    again: Any = []
    world = loop.new_world()
    for turn in range(repeats + 1):
        used = clock if turn else Clock()  # the first compiles
        world = jax.block_until_ready(loop.new_world())
        world, hits = used.time(loop.name, WHOLE, loop.serve, world)
        world, again = used.time(loop.name, AGAIN, loop.match, world)
    rows = [
        {key: value / count if key.endswith("_us") else value for key, value in row.items()}
        for row in clock.rows()
    ]
    return world, (hits.tolist(), again.tolist()), rows


def _lives(clock: Clock) -> list[Row]:
    """All calls of a prompt together, in a row for each side."""
    sides = dict.fromkeys(side for side, _ in clock.seconds)
    return [
        {
            "side": side,
            "call": WHOLE,
            **_summary(
                [
                    1e6 * sum(calls)
                    for calls in zip(*(clock.seconds[side, call] for call in CALLS), strict=True)
                ]
            ),
        }
        for side in sides
    ]


def check_found(*passes: dict[str, list[int]]) -> None:
    """Ours, in both ways, and plain Python follow the same rules."""
    same = (OwnLoop.name, OwnStore.name, "plain Python")
    for found in passes:
        if not found[same[0]] == found[same[1]] == found[same[2]]:
            totals = {name: sum(found[name]) for name in same}
            raise RuntimeError(f"ours and plain Python should find the same, and found {totals}")


def _found_rows(found: dict[str, list[int]], hashed: dict[str, float]) -> list[Row]:
    own = found[OwnLoop.name]
    return [
        {
            "side": side,
            "hit_tokens": sum(hits),
            "prompts_otherwise": sum(a != b for a, b in zip(hits, own, strict=True)),
            "hash_us": hashed.get(side, 0.0),
        }
        for side, hits in found.items()
    ]


def match_long(
    tokens: int, config: swa.PoolConfig, peers: Sequence[StorePeer], repeats: int
) -> list[Row]:
    """One prompt, cached whole, matched again and again."""
    page_size = config.page_size
    rng = np.random.default_rng(0)
    prompt = rng.integers(1, 2**31 - 1, tokens).astype(np.int32)
    prompts = Prompts([prompt] * repeats, (tokens,))
    stores: list[Calls] = [OwnStore(config, prompts.rooms)]
    stores += [peer.make(config, 1, tokens + 1) for peer in peers if peer.make is not None]
    clock, expected = Clock(), (tokens - 1) // page_size * page_size
    for store in stores:
        store.prepare(prompts.tokens[:2], prompts.lengths[:2])
        serve(Clock(), store, 0, tokens, page_size)
        look(store, 1, tokens)
    for _ in range(repeats):
        for store in stores:
            found = clock.time(store.name, LONG_MATCH, look, store, 1, tokens)
            assert found == expected, (store.name, found, expected)
    loop = OwnLoop(config, prompts.rooms, prompts.tokens, prompts.lengths)
    _, (_, again), rows = time_loop(loop, 2)
    assert again == [expected] * repeats
    loop_rows = [{**row, "call": LONG_MATCH} for row in rows if row["call"] == AGAIN]
    return loop_rows + clock.rows()


def judge(rows: Sequence[Row], peers: Sequence[StorePeer]) -> list[Row]:
    """The goal of the long match, and each call beside the fastest engine and plain Python."""
    engines = {peer.name for peer in peers if peer.is_engine}
    plain = {peer.name for peer in peers} - engines
    judged = []
    by_call: dict[tuple[int, str], dict[str, Row]] = {}
    for row in rows:
        by_call.setdefault((row["page_size"], row["call"]), {})[row["side"]] = row
    for (size, call), timed in by_call.items():
        for side in (OwnLoop.name, OwnStore.name):
            if side in timed:
                own = timed[side]["mean_us"]
                judged.append(
                    {
                        "page_size": size,
                        "call": call,
                        "side": side,
                        "us": own,
                        "engine": _fastest(timed, engines),
                        "plain": _fastest(timed, plain),
                        "met": own < LONG_GOAL if call == LONG_MATCH else None,
                    }
                )
    return judged


def _fastest(timed: dict[str, Row], names: set[str]) -> Row | None:
    found = [timed[name] for name in names if name in timed]
    best = min(found, key=lambda row: row["mean_us"], default=None)
    return None if best is None else {"side": best["side"], "us": best["mean_us"]}


def page(result: dict[str, Any], *, pictures: bool) -> str:
    """The Markdown page of a run, with links to pictures where they are drawn beside it."""
    place = {name: value for name, value in result["environment"].items() if value is not None}
    rows, smoke = result["results"], result["smoke"]
    lines = [
        "# The prefix cache, side by side",
        "",
        f"{result['prompts']} prompts, pools of {result['pool_tokens']:,} tokens each. {_HEAD}",
        "",
        ", ".join(f"{name} {value}" for name, value in place.items()),
        "",
        *(f"* {peer['name']} ({peer['note']}): {peer['differs']}." for peer in result["peers"]),
        "",
        "## Goal" + ("; tiny sizes, which judge nothing" if smoke else ""),
        "",
        f"A match of {LONG:,} cached tokens at page 64 in less than 1 ms.",
        "",
        *table(
            ["page", "ours", "us", "fastest engine, us", "plain Python, us", "below 1 ms"],
            [
                [
                    f"{row['page_size']}",
                    row["side"],
                    f"{row['us']:,.0f}",
                    _named(row["engine"]),
                    _named(row["plain"]),
                    "yes" if row["met"] else "**no**",
                ]
                for row in result["judged"]
                if row["call"] == LONG_MATCH
            ],
        ),
        *(["", "![Microseconds a prompt](prefix_cache.png)"] if pictures else []),
    ]
    for size in dict.fromkeys(row["page_size"] for row in rows):
        here = [row for row in rows if row["page_size"] == size]
        found = [row for row in result["found"] if row["page_size"] == size]
        lines += ["", f"## Page {size}: mean (median) microseconds", "", *_by_side(here, found)]
    return "\n".join(lines) + "\n"


_HEAD = (
    "Written by `python -m benchmarks.prefix_cache`. A prompt's life: match and lock, evict what "
    'is short, grant, insert and unlock. "In a loop": one compiled program for all prompts; "a '
    'call at a time": each call dispatched and waited for. "Otherwise" counts the prompts of which '
    "a side found more or less than ours did. vLLM matches by hashes made before the clock runs, "
    "grants, caches and evicts in one call, and has no other call for it. The process stays on "
    "one core."
)


def _named(best: Row | None) -> str:
    return "" if best is None else f"{best['side']}, {best['us']:,.0f}"


def _by_side(rows: Sequence[Row], found: Sequence[Row]) -> list[str]:
    calls = [WHOLE, *CALLS, AGAIN]
    times = {(row["side"], row["call"]): row for row in rows}
    lines = []
    for hits in found:
        cells = [times.get((hits["side"], call)) for call in calls]
        shown = [f"{row['mean_us']:,.0f} ({row['median_us']:,.0f})" if row else "" for row in cells]
        lines.append(
            [
                hits["side"],
                *shown,
                f"{hits['hash_us']:,.0f}" if hits["hash_us"] else "",
                f"{hits['hit_tokens']:,}",
                f"{hits['prompts_otherwise']}",
            ]
        )
    return table(["", *calls, "hashing, before", "tokens found", "otherwise"], lines)


def draw(result: dict[str, Any], file: Path) -> None:
    """Mean times of a prompt's life and of the long match. Needs matplotlib."""
    from matplotlib.figure import Figure  # draws into files without a backend being chosen

    rows, calls = result["results"], (WHOLE, AGAIN, LONG_MATCH)
    pages = list(dict.fromkeys(row["page_size"] for row in rows))
    figure = Figure(figsize=(12, 0.5 + 2.4 * len(pages)), layout="constrained")
    grid = figure.subplots(len(pages), len(calls), squeeze=False)
    for size, line in zip(pages, grid, strict=True):
        for call, axes in zip(calls, line, strict=True):
            here = [row for row in rows if (row["page_size"], row["call"]) == (size, call)][::-1]
            times = [row["mean_us"] for row in here]
            colors = ["#0072B2" if "swa_jax" in row["side"] else "#999999" for row in here]
            axes.barh([row["side"] for row in here], times, color=colors)
            for place, value in enumerate(times):
                axes.text(value, place, f" {value:,.0f}", va="center", fontsize=7)
            axes.set_xscale("log")
            axes.margins(x=0.2)
            axes.tick_params(labelsize=7)
            axes.set_title(f"{call}, page {size}: us", fontsize=9, loc="left")
    figure.savefig(file, dpi=90, metadata={"Software": None})


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """Runs, prints and, if asked to, writes."""
    args = _parser().parse_args(argv)
    if not args.smoke:
        stay_on_one_core()
    peers = find_stores(engines=not args.no_engines)
    if args.smoke:
        # Both parts with arrays of the same lengths, so that they share their programs.
        prompts, sizes, pool_tokens, long, repeats = of_the_trace(12, 512), [64], 4096, 512, 12
    else:
        prompts, sizes, pool_tokens = of_the_trace(args.requests), args.pages, args.tokens
        long, repeats = LONG, 10
    rows: list[Row] = []
    found: list[Row] = []
    for size in sizes:
        progress(f"page {size}: {len(prompts.tokens)} prompts")
        config = swa.PoolConfig(pool_tokens, pool_tokens, size, WINDOW)
        times, hits = compare(prompts, config, peers, 2 if args.smoke else 3)
        progress(f"page {size}: a prompt of {long:,} tokens")
        times += match_long(long, config, peers, repeats)
        rows += [{"page_size": size, **row} for row in times]
        found += [{"page_size": size, **row} for row in hits]
    result = {
        "environment": environment(),
        "smoke": args.smoke,
        "prompts": len(prompts.tokens),
        "pool_tokens": pool_tokens,
        "peers": [
            {"name": each.name, "note": each.note, "differs": each.differs} for each in peers
        ],
        "judged": judge(rows, peers),
        "found": found,
        "results": rows,
    }
    text = page(result, pictures=draws(args.results))
    print(text)
    if args.results is not None:
        write_results("prefix_cache", result, text, draw, args.results)
    return result


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.prefix_cache", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--requests", type=int, default=200, help="the first so many of the trace")
    parser.add_argument("--pages", type=int, nargs="+", default=[16, 64], help="page sizes")
    parser.add_argument("--tokens", type=int, default=2**20, help="in each pool")
    parser.add_argument("--results", type=Path, help="write JSON, Markdown and a picture there")
    parser.add_argument("--no-engines", action="store_true", help="plain Python alone")
    parser.add_argument("--smoke", action="store_true", help="tiny sizes: does it run at all")
    return parser


if __name__ == "__main__":
    main()
