"""The pages of the documentation, and the code in them."""

import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.rglob("*.md"))
# Pages whose code compiles a serving loop, a matter of gigabytes: see LARGE in conftest.py.
LARGE = ("docs/guide/host-tier.md", "docs/guide/serving.md")

FENCE = re.compile(r"^```(?P<kind>\w*)[^\n]*\n(?P<body>.*?)^```$", re.MULTILINE | re.DOTALL)
LEFT_OUT = re.compile(r"<!-- not run: \S.*? -->\n\Z", re.DOTALL)


def name_of(path):
    return path.relative_to(ROOT).as_posix()


def text_of(path):
    return path.read_text(encoding="utf-8")


def without_code(text):
    return re.sub(r"`[^`\n]+`", "", FENCE.sub("", text))


def python_blocks(text):
    """Those that are to run, with the line each begins in."""
    for block in FENCE.finditer(text):
        if block["kind"] == "python" and not LEFT_OUT.search(text[: block.start()]):
            yield text.count("\n", 0, block.start("body")), block["body"]


def run_code(page):
    """Runs a page's blocks one after the other, in one namespace."""
    names = {"__name__": page.stem}
    for line, body in python_blocks(text_of(page)):
        # The lines above keep the numbers of a traceback those of the page.
        exec(compile("\n" * line + body, str(page), "exec"), names)


RUNNING = [page for page in PAGES if any(python_blocks(text_of(page)))]
