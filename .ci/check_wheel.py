"""Checks that a wheel holds every file of the package: modules, data and the typing marker."""

import sys
from pathlib import Path
from zipfile import ZipFile

ROOT = Path(__file__).parent.parent


def main(wheel: str) -> None:
    """Exits with the names of the files that the wheel lacks."""
    expected = {"swa_jax_command.py"} | {
        path.relative_to(ROOT).as_posix()
        for path in (ROOT / "swa_jax").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    for needed in ("swa_jax/py.typed", "swa_jax/data/"):
        if not any(name.startswith(needed) for name in expected):
            sys.exit(f"the package has no {needed}")
    missing = sorted(expected - set(ZipFile(wheel).namelist()))
    if missing:
        sys.exit(f"{Path(wheel).name} lacks {', '.join(missing)}")
    print(f"{Path(wheel).name} holds all {len(expected)} files of the package")


if __name__ == "__main__":
    main(sys.argv[1])
