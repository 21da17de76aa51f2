"""The soak in small: all parts, and mistakes made on purpose, which it must name.

`python -m tests.soaking` is the whole of it.
"""

import json

import jax.numpy as jnp
import pytest

from tests.soaking.command import SHARES, SHORT, choose, main
from tests.soaking.host_part import HostPart
from tests.soaking.memory import Held, is_constant
from tests.soaking.part import Result, all_wrong, missing, soak
from tests.soaking.planted import DOUBLE_FREE, LEAK, STALE_MAPPING, TAKEN_BLOCK, Plant
from tests.soaking.rows_part import RowsPart
from tests.soaking.serving_part import ServingPart
from tests.soaking.watch import BrokenLawError
from tests.soaking.weather import MIXED

STEP = 300


def soaked(parts, requests, tmp_path, capsys):
    """What a soak of these parts says; that all was right."""
    file = tmp_path / "soak.json"
    with pytest.raises(SystemExit) as left:
        main(["--requests", str(requests), "--parts", *parts, "--json", str(file)])
    assert left.value.code == 0, capsys.readouterr().out
    found = json.loads(file.read_text())
    assert found["wrong"] == []
    assert (found["faults"], found["leaked_pages"]) == (0, 0)
    assert found["requests"] >= requests * 0.99
    assert found["law_checks"] > 15 * found["steps"]
    assert all(part["memory"]["constant"] for part in found["parts"])
    return found["parts"]


def test_every_kind_of_load_is_served_and_nothing_is_left(tmp_path, capsys):
    assert len(soaked(SHORT[:-1], 8_000, tmp_path, capsys)) == 3


@pytest.mark.long
@pytest.mark.parametrize(
    ("part", "requests"),
    [
        pytest.param("host:stored", 600, id="pages and requests go to the host and come back"),
        pytest.param("loops:sampled", 1500, id="texts are drawn, and a model drafts them"),
    ],
)
def test_other_kinds_of_load_are_served(part, requests, tmp_path, capsys):
    assert len(soaked([part], requests, tmp_path, capsys)) == 1


def planted(kind):
    return Plant(jnp.int32(kind), jnp.int32(STEP))


def named(part):
    """The law that a part says broke, just after the planted mistake."""
    with pytest.raises(BrokenLawError) as seen:
        part.run(5000, 5000, MIXED)
    assert STEP <= seen.value.step <= STEP + 100
    return seen.value.law


LAWS = {
    LEAK: "every_page_has_its_owner",
    STALE_MAPPING: "allocator.",
    DOUBLE_FREE: "every_page_has_its_owner",
    TAKEN_BLOCK: "allocator.",
}


@pytest.mark.parametrize("kind", LAWS, ids=["leak", "stale mapping", "double free", "taken block"])
def test_a_mistake_in_the_serving_loop_is_named_with_its_step(kind):
    assert LAWS[kind] in named(ServingPart("unified", 0, planted(kind)))


@pytest.mark.long
@pytest.mark.parametrize(
    ("config", "law"),
    [("tight", "every_page_has_its_owner"), ("sampled", "nobody_names_what_is_foreign")],
)
def test_a_double_free_in_pools_of_their_own_is_named(config, law):
    assert law in named(ServingPart(config, 0, planted(DOUBLE_FREE)))


@pytest.mark.long
def test_a_leak_within_a_slice_over_a_host_tier_is_named_with_its_step():
    assert "every_page_has_its_owner" in named(HostPart("write_through", 0, plant=planted(LEAK)))


# From that step on every row that is given up forgets a page, or frees twice what others may hold
# too; and a tail that arrives keeps the mappings of whoever had its pages.
OF_ROWS = {
    LEAK: "every_page_has_its_owners",
    STALE_MAPPING: "allocator.",
    DOUBLE_FREE: "every_page_has_its_owners",
}


@pytest.mark.parametrize("kind", OF_ROWS, ids=["leak", "stale mapping", "double free"])
def test_a_mistake_over_an_allocator_is_named_with_its_step(kind):
    assert OF_ROWS[kind] in named(RowsPart("pages", 0, planted(kind)))


def test_a_soak_in_which_something_never_happened_is_wrong():
    result = Result("one", "a group")
    result.counts["retracted"] = 3
    assert missing([result], {"a group": {"retracted"}}) == []
    assert missing([result], {"a group": {"retracted", "drafted"}}) == [
        "a group: drafted never happened"
    ]


def test_a_broken_law_comes_first_and_hides_what_never_happened():
    whole = Result("one", "a group", wrong=["memory grew"])
    broken = Result("two", "a group", wrong=["two: broken after step 3", "4 faults"], broken=True)
    needs = {"a group": {"retracted"}}
    never = "a group: retracted never happened"
    assert all_wrong([whole], needs) == ["one: memory grew", never]
    assert all_wrong([whole, broken], needs) == [
        "two: two: broken after step 3",
        "one: memory grew",
        "two: 4 faults",
    ]


def test_a_part_that_a_law_ended_says_so():
    class Breaks:
        name, group, needs = "a part", "a group", ("retracted",)

        def run(self, goal, quota, block):
            raise BrokenLawError(self.name, "a law", 7)

        def close(self):
            raise NotImplementedError

    result = soak(Breaks, 10, float("inf"), print, block_size=5)
    assert result.broken
    assert result.wrong == ["a part: broken after step 7: a law"]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["--requests", "0"], "--requests: must be 1 or more, got 0"),
        (["--requests", "-5"], "--requests: must be 1 or more, got -5"),
        (["--minutes", "-1"], "--minutes: must be a finite number above 0, got -1"),
        (["--minutes", "nan"], "--minutes: must be a finite number above 0, got nan"),
        (["--minutes", "inf"], "--minutes: must be a finite number above 0, got inf"),
        (["--minutes", "soon"], "--minutes: invalid"),
        (["--seed", "-1"], f"--seed: must be from 0 to {2**32 - 1}, got -1"),
        (["--seed", str(2**32)], f"--seed: must be from 0 to {2**32 - 1}, got {2**32}"),
    ],
)
def test_numbers_that_mean_nothing_are_refused(given, said, capsys):
    with pytest.raises(SystemExit) as left:
        main(given)
    assert left.value.code == 2
    assert said in capsys.readouterr().err


def test_growing_memory_is_seen():
    steady = [Held(2**30 + block % 3, 50) for block in range(40)]
    assert is_constant(steady)
    assert not is_constant([Held(2**30 + block * 2**21, 50) for block in range(40)])
    assert not is_constant([Held(2**30, 50 + block) for block in range(40)])


def test_parts_are_chosen_by_name():
    assert choose([], None) == list(SHARES)
    assert choose([], 2) == list(SHORT)
    assert choose(["host"], None) == ["host:write_back", "host:stored"]
    with pytest.raises(SystemExit, match="unknown parts"):
        choose(["nothing"], None)
