"""What `swa-jax bench` does with what it was asked for: one point, on this device."""

import time
from collections.abc import Collection
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import jax

from swa_jax.bench.baseline import FreeListAllocator
from swa_jax.bench.environment import CompileClock, environment
from swa_jax.bench.ours import OwnCalls
from swa_jax.bench.run import Row, Told, prepare, time_all
from swa_jax.bench.scans import NAME
from swa_jax.bench.workload import Point, Workload
from swa_jax.need_device import need_device
from swa_jax.out_of_memory import device_memory, is_out_of_memory

if TYPE_CHECKING:
    from rich.table import Table

_MOST_STEPS = 240  # decode steps of one compiled loop
_HEADINGS = {NAME: "in a loop", OwnCalls.name: "a call", FreeListAllocator.name: "plain Python"}


class DifferentError(Exception):
    """The allocators did different things, so their times say nothing."""


@dataclass(frozen=True)
class Timed:
    """The figures of a run."""

    workload: Workload
    environment: dict[str, object]
    rows: list[Row]
    compared: int  # effects of the two allocators that were compared first
    compile_seconds: float
    seconds: float


def workload_at(point: Point, seconds: float) -> Workload:
    """The sizes of one point; as many decode steps as its pools have room for.

    Raises:
      ValueError: a pool too small for one batch.
    """
    least = max(point.slots, point.decode_tokens(1))
    if least > point.pool_tokens:
        raise ValueError(
            f"a batch takes {least:,} tokens and a pool has {point.pool_tokens:,}: give a larger "
            "--pool-tokens, or fewer --rows or --batch"
        )
    steps = _MOST_STEPS
    while point.decode_tokens(steps) > point.pool_tokens:
        steps //= 2
    return Workload(
        main=point,
        pools=(point.pool_tokens,),
        pages=(point.page_size,),
        batches=(),
        slots=(),
        long_row=point.slots,
        loop_steps=steps,
        call_steps=min(48, steps),
        seconds=seconds,
    )


def run_here(workload: Workload, told: Told, names: Collection[str] | None = None) -> Timed:
    """Compares, then times.

    On a CPU the calling thread computes from here on, which saves some 40 us a call.

    Args:
      workload: of `workload_at`.
      told: called as it goes on.
      names: of the cases; all by default.

    Raises:
      DifferentError: the allocators differ, or one leaks.
      ValueError: no device, or no memory for the pools.
    """
    jax.config.update("jax_cpu_enable_async_dispatch", False)
    need_device()
    start, clock = time.perf_counter(), CompileClock()
    try:
        drivers, compared = prepare(workload, [], told, names)
        rows = time_all(workload, drivers, told, names)
    except (MemoryError, RuntimeError) as error:
        if is_out_of_memory(error):
            raise ValueError(
                f"no memory for these pools: give a smaller --pool-tokens{device_memory()}"
            ) from None
        if isinstance(error, jax.errors.JaxRuntimeError):
            raise
        raise DifferentError(str(error)) from error
    return Timed(
        workload, environment(), rows, compared, clock.seconds, time.perf_counter() - start
    )


def as_dict(timed: Timed) -> dict[str, Any]:
    """All figures, ready for JSON; times are microseconds a step."""
    return {
        "ok": True,
        "environment": timed.environment,
        "point": asdict(timed.workload.main),
        "effects_compared": timed.compared,
        "compile_seconds": round(timed.compile_seconds, 1),
        "seconds": round(timed.seconds, 1),
        "results": timed.rows,
    }


def as_table(timed: Timed) -> "Table":
    """A line for each case, a column for each way to do it; needs rich."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    point = timed.workload.main
    title = f"Microseconds a step: pools of {point.pool_tokens:,} tokens, page {point.page_size}"
    table = Table(
        title=title, title_justify="left", box=SIMPLE_HEAD, show_edge=False, padding=(0, 1)
    )
    table.add_column("")
    for heading in (*_HEADINGS.values(), "faster"):
        table.add_column(heading, justify="right", overflow="fold")
    cases: dict[str, dict[str, Row]] = {}
    for row in timed.rows:
        # The tail extend is timed at a point of its own, and nothing else is shown of that.
        cases.setdefault(row["case"], {}).setdefault(row["side"], row)
    for case, sides in cases.items():
        cells = (_cell(sides.get(side)) for side in _HEADINGS)
        table.add_row(case, *cells, _ratio(sides))
    return table


def _cell(row: Row | None) -> str:
    if row is None:
        return ""
    spread = (row["q3_us"] - row["q1_us"]) / 2
    return f"{_us(row['median_us'])} ±{_us(spread)}"


def _us(value: float) -> str:
    return f"{value:,.2f}" if value < 10 else f"{value:,.1f}" if value < 100 else f"{value:,.0f}"


def _ratio(sides: dict[str, Row]) -> str:
    if NAME not in sides or FreeListAllocator.name not in sides:
        return ""
    ratio = sides[FreeListAllocator.name]["median_us"] / sides[NAME]["median_us"]
    return f"{ratio:.1f}x" if ratio >= 0.1 else f"{ratio:.2g}x"


def notes(timed: Timed) -> list[str]:
    """What the figures are."""
    point, place = timed.workload.main, timed.environment
    sizes = (
        f"{point.batch:,} rows decode; {point.rows:,} x {point.row_tokens:,} tokens are extended "
        f"and freed (tail extend: one row of {timed.workload.long_row:,}). Medians, ± half the "
        "distance of the quartiles."
    )
    ways = (
        "in a loop: a step of one compiled loop; a call: one jitted call, state donated, dispatch "
        "and waiting included; plain Python: two free lists on the host; faster: the loop than "
        "these."
    )
    how = (
        f"{timed.compared} effects of ours and of plain Python were compared first. "
        f"{timed.seconds:.0f} s on {place['device']}, {timed.compile_seconds:.0f} s of them "
        f"compiling; load {place['load_average'] or 'unknown'}."
    )
    return [sizes, ways, how]
