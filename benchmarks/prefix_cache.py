"""Times match, insert and evict of the prefix cache beside a plain radix tree in Python.

    python -m benchmarks.prefix_cache [--requests N] [--json FILE] [--smoke]

First the prompts of the bundled trace, one after the other, through both: every request is matched,
gets pages for all of its prompt, and is inserted; when pages are short, the oldest are evicted.
Then how the cost of each call grows with the pages that are cached. Ours is called from the host,
jitted, state and cache donated, and waited for: dispatch counts. The host tree knows one pool and
no window; its prompts come as bytes already.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

import swa_jax as swa
from benchmarks.environment import environment
from benchmarks.host_tree import HostTree
from swa_jax import prefix_cache as pc
from swa_jax.replay.content import content_of, request_tokens
from swa_jax.replay.trace import load_trace

R = TypeVar("R")

PAGE = 16
WINDOW = 127
ROOMS = (2**13, 2**15, 2**17)  # prompts are padded to one of these: each compiles once


class Ours:
    """The compiled calls, one set for each size of prompt."""

    def __init__(self, pages: int) -> None:
        """Pools of `pages` pages each."""
        config = swa.PoolConfig(pages * PAGE, pages * PAGE, PAGE, WINDOW)
        self.state, self.cache = swa.init(config), pc.init(config)
        self._match = jax.jit(pc.match_prefix, donate_argnums=0)
        self._insert = jax.jit(pc.insert, donate_argnums=(0, 1))
        self._evict = jax.jit(_evict, donate_argnums=(0, 1))
        self._alloc = jax.jit(_alloc, static_argnums=2, donate_argnums=0)

    def match(self, tokens: jax.Array, length: jax.Array) -> jax.Array:
        """Tokens found."""
        self.cache, match = self._match(self.cache, self.state, tokens, length)
        return jax.block_until_ready(match.length)

    def alloc(self, count: jax.Array, room: int) -> jax.Array:
        """Slots of whole pages for a prompt."""
        self.state, grant = self._alloc(self.state, count, room)
        return jax.block_until_ready(grant.slots)

    def insert(self, tokens: jax.Array, length: jax.Array, slots: jax.Array) -> jax.Array:
        """Tokens that were cached already."""
        self.cache, self.state, done = self._insert(self.cache, self.state, tokens, length, slots)
        return jax.block_until_ready(done.length_already_cached)

    def evict(self, tokens: jax.Array) -> jax.Array:
        """Tokens given back."""
        self.cache, self.state, gone = self._evict(self.cache, self.state, tokens)
        return jax.block_until_ready(gone.full_tokens)

    def free_pages(self) -> int:
        """Pages that can be granted."""
        return int(swa.available_size(self.state)) // PAGE


def _evict(
    cache: pc.PrefixCache, state: swa.AllocatorState, tokens: jax.Array
) -> tuple[pc.PrefixCache, swa.AllocatorState, pc.Evicted]:
    return pc.evict(cache, state, full_tokens=tokens)


def _alloc(
    state: swa.AllocatorState, count: jax.Array, room: int
) -> tuple[swa.AllocatorState, swa.Grant]:
    return swa.alloc(state, count, capacity=room)


class Clock:
    """Microseconds by side and call."""

    def __init__(self) -> None:
        """Nothing yet."""
        self.times: dict[tuple[str, str], list[float]] = {}

    def time(self, side: str, call: str, work: Callable[..., R], *args: object) -> R:
        """Runs `work` and notes how long it took."""
        start = time.perf_counter()
        result = work(*args)
        self.times.setdefault((side, call), []).append(1e6 * (time.perf_counter() - start))
        return result

    def rows(self) -> list[dict[str, Any]]:
        """Median, least and most of each."""
        return [
            {
                "side": side,
                "call": call,
                "median_us": statistics.median(values),
                "mean_us": statistics.fmean(values),
                "min_us": min(values),
                "max_us": max(values),
                "calls": len(values),
            }
            for (side, call), values in self.times.items()
        ]


def on_the_trace(requests: int, pages: int) -> list[dict[str, Any]]:
    """Every prompt of the trace through both, results compared as it goes."""
    trace = load_trace("mooncake-conversation", limit=requests)
    content = content_of(trace)
    assert content is not None
    ours, host, clock = Ours(pages), HostTree(pages, PAGE), Clock()
    warm: set[int] = set()
    for index, length in enumerate(trace.prompt_lens.tolist()):
        room = next(room for room in ROOMS if room >= length)
        tokens = request_tokens(content, jnp.int32(index), room)
        count = jnp.int32(length // PAGE * PAGE)
        raw = np.asarray(tokens)[:length].tobytes()
        timed = clock if room in warm else Clock()  # a first call compiles
        warm.add(room)
        need = length // PAGE
        if ours.free_pages() < need:
            short = jnp.int32((need - ours.free_pages()) * PAGE)
            gone = int(timed.time("swa_jax", "evict", ours.evict, short)) // PAGE
            timed.time("host", "evict", host.evict, max(gone, need - len(host.free)))
        hit = timed.time("swa_jax", "match", ours.match, tokens, jnp.int32(length))
        path = timed.time("host", "match", host.match, raw)
        assert int(hit) // PAGE == len(path), (index, int(hit) // PAGE, len(path))
        slots = ours.alloc(count, room)
        own = [host.free.pop() for _ in range(need)]
        timed.time("swa_jax", "insert", ours.insert, tokens, count, slots)
        timed.time("host", "insert", host.insert, raw, own)
    pc.check(ours.cache, ours.state)
    swa.check(ours.state)
    return clock.rows()


def by_cache_size(sizes: list[int], turns: int) -> list[dict[str, Any]]:
    """A prompt of 8,192 tokens against caches that are nearly full, from small to large."""
    room = ROOMS[0]
    rng = np.random.default_rng(0)
    rows = []
    for pages in sizes:
        ours, host, clock = Ours(pages), HostTree(pages, PAGE), Clock()
        count, need = jnp.int32(room), room // PAGE
        for turn in range(pages // need + turns):
            tokens = jnp.asarray(rng.integers(1, 2**31 - 1, room), jnp.int32)
            raw = np.asarray(tokens).tobytes()
            timed = clock if turn >= pages // need + 2 else Clock()
            if ours.free_pages() < need:
                timed.time("swa_jax", "evict", ours.evict, count)
                timed.time("host", "evict", host.evict, need)
            slots = ours.alloc(count, room)
            own = [host.free.pop() for _ in range(need)]
            timed.time("swa_jax", "insert", ours.insert, tokens, count, slots)
            timed.time("host", "insert", host.insert, raw, own)
            hit = timed.time("swa_jax", "match", ours.match, tokens, count)
            assert int(hit) == room == len(timed.time("host", "match", host.match, raw)) * PAGE
        rows += [row | {"pages": pages} for row in clock.rows()]
    return rows


def show(title: str, rows: list[dict[str, Any]]) -> None:
    """Prints a table."""
    print(f"\n{title}")
    print(f"{'pages':>8} {'call':<8} {'side':<8} {'median us':>10} {'mean':>10} {'calls':>6}")
    for row in rows:
        pages = row.get("pages", "")
        print(
            f"{pages:>8} {row['call']:<8} {row['side']:<8} {row['median_us']:>10.0f} "
            f"{row['mean_us']:>10.0f} {row['calls']:>6}"
        )


def main(argv: list[str] | None = None) -> None:
    """Runs both parts."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--json", type=Path, help="write every figure to this file")
    parser.add_argument("--smoke", action="store_true", help="tiny sizes: does it run at all")
    args = parser.parse_args(argv)
    sizes = [2**10] if args.smoke else [2**12, 2**14, 2**16, 2**18]
    trace = on_the_trace(3 if args.smoke else args.requests, 2**13 if args.smoke else 2**16)
    growth = by_cache_size(sizes, 4 if args.smoke else 22)
    show("One request of the trace, page 16", trace)
    show("8,192 tokens, by the size of a full cache", growth)
    if args.json is not None:
        figures = {"environment": environment(), "trace": trace, "growth": growth}
        args.json.write_text(json.dumps(figures, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
