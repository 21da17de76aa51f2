"""Tests each supported Python with the oldest and the newest supported JAX.

    make matrix
    python .ci/matrix.py [--python 3.12 ...] [--jax oldest|newest ...] [--fresh]

Interpreters are looked for on PATH and in pyenv's folder; one that is not found is named, and a
failure. Environments stay in .matrix/ and are used again; `--fresh` makes them anew.
"""

import argparse
import os
import runpy
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).parent.parent
SUPPORTED = runpy.run_path(str(ROOT / "swa_jax" / "supported.py"))
JAX = dict(zip(("oldest", "newest"), SUPPORTED["JAX"], strict=True))
# Sizes and errors, the laws, scenarios, and the command line with a real replay.
QUICK = (
    "tests/test_config.py",
    "tests/test_check.py",
    "tests/test_inputs.py",
    "tests/test_scenarios.py",
    "tests/test_cli.py",
    "tests/test_determinism.py",
)
# Equal bits over the versions of JAX, of every program; with one Python, since it takes minutes.
BITS = ("-m", "tests.determinism")


def main() -> int:
    """Prints a line for each combination; 1 if any failed or could not be tried."""
    options = _parser().parse_args()
    lines = []
    for version in options.python:
        found = next(_interpreters(version), None)
        for name in options.jax:
            if found is None:
                lines.append((version, name, "no such Python on PATH or in pyenv's folder"))
            else:
                every = version == options.python[0]
                result = _test(found, version, name, fresh=options.fresh, every_program=every)
                lines.append((version, name, result))
            print(" ".join(("matrix:", *lines[-1])), flush=True)
    return int(any(not result.startswith("passed") for _, _, result in lines))


def _versions() -> list[str]:
    """3.11, 3.12, ... as far as supported."""
    first, last = (int(version.split(".")[1]) for version in SUPPORTED["PYTHON"])
    return [f"3.{minor}" for minor in range(first, last + 1)]


def _interpreters(version: str) -> Iterator[str]:
    """Those of a version that run and can make environments."""
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    places = [sys.executable, shutil.which(f"python{version}")]
    places += [str(path) for path in sorted(pyenv.glob(f"{version}.*/bin/python"), reverse=True)]
    code = f"import sys, ensurepip, venv; sys.exit(sys.version_info[:2] != {_pair(version)})"
    for place in places:
        # A shim of pyenv may be there for a version that is not chosen, and does not run.
        if place and not subprocess.run([place, "-c", code], capture_output=True).returncode:
            yield place


def _pair(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split("."))


def _test(
    interpreter: str, version: str, jax: str, *, fresh: bool, every_program: bool = False
) -> str:
    """Installs and tests one combination; what came of it."""
    start, folder = time.perf_counter(), ROOT / ".matrix" / f"{version}-jax-{JAX[jax]}"
    python = str(folder / "bin" / "python")
    if fresh or not Path(python).exists():
        _run([interpreter, "-m", "venv", "--clear", str(folder)])
    pip = [python, "-m", "pip", "--quiet", "--no-input", "--disable-pip-version-check"]
    pins = [f"jax=={JAX[jax]}", f"jaxlib=={JAX[jax]}"]
    if _run([*pip, "install", "-e", ".[cli,debug,plot]", "chex", "pytest>=8", *pins]):
        return f"jax {JAX[jax]}: cannot be installed"
    installed = time.perf_counter()
    for command in (
        [python, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "not long", *QUICK],
        [str(folder / "bin" / "swa-jax"), "doctor", "--quiet"],
        *([[python, *BITS]] if every_program else []),
    ):
        if _run(command):
            return f"jax {JAX[jax]}: FAILED: {' '.join(command[1:])}"
    tested = time.perf_counter()
    return (
        f"passed: jax {JAX[jax]}, installed in {installed - start:.0f} s, tested in "
        f"{tested - installed:.0f} s"
    )


def _run(command: Sequence[str]) -> int:
    """Runs it in the repository; says what it said where it fails."""
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        print(f"{' '.join(command)}\n{done.stdout}{done.stderr}", file=sys.stderr)
    return done.returncode


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--python", nargs="+", choices=_versions(), default=_versions())
    parser.add_argument("--jax", nargs="+", choices=tuple(JAX), default=tuple(JAX))
    parser.add_argument("--fresh", action="store_true", help="make the environments anew")
    return parser


if __name__ == "__main__":
    sys.exit(main())
