"""What a benchmark says while it runs, and where its figures go."""

import json
import sys
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any


def progress(text: str) -> None:
    """A line on stderr, with the time."""
    print(f"{time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)


def draws(folder: Path | None) -> bool:
    """Whether pictures are written beside a page: into a folder, where matplotlib is installed."""
    return folder is not None and find_spec("matplotlib") is not None


def write_results(
    name: str,
    result: dict[str, Any],
    page: str,
    draw: Callable[[dict[str, Any], Path], None],
    folder: Path,
) -> None:
    """Writes `name` as JSON, Markdown and, where matplotlib is installed, a picture."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    (folder / f"{name}.md").write_text(page, encoding="utf-8")
    if not draws(folder):
        progress("no picture: matplotlib is not installed")
        return
    draw(result, folder / f"{name}.png")
