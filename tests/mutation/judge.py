"""Runs tests against changed copies of the package: one process forked for each mutant.

The package and its tests are copied once into a temporary tree; a mutant rewrites one file of it.
The process that forks has imported JAX and pytest but never started a device, which saves seconds a
mutant. Programs that a mutant leaves as they are come from a persistent compilation cache: its keys
hash the whole program, so a changed one is never taken for another.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import chex
import hypothesis
import hypothesis.stateful
import jax
import jax.numpy
import numpy
import pytest

from .patch import PACKAGE, ROOT, Mutant

CACHE = ROOT / ".pytest_cache" / "jax-mutants"
KILLED, SURVIVED, TIMED_OUT, BROKEN = "killed", "survived", "timed out", "broken"
UNFINISHED = "not finished"  # neither noticed nor survived: its tests were cut off
_IMPORTED = (chex, hypothesis.stateful, jax.numpy, numpy)


@dataclass(frozen=True)
class Tests:
    """Tests of one file; `only` is a regular expression that their names must match."""

    file: str  # in tests/
    only: str = ""


@dataclass(frozen=True)
class Outcome:
    """What became of one mutant."""

    fate: str
    by: str  # the first test that failed, or why there is none
    seconds: float


class Judge:
    """A copy of the repository's package and tests, to be changed and tested in, one at a time."""

    def __init__(self) -> None:
        self.tree = Path(tempfile.mkdtemp(prefix="mutants-"))
        leave_out = shutil.ignore_patterns("mutation", "results")
        for part in (PACKAGE, "tests", "benchmarks"):
            shutil.copytree(ROOT / part, self.tree / part, ignore=leave_out)
        shutil.copy(ROOT / "pyproject.toml", self.tree)
        CACHE.mkdir(parents=True, exist_ok=True)
        (self.tree / ".pytest_cache").mkdir()
        (self.tree / ".pytest_cache" / "jax").symlink_to(CACHE)
        self._answer = self.tree / "outcome.json"
        self._passed = self.tree / "passed.txt"
        self._child = 0
        self._begun = self._limit = self._total = 0.0
        self._right: tuple[Path, str] | None = None

    def close(self) -> None:
        """Ends what still runs and removes the copy."""
        if self._child:
            self._end()
        shutil.rmtree(self.tree, ignore_errors=True)

    def __enter__(self) -> Judge:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def begin(
        self,
        mutant: Mutant | None,
        tests: Sequence[Tests],
        limit: float,
        *,
        total: float = 1e9,
        sooner: Sequence[str] = (),
    ) -> None:
        """Applies a mutant, or none, and begins to run tests.

        Args:
          mutant: what to change.
          tests: in this order.
          limit: most seconds for one test; a mutant that takes longer hangs, and is noticed.
          total: seconds after which no more tests are tried; the mutant is not finished then.
          sooner: names of tests among them that are run before the others.
        """
        if mutant is not None:
            path = self.tree / PACKAGE / mutant.file
            right = path.read_text(encoding="utf-8")
            path.write_text(mutant.apply(right), encoding="utf-8")
            self._right = path, right
        self._answer.unlink(missing_ok=True)
        self._passed.write_text("", encoding="utf-8")
        self._begun, self._limit, self._total = time.monotonic(), limit, total
        self._child = os.fork()
        if not self._child:
            _serve(self.tree, _Watch(tests, sooner, self._passed), self._answer)

    def poll(self) -> Outcome | None:
        """The outcome, once there is one; the file is put back then."""
        seconds = time.monotonic() - self._begun
        if os.waitpid(self._child, os.WNOHANG)[0]:
            self._child = 0
            outcome = self._read(seconds)
        elif time.time() - self._passed.stat().st_mtime > self._limit:
            self._end()
            outcome = Outcome(TIMED_OUT, f"a test ran for {self._limit:.0f} s", seconds)
        elif seconds > self._total:
            self._end()
            passed = self._passed.stat().st_size
            outcome = Outcome(UNFINISHED, f"{passed} tests passed in {self._total:.0f} s", seconds)
        else:
            return None
        if self._right is not None:
            path, right = self._right
            path.write_text(right, encoding="utf-8")
            self._right = None
        return outcome

    def _read(self, seconds: float) -> Outcome:
        if not self._answer.exists():  # the compiler or a test took the process down
            return Outcome(KILLED, "the process crashed", seconds)
        fate, by = json.loads(self._answer.read_text(encoding="utf-8"))
        return Outcome(fate, by, seconds)

    def _end(self) -> None:
        os.killpg(self._child, signal.SIGKILL)
        os.waitpid(self._child, 0)
        self._child = 0


def _serve(tree: Path, watch: _Watch, answer: Path) -> None:
    """In the new process: never returns."""
    try:
        os.setpgid(0, 0)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        out = os.open(tree / "output.txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(out, 1)
        os.dup2(out, 2)
        fate, by = _test(tree, watch)
        answer.write_text(json.dumps([fate, by]), encoding="utf-8")
    except BaseException:
        answer.write_text(json.dumps([BROKEN, traceback.format_exc()]), encoding="utf-8")
    finally:
        sys.stdout.flush()
        os._exit(0)


def _test(tree: Path, watch: _Watch) -> tuple[str, str]:
    os.chdir(tree)
    sys.dont_write_bytecode = True  # of a file that changes twice a second
    here = [path for path in sys.path if Path(path).resolve() not in (ROOT, ROOT / "tests")]
    sys.path[:] = [str(tree), *here]
    for name in [name for name in sys.modules if name.split(".")[0] in (PACKAGE, "tests")]:
        if "mutation" not in name:
            del sys.modules[name]
    try:
        package = __import__(PACKAGE)
    except Exception as error:
        return KILLED, f"the package cannot be imported: {error!r}"
    if not Path(package.__file__ or "").is_relative_to(tree):
        return BROKEN, f"took the package from {package.__file__}"
    hypothesis.settings.register_profile(
        "mutants",
        deadline=None,
        max_examples=30,
        derandomize=True,
        database=None,
        phases=[hypothesis.Phase.explicit, hypothesis.Phase.generate],
    )
    os.environ["HYPOTHESIS_PROFILE"] = "mutants"
    files = list(dict.fromkeys(f"tests/{each.file}" for each in watch.tests))
    options = ["-qx", "-pno:cacheprovider", "-pno:xdist", "-oaddopts=", "-p", "no:nbmake"]
    options += ["-W", "ignore::pytest.PytestAssertRewriteWarning"]
    code = int(pytest.main([*options, *files], plugins=[watch]))
    if code == 0:
        return SURVIVED, f"{watch.ran} tests passed"
    if watch.failed:
        return KILLED, watch.failed
    if code == pytest.ExitCode.INTERRUPTED:
        return KILLED, f"a test file cannot be imported: {watch.unread}"
    return BROKEN, f"pytest ended with {code}"


class _Watch:
    """A pytest plugin: runs chosen tests in the order of the table, keeps the first failure."""

    def __init__(self, tests: Sequence[Tests], sooner: Sequence[str], passed: Path) -> None:
        self.tests = tests
        self._sooner = sooner
        self._passed = passed  # a letter for each test
        self.failed = self.unread = ""
        self.ran = 0

    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        chosen: dict[str, Any] = {}
        for each in self.tests:
            for item in items:
                file, _, name = item.nodeid.partition("::")
                if file == f"tests/{each.file}" and re.search(each.only, name):
                    chosen.setdefault(item.nodeid, item)
        before = {f"tests/{name}": place for place, name in enumerate(self._sooner)}
        items[:] = sorted(chosen.values(), key=lambda item: before.get(item.nodeid, len(before)))

    def pytest_collectreport(self, report: Any) -> None:
        if report.failed:
            self.unread = self.unread or f"{report.nodeid}: {report.longrepr}"[-400:]

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.when == "call":
            self.ran += 1
            with self._passed.open("a", encoding="utf-8") as file:
                file.write(".")
        if report.failed and not self.failed:
            self.failed = report.nodeid.removeprefix("tests/")
