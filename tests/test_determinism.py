"""The same program has the same bits as when it was recorded, with whatever JAX is installed.

`python -m tests.determinism` runs more ways and settings, `make matrix` the versions.
"""

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.determinism import record
from tests.determinism.command import HOST_LOOP, judge, main, run
from tests.determinism.digest import digest
from tests.determinism.numbers import below, words
from tests.determinism.program import RANKS, Driven, Program
from tests.determinism.programs import PROGRAMS
from tests.determinism.ways import batched, scanned

ROOT = Path(__file__).parent.parent
# One of each kind; the others run in the matrix, and where long tests do.
QUICK = ("allocator, page 1", "prefix cache, page 2", "serving, cache", "replay, no cache")
LONG = pytest.mark.long


def _cases(names):
    return [pytest.param(name, marks=() if name in QUICK else LONG) for name in names]


@pytest.mark.parametrize("name", _cases(PROGRAMS))
def test_bits_are_those_of_the_record(name):
    program = PROGRAMS[name]
    way = HOST_LOOP if isinstance(program, Driven) else "scan, donated"
    trails = run(program, way)
    verdict = judge(program, way, trails, trails)
    assert verdict["ok"], verdict["said"]


def test_the_record_has_every_program_and_no_other():
    known = record.read()
    assert set(known) == set(PROGRAMS)
    for name, program in PROGRAMS.items():
        assert len(known[name].ranks) == (1 if isinstance(program, Driven) else RANKS)


@pytest.mark.long
@pytest.mark.parametrize(
    ("given", "environment"),
    [
        (["--devices", "8", "--ways", "devices", "steps"], {}),
        (["--ways", "scan", "steps, donated", "vmap", "eager"], {}),
        (["--ways", "scan, donated"], {"JAX_ENABLE_X64": "1"}),
        (["--ways", "scan, donated"], {"JAX_DISABLE_MOST_OPTIMIZATIONS": "0"}),
    ],
    ids=["devices", "ways", "64 bits", "optimizations"],
)
def test_a_setting_of_a_process_changes_no_bit(given, environment, tmp_path):
    out = tmp_path / "found.json"
    command = [sys.executable, "-m", "tests.determinism", *given, "--json", str(out)]
    done = subprocess.run(
        [*command, "--only", "allocator, page 1", "prefix cache, page 2"],
        cwd=ROOT,
        env=os.environ | {"JAX_PLATFORMS": "cpu"} | environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    assert all(row["said"] == "as recorded" for row in json.loads(out.read_text())["runs"])


# ---- what the digests see -------------------------------------------------------------------


def _tree(fields, **values):
    """A dataclass of these fields in this order."""
    kind = dataclasses.make_dataclass("Tree", fields, frozen=True)
    jax.tree_util.register_dataclass(kind, data_fields=list(fields), meta_fields=[])
    return kind(**values)


def test_a_digest_is_of_names_values_dtypes_and_shapes():
    three = jnp.arange(3, dtype=jnp.int32)
    base = digest({"a": three, "b": three + 1})
    assert len(base) == 64
    assert base == digest({"b": np.arange(1, 4, dtype=np.int32), "a": np.arange(3, dtype=np.int32)})
    others = [
        {"a": three + 1, "b": three},
        {"a": three, "c": three + 1},
        {"a": three[None], "b": three + 1},
        {"a": three.astype(jnp.uint32), "b": three + 1},
        {"a": three},
    ]
    assert len({base, *map(digest, others)}) == len(others) + 1


def test_the_order_of_fields_and_a_field_of_none_change_no_digest():
    one, two = jnp.int32(1), jnp.int32(2)
    base = digest(_tree(["x", "y"], x=one, y=two))
    assert base == digest(_tree(["y", "x"], x=one, y=two))
    assert base == digest(_tree(["x", "owner", "y"], x=one, owner=None, y=two))
    assert base != digest(_tree(["x", "owner", "y"], x=one, owner=two, y=two))


def test_bytes_are_in_one_order():
    values = np.arange(12, dtype=np.int32).reshape(3, 4)
    assert digest(values) == digest(values.astype(">i4"))
    assert digest(values.T) == digest(np.ascontiguousarray(values.T))


def test_numbers_are_those_of_every_numpy():
    assert words(7, 2, 2).tolist() == [[1342382292, 1926751966], [1665772335, 483628757]]
    assert below(10, 7, 4).tolist() == [2, 6, 5, 7]


# ---- what is said of a difference -----------------------------------------------------------


def _counting(spoiled=None):
    """Adds its inputs; `spoiled` is a step (from 1) that one rank gets wrong."""

    def step(carry, given):
        count, total = carry
        wrong = jnp.where((count + 1 == (spoiled or 0)) & (given["rank"] == 1), 1, 0)
        return (count + 1, total + given["value"] + wrong), total

    def inputs(rank):
        return {"value": below(9, rank, 12), "rank": np.full(12, rank, np.int32)}

    return Program("counting", lambda rank: (jnp.int32(0), jnp.int32(0)), inputs, step, 4)


def test_a_difference_is_named_by_program_seed_and_steps():
    right = record.recorded(scanned(_counting(), donate=False))
    assert record.difference(_counting(), "scan", scanned(_counting(), donate=True), right) is None
    assert record.difference(_counting(), "vmap", batched(_counting()), right) is None
    spoiled = _counting(spoiled=7)
    said = record.difference(spoiled, "scan", scanned(spoiled, donate=False), right)
    assert said is not None
    assert said.startswith("counting (scan), seed 1: first difference in steps 5 to 8: ")


def test_numbers_that_differ_are_not_blamed_on_the_program():
    right = scanned(_counting(), donate=False)
    trails = [list(trail) for trail in right]
    trails[0][0] = "0" * 64
    said = record.difference(_counting(), "scan", trails, record.recorded(right))
    assert said is not None
    assert "its inputs differ" in said


# Digests of a program that nobody ran: the inputs, then three looks.
MADE_UP = [[f"{rank}{at}" * 32 for at in range(4)] for rank in range(RANKS)]


@pytest.mark.parametrize(
    ("way", "trails"),
    [
        ("scan", MADE_UP),
        ("steps", MADE_UP[:1]),
        ("steps, donated", MADE_UP[:1]),
        ("eager", [MADE_UP[0][:2]]),
    ],
)
def test_a_way_gives_as_many_digests_as_are_recorded(way, trails):
    right = record.recorded(MADE_UP)
    assert record.difference(_counting(), way, trails, right) is None
    said = record.difference(_counting(), way, [*trails[:-1], trails[-1][:-1]], right)
    assert said is not None
    assert f"digests: {len(trails[-1]) - 1}, recorded {len(trails[-1])}" in said
    said = record.difference(_counting(), way, trails[:-1], right)
    assert said is not None
    assert f"seeds: {len(trails) - 1}, recorded {len(trails)}" in said


@pytest.mark.parametrize(
    ("kept", "said"),
    [
        (MADE_UP[:1], "seeds in the record: 1 of 8"),
        ([*MADE_UP[:-1], MADE_UP[-1][:2]], "digests in the record: 2 to 4 a seed"),
        ([trail[:2] for trail in MADE_UP], "digests: 4, recorded 2"),
        ([[*trail, trail[0]] for trail in MADE_UP], "digests: 4, recorded 5"),
    ],
)
@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize(("way", "ranks"), [("scan", RANKS), ("steps", 1)])
def test_a_record_of_another_size_is_a_difference(way, ranks, exact, kept, said, monkeypatch):
    monkeypatch.setattr(record, "read", lambda: {"counting": record.recorded(kept)})
    program, trails = dataclasses.replace(_counting(), exact=exact), MADE_UP[:ranks]
    verdict = judge(program, way, trails, trails)
    assert not verdict["ok"]
    assert said in str(verdict["said"])


def test_a_host_loop_that_ends_sooner_is_a_difference():
    program = Driven("a loop", lambda devices: iter(()), "a turn")
    right = record.recorded(MADE_UP[:1])
    assert record.difference(program, HOST_LOOP, MADE_UP[:1], right) is None
    said = record.difference(program, HOST_LOOP, [MADE_UP[0][:3]], right)
    assert said == "a loop (host loop), seed 0: digests: 3, recorded 4"


@pytest.mark.parametrize("more", [[], ["--settings"]])
def test_unknown_programs_are_refused(more, capsys):
    with pytest.raises(SystemExit) as left:
        main(["--only", "allocator, page 1", "nonsense", *more])
    assert left.value.code == 2
    assert "no program is called 'nonsense'; there are allocator, page 1; " in (
        capsys.readouterr().err
    )


def test_what_floats_choose_is_told_and_not_held_against_it(monkeypatch):
    loose = dataclasses.replace(_counting(), exact=False)
    trails = scanned(loose, donate=False)
    other = [[*trail[:-1], "1" * 64] for trail in trails]
    monkeypatch.setattr(record, "read", lambda: {loose.name: record.recorded(other)})
    verdict = judge(loose, "scan", trails, trails)
    assert verdict["ok"]
    assert "not promised" in str(verdict["said"])
    other = [[*trail[:-1], "0" * 64] for trail in trails]
    assert not judge(loose, "steps", other, trails)["ok"]


def test_a_record_is_written_and_read(tmp_path):
    file = tmp_path / "bits.json"
    trails = {"counting": scanned(_counting(), donate=False)}
    record.write(trails, file)
    assert record.read(file) == {"counting": record.recorded(trails["counting"])}
    record.write({"more": trails["counting"][:1]}, file)
    assert set(record.read(file)) == {"counting", "more"}
