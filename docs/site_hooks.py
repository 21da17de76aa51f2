"""What `make docs` adds to mkdocs.

* Pages that lie outside docs/, and notebooks as pages.
* Links: in a page they are written for the repository, so that they work there, and are made to
  fit the site here.
* `::: swa_jax.prefix_cache` shows every name of that package's `__all__`, each as the object that
  it is: a package can have a function and a module of one name, and mkdocstrings would take the
  module.
"""

import ast
import functools
import json
import os
import posixpath
import re
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import File, Files
    from mkdocs.structure.pages import Page

ROOT = Path(__file__).parent.parent
# What is shown of the rest of the repository, under repository/ of the site.
OUTSIDE = ("CONTRIBUTING.md", "CHANGELOG.md", "benchmarks/results/*.md", "benchmarks/results/*.png")
_LINK = re.compile(r"(?<!\!)\[(?P<text>[^\]\n]+)\]\((?P<target>[^)#\s]+)(?P<anchor>#[^)\s]*)?\)")
_SHOWN = re.compile(r"^::: (\S+)$", re.MULTILINE)
_FENCE = re.compile(r"(^```.*?^```[^\n]*$|`[^`\n]+`)", re.MULTILINE | re.DOTALL)


def on_files(files: "Files", config: "MkDocsConfig") -> "Files":
    """Adds the pages that are not in docs/."""
    from mkdocs.structure.files import File

    for pattern in OUTSIDE:
        for path in sorted(ROOT.glob(pattern)):
            place = f"repository/{path.relative_to(ROOT).as_posix()}"
            files.append(File.generated(config, place, abs_src_path=str(path)))
    for path in sorted((ROOT / "notebooks").glob("*.ipynb")):
        text = notebook_as_markdown(path)
        files.append(File.generated(config, f"notebooks/{path.stem}.md", content=text))
    return files


def on_page_markdown(markdown: str, page: "Page", config: "MkDocsConfig", files: "Files") -> str:
    """Makes links that fit the repository fit the site."""
    file: File = page.file

    def fit(match: re.Match[str]) -> str:
        target = site_link(file.src_uri, match["target"])
        if target is None:  # the site does not have it
            return match["text"]
        return f"[{match['text']}]({target}{match['anchor'] or ''})"

    parts = _FENCE.split(markdown)  # every second one is code
    linked = "".join(part if i % 2 else _LINK.sub(fit, part) for i, part in enumerate(parts))
    return _SHOWN.sub(lambda match: shown(match[1]), linked)


def shown(name: str) -> str:
    """What to ask mkdocstrings for where a page asks for a package, or for a name of one."""
    package, _, last = name.rpartition(".")
    if public_names(name):
        about = f"::: {name}\n    options: {{ members: false, show_root_heading: false }}"
        return "\n\n".join([about, *(f"::: {path}" for path in public_names(name).values())])
    return f"::: {public_names(package).get(last, name)}"


@functools.cache
def public_names(package: str) -> dict[str, str]:
    """The names in the `__all__` of a package, and where each is defined; none if it has none."""
    path = ROOT / package.replace(".", "/") / "__init__.py"
    if not package or not path.exists():
        return {}
    tree, listed, homes = ast.parse(path.read_text(encoding="utf-8")), [], {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            homes |= {each.name: f"{node.module}.{each.name}" for each in node.names}
        elif isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            listed = ast.literal_eval(node.value)
    functions_first = sorted(listed, key=lambda name: (name[0].isupper(), name.isupper()))
    return {name: homes.get(name, f"{package}.{name}") for name in functions_first}


def in_repository(src_uri: str) -> str:
    """Where a page of the site lies in the repository."""
    if src_uri.startswith("repository/"):
        return src_uri.removeprefix("repository/")
    if re.match(r"notebooks/\d", src_uri):
        return src_uri.removesuffix(".md") + ".ipynb"
    return f"docs/{src_uri}"


def site_link(src_uri: str, target: str) -> str | None:
    """A link's target as the page needs it on the site; None for what the site does not have.

    Args:
      src_uri: the page, as mkdocs names it.
      target: as written, relative to where the page lies in the repository.
    """
    if re.match(r"[a-z]+:|/", target):
        return target
    here = posixpath.dirname(in_repository(src_uri))
    path = posixpath.normpath(posixpath.join(here, target))
    if path.startswith("docs/"):
        place = path.removeprefix("docs/")
    elif path.startswith("notebooks/") and path.endswith(".ipynb"):
        place = path.removesuffix(".ipynb") + ".md"
    elif any(Path(path).match(pattern) for pattern in OUTSIDE):
        place = f"repository/{path}"
    else:
        return None if (ROOT / path).exists() else target
    return posixpath.relpath(place, posixpath.dirname(src_uri) or ".")


def notebook_as_markdown(path: Path) -> str:
    """A notebook's text and code; what it shows too, where it is to be run.

    The notebooks in the repository have no outputs. With SWA_JAX_NOTEBOOK_OUTPUTS=1 they are run
    here, which takes a minute or two.
    """
    name = path.relative_to(ROOT).as_posix()
    if os.environ.get("SWA_JAX_NOTEBOOK_OUTPUTS") == "1":
        cells, about = run_notebook(path), f"*This page is `{name}`.*"
    else:
        cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
        about = f"*This page is `{name}` without its outputs; run it to see them.*"
    parts = []
    for cell in cells:
        source = "".join(cell["source"])
        is_code = cell["cell_type"] == "code"
        parts.append(f"```python\n{source}\n```" if is_code else source)
        parts += [text for output in cell.get("outputs", []) if (text := as_shown(output))]
    parts.insert(1, about)
    return "\n\n".join(parts) + "\n"


def run_notebook(path: Path) -> list[dict[str, Any]]:
    """The cells of a notebook after a run."""
    import nbformat
    from nbclient import NotebookClient

    book = nbformat.read(path, as_version=4)
    where = {"metadata": {"path": str(path.parent)}}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what a kernel says about its own transport
        NotebookClient(book, timeout=600, kernel_name="python3", resources=where).execute()
    return book.cells


def as_shown(output: dict[str, Any]) -> str:
    """One output of a cell as Markdown: a picture, a table, or text."""
    if output["output_type"] == "stream":
        return "" if output["name"] == "stderr" else _fenced(output["text"])
    data = output.get("data", {})
    if "image/png" in data:
        picture = "".join(data["image/png"].split())
        return f'<img alt="What the cell shows" src="data:image/png;base64,{picture}">'
    html = data.get("text/html", "<pre")
    if "<pre" not in html:
        # On one line: a blank one would end the HTML for Markdown.
        return f"<div>{' '.join(html.split())}</div>"
    return _fenced(data["text/plain"]) if "text/plain" in data else ""


def _fenced(text: str) -> str:
    return f"```text\n{text.rstrip()}\n```"
