"""What users may rely on, as text: the kind and signature of every public name.

    python tests/public_api.py            # writes tests/public_api.txt: accepts what has changed

Public are the names in `__all__` of `swa_jax` and of every package in it, and those of `MODULES`.
Sources are read, not imported: the text is the same with any version of Python and JAX, and needs
no extra.
"""

import ast
import functools
from collections.abc import Iterator
from pathlib import Path
from typing import TypeAlias

ROOT = Path(__file__).parent.parent
RECORDED = ROOT / "tests" / "public_api.txt"
# Public without an `__all__`.
MODULES = {
    "swa_jax.checked": ("Checked", "checking", "init", "watch"),
    "swa_jax.cpu_copy": ("CpuCopy", "get_cpu_copy", "load_cpu_copy"),
    "swa_jax.replay.driver": ("ReplayResult", "ReplaySettings", "run_replay"),
    "swa_jax.replay.trace": ("Trace", "TraceError", "load_trace"),
}
Function: TypeAlias = ast.FunctionDef | ast.AsyncFunctionDef
_DECORATORS = {"property", "classmethod", "staticmethod", "cached_property"}


def public_api() -> list[str]:
    """A line for each public name, and for each public part of a public class."""
    packages = {name: _listed(name) for name in _packages()}
    named = {name: names for name, names in packages.items() if names} | MODULES
    return [
        line
        for module, names in sorted(named.items())
        for name in sorted(names)
        for line in _lines(f"{module}.{name}", *_find(module, name))
    ]


def _packages() -> Iterator[str]:
    for file in (ROOT / "swa_jax").rglob("__init__.py"):
        yield ".".join(file.parent.relative_to(ROOT).parts)


def _file(module: str) -> Path:
    path = ROOT.joinpath(*module.split("."))
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


@functools.cache
def _tree(module: str) -> ast.Module:
    return ast.parse(_file(module).read_text(encoding="utf-8"))


def _statements(module: str) -> Iterator[ast.stmt]:
    """Those at the top, and what is imported under `if` and `try`."""
    for node in _tree(module).body:
        yield from node.body if isinstance(node, ast.If | ast.Try) else (node,)


def _listed(module: str) -> tuple[str, ...]:
    """`__all__` of a module; nothing where it has none."""
    for node in _tree(module).body:
        if isinstance(node, ast.Assign) and _is_named(node.targets[0], "__all__"):
            return tuple(ast.literal_eval(node.value))
    return ()


def _is_named(node: ast.expr, name: str) -> bool:
    return isinstance(node, ast.Name) and node.id == name


def _find(module: str, name: str) -> tuple[str, ast.stmt | None]:
    """Where a name is defined, and its definition; None where it is a module."""
    for node in _statements(module):
        if isinstance(node, Function | ast.ClassDef) and node.name == name:
            return module, node
        if isinstance(node, ast.Assign) and any(_is_named(each, name) for each in node.targets):
            return module, node
        if isinstance(node, ast.AnnAssign) and _is_named(node.target, name):
            return module, node
        if isinstance(node, ast.ImportFrom):
            for alias in node.names:
                if (alias.asname or alias.name) == name and node.module:
                    return _find_imported(node.module, alias.name)
    raise LookupError(f"{module} lists {name} and does not define it")


def _find_imported(module: str, name: str) -> tuple[str, ast.stmt | None]:
    path = ROOT.joinpath(*module.split("."), name)
    if path.is_dir() or path.with_suffix(".py").exists():
        try:
            return _find(module, name)  # a function may be called as its module is
        except LookupError:
            return f"{module}.{name}", None
    return _find(module, name)


def _lines(name: str, module: str, node: ast.stmt | None) -> Iterator[str]:
    if node is None:
        yield f"{name}: module"
    elif isinstance(node, Function):
        yield f"{name}: function{_signature(node)}"
    elif isinstance(node, ast.ClassDef):
        yield f"{name}: class({', '.join(ast.unparse(base) for base in node.bases)})"
        for part in node.body:
            yield from (f"{name}.{line}" for line in _part(part))
    elif isinstance(node, ast.AnnAssign):
        yield f"{name}: {ast.unparse(node.annotation)}"
    elif isinstance(node, ast.Assign):
        yield f"{name} = {_value(node.value)}"


def _part(node: ast.stmt) -> Iterator[str]:
    """A public field or method of a class."""
    if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
        if not node.target.id.startswith("_"):
            value = "" if node.value is None else f" = {_value(node.value)}"
            yield f"{node.target.id}: {ast.unparse(node.annotation)}{value}"
    elif isinstance(node, Function) and (node.name == "__init__" or node.name[0] != "_"):
        kinds = [ast.unparse(each) for each in node.decorator_list]
        kind = next((each for each in kinds if each in _DECORATORS), "method")
        yield f"{node.name}: {kind}{_signature(node)}"


def _signature(node: Function) -> str:
    returns = "" if node.returns is None else f" -> {ast.unparse(node.returns)}"
    return f"({ast.unparse(node.args)}){returns}"


def _value(node: ast.expr) -> str:
    text = ast.unparse(node)
    return text if len(text) <= 200 else f"{text[:197]}..."


def as_text() -> str:
    """The list as it is recorded."""
    return "\n".join(public_api()) + "\n"


if __name__ == "__main__":
    RECORDED.write_text(as_text(), encoding="utf-8")
    print(f"{RECORDED.relative_to(ROOT)}: {len(public_api())} lines")
