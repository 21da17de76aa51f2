"""Requests that run at once out of one budget, beside every fixed split of the same bytes.

    python -m benchmarks.unified [--mib N] [--shares A,B,...] [--json FILE] [--smoke]

Two loads, one after the other in one server: long prompts, which want full pages, then many short
ones, which want as many SWA pages. A fixed split is right for one of them; a unified budget moves.
The memory is gpt-oss-20b's at page 16 (12 full and 12 SWA layers, window 128) with a prefix cache.
The model computes nothing: what is counted are requests and steps, no times.
"""

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

import swa_jax as swa
from benchmarks.serving import NoModel
from swa_jax import serving
from swa_jax.bench.environment import environment
from swa_jax.counts import held_pages
from swa_jax.models import ModelConfig, get_model
from swa_jax.serving import ServingConfig, make_requests

PAGE = 16
VOCABULARY = 2  # what the model that computes nothing knows
SHARES = (0.05, 0.1, 0.2, 0.3, 0.4, 0.5)


@dataclass(frozen=True)
class Load:
    """Requests of one kind."""

    name: str
    count: int
    prompt: int  # tokens
    new: int  # tokens


@dataclass(frozen=True)
class Trial:
    """What is served, in how much memory."""

    mib: int
    loads: tuple[Load, ...]
    max_running: int


TRIAL = Trial(256, (Load("long", 32, 1500, 64), Load("short", 256, 100, 28)), 48)
SMOKE = Trial(24, (Load("long", 6, 300, 8), Load("short", 24, 40, 8)), 12)


def fixed_split(model: ModelConfig, budget: int, share: float) -> swa.PoolConfig:
    """Two pools, of which the SWA pool gets that share of the bytes."""
    swa_pages = int(budget * share) // (model.swa_bytes_per_token * PAGE) - 1
    rest = budget - (swa_pages + 1) * model.swa_bytes_per_token * PAGE
    full_pages = rest // (model.full_bytes_per_token * PAGE) - 1
    return swa.PoolConfig(full_pages * PAGE, swa_pages * PAGE, PAGE, model.past_window)


def run(trial: Trial, pool: swa.PoolConfig) -> dict[str, dict[str, float]]:
    """Serves the loads one after the other, and says of each how many ran at once.

    Raises:
      RuntimeError: a request that was not served, or a page that was lost.
    """
    longest = max(load.prompt + load.new for load in trial.loads)
    config = ServingConfig(
        pool, longest, max_running=trial.max_running, chunk_tokens=512, prefill_rows=4
    )
    places = max(load.count for load in trial.loads)
    model, figures = NoModel(VOCABULARY), {}
    world = serving.new_world(model, config, places)
    rng = np.random.default_rng(0)
    for load in trial.loads:
        rows = rng.integers(VOCABULARY, size=(load.count, load.prompt)).tolist()
        requests = make_requests(rows, max_new_tokens=load.new, prompt_columns=longest)
        before = {name: int(value) for name, value in vars(world.stats).items()}
        stats = replace(world.stats, peak_running=jnp.int32(0))
        world, at = serving.submit(config, replace(world, stats=stats), requests)
        while bool(serving.unfinished(world)):
            world = serving.run_steps(model, None, config, world, 256)
        _check(world, at, load)
        world = serving.release(world, at)
        after = {name: int(value) for name, value in vars(world.stats).items()}
        more = {name: after[name] - before[name] for name in after}
        figures[load.name] = {
            "steps": more["steps"],
            "peak_running": after["peak_running"],
            "mean_decoding": round(more["generated"] / max(more["decode_steps"], 1), 2),
            "retracted": more["retracted"],
        }
    figures["both"] = {"steps": sum(int(part["steps"]) for part in figures.values())}
    return figures


def _check(world: serving.World, at: jax.Array, load: Load) -> None:
    done, reasons = serving.finish_reasons(world, at)
    ended = {serving.FINISH_REASONS[reason] for reason in np.asarray(reasons)}
    if not done.all() or ended != {"length"}:
        raise RuntimeError(f"{load.name}: requests ended with {sorted(ended)}")
    assert world.cache is not None
    swa.check(world.allocator)
    held, cached = int(held_pages(world.allocator)[0]), int(world.cache.in_tree.sum())
    if held != cached or any(swa.faults(world.allocator).values()):
        raise RuntimeError(f"{load.name}: {held} full pages held, {cached} cached")


def compare(trial: Trial, shares: Sequence[float]) -> dict[str, dict[str, dict[str, float]]]:
    """The figures of the unified budget and of each fixed split."""
    model, budget = get_model("gpt-oss-20b"), trial.mib * 2**20
    pools = {"unified": swa.PoolConfig.unified(budget, model, PAGE)}
    pools |= {f"{share:.0%} SWA": fixed_split(model, budget, share) for share in shares}
    return {name: run(trial, pool) for name, pool in pools.items()}


def table(figures: dict[str, dict[str, dict[str, float]]]) -> str:
    """The figures as Markdown."""
    lines = [
        "| memory | long: at once at most, steps | short: at once at most, steps | steps |",
        "|---|---|---|---|",
    ]
    for name, parts in figures.items():
        cells = (f"{parts[k]['peak_running']}, {parts[k]['steps']:,}" for k in ("long", "short"))
        lines.append(f"| {name} | {' | '.join(cells)} | {parts['both']['steps']:,} |")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> dict[str, object]:
    """Runs from the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--mib", type=int, help="memory for KV")
    parser.add_argument("--shares", help="bytes for the SWA pool, parts of all, by commas")
    parser.add_argument("--json", type=Path, help="where the figures go")
    parser.add_argument("--smoke", action="store_true", help="few requests, one fixed split")
    options = parser.parse_args(arguments)
    trial, shares = (SMOKE, (0.3,)) if options.smoke else (TRIAL, SHARES)
    if options.mib is not None:
        trial = replace(trial, mib=options.mib)
    if options.shares is not None:
        shares = tuple(float(share) for share in options.shares.split(","))
    figures = compare(trial, shares)
    print(table(figures))
    found = {"environment": environment(), "mib": trial.mib, "figures": figures}
    if options.json is not None:
        options.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    return found


if __name__ == "__main__":
    main()
