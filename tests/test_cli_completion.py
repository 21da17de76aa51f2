"""Completion in bash, and help pages: neither waits for JAX."""

import json
import os
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

REPORT = (
    "import atexit, json, sys; sys.argv = ['swa-jax', *sys.argv[1:]]; "
    "atexit.register(lambda: print(json.dumps('jax' in sys.modules), file=sys.stderr)); "
    "import swa_jax_command; sys.exit(swa_jax_command.main())"
)


def started(*arguments: str, **environment: str) -> tuple[str, bool]:
    """What the script prints, and whether it imported JAX."""
    done = subprocess.run(
        [sys.executable, "-c", REPORT, *arguments],
        cwd=ROOT,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout, json.loads(done.stderr.splitlines()[-1])


def completed(line: str) -> list[str]:
    """What the last word of a command line may become, by the script alone."""
    words = line.split(" ")
    said, with_jax = started(
        _SWA_JAX_COMPLETE="complete_bash", COMP_WORDS=line, COMP_CWORD=str(len(words) - 1)
    )
    assert not with_jax
    return said.split()


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("swa-jax re", ["replay"]),
        ("swa-jax replay moo", ["mooncake-conversation"]),
        ("swa-jax plan --model gpt-oss-", ["gpt-oss-20b", "gpt-oss-120b"]),
        ("swa-jax replay --pol", ["--policy"]),
    ],
)
def test_words_are_completed_without_jax(line, expected):
    assert completed(line) == expected


def test_bash_completes(tmp_path):
    if shutil.which("bash") is None:
        pytest.skip("no bash here")
    command = tmp_path / "swa-jax"
    command.write_text(f"#!{sys.executable}\nimport swa_jax_command\nswa_jax_command.main()\n")
    command.chmod(command.stat().st_mode | stat.S_IXUSR)
    script = (
        'eval "$(_SWA_JAX_COMPLETE=source_bash swa-jax)"; complete -p swa-jax; '
        "COMP_WORDS=(swa-jax replay --placement r); COMP_CWORD=3; "
        '_swa_jax_completion swa-jax; echo "${COMPREPLY[@]}"'
    )
    path = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "--norc", "-c", script],
        env={**os.environ, "PATH": path, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    known, words = done.stdout.splitlines()
    assert "_swa_jax_completion swa-jax" in known, done.stderr
    assert words == "round-robin"


def test_help_needs_no_jax():
    said, with_jax = started("bench", "--help")
    assert "swa-jax bench --pool-tokens 65536" in said
    assert not with_jax
    said, with_jax = started("--version", "--help")
    assert said.startswith("swa-jax ")
    assert with_jax
