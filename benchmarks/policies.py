"""Compares the prefix cache's eviction policies by their hit rate on both halves of a trace.

    python -m benchmarks.policies TRACE [--page-size 64] [--hbm 40GiB] [--json FILE]

Each half is replayed by itself with gpt-oss-20b's KV memory; no priorities are given, so "priority"
is the least recently used there and is left out. The last row is an unlimited cache that forgets
nothing, by the trace's own block ids.
"""

import argparse
import dataclasses
import json
from pathlib import Path

import numpy as np

from swa_jax.bench.environment import environment
from swa_jax.config import PoolConfig
from swa_jax.models import get_model, parse_bytes, plan_pools
from swa_jax.replay.driver import ReplaySettings, run_replay
from swa_jax.replay.trace import Trace, load_trace

POLICIES = ("lru", "lfu", "fifo", "cost")


def part_of(trace: Trace, start: int, end: int) -> Trace:
    """The requests from `start` to `end`."""
    ids = trace.hash_ids
    return dataclasses.replace(
        trace,
        arrival_ms=trace.arrival_ms[start:end],
        prompt_lens=trace.prompt_lens[start:end],
        output_lens=trace.output_lens[start:end],
        hash_ids=None if ids is None else ids[start:end],
    )


def unlimited(trace: Trace) -> float:
    """Share of blocks that came before."""
    seen: set[int] = set()
    hits = total = 0
    for ids in trace.hash_ids or ():
        for block in np.asarray(ids).tolist():
            total += 1
            hits += block in seen
            seen.add(block)
    return hits / max(total, 1)


def main(argv: list[str] | None = None) -> None:
    """Replays both halves with every policy."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("trace")
    parser.add_argument("--page-size", type=int, default=64)
    parser.add_argument("--hbm", type=parse_bytes, default=parse_bytes("40GiB"))
    parser.add_argument("--limit", type=int)
    parser.add_argument("--json", type=Path, help="write every figure to this file")
    args = parser.parse_args(argv)
    trace, model = load_trace(args.trace, limit=args.limit), get_model("gpt-oss-20b")
    sizes = plan_pools(
        model, args.hbm, args.page_size, max_running=256, chunk_tokens=8192, prefix_cache=True
    )
    pool = PoolConfig(sizes.full_tokens, sizes.swa_tokens, args.page_size, model.past_window)
    middle, rows = len(trace) // 2, []
    for name, half in (
        ("first", part_of(trace, 0, middle)),
        ("second", part_of(trace, middle, len(trace))),
    ):
        for policy in POLICIES:
            result = run_replay(half, model, pool, ReplaySettings(policy=policy))
            rate = result.reuse.hit_blocks / max(result.prompt_blocks, 1)
            rows.append({"half": name, "policy": policy, "block_hit_rate": rate})
            rows[-1] |= {"hit_rate": result.hit_rate, "run_s": result.wall_s}
            print(f"{name:<7} {policy:<10} {100 * rate:6.2f} % of blocks", flush=True)
        rows.append({"half": name, "policy": "unlimited", "block_hit_rate": unlimited(half)})
        print(f"{name:<7} {'unlimited':<10} {100 * unlimited(half):6.2f} % of blocks", flush=True)
    if args.json is not None:
        figures = {"environment": environment(), "page_size": args.page_size, "rows": rows}
        args.json.write_text(json.dumps(figures, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
