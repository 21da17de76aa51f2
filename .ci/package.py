"""Builds the sdist and a wheel out of it, installs that into an empty environment, and tries it.

make package
"""

import subprocess
import sys
import tempfile
import time
import venv
from collections.abc import Sequence
from pathlib import Path

CI = Path(__file__).parent


def main() -> None:
    """Exits with the first command that fails."""
    with tempfile.TemporaryDirectory() as folder:
        built, away = Path(folder, "dist"), Path(folder, "away")
        away.mkdir()
        # With nothing chosen, build makes the wheel from the sdist, which proves that whole.
        _run("built", [sys.executable, "-m", "build", "--outdir", str(built), str(CI.parent)])
        (wheel,) = built.glob("*.whl")
        _run("complete", [sys.executable, str(CI / "check_wheel.py"), str(wheel)])
        venv.create(Path(folder, "empty"), with_pip=True)
        scripts = Path(folder, "empty", "bin")
        pip = [str(scripts / "python"), "-m", "pip", "--quiet", "--disable-pip-version-check"]
        _run("installed", [*pip, "install", f"{wheel}[cli]"])
        _run("works", [str(scripts / "python"), str(CI / "smoke.py")], away)
        _run("doctor", [str(scripts / "swa-jax"), "doctor"], away)


def _run(what: str, command: Sequence[str], folder: Path | None = None) -> None:
    """Runs it, its output held back unless it fails."""
    start = time.perf_counter()
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"not {what}: {' '.join(command)}\n{done.stdout}{done.stderr}")
    print(f"{what} ({time.perf_counter() - start:.1f} s)", flush=True)


if __name__ == "__main__":
    main()
