"""How near each transition is to what it must do: bytes, buffers, compilation, transfers.

    python -m benchmarks.limits [--out benchmarks/results/limits]

writes a JSON and a Markdown file of these names. The bytes that the compiled program touches are
those of `cost_analysis`, less the tables of the pools: XLA counts the whole table that a gather
reads from or that a scatter writes into in place. Two sizes of pool tell how much that is.
"""

import argparse
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

import swa_jax as swa
from benchmarks.limit_cases import LEGEND, Limit, limits_of
from swa_jax import prefix_cache
from swa_jax.bench.environment import CompileClock, environment

_HEAD = (
    "| transition | must touch | bytes | the program touches | x | buffers reused | compile, s "
    "| compilations | transfers |"
)
PAGE, ROWS, SLOTS = 16, 256, 65_536
POOL = 2**20  # tokens
SMALL = 2**18


@dataclass(frozen=True)
class Measured:
    """One line of the table."""

    name: str
    formula: str
    must: int
    touched: int  # bytes, less whole tables
    per_page: float  # bytes that cost_analysis adds for each page of the pools
    buffers: int  # arrays of the donated states
    aliased: int  # of them, those that the program reuses
    compile_s: float
    compilations: int  # in all calls with equal shapes
    transfers: int  # between host and device in those calls


def config_of(tokens: int, page_size: int = PAGE) -> swa.PoolConfig:
    """Both pools of one size, and a window."""
    return swa.PoolConfig(tokens, tokens, page_size, sliding_window=8 * page_size)


def donated(limit: Limit, config: swa.PoolConfig) -> tuple[Any, ...]:
    """Fresh states of the kinds that the transition takes and gives back."""
    state = swa.init(config)
    return (prefix_cache.init(config), state) if limit.on_cache else (state,)


def lowered(limit: Limit, config: swa.PoolConfig) -> jax.stages.Lowered:
    """The transition with all states donated, not compiled yet."""
    states = jax.eval_shape(lambda: donated(limit, config))
    places = tuple(range(len(states)))
    return jax.jit(limit.call, donate_argnums=places).lower(*states, *limit.arguments)


def touched_bytes(compiled: jax.stages.Compiled) -> float:
    """What `cost_analysis` says, whole tables included."""
    cost = compiled.cost_analysis()
    if cost is None:
        raise RuntimeError(f"no cost analysis on {jax.default_backend()}")
    return float(cost["bytes accessed"])


def aliased_buffers(compiled: jax.stages.Compiled) -> int:
    """Arguments whose memory becomes that of a result."""
    first_line = (compiled.as_text() or "").partition("\n")[0]
    aliases = re.search(r"input_output_alias=\{(.*?)\}, \w+=", first_line)
    return len(re.findall(r"(?:may|must)-alias", aliases.group(1))) if aliases else 0


def measure(limit: Limit, small: Limit, clock: CompileClock) -> Measured:
    """Compiles at two sizes of pool and calls it at the larger.

    Args:
      limit: for pools of POOL tokens.
      small: the same for pools of SMALL tokens.
      clock: listens to compilations.
    """
    config, smaller = config_of(POOL), config_of(SMALL)
    spent = clock.seconds
    program = lowered(limit, config).compile()
    spent = clock.seconds - spent
    at_large, at_small = touched_bytes(program), touched_bytes(lowered(small, smaller).compile())
    per_page = (at_large - at_small) / (config.full_pages - smaller.full_pages)
    again, transfers = repeat(limit, config, clock)
    return Measured(
        limit.name,
        limit.formula,
        limit.must,
        round(at_large if limit.whole else at_large - per_page * config.full_pages),
        round(per_page, 1),
        len(jax.tree.leaves(jax.eval_shape(lambda: donated(limit, config)))),
        aliased_buffers(program),
        round(spent, 2),
        1 + again,
        transfers,
    )


def repeat(limit: Limit, config: swa.PoolConfig, clock: CompileClock) -> tuple[int, int]:
    """Programs that three calls compile again, and 1 if one moved data between host and device."""
    states = donated(limit, config)
    step = jax.jit(limit.call, donate_argnums=tuple(range(len(states))))
    before = clock_count(clock)
    transfers = 0
    for _ in range(3):
        try:
            with jax.transfer_guard("disallow"):
                result = jax.block_until_ready(step(*states, *limit.arguments))
        except jax.errors.JaxRuntimeError:
            return clock_count(clock) - before, 1
        states = result[: len(states)] if isinstance(result, tuple) else (result,)
    return clock_count(clock) - before, transfers


def clock_count(clock: CompileClock) -> int:
    """Programs compiled since the clock was made."""
    return sum(int(row["times"]) for row in clock.programs().values())


def table(rows: list[Measured]) -> str:
    """Markdown."""
    lines = [
        f"Pools of {POOL:,} tokens, page {PAGE}, {ROWS} rows, {SLOTS:,} slots. {LEGEND}",
        "",
        _HEAD,
        "|---|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    lines += [
        f"| {row.name} | {row.formula} | {row.must:,} | {row.touched:,} | "
        f"{row.touched / row.must:.1f} | {row.aliased} of {row.buffers} | {row.compile_s:.2f} | "
        f"{row.compilations} | {row.transfers} |"
        for row in rows
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    """Measures all and writes both files."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    default = Path("benchmarks/results/limits")
    parser.add_argument(
        "--out", type=Path, default=default, help=f"where .json and .md go ({default})"
    )
    out = parser.parse_args().out
    jax.config.update("jax_enable_compilation_cache", False)
    clock = CompileClock()
    large = limits_of(config_of(POOL), ROWS, SLOTS)
    small = limits_of(config_of(SMALL), ROWS, SLOTS)
    rows = [measure(*pair, clock) for pair in zip(large, small, strict=True)]
    out.parent.mkdir(parents=True, exist_ok=True)
    text = table(rows)
    out.with_suffix(".md").write_text(text, encoding="utf-8")
    found = {"environment": environment(), "limits": [row.__dict__ for row in rows]}
    out.with_suffix(".json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
