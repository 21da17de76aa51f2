"""Each known bug is put back: its recorded program sees it, and shrinks to a minimal one."""

import contextlib
import sys

import jax
import mutants
import pytest
from test_recorded import FOLDER

import swa_jax as swa
from swa_jax import debug
from swa_jax.debug.program import check_program
from swa_jax.debug.shrink import without_calls

CONFIG = swa.PoolConfig(32, 32, 4, 4)
# bug, recorded program, call that is named, law, calls that are left when it is made small
REGRESSIONS = {
    "B01": (
        mutants.page_freed_again_for_each_token,
        "one_token_frees_its_swa_page_once",
        2,
        "no_stale_mapping",
        ["alloc", "free_swa"],
    ),
    "B02": (
        mutants.stale_mapping_before_the_tail,
        "swa_tail_clears_recycled_mappings",
        5,
        "granted_mapping",
        ["damage_mapping", "alloc_extend_swa_tail"],
    ),
    "B03": (
        mutants.late_look_up_in_a_group,
        "group_settles_its_frees_at_the_call",
        3,
        "settled_at_the_call",
        ["alloc", "free_group_begin", "free_swa"],
    ),
}


@contextlib.contextmanager
def put_back(bug):
    """The bug, and nothing compiled before or after it."""
    jax.clear_caches()
    with pytest.MonkeyPatch.context() as patch:
        bug(patch)
        yield
    jax.clear_caches()


@pytest.mark.parametrize("name", REGRESSIONS)
def test_a_recorded_program_sees_its_bug_and_shrinks_to_a_minimal_one(name, tmp_path):
    bug, file, number, law, left = REGRESSIONS[name]
    program = debug.load(FOLDER / f"{file}.json")

    def failure(tried):
        if bug is not mutants.late_look_up_in_a_group:
            return debug.first_failure(tried)
        with pytest.MonkeyPatch.context() as patch:  # it remembers calls from one run to the next
            bug(patch)
            return debug.first_failure(tried)

    with contextlib.nullcontext() if bug is mutants.late_look_up_in_a_group else put_back(bug):
        found = failure(program)
        assert found is not None
        assert found.call == number
        assert law in found.laws
        assert str(found).startswith(
            f"call {number}, {program.calls[number - 1].name} for request "
        )
        assert "request" in str(found).partition("broke")[2]  # who holds the pages
        small = debug.shrink(program, lambda tried: failure(tried) is not None)
        assert [call.name for call in small.calls] == left
        assert failure(small) is not None
    assert debug.first_failure(small) is None
    debug.save(debug.record_outcomes(small), tmp_path / "small.json")  # and it is a test
    assert debug.run(debug.load(tmp_path / "small.json")).failure is None


def needs(*names):
    """Fails where these calls are there in this order, the last one with something to free."""

    def fails(program):
        check_program(program)
        found = iter(program.calls)
        there = all(any(call.name == name for call in found) for name in names)
        frees = [call for call in program.calls if call.name == "free"]
        return there and any(any(call.arguments["slots"]) for call in frees)

    return fails


def long_program(calls=60):
    """Nothing here is run."""
    made = []
    for number in range(1, calls, 3):
        made += [
            debug.Call("alloc", {"num_tokens": 8, "capacity": 8}),
            debug.Call("free_swa", {"slots": [f"{number}[0:8]"], "as_of": number}),
            debug.Call("free", {"slots": [f"{number}[0:8]", "0*8"]}, f"request {number}"),
        ]
    return debug.Program(CONFIG, tuple(made), "long")


@pytest.mark.parametrize("calls", [6, 60, 420])
def test_a_program_shrinks_to_what_fails(calls):
    small = debug.shrink(long_program(calls), needs("alloc", "free"))
    assert [call.name for call in small.calls] == ["alloc", "free"]
    assert small.calls[0].arguments == {"num_tokens": 0, "capacity": 8}
    assert len(small.calls[1].arguments["slots"]) == 1
    assert small.about == "long"


def test_no_single_call_can_be_left_out():
    """A call that is needed while a number is large is not when it is small."""

    def fails(program):
        sizes = [c.arguments["num_tokens"] for c in program.calls if c.name == "alloc"]
        return bool(sizes) and (any(c.name == "share" for c in program.calls) or max(sizes) <= 8)

    alloc = debug.Call("alloc", {"num_tokens": 12, "capacity": 16})
    share = debug.Call("share", {"slots": ["1[0:12]"]})
    small = debug.shrink(debug.Program(CONFIG, (alloc, share, alloc)), fails)
    assert [call.name for call in small.calls] == ["alloc"]


def test_numbers_shrink_to_the_least_that_fails():
    def fails(program):
        return any(
            call.name == "alloc" and call.arguments["num_tokens"] >= 5 for call in program.calls
        )

    small = debug.shrink(long_program(6), fails)
    assert [call.arguments["num_tokens"] for call in small.calls] == [5]


def test_what_a_call_left_out_handed_out_is_padding():
    program = long_program(6)
    check_program(program)
    rest = without_calls(program, {0, 2})
    check_program(rest)
    assert [dict(call.arguments) for call in rest.calls] == [
        {"slots": ["0*8"], "as_of": 0},
        {"num_tokens": 8, "capacity": 8},
        {"slots": ["2[0:8]"], "as_of": 2},
        {"slots": ["2[0:8]", "0*8"]},
    ]


def test_a_program_that_does_not_fail_is_not_shrunk():
    with pytest.raises(ValueError, match="nothing to shrink"):
        debug.shrink(long_program(6), lambda program: False)


def test_without_hypothesis_it_says_what_is_missing(monkeypatch):
    monkeypatch.setitem(sys.modules, "hypothesis", None)
    with pytest.raises(ImportError, match=r"pip install \"swa-jax\[debug\]\""):
        debug.shrink(long_program(6), lambda program: True)
