"""The public API is what tests/public_api.txt says, so that it changes only on purpose."""

import difflib
import importlib

import public_api
import pytest

import swa_jax


def test_the_public_api_is_the_recorded_one():
    recorded = public_api.RECORDED.read_text(encoding="utf-8").splitlines()
    changes = difflib.unified_diff(
        recorded, public_api.public_api(), "recorded", "now", n=0, lineterm=""
    )
    said = "\n".join(changes)
    assert not said, (
        f"the public API has changed; `make api` accepts it, CHANGELOG.md says it:\n{said}"
    )


def test_what_is_recorded_can_be_imported():
    lines = public_api.RECORDED.read_text(encoding="utf-8").splitlines()
    names = {line.partition(": ")[0].partition(" = ")[0] for line in lines}
    at_top = {name.removeprefix("swa_jax.") for name in names if name.count(".") == 1}
    assert at_top == set(swa_jax.__all__)
    for name in (
        "swa_jax.prefix_cache.insert",
        "swa_jax.cpu_copy.get_cpu_copy",
        "swa_jax.planner.plan_split",
    ):
        module, _, attribute = name.rpartition(".")
        assert name in names
        assert hasattr(importlib.import_module(module), attribute)


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("swa_jax.free_group_end", "function(state: AllocatorState) -> AllocatorState"),
        ("swa_jax.PoolConfig.page_size", "int = 1"),
        ("swa_jax.AllocatorState", "class()"),
    ],
)
def test_lines_say_kind_and_signature(name, line):
    assert f"{name}: {line}" in public_api.public_api()


def test_functions_called_as_their_module_are_functions():
    kinds = {
        line.partition(": ")[0]: line.partition(": ")[2]
        for line in public_api.public_api()
        if line.startswith(("swa_jax.check", "swa_jax.share", "swa_jax.free"))
    }
    assert all(kinds[f"swa_jax.{name}"].startswith("function(") for name in ("check", "share"))
