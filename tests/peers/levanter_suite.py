"""Runs Levanter's own tests of its page table, scheduler and engine with our table inside.

    python tests/peers/levanter_suite.py CHECKOUT [--theirs]

CHECKOUT is a copy of its repository, not installed: haliax, equinox, draccus, optax, chex,
transformers and what they need are. The test files are copied to a temporary folder and run there
as they are; only the module `levanter.inference.page_table` is another.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

FILES = (
    "test_page_table.py",
    "test_clone_pages.py",
    "test_jit_scheduler.py",
    "test_engine.py",
    "test_paged_attention.py",
)
BY_HAND = "the test writes a row of pages that nobody holds (count 0); law 3 knows no such row"
NOT_APPLICABLE = {
    "test_clone_pages_from_partial_last_page_allocates_fresh_page": BY_HAND,
    "test_clone_pages_from_boundary_shares_last_page": BY_HAND,
}
CONFTEST = """
import importlib, sys, types
package = types.ModuleType("levanter")
package.__path__ = [{source!r}]
sys.modules["levanter"] = package
sys.path[:0] = [{ours!r}, {named!r}]
if {ours_in}:
    import levanter.inference
    module = importlib.import_module("levanter_named")
    sys.modules["levanter.inference.page_table"] = module
    levanter.inference.page_table = module
"""


def run(checkout: Path, *, ours: bool) -> dict[str, tuple[int, int, list[str]]]:
    """Cases, passed and the names of those that failed, by file."""
    root = Path(__file__).parents[2]
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        source = str(checkout / "src" / "levanter")
        text = CONFTEST.format(
            source=source, ours=str(root), named=str(Path(__file__).parent), ours_in=ours
        )
        (Path(folder) / "conftest.py").write_text(text)
        for name in FILES:
            shutil.copy(checkout / "tests" / "inference" / name, folder)
            found[name] = _run_one(Path(folder), name)
    return found


def _run_one(folder: Path, name: str) -> tuple[int, int, list[str]]:
    command = [sys.executable, "-m", "pytest", "-q", "-rA", "-p", "no:cacheprovider", name]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    passed = re.findall(r"^PASSED \S+?::(\S+)", done.stdout, re.MULTILINE)
    failed = re.findall(r"^(?:FAILED|ERROR) \S+?::(\S+)", done.stdout, re.MULTILINE)
    if not passed and not failed:
        raise RuntimeError(f"{name} did not run:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    return len(passed) + len(failed), len(passed), failed


def main() -> int:
    """Prints a row a file; 1 where a case fails that should not."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkout", type=Path)
    parser.add_argument("--theirs", action="store_true", help="with their own table, to compare")
    args = parser.parse_args()
    bad = 0
    print("| file | cases | passed | not applicable |\n|---|---|---|---|")
    for name, (cases, passed, failed) in run(args.checkout, ours=not args.theirs).items():
        excused = [each for each in failed if each in NOT_APPLICABLE and not args.theirs]
        bad += len(failed) - len(excused)
        why = "; ".join(sorted({NOT_APPLICABLE[each] for each in excused}))
        rest = [each for each in failed if each not in excused]
        text = f"{len(excused)}: {why}" if excused else "0"
        print(f"| {name} | {cases} | {passed} | {text}{f' FAILED {rest}' if rest else ''} |")
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main())
