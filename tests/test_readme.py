"""The README's example runs as it stands, and prints what the README says."""

import re
from pathlib import Path

README = Path(__file__).parent.parent / "README.md"


def test_the_example_runs_and_prints_what_it_says(capsys):
    text = README.read_text(encoding="utf-8")
    blocks = re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)
    assert blocks
    for block in blocks:
        exec(compile(block, str(README), "exec"), {})
    printed = capsys.readouterr().out
    assert printed.startswith("1024 256 {'double_free': 0")
    assert re.search(r"[1-9]", printed.split("{")[1]) is None


def test_every_public_call_is_in_the_readme():
    import swa_jax as swa

    text = README.read_text(encoding="utf-8")
    helpers = {"FAULT_KINDS", "AllocatorState", "InvariantError", "PagePool"}
    helpers |= {"PageTables", "WindowPageTables"}
    helpers |= {"frontier", "state_bytes", "step_invariants"}
    missing = [name for name in swa.__all__ if name not in helpers and name not in text]
    assert not missing
