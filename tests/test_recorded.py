"""Every program in tests/recorded runs: the laws hold after each call, and it comes to the same.

To add one: record it (`swa_jax.debug.Recorder`), or shrink a failing one and run
`record_outcomes` on it once the bug is mended, `save` it into tests/recorded. Nothing else.
"""

from pathlib import Path

import pytest

from swa_jax.debug import CALLS, load, record_outcomes, run
from swa_jax.debug.files import as_text

FOLDER = Path(__file__).parent / "recorded"
FILES = sorted(FOLDER.glob("*.json"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_recorded_program_keeps_the_laws_and_comes_to_the_same(path):
    timeline = run(load(path))
    assert timeline.failure is None, timeline


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_recorded_program_says_what_it_is_about_and_what_comes_of_it(path):
    program = load(path)
    assert program.about
    assert all(call.outcome is not None for call in program.calls)
    assert as_text(program) == path.read_text()  # as `save` writes it


def test_every_call_is_in_some_recorded_program():
    seen = {call.name for path in FILES for call in load(path).calls}
    assert seen == set(CALLS)


def test_outcomes_are_recorded_anew():
    program = load(FOLDER / "one_token_frees_its_swa_page_once.json")
    assert record_outcomes(program) == program
