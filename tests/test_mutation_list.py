"""The mutation suite itself: `python -m tests.mutation` runs it, here it is kept in order."""

import ast
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.mutation.command import all_mutants, all_noticed, choose, main, score, sooner
from tests.mutation.explained import EXPLAINED
from tests.mutation.generate import mutants_in, mutants_of
from tests.mutation.judge import KILLED, SURVIVED, TIMED_OUT, UNFINISHED, Judge, Outcome
from tests.mutation.known import KNOWN
from tests.mutation.patch import ROOT, Mutant, source_of
from tests.mutation.which_tests import TESTS

MUTANTS = all_mutants()
# Each is seen by the first tests that it is tried on, which compile little.
SAMPLE = r"^paging:pages_for: offset_of|B04 the end|^config:_positive_int: number < 1 =>"


@pytest.mark.parametrize("mutant", KNOWN, ids=lambda mutant: mutant.name)
def test_a_known_bug_still_applies_and_says_where(mutant):
    changed = mutant.apply(source_of(mutant.file))
    assert ast.dump(ast.parse(changed)) != ast.dump(ast.parse(source_of(mutant.file)))
    functions = [node for node in ast.walk(ast.parse(changed)) if isinstance(node, ast.FunctionDef)]
    (function,) = [node for node in functions if node.name == mutant.where]
    assert mutant.new in ast.get_source_segment(changed, function)


def test_names_are_of_one_mutant_each():
    names = [mutant.name for mutant in MUTANTS]
    assert len(set(names)) == len(names)


def test_what_is_explained_is_a_mutant():
    assert set(EXPLAINED) <= {mutant.name for mutant in MUTANTS}
    assert all(len(reason.split()) >= 5 for reason in EXPLAINED.values())


def test_every_module_has_tests_that_exist():
    for file, tests in TESTS.items():
        assert source_of(file)
        assert tests
        assert all((ROOT / "tests" / each.file).is_file() for each in tests)
    assert {mutant.file for mutant in KNOWN} <= set(TESTS)


@pytest.mark.parametrize("file", ["pool.py", "prefix_cache/locks.py"])
def test_generated_mutants_are_one_change_each(file):
    source = source_of(file)
    for mutant in mutants_of(file):
        assert ast.dump(ast.parse(mutant.apply(source))) != ast.dump(ast.parse(source)), mutant.name


@pytest.mark.parametrize(
    ("code", "changes"),
    [
        ("a < b", ["a <= b"]),
        ("a <= b < c", ["a < b < c", "a <= b <= c"]),
        ("a is b", []),
        ("a & ~b", ["(a)", "(~b)", "(b)"]),
        ("a and b", ["(b)", "(a)"]),
        ("a or b or c", ["((b) or (c))", "((a) or (c))", "((a) or (b))"]),
        ("n - 1", ["(n)"]),
        ('x.get(mode="fill")', ['mode="clip"']),
        ('x.get(mode="clip")', ['mode="fill"']),
        ("jnp.minimum(a, b)", ["(a)"]),
        ("jnp.where(m, a, b)", ["jnp.where(m | True, a, b)", "jnp.where(m & False, a, b)"]),
        ("look_up(t, i, 0)", ["look_up(t, jnp.minimum(i, (t).shape[0] - 1), 0)"]),
        ("replace(s, a=1, b=2)", ["replace(s, b=2)", "replace(s, a=1)"]),
    ],
)
def test_what_an_expression_is_changed_to(code, changes):
    mutants = mutants_in("pool.py", f"def f():\n    return {code}\n")
    assert [mutant.new for mutant in mutants] == changes
    assert all(mutant.where == "f" for mutant in mutants)


def test_what_noticed_others_of_the_module_comes_first():
    mutant = next(mutant for mutant in MUTANTS if mutant.file == "pool.py")
    fates = [(KILLED, "b"), (KILLED, "a"), (SURVIVED, "9 tests passed"), (KILLED, "a")]
    known = {f"pool:f: {n}": Outcome(fate, by, 1.0) for n, (fate, by) in enumerate(fates)}
    known["pool_view:f: x"] = Outcome(KILLED, "c", 1.0)
    assert sooner(mutant, known) == ["a", "b"]


def test_a_patch_that_does_not_fit_is_refused():
    with pytest.raises(ValueError, match="once, is 0 times"):
        Mutant("pool.py", "take", "no such line", "", "a bug").apply("")
    with pytest.raises(ValueError, match="once, is 2 times"):
        Mutant("pool.py", "take", "a", "b", "a bug").apply("a a")
    with pytest.raises(ValueError, match="any more"):
        Mutant("pool.py", "take", "a", "b", start=1).apply("ab")


def test_the_score_counts_by_module():
    name = next(mutant.name for mutant in MUTANTS if mutant.file == "pool.py")
    text = score({name: Outcome(KILLED, "", 1.0), "rank:x: a => b": Outcome(SURVIVED, "", 1.0)})
    assert [line.split()[0] for line in text.splitlines()] == ["module", "pool", "rank", "all"]


def test_a_mutant_that_is_cut_off_is_neither_noticed_nor_survived(monkeypatch):
    monkeypatch.setattr(shutil, "copytree", lambda *_, **__: None)
    monkeypatch.setattr(os, "fork", lambda: 2**30)  # no process has this number
    monkeypatch.setattr(os, "waitpid", lambda *_: (0, 0))
    monkeypatch.setattr(os, "killpg", lambda *_: None)
    with Judge() as judge:
        judge.begin(None, (), 60, total=-1)
        outcome = judge.poll()
    assert outcome is not None
    assert outcome.fate == UNFINISHED
    name = next(iter(EXPLAINED))
    head, *rows = score({name: outcome, "pool:f: x": Outcome(KILLED, "", 1.0)}).splitlines()
    assert head.endswith("survived  not finished        broken")
    assert rows[-1].split()[1:] == ["1", "0", "0", "0", "1", "0"]


def test_all_are_noticed_only_if_each_one_is():
    explained, reasonless = next(iter(EXPLAINED)), "pool:f: x"
    right = {reasonless: KILLED, "pool:f: y": TIMED_OUT, explained: SURVIVED}
    assert all_noticed({name: Outcome(fate, "", 1.0) for name, fate in right.items()})
    assert not all_noticed({reasonless: Outcome(SURVIVED, "", 1.0)})
    assert not all_noticed({reasonless: Outcome(UNFINISHED, "", 1.0)})
    assert not all_noticed({explained: Outcome(UNFINISHED, "", 1.0)})


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["--one-in", "0"], "--one-in: must be 1 or more, got 0"),
        (["--jobs", "0"], "--jobs: must be 1 or more, got 0"),
        (["--first", "-1"], "--first: must be 1 or more, got -1"),
        (["--limit", "nan"], "--limit: must be above 0, got nan"),
        (["--total", "0"], "--total: must be above 0, got 0"),
        (["--only", "("], "--only: '(' is no regular expression: "),
        (["--again", "survives"], "--again: invalid choice: 'survives'"),
        (["--only", "^nothing$"], "no mutant matches --only '^nothing$' with --one-in 1"),
    ],
)
def test_what_would_run_no_mutant_is_refused(given, said, monkeypatch, capsys):
    monkeypatch.setattr("tests.mutation.command.all_mutants", lambda: MUTANTS)
    with pytest.raises(SystemExit) as left:
        main(given)
    assert left.value.code == 2
    assert said in capsys.readouterr().err


def test_a_sample_is_run_and_killed():
    assert len(choose(MUTANTS, SAMPLE, 1)) == 3
    command = [sys.executable, "-m", "tests.mutation", "--only", SAMPLE, "--first", "1"]
    done = subprocess.run(command, cwd=Path(ROOT), capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("killed  ") == 4  # three mutants, and the head of the table
