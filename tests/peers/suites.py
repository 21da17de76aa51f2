"""Runs the peers' own unit tests on the classes of `swa_jax.compat`.

    python -m tests.peers.suites --sgl-jax CHECKOUT        # of sgl-project/sglang-jax
    python -m tests.peers.suites --sglang DIRECTORY        # with test files of sgl-project/sglang

Copies each test file to a temporary folder, once as it is and once with nothing but the imports of
the classes in question changed, runs both with pytest and prints what became of each case. A case
that fails as it is, on the peer itself, says nothing about ours: it is not applicable. Fetches
nothing; the peer must be importable by this Python. Run with `PYTHONPATH` at this repository.
"""

import argparse
import ast
import json
import os
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from tests.peers.suite_reasons import REASONS

ROOT = Path(__file__).parent.parent.parent
CLASSES = (
    "TokenToKVPoolAllocator",
    "PagedTokenToKVPoolAllocator",
    "SWATokenToKVPoolAllocator",
    "PureSWATokenToKVPoolAllocator",
    "SWARadixCache",
)
SGL_JAX_MODULES = ("sgl_jax.srt.mem_cache.allocator", "sgl_jax.srt.mem_cache.swa_radix_cache")
SGLANG_MODULES = tuple(
    f"sglang.srt.mem_cache.{name}"
    for name in ("allocator", "allocator.swa", "allocator.paged", "allocator.token")
)
# sglang names torchvision in places that no allocator comes near; see `benchmarks.sglang_classes`.
PREPARE = {
    "sgl_jax": "",
    "sglang": """
from benchmarks import sglang_classes
standing_in = sglang_classes.without_torchvision()
standing_in.__enter__()
from sglang.test.test_utils import maybe_stub_sgl_kernel
maybe_stub_sgl_kernel()
""",
}
# isinstance checks inside the peer must know our classes, as they would in a real drop-in.
REGISTER = """
import importlib
import {ours} as ours
from swa_jax.compat.common.registering import register_classes
for name in {modules}:
    try:
        engine = importlib.import_module(name)
    except ImportError:
        continue
    register_classes(engine, *[
        getattr(ours, one) for one in {classes}
        if hasattr(ours, one) and type(getattr(engine, one, None)).__name__ == "ABCMeta"
    ])
"""


@dataclass(frozen=True)
class Peer:
    """A peer, where its classes come from, and where ours do."""

    name: str
    modules: tuple[str, ...]
    ours: str

    def conftest(self, *, registers: bool) -> str:
        """What is done before a test file is read."""
        if not registers:
            return PREPARE[self.name]
        register = REGISTER.format(ours=self.ours, modules=self.modules, classes=CLASSES)
        return PREPARE[self.name] + register


SGL_JAX = Peer("sgl_jax", SGL_JAX_MODULES, "swa_jax.compat.sgl_jax")
SGLANG = Peer("sglang", SGLANG_MODULES, "tests.peers.torch_bridge")


@dataclass
class Outcome:
    """What became of one test file."""

    file: str
    cases: int = 0
    passed: int = 0
    failed: dict[str, str] = field(default_factory=dict)
    not_applicable: dict[str, str] = field(default_factory=dict)


def rewritten(source: str, modules: Sequence[str], ours: str, names: Iterable[str]) -> str:
    """`source` with the imports of `names` from `modules` coming from the module `ours`."""
    lines = source.splitlines()
    for node in reversed(list(ast.walk(ast.parse(source)))):
        if not isinstance(node, ast.ImportFrom) or node.module not in modules:
            continue
        mine = [alias for alias in node.names if alias.name in names]
        rest = [alias for alias in node.names if alias.name not in names]
        if not mine:
            continue
        indent = " " * node.col_offset
        new = [f"{indent}from {ours} import {', '.join(map(_spelled, mine))}"]
        if rest:
            new.append(f"{indent}from {node.module} import {', '.join(map(_spelled, rest))}")
        lines[node.lineno - 1 : node.end_lineno] = new
    return "\n".join(lines) + "\n"


def _spelled(alias: ast.alias) -> str:
    return f"{alias.name} as {alias.asname}" if alias.asname else alias.name


def run_pytest(file: Path, timeout: float) -> dict[str, tuple[str, str]]:
    """By case: "passed", "failed" or "skipped", and the first line of why."""
    report = file.with_suffix(".xml")
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        f"--junitxml={report}",
    ]
    paths = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    environment = os.environ | {
        "PYTHONPATH": paths,
        "JAX_PLATFORMS": "cpu",
        "USE_DEVICE_TYPE": "cpu",
        "SGLANG_USE_CPU_ENGINE": "1",
        "SGLANG_TEST_MAX_RETRY": "0",
    }
    subprocess.run(
        [*command, file.name],
        cwd=file.parent,
        env=environment,
        timeout=timeout,
        capture_output=True,
        check=False,
    )
    results = {}
    for case in ElementTree.parse(report).iter("testcase"):
        name = f"{case.get('classname', '').rsplit('.', 1)[-1]}.{case.get('name')}"
        kind, why = "passed", ""
        for child in case:
            if child.tag in ("failure", "error", "skipped"):
                kind = "skipped" if child.tag == "skipped" else "failed"
                why = _first_reason(child)
        results[name] = (kind, why)
    return results


def _first_reason(child: ElementTree.Element) -> str:
    """The first line that pytest marks as the error; a wrapper's own error comes later."""
    marked = [line[1:].strip() for line in (child.text or "").splitlines() if line[:2] == "E "]
    message = (child.get("message") or "").strip().splitlines()
    return next(iter([*marked, *message]), "")


def judge(file: str, on_theirs: dict, on_ours: dict) -> Outcome:
    """Sorts cases. What the peer itself does not pass, or skips, is not applicable."""
    outcome = Outcome(file, cases=len(on_theirs))
    for name, (kind, why) in on_theirs.items():
        mine, my_why = on_ours.get(name, ("failed", "the file could not be read"))
        known = REASONS.get(f"{Path(file).name}::{name}")
        if kind == "skipped":
            outcome.not_applicable[name] = f"skipped: {why}"
        elif kind == "failed":
            outcome.not_applicable[name] = f"fails on the peer itself: {why}"
        elif mine == "passed":
            outcome.passed += 1
        elif known:
            outcome.not_applicable[name] = known
        else:
            outcome.failed[name] = my_why
    return outcome


def run_files(
    peer: Peer, files: Iterable[Path], names: Sequence[str], timeout: float
) -> list[Outcome]:
    """Each file on the peer's classes and on ours."""
    outcomes = []
    for file in files:
        source = file.read_text(encoding="utf-8")
        changed = rewritten(source, peer.modules, peer.ours, names)
        with tempfile.TemporaryDirectory() as folder:
            runs = []
            for kind, text in (("theirs", source), ("ours", changed)):
                place = Path(folder) / kind
                place.mkdir()
                (place / file.name).write_text(text, encoding="utf-8")
                conftest = peer.conftest(registers=kind == "ours")
                (place / "conftest.py").write_text(conftest, encoding="utf-8")
                runs.append(run_pytest(place / file.name, timeout))
        outcomes.append(judge(file.name, *runs))
        print(_line(outcomes[-1]), flush=True)
    return outcomes


def naming(folder: Path, names: Iterable[str]) -> list[Path]:
    """The test files below `folder` that name one of the classes."""
    files = sorted(folder.rglob("test_*.py"))
    return [file for file in files if any(name in file.read_text("utf-8") for name in names)]


def _line(one: Outcome) -> str:
    away, failed = len(one.not_applicable), len(one.failed)
    return f"| {one.file} | {one.cases} | {one.passed} | {failed} | {away} |"


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints a table, with reasons below; the exit status says whether anything failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sgl-jax", type=Path, help="a checkout of sglang-jax")
    parser.add_argument("--sglang", type=Path, help="a folder with test files of sglang")
    parser.add_argument("--only", default="", help="run files whose names contain this")
    parser.add_argument("--classes", nargs="*", default=CLASSES, help="whose imports change")
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds for a file")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    print("| file | cases | passed | failed | not applicable |\n|---|---|---|---|---|")
    outcomes = []
    for folder, peer in ((options.sgl_jax, SGL_JAX), (options.sglang, SGLANG)):
        if folder is not None:
            files = [f for f in naming(folder, options.classes) if options.only in f.name]
            outcomes += run_files(peer, files, options.classes, options.timeout)
    for one in outcomes:
        for kind in ("failed", "not_applicable"):
            for case, why in getattr(one, kind).items():
                print(f"{kind.replace('_', ' ')}: {one.file} {case}: {why}")
    if options.json:
        options.json.write_text(json.dumps([asdict(one) for one in outcomes], indent=1))
    return int(any(one.failed for one in outcomes))


if __name__ == "__main__":
    sys.exit(main())
