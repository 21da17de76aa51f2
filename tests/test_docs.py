"""The documentation: its code runs, its links lead somewhere, its commands and names exist."""

import functools
import importlib
import json
import re
import runpy
import shlex
from types import SimpleNamespace

import pytest
import yaml
from doc_pages import (
    DOCS,
    FENCE,
    LARGE,
    PAGES,
    ROOT,
    RUNNING,
    name_of,
    run_code,
    text_of,
    without_code,
)

import swa_jax
from swa_jax.commands.app import app_command

NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
CONFIG = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))
MOST_LINES = 50  # of a cell

LINK = re.compile(r"!?\[[^\]\n]+\]\((?P<path>[^)#\s]*)(?:#(?P<anchor>[^)\s]*))?\)")
SHOWN = re.compile(r"^::: (\S+)$", re.MULTILINE)
SMALL = [page for page in RUNNING if name_of(page) not in LARGE]
each_small_page = pytest.mark.parametrize("page", SMALL, ids=name_of)
each_page = pytest.mark.parametrize("page", PAGES, ids=name_of)
each_notebook = pytest.mark.parametrize("book", NOTEBOOKS, ids=name_of)


@each_small_page
def test_code_of_a_page_runs(page):
    run_code(page)


def test_code_is_called_python():
    """A fence without a name, or with another one, would not be run."""
    known = {"python", "sh", "text", "json", "toml", "html"}
    wrong = [
        f"{name_of(page)}: {block['kind']!r}"
        for page in PAGES
        for block in FENCE.finditer(text_of(page))
        if block["kind"] not in known
    ]
    assert not wrong


def slug(heading):
    """As Python-Markdown names a heading's anchor."""
    plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading)
    plain = re.sub(r"[^\w\s-]", "", plain).strip().lower()
    return re.sub(r"[-\s]+", "-", plain)


@functools.cache
def anchors(path):
    found = set()
    for heading in re.findall(r"^#+ (.+?)\s*$", FENCE.sub("", text_of(path)), re.MULTILINE):
        name, count = slug(heading), 1
        while name in found:
            name, count = f"{slug(heading)}_{count}", count + 1
        found.add(name)
    return found


def broken_links(path, text):
    for link in LINK.finditer(without_code(text)):
        target, anchor = link["path"], link["anchor"]
        if re.match(r"[a-z]+:", target):
            continue
        aim = (path.parent / target).resolve() if target else path
        if not aim.exists():
            yield f"{name_of(path)}: {target} does not exist"
        elif anchor and aim.suffix == ".md" and anchor not in anchors(aim):
            yield f"{name_of(path)}: {target}#{anchor} is no heading"


@each_page
def test_links_of_a_page_lead_somewhere(page):
    assert not list(broken_links(page, text_of(page)))


@each_notebook
def test_links_of_a_notebook_lead_somewhere(book):
    cells = json.loads(text_of(book))["cells"]
    words = ["".join(c["source"]) for c in cells if c["cell_type"] == "markdown"]
    assert not list(broken_links(book, "\n".join(words)))


def nav_entries(nav):
    for entry in nav:
        if isinstance(entry, str):
            yield entry
        else:
            for value in entry.values():
                yield from [value] if isinstance(value, str) else nav_entries(value)


def test_navigation_is_whole():
    named = list(nav_entries(CONFIG["nav"]))
    site = load("site_hooks")
    missing = [entry for entry in named if not (ROOT / site.in_repository(entry)).exists()]
    assert not missing, "in mkdocs.yml, but not in the repository"
    assert len(set(named)) == len(named)
    here = {name_of(page).removeprefix("docs/") for page in PAGES}
    here |= {f"notebooks/{book.stem}.md" for book in NOTEBOOKS}
    assert not here - set(named), "pages that mkdocs.yml does not name"


def load(name):
    """A module that lies among the pages."""
    return SimpleNamespace(**runpy.run_path(str(DOCS / f"{name}.py")))


@pytest.mark.parametrize(
    ("page", "target", "link"),
    [
        ("index.md", "how-to/loop.md", "how-to/loop.md"),
        (
            "how-to/loop.md",
            "../../notebooks/03-serving-loop.ipynb",
            "../notebooks/03-serving-loop.md",
        ),
        ("planning.md", "../benchmarks/results/jenga.md", "repository/benchmarks/results/jenga.md"),
        ("differences-sglang.md", "../CONTRIBUTING.md", "repository/CONTRIBUTING.md"),
        ("notebooks/06-planning.md", "../docs/planning.md", "../planning.md"),
        ("notebooks/01-tour.md", "02-three-bugs.ipynb", "02-three-bugs.md"),
        ("repository/CONTRIBUTING.md", "docs/architecture.md", "../architecture.md"),
        ("architecture.md", "../swa_jax/state.py", None),
        ("index.md", "https://example.org/a", "https://example.org/a"),
    ],
)
def test_links_into_the_repository_are_made_to_fit_the_site(page, target, link):
    assert load("site_hooks").site_link(page, target) == link


def test_nothing_is_fetched_from_elsewhere():
    """The build machine, and readers, may reach no other host."""
    assert CONFIG["strict"] is True
    assert CONFIG["theme"]["font"] is False
    assert "social" not in str(CONFIG["plugins"])
    assert "extra_javascript" not in CONFIG
    assert "http" not in text_of(DOCS / "site.css")


# Reference


def shown():
    """What the reference asks for: packages, modules, and names of the allocator."""
    pages = (DOCS / "reference").glob("*.md")
    return [name for page in pages for name in SHOWN.findall(text_of(page))]


def test_reference_has_every_public_package():
    packages = {
        ".".join(path.parent.relative_to(ROOT).parts)
        for path in (ROOT / "swa_jax").rglob("__init__.py")
        if "__all__" in text_of(path)
    }
    assert packages - {"swa_jax"} <= set(shown())


def test_reference_has_every_name_of_the_allocator_once():
    names = [name.partition(".")[2] for name in shown() if name.count(".") == 1]
    assert sorted(name for name in names if name in swa_jax.__all__) == sorted(swa_jax.__all__)


def test_reference_knows_where_each_name_is_defined():
    """A name may be a function's and a module's; the function is meant."""
    load_names = load("site_hooks").public_names
    for package in {*shown(), "swa_jax"}:
        for name, path in load_names(package).items():
            home, _, last = path.rpartition(".")
            here = importlib.import_module(package)
            assert getattr(importlib.import_module(home), last) is getattr(here, name)


def test_reference_shows_what_a_call_refuses():
    pytest.importorskip("griffe", reason="part of the extra docs")
    refused = "Refused, counted:\n  double_free: a page,\n    twice.\n  unmapped: none.\n"
    text = f"Does.\n\n{refused}\nLaw 4.\n"
    shown = load("site_docstrings").readable(text)
    assert (
        "**Refused, counted:**\n\n- *double_free*: a page,\n  twice.\n- *unmapped*: none." in shown
    )
    assert shown.startswith("Does.\n\n")
    assert shown.endswith("\n\nLaw 4.\n")


def test_outputs_of_a_notebook_become_markdown():
    as_shown = load("site_hooks").as_shown
    text = {"output_type": "stream", "name": "stdout", "text": "a\nb\n"}
    assert as_shown(text) == "```text\na\nb\n```"
    assert as_shown(text | {"name": "stderr"}) == ""
    table = {"text/html": "<b>x</b>\n\n<i>y</i>", "text/plain": "x"}
    assert (
        as_shown({"output_type": "display_data", "data": table}) == "<div><b>x</b> <i>y</i></div>"
    )
    data = {"text/html": "<pre>x</pre>", "text/plain": "x"}
    assert as_shown({"output_type": "execute_result", "data": data}) == "```text\nx\n```"


# Commands


def command_lines(text):
    """Lines of shell blocks, indented ones and code in a line that call `swa-jax`."""
    shell = [block["body"] for block in FENCE.finditer(text) if block["kind"] == "sh"]
    shell += re.findall(r"^ {4}(\S.*)$", FENCE.sub("", text), re.MULTILINE)
    shell += re.findall(r"`(swa-jax [^`\n]+)`", text)
    for line in "\n".join(shell).splitlines():
        match = re.match(r"(?:\S*/)?swa-jax (.*?)(?:\s[|>&].*)?$", line.strip())
        if match:
            yield match[1]


def unknown_options(line):
    command, path = app_command(), []
    words = shlex.split(line)
    while words and words[0] in getattr(command, "commands", {}):
        path.append(words[0])
        command = command.commands[words.pop(0)]
    if not path and words and re.match(r"[a-z]", words[0]):
        return [f"no command {words[0]}"]
    known = {name for param in command.params for name in param.opts + param.secondary_opts}
    known |= {"--help", "-h"}
    given = [word.partition("=")[0] for word in words if re.match("--?[a-z]", word)]
    return [f"{' '.join(path)} has no {option}" for option in given if option not in known]


def test_an_option_that_is_not_there_is_seen():
    text = "```sh\nswa-jax plan --modell x | jq .\n```\n\n    .venv/bin/swa-jax replai x\n"
    wrong = [why for line in command_lines(text) for why in unknown_options(line)]
    assert wrong == ["plan has no --modell", "no command replai"]


def test_a_broken_link_is_seen():
    page = DOCS / "index.md"
    text = "[a](nope.md) [b](glossary.md#time) [c](glossary.md#no) [d](#install) [e](https://x)"
    assert list(broken_links(page, text)) == [
        "docs/index.md: nope.md does not exist",
        "docs/index.md: glossary.md#no is no heading",
    ]


@each_page
def test_commands_and_their_options_exist(page):
    wrong = [why for line in command_lines(text_of(page)) for why in unknown_options(line)]
    assert not wrong


def test_command_page_has_every_command():
    named = set(re.findall(r"`swa-jax ([a-z-]+)", text_of(DOCS / "reference/command-line.md")))
    assert named == set(app_command().commands)


# Notebooks


@each_notebook
def test_notebook_has_no_outputs(book):
    content = json.loads(text_of(book))
    assert content["metadata"]["kernelspec"]["name"] == "python3"
    for cell in content["cells"]:
        assert cell["metadata"] == {}
        if cell["cell_type"] == "code":
            assert cell["outputs"] == []
            assert cell["execution_count"] is None


@each_notebook
def test_notebook_is_written_for_a_reader(book):
    """It begins with a title, its cells are short, and it asserts what it says."""
    cells = json.loads(text_of(book))["cells"]
    assert cells[0]["cell_type"] == "markdown"
    assert cells[0]["source"][0].startswith("# ")
    code = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    assert max(source.count("\n") + 1 for source in code) <= MOST_LINES
    assert sum(source.count("assert ") for source in code) >= 5
    assert len({cell["id"] for cell in cells}) == len(cells)
