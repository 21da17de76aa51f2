"""Runs the programs and compares their digests with the record.

    python -m tests.determinism [--devices N] [--only WORDS ...] [--ways WAY ...] [--json FILE]
    python -m tests.determinism --record      keep what comes out now
    python -m tests.determinism --settings    all of it, in a process for each setting

A program's bits must be the recorded ones whatever the way, the number of devices, the settings and
the version of JAX. Ends with 1 where they are not.
"""

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import jax
import numpy as np

from . import record
from .program import RANKS, Driven, Program
from .programs import PROGRAMS
from .ways import WAYS, Trail, driven

HOST_LOOP = "host loop"
# Each in a process of its own: arguments, and the environment.
SETTINGS: dict[str, tuple[list[str], dict[str, str]]] = {
    "one device": (["--ways", "scan, donated", "scan", "steps, donated", "vmap"], {}),
    "eight devices": (["--devices", "8", "--ways", "devices", "steps"], {}),
    "64 bits": (["--ways", "scan, donated"], {"JAX_ENABLE_X64": "1"}),
    "all optimizations": (
        ["--ways", "scan, donated"],
        {"JAX_DISABLE_MOST_OPTIMIZATIONS": "0"},
    ),
    "eager": (["--ways", "eager", "--only", "allocator, page 1", "prefix cache, page 2"], {}),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """1 if a program has other bits than it should."""
    options = _parser().parse_args(arguments)
    if options.settings:
        return _all_settings(options)
    _prepare(options.devices)
    chosen = _chosen(options.only)
    print(_environment(options.devices), flush=True)
    rows, first = [], {}
    for name, program in chosen.items():
        for way in _ways(program, options):
            started = time.perf_counter()
            trails = run(program, way)
            first.setdefault(name, trails)
            seconds = time.perf_counter() - started
            said = judge(program, way, trails, first[name], keeps=options.record)
            digest = record.recorded(trails).digest[: record.SHORT]
            rows.append({"program": name, "way": way, "digest": digest, "seconds": seconds, **said})
            print(f"{name} | {way} | {digest} | {seconds:.0f} s | {said['said']}", flush=True)
        if options.record:
            record.write({name: first[name]})
    wrong = [row for row in rows if not row["ok"]]
    print(f"{len(rows) - len(wrong)} of {len(rows)} as they should be")
    if options.json:
        found = {"environment": _environment(options.devices), "runs": rows}
        Path(options.json).write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    return int(bool(wrong))


def _chosen(only: Sequence[str] | None) -> dict[str, Program | Driven]:
    """A name in full stands for itself, other words for every name that has them."""
    if not only:
        return PROGRAMS
    return {
        name: program
        for name, program in PROGRAMS.items()
        if any(words == name or (words in name and words not in PROGRAMS) for words in only)
    }


def _known(words: str) -> str:
    """For the parser: words that some name has."""
    if not words or not any(words in name for name in PROGRAMS):
        known = "; ".join(PROGRAMS)
        raise argparse.ArgumentTypeError(f"no program is called {words!r}; there are {known}")
    return words


def run(program: Program | Driven, way: str) -> list[Trail]:
    """The digests of a program, run that way."""
    if isinstance(program, Driven):
        return driven(program, jax.devices())
    return WAYS[way](program)


def judge(
    program: Program | Driven,
    way: str,
    trails: Sequence[Trail],
    first: Sequence[Trail],
    *,
    keeps: bool = False,
) -> dict[str, object]:
    """Whether the bits are right (`ok`), and in words (`said`).

    Args:
      program: that was run.
      way: how.
      trails: its digests.
      first: those of the first way in this process: all ways must agree with each other, also
        where floats choose.
      keeps: they are about to be recorded, so the record is not asked.
    """
    here = record.difference(program, way, trails, record.recorded(first))
    if here is not None and len(first[0]) >= len(trails[0]) and len(first) >= len(trails):
        return {"ok": False, "said": f"two ways differ: {here}"}
    if keeps:
        return {"ok": True, "said": "to be recorded"}
    right = record.read().get(program.name)
    if right is None:
        return {"ok": False, "said": f"{program.name}: not recorded; run with --record"}
    lacking = record.cut_short(program, right)
    if lacking is not None:
        return {"ok": False, "said": f"DIFFERS: {lacking}"}
    other = record.difference(program, way, trails, right)
    if other is None:
        return {"ok": True, "said": "as recorded"}
    if not program.exact and record.size_difference(program, way, trails, right) is None:
        return {"ok": True, "said": f"not promised, since floats choose, and differs: {other}"}
    return {"ok": False, "said": f"DIFFERS: {other}"}


def _ways(program: Program | Driven, options: argparse.Namespace) -> list[str]:
    if isinstance(program, Driven):
        return [HOST_LOOP]
    if options.record or not options.ways:
        return ["devices"] if options.devices >= RANKS and not options.record else ["scan, donated"]
    return options.ways


def _prepare(devices: int) -> None:
    """Before the first array is made."""
    jax.config.update("jax_platforms", os.environ.get("JAX_PLATFORMS", "cpu"))
    if devices > 1:
        jax.config.update("jax_num_cpu_devices", devices)
    if "JAX_DISABLE_MOST_OPTIMIZATIONS" not in os.environ:  # nearly all time goes into compiling
        jax.config.update("jax_disable_most_optimizations", True)
    assert len(jax.devices()) >= devices, f"{devices} devices are asked for, got {jax.devices()}"


def _environment(devices: int) -> str:
    return (
        f"Python {platform.python_version()}, jax {jax.__version__}, NumPy {np.__version__}, "
        f"{devices} device(s), 64 bits {'on' if jax.config.read('jax_enable_x64') else 'off'}, "
        "optimizations "
        f"{'few' if jax.config.read('jax_disable_most_optimizations') else 'all'}"
    )


def _all_settings(options: argparse.Namespace) -> int:
    """One line each; 1 if any process found a difference."""
    failed = 0
    for name, (given, environment) in SETTINGS.items():
        only = [] if not options.only or "--only" in given else ["--only", *options.only]
        command = [sys.executable, "-m", "tests.determinism", *given, *only]
        print(f"== {name}", flush=True)
        failed |= subprocess.run(command, env=os.environ | environment, check=False).returncode
    return int(bool(failed))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tests.determinism",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--devices", type=int, default=1, help="CPU devices of this process")
    parser.add_argument("--only", nargs="+", type=_known, help="programs with these in their names")
    parser.add_argument("--ways", nargs="+", choices=tuple(WAYS), help="how each is run")
    parser.add_argument("--json", metavar="FILE", help="where the results go too")
    parser.add_argument("--record", action="store_true", help="keep what comes out")
    parser.add_argument("--settings", action="store_true", help="a process for each setting")
    return parser
