"""Tokens per second of the compiled serving loop beside two loops on the host.

    python -m benchmarks.serving [--requests N] [--repeats N] [--hidden H] [--json FILE] [--smoke]

The same model, prompts and order in all three, greedy, without a prefix cache:

  compiled        `swa_jax.serving.serve`: one program
  python loop     the same transitions, each its own compiled call, driven from Python; the world is
                  donated, and the host asks after each step whether anybody is left
  host allocator  pages in Python lists, tables built with NumPy, one compiled pass a step

The share of a step that is not the model is measured by the same loop over a model that computes
nothing: everything but the model's own pass is then left. Figures without compilation.
"""

import argparse
import functools
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import swa_jax as swa
from benchmarks.host_server import HostServer
from swa_jax import serving
from swa_jax.bench.environment import environment
from swa_jax.models import DecoderConfig, PagedBatch, num_params, random_params
from swa_jax.models.decoder import KVPool
from swa_jax.models.decoder.rope import Rope
from swa_jax.serving import ServingConfig, make_requests
from swa_jax.serving.queue import open_requests
from swa_jax.serving.trees import Tree

PAGE = 16


def model_of(hidden: int) -> DecoderConfig:
    """A Gemma-like decoder: five SWA layers to a full one, twice; 62 million parameters at 640."""
    rope = Rope(theta=10_000.0)
    return DecoderConfig(
        family="gemma3",
        vocab_size=16_384 if hidden >= 256 else 256,
        hidden_size=hidden,
        num_heads=max(2, hidden // 128),
        kv_heads=max(1, hidden // 512),
        head_dim=min(128, hidden // 2),
        intermediate_size=3 * hidden,
        layer_kinds="SSSSSF" * 2,
        sliding_window=128,
        full_rope=rope,
        swa_rope=rope,
        attention_scale=0.088,
        max_context=4096,
        qk_norm=True,
        tie_embeddings=True,
    )


@dataclass(frozen=True)
class NoModel:
    """A model that computes nothing, so that what is left of a step is not the model."""

    vocab_size: int
    eos_token_ids: tuple[int, ...] = ()

    def init_kv(self, pool: swa.PoolConfig) -> jax.Array:
        """Something to carry."""
        del pool
        return jnp.zeros(1, jnp.int32)

    def forward(
        self, params: Tree, kv: jax.Array, batch: PagedBatch
    ) -> tuple[jax.Array, jax.Array]:
        """Looks at every part of the batch, so that none is optimised away."""
        del params
        tables = jnp.sum(batch.full_pages, axis=1) + jnp.sum(batch.swa_pages, axis=1)
        slots = batch.full_slots + batch.swa_slots + batch.positions + tables[:, None]
        return slots.astype(jnp.float32)[..., None], kv + jnp.sum(slots, dtype=jnp.int32)

    def unembed(self, params: Tree, hidden: jax.Array) -> jax.Array:
        """Two logits."""
        del params
        return jnp.concatenate([hidden, -hidden], axis=-1)

    def move_kv(self, kv: jax.Array, old: serving.MovedSlots, new: serving.MovedSlots) -> jax.Array:
        """Nothing to move."""
        del old, new
        return kv

    def pools(self, kv: jax.Array) -> KVPool:
        """No layers."""
        del kv
        return KVPool((), ())

    def with_pools(self, kv: jax.Array, pools: KVPool) -> jax.Array:
        """Nothing to change."""
        del pools
        return kv


@dataclass(frozen=True)
class Load:
    """What is served."""

    prompts: list[list[int]]
    new: list[int]

    @classmethod
    def random(cls, count: int, vocab: int, longest: int) -> "Load":
        """Prompts of a quarter to all of `longest` tokens, 16 to 64 tokens generated."""
        rng = np.random.default_rng(0)
        lengths = rng.integers(longest // 4, longest + 1, count)
        prompts = [rng.integers(0, vocab, length).tolist() for length in lengths]
        return cls(prompts, rng.integers(16, 65, count).tolist())


def run_compiled(
    model: serving.ServingModel, params: Tree, config: ServingConfig, load: Load
) -> tuple[list[list[int]], int]:
    """The whole loop in one program: texts and steps."""
    requests = make_requests(load.prompts, max_new_tokens=load.new)
    served = serving.serve(model, params, requests, config)
    tokens, lengths = np.asarray(served.tokens), np.asarray(served.lengths)
    texts = [row[:length].tolist() for row, length in zip(tokens, lengths, strict=True)]
    return texts, int(served.stats.steps)


def pieces(
    model: serving.ServingModel, config: ServingConfig
) -> list[Callable[[Tree, serving.World], serving.World]]:
    """The transitions of a step, each its own program that takes the world over."""

    def own(transition: Callable[[serving.World], serving.World]) -> Callable[..., serving.World]:
        jitted = jax.jit(transition, donate_argnums=0)
        return lambda params, world: jitted(world)

    def with_model(transition: Callable[..., serving.World]) -> Callable[..., serving.World]:
        bound = functools.partial(transition, model, config)
        return jax.jit(lambda params, world: bound(params, None, world), donate_argnums=1)

    scheduling = [serving.finish, serving.leave, serving.admit, serving.make_room]
    host = [own(functools.partial(transition, config)) for transition in scheduling]
    return [*host, with_model(serving.decode_step), with_model(serving.prefill_step)]


def run_python_loop(
    calls: list[Callable[[Tree, serving.World], serving.World]],
    model: serving.ServingModel,
    params: Tree,
    config: ServingConfig,
    load: Load,
) -> tuple[list[list[int]], int]:
    """The same transitions, driven from Python: texts and steps."""
    requests = make_requests(load.prompts, max_new_tokens=load.new)
    world = serving.new_world(model, config, len(load.prompts))
    world, _ = serving.submit(config, world, requests)
    steps = 0
    while bool(open_requests(world.queue)):
        for call in calls:
            world = call(params, world)
        steps += 1
    places = jnp.arange(len(load.prompts), dtype=jnp.int32)
    tokens, lengths = (np.asarray(part) for part in serving.outputs(config, world, places))
    return [row[:length].tolist() for row, length in zip(tokens, lengths, strict=True)], steps


def compare(args: argparse.Namespace) -> dict[str, Any]:
    """Times the three in turns and checks that they generate the same."""
    decoder = model_of(args.hidden)
    model, params = serving.Decoder(decoder), random_params(decoder, jax.random.key(0))
    config = config_of(args)
    load = Load.random(args.requests, decoder.vocab_size, args.longest)
    calls = pieces(model, config)
    sides = {
        "compiled": lambda: run_compiled(model, params, config, load),
        "python loop": lambda: run_python_loop(calls, model, params, config, load),
        "host allocator": lambda: host_side(model, params, config, load),
    }
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    texts: dict[str, list[list[int]]] = {}
    steps = {}
    for turn in range(args.repeats + 1):
        for name, side in sides.items():
            start = time.perf_counter()
            texts[name], steps[name] = side()
            if turn:  # the first one compiles
                seconds[name].append(time.perf_counter() - start)
    first = texts["compiled"]
    for name, other in texts.items():
        if other != first:
            raise AssertionError(f"{name} generated something else than the compiled loop")
    tokens = sum(load.new)
    rows = [
        {
            "side": name,
            "seconds": statistics.median(times),
            "tokens_per_second": tokens / statistics.median(times),
            "steps": steps[name],
            "spread": [min(times), max(times)],
        }
        for name, times in seconds.items()
    ]
    return {"parameters": num_params(decoder), "tokens": tokens, "rows": rows}


def host_side(
    model: serving.ServingModel, params: Tree, config: ServingConfig, load: Load
) -> tuple[list[list[int]], int]:
    """The loop with pages in Python lists: texts and steps."""
    server = HostServer(model, params, config)
    return server.serve(load.prompts, load.new), server.steps


def config_of(args: argparse.Namespace) -> ServingConfig:
    """Pools that hold everybody who runs: the host allocator retracts nobody."""
    context = args.longest + 64
    pages = -(-context // PAGE) + 1
    pool = swa.PoolConfig(args.rows * pages * PAGE, args.rows * pages * PAGE, PAGE, 127)
    return ServingConfig(
        pool, context, max_running=args.rows, chunk_tokens=args.chunk, prefix_cache=False
    )


def share(args: argparse.Namespace) -> list[dict[str, float]]:
    """Microseconds of a step with the model and without it, with and without a prefix cache."""
    decoder = model_of(args.hidden)
    params = random_params(decoder, jax.random.key(0))
    load = Load.random(args.requests, decoder.vocab_size, args.longest)
    bits = Load([[token % 2 for token in prompt] for prompt in load.prompts], load.new)
    rows = []
    for cached in (False, True):
        config = replace(config_of(args), prefix_cache=cached)
        step = {}
        sides = (("model", serving.Decoder(decoder), load), ("none", NoModel(2), bits))
        for name, model, asked in sides:
            times = []
            for _ in range(args.repeats + 1):
                start = time.perf_counter()
                _, steps = run_compiled(model, params, config, asked)
                times.append((time.perf_counter() - start) / steps)
            step[name] = 1e6 * statistics.median(times[1:])
        rows.append(
            {
                "prefix_cache": cached,
                "step_us": step["model"],
                "without_model_us": step["none"],
                "share": step["none"] / step["model"],
            }
        )
    return rows


def main(argv: list[str] | None = None) -> None:
    """Runs both parts and prints them."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--requests", type=int, default=24)
    parser.add_argument("--rows", type=int, default=8, help="requests that run at once")
    parser.add_argument("--longest", type=int, default=512, help="longest prompt, tokens")
    parser.add_argument("--chunk", type=int, default=128, help="prefill tokens of a step")
    parser.add_argument("--hidden", type=int, default=640)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path, help="write every figure to this file")
    parser.add_argument("--smoke", action="store_true", help="tiny sizes: does it run at all")
    args = parser.parse_args(argv)
    if args.smoke:
        args.requests, args.rows, args.longest, args.chunk = 3, 2, 24, 8
        args.hidden, args.repeats = 16, 1
    result = compare(args)
    print(f"{result['parameters'] / 1e6:.1f} million parameters, {result['tokens']} tokens")
    fastest = result["rows"][0]["tokens_per_second"]
    for row in result["rows"]:
        ratio = fastest / row["tokens_per_second"]
        print(
            f"{row['side']:<15} {row['tokens_per_second']:8.1f} tokens/s  {row['steps']:5} steps  "
            f"compiled is {ratio:.2f} x"
        )
    shares = share(args)
    for row in shares:
        print(
            f"prefix cache {'on ' if row['prefix_cache'] else 'off'}: {row['step_us']:.0f} us a "
            f"step, {row['without_model_us']:.0f} us of it are not the model "
            f"({100 * row['share']:.2f} %)"
        )
    if args.json is not None:
        figures = {"environment": environment(), **result, "share": shares}
        args.json.write_text(json.dumps(figures, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
