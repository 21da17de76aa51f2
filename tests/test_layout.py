"""The repository as such: who imports whom, how long things get, what must not be in a file."""

import ast
import inspect
import subprocess
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import swa_jax

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "swa_jax"
MODULES = sorted(PACKAGE.rglob("*.py"))

# A core module imports from layers before its own, or from its own; never from a later one.
LAYERS = (
    ("config",),
    ("faults",),
    ("state",),
    ("paging", "pool"),
    ("plan", "plan_decode", "plan_extend", "plan_free"),
    ("allocator", "free", "group", "mapping", "window", "check"),
)
LAYER_OF = {f"swa_jax.{name}": i for i, names in enumerate(LAYERS) for name in names}

BANNED_IMPORTS = {"torch", "optax"}
MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 60
# In two parts, or this file would hold what it looks for.
MACHINE_PATHS = ("/" + "work/", "/" + "tmp/w")
AT_METHODS = {"add", "apply", "divide", "get", "max", "min", "mul", "multiply", "power", "set"}

each_module = pytest.mark.parametrize("path", MODULES, ids=lambda p: str(p.relative_to(ROOT)))


def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), str(path))


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


NAMES = {module_name(path): path for path in MODULES}


def imports(path: Path) -> Iterator[tuple[int, str]]:
    """Every (line, module) that a file imports, relative ones spelled out."""
    package = path.relative_to(ROOT).parent.parts
    for node in ast.walk(parse(path)):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            anchor = package[: len(package) - node.level + 1] if node.level else ()
            base = ".".join((*anchor, *(node.module.split(".") if node.module else ())))
            for alias in node.names:
                # `from package import x` means the module x where there is one.
                full = f"{base}.{alias.name}"
                yield node.lineno, full if full in NAMES else base


def where(path: Path, line: int) -> str:
    return f"{path.relative_to(ROOT)}:{line}"


@each_module
def test_imports_nothing_from_other_frameworks(path: Path) -> None:
    wrong = [
        f"{where(path, line)} imports {name}"
        for line, name in imports(path)
        if name.split(".")[0] in BANNED_IMPORTS
    ]
    assert not wrong, f"the package needs only jax and numpy: {wrong}"


def import_graph() -> dict[str, set[str]]:
    return {
        name: {to for _, to in imports(path) if to in NAMES and to != name}
        for name, path in NAMES.items()
    }


# The package itself re-exports every layer, so it stands above them all.
RANKS = {**LAYER_OF, "swa_jax": len(LAYERS)}


def dependencies(start: str) -> dict[str, str]:
    """Ranked modules that `start` imports, each with the module whose import it is.

    A helper module that is in no layer may be used anywhere: what it imports counts as its user's.
    """
    graph, found = import_graph(), dict[str, str]()
    todo = [start]
    while todo:
        importer = todo.pop()
        new = graph[importer] - found.keys()
        found.update(dict.fromkeys(new, importer))
        todo += [name for name in new if name not in RANKS]
    return {name: importer for name, importer in found.items() if name in RANKS}


@pytest.mark.parametrize("name", [name for name in LAYER_OF if name in NAMES])
def test_core_imports_go_one_way(name: str) -> None:
    wrong = [
        f"{importer} imports {to}"
        for to, importer in dependencies(name).items()
        if RANKS[to] > RANKS[name]
    ]
    order = " -> ".join("/".join(names) for names in LAYERS)
    assert not wrong, f"{name} must not depend on a later layer of {order}: {wrong}"


def test_no_import_cycle() -> None:
    try:
        TopologicalSorter(import_graph()).prepare()
    except CycleError as error:
        pytest.fail(f"modules import each other in a circle: {' <- '.join(error.args[1])}")


@each_module
def test_file_is_short(path: Path) -> None:
    lines = len(path.read_text(encoding="utf-8").splitlines())
    assert lines <= MAX_FILE_LINES, (
        f"{path.relative_to(ROOT)} has {lines} lines, more than {MAX_FILE_LINES}: split it"
    )


def lines_without_docstring(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Lines from the `def` to the end, less the docstring's own."""
    first = function.body[0]
    has_docstring = ast.get_docstring(function, clean=False) is not None
    docstring = (first.end_lineno or first.lineno) - first.lineno + 1 if has_docstring else 0
    return (function.end_lineno or function.lineno) - function.lineno + 1 - docstring


@each_module
def test_functions_are_short(path: Path) -> None:
    functions = [
        node
        for node in ast.walk(parse(path))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]
    wrong = [
        f"{where(path, f.lineno)} {f.name}: {lines_without_docstring(f)} lines"
        for f in functions
        if lines_without_docstring(f) > MAX_FUNCTION_LINES
    ]
    assert not wrong, f"longer than {MAX_FUNCTION_LINES} lines without docstring: {wrong}"


@each_module
def test_gathers_and_scatters_say_their_mode(path: Path) -> None:
    wrong = [
        f"{where(path, node.lineno)} .at[...].{node.func.attr}(...)"
        for node in ast.walk(parse(path))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr in AT_METHODS
        and isinstance(node.func.value, ast.Subscript)
        and isinstance(node.func.value.value, ast.Attribute)
        and node.func.value.value.attr == "at"
        and "mode" not in {keyword.arg for keyword in node.keywords}
    ]
    assert not wrong, f"an index out of range must be dropped or filled, say mode=: {wrong}"


def test_public_names_exist_once() -> None:
    names = list(swa_jax.__all__)
    missing = [name for name in names if not hasattr(swa_jax, name)]
    assert not missing, f"in swa_jax.__all__ but not in swa_jax: {missing}"
    assert len(set(names)) == len(names), f"named twice in swa_jax.__all__: {names}"


def has_own_docstring(name: str) -> bool:
    docstring = inspect.getdoc(getattr(swa_jax, name)) or ""
    # A dataclass without a docstring is given its own signature for one.
    return bool(docstring) and not docstring.startswith(f"{name}(")


def test_public_names_have_docstrings() -> None:
    callables = [name for name in swa_jax.__all__ if callable(getattr(swa_jax, name, None))]
    wrong = [name for name in callables if not has_own_docstring(name)]
    assert not wrong, f"public names without a docstring: {wrong}"


def repository_files() -> list[Path]:
    """Files that are in the repository or would be with the next commit."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    try:
        run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"not a git checkout: {error}")
    return [path for name in run.stdout.split("\0") if name and (path := ROOT / name).is_file()]


def test_no_machine_path_in_a_file() -> None:
    wrong = []
    for path in repository_files():
        text = path.read_bytes().decode("utf-8", errors="replace")
        for number, line in enumerate(text.splitlines(), start=1):
            wrong += [f"{where(path, number)} {p}" for p in MACHINE_PATHS if p in line]
    assert not wrong, f"paths of one machine mean nothing on another: {wrong}"
