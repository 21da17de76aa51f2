"""What a soak found: a table by part, and the same as JSON."""

from __future__ import annotations

import platform
from typing import Any

import jax

from .memory import growth, is_constant, warm
from .part import Result

_MIB = 2**20


def as_json(results: list[Result], wrong: list[str], seed: int) -> dict[str, Any]:
    """All of it."""
    return {
        "requests": sum(result.requests for result in results),
        "steps": sum(result.steps for result in results),
        "law_checks": sum(result.looks for result in results),
        "faults": sum(result.faults for result in results),
        "leaked_pages": sum(result.leaked for result in results),
        "seconds": round(sum(result.seconds for result in results), 1),
        "cpu_seconds": round(sum(result.cpu_seconds for result in results), 1),
        "wrong": wrong,
        "seed": seed,
        "environment": {"jax": jax.__version__, "python": platform.python_version()},
        "parts": [_part(result) for result in results],
    }


def _part(result: Result) -> dict[str, Any]:
    seen = result.seen
    found: dict[str, Any] = {
        "name": result.name,
        "requests": result.requests,
        "steps": result.steps,
        "law_checks": result.looks,
        "faults": result.faults,
        "leaked_pages": result.leaked,
        "seconds": round(result.seconds, 1),
        "cpu_seconds": round(result.cpu_seconds, 1),
        "wrong": result.wrong,
        "happened": {name: count for name, count in sorted(result.counts.items()) if count},
    }
    if seen:
        before = warm(seen)
        found["memory"] = {
            "blocks": len(seen),
            "constant": is_constant(seen),
            "mib": [round(held.rss / _MIB, 1) for held in (seen[0], before, seen[-1])],
            "mib_grown": round(growth(seen).rss / _MIB, 1),
            "arrays": [held.arrays for held in (seen[0], before, seen[-1])],
        }
    return found


def as_text(results: list[Result]) -> str:
    """A table, and below it what happened in each part."""
    head = f"{'part':26}{'requests':>10}{'steps':>12}{'law checks':>13}{'faults':>8}{'leaked':>8}"
    lines = [head + f"{'seconds':>9}{'CPU s':>8}{'MiB warm and end':>20}{'arrays':>8}"]
    for result in results:
        seen = result.seen
        memory, arrays = "", ""
        if seen:
            before = warm(seen)
            memory = f"{before.rss / _MIB:.0f} {seen[-1].rss / _MIB:.0f}"
            arrays = f"{growth(seen).arrays:+d}"
        lines.append(
            f"{result.name:26}{result.requests:>10,}{result.steps:>12,}{result.looks:>13,}"
            f"{result.faults:>8}{result.leaked:>8}{result.seconds:>9.1f}{result.cpu_seconds:>8.1f}"
            f"{memory:>20}{arrays:>8}"
        )
    for result in results:
        counts = sorted(result.counts.items())
        told = ", ".join(
            f"{name} {count:,}" for name, count in counts if name not in ("ended", "steps", "looks")
        )
        lines += ["", f"{result.name}: {told}"]
    return "\n".join(lines)
