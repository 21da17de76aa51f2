"""The README's examples run as they stand and print what it says; its links lead somewhere."""

import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
TEXT = (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_examples_run_and_print_what_it_says(capsys):
    blocks = re.findall(r"```python\n(.*?)```", TEXT, flags=re.DOTALL)
    printed = []
    for block in blocks:
        exec(compile(block, "README.md", "exec"), {})
        printed.append(capsys.readouterr().out)
    first, loop = printed
    assert first.split("[")[0] == "True 55 "
    assert first.split("[")[1].rstrip("]\n").split() == [str(slot) for slot in range(16, 36)]
    assert loop.startswith("1024 256 {'double_free': 0")
    assert re.search(r"[1-9]", loop.split("{")[1]) is None


def test_the_first_grant_takes_five_lines():
    block = re.findall(r"```python\n(.*?)```", TEXT, flags=re.DOTALL)[0]
    assert len([line for line in block.splitlines() if line.strip()]) == 5


def test_every_public_call_is_in_the_readme():
    import swa_jax as swa

    helpers = {"FAULT_KINDS", "AllocatorState", "InvariantError", "PagePool"}
    helpers |= {"PageTables", "WindowPageTables", "OwnerTags"}
    helpers |= {"frontier", "state_bytes", "step_invariants"}
    missing = [name for name in swa.__all__ if name not in helpers and name not in TEXT]
    assert not missing


def test_its_links_and_pictures_are_there():
    targets = re.findall(r"\]\(([^)#\s]+)", TEXT)
    here = [target for target in targets if not re.match(r"[a-z]+:", target)]
    assert here
    assert [target for target in here if not (ROOT / target).exists()] == []
