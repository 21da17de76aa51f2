"""What is installed: one version, light imports, extras that the doctor knows, git's hooks."""

import json
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import swa_jax
from swa_jax import supported
from swa_jax.doctor.extras import EXTRAS

ROOT = Path(__file__).parent.parent

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
# What only contributors install.
NOT_FOR_USERS = {"bench", "dev", "docs", "peers"}
NEVER = ("chex", "typer", "rich", "matplotlib", "hypothesis", "torch", "tokenizers", "safetensors")


def run(*command: str) -> str:
    done = subprocess.run(
        [sys.executable, *command],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert not done.returncode, done.stderr
    return done.stdout


def test_the_version_is_said_once():
    assert "version" in PROJECT["dynamic"]
    assert f"## [{swa_jax.__version__}]" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")


def test_supported_versions_are_those_that_pip_is_told():
    needs = {line.partition(">=")[0]: line.partition(">=")[2] for line in PROJECT["dependencies"]}
    for name in ("jax", "jaxlib"):
        assert supported.JAX[0].startswith(needs[name])
    assert PROJECT["requires-python"] == f">={supported.PYTHON[0]}"
    named = {line.rpartition(" ")[2] for line in PROJECT["classifiers"] if "Python :: 3." in line}
    assert (min(named), max(named)) == supported.PYTHON


def test_the_doctor_knows_every_extra_of_users():
    extras = PROJECT["optional-dependencies"]
    assert set(EXTRAS) == set(extras) - NOT_FOR_USERS
    for extra, packages in EXTRAS.items():
        asked = {
            line.partition(">=")[0] for line in extras[extra] if not line.startswith("swa-jax")
        }
        assert asked <= set(packages), extra


def test_import_brings_nothing_but_jax_and_what_jax_brings():
    code = (
        "import json, sys; import jax, jax.numpy; before = set(sys.modules); import swa_jax; "
        f"print(json.dumps([sorted(set(sys.modules) & set({NEVER})), "
        "sorted({name.partition('.')[0] for name in set(sys.modules) - before})]))"
    )
    never, new = json.loads(run("-c", code))
    assert not never
    assert set(new) <= {"swa_jax", *sys.stdlib_module_names}, new


def test_the_package_is_typed():
    assert (Path(swa_jax.__file__).parent / "py.typed").exists()


def test_hooks_run_what_ci_runs():
    yaml = pytest.importorskip("yaml")
    config = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text(encoding="utf-8"))
    (repo,) = config["repos"]
    assert repo["repo"] == "local"
    tools = {hook["entry"].split()[0].rpartition("/")[2] for hook in repo["hooks"]}
    assert tools == {"ruff", "nbstripout", "pyright"}
    lint = (ROOT / "Makefile").read_text(encoding="utf-8")
    assert all(f"$(BIN)/{tool} " in lint for tool in tools)
