"""A wall clock that is put forward or back by days, and files with the dates of nobody's clock."""

import ast
import os
from pathlib import Path

import pytest
from storage_pages import FINGERPRINT, KEYS, page_of, same
from world_faults import Clock

from swa_jax.host_cache import file_storage
from swa_jax.host_cache.file_storage import FileStorage

PACKAGE = Path(__file__).parent.parent / "swa_jax"
DAY = 86400.0
# A time that is shown, or that orders files for the next process, beside an order of its own.
WALL_CLOCKS = {
    "bench/environment.py",
    "host_cache/file_storage.py",
    "http/app.py",
    "http/completions.py",
}
_WALL = {"time", "time_ns", "now", "today", "utcnow"}


def wall_clocks(path):
    """Whether a module reads a wall clock."""
    text = path.read_text(encoding="utf-8")
    if not any(words in text for words in ("import time", "time import", "import datetime")):
        return False
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            owner = ast.unparse(node.func.value).rpartition(".")[2]
            if node.func.attr in _WALL and owner in {"time", "datetime", "date"}:
                return True
        taken = node.names if isinstance(node, ast.ImportFrom) and node.module == "time" else []
        if {name.name for name in taken} & _WALL:
            return True
    return False


def test_nothing_waits_or_expires_by_the_wall_clock():
    """Time-outs and durations are of monotonic clocks, which nobody can put back."""
    found = {
        path.relative_to(PACKAGE).as_posix() for path in PACKAGE.rglob("*.py") if wall_clocks(path)
    }
    assert found == WALL_CLOCKS


def opened(path, most=10**6):
    return FileStorage(path, FINGERPRINT, most)


def order(storage):
    """Numbers of the pages that are there, the least recently used first."""
    names, there = [key.name for key in KEYS], storage.keys()
    return [names.index(name) for name in there]


def use(path, *numbers):
    """Another process reads or writes pages, and finds them in the right order before."""
    with opened(path) as storage:
        before = order(storage)
        for number in numbers:
            if storage.has(KEYS[number]):
                assert same(storage.get(KEYS[number]), page_of(number))
            else:
                storage.put(KEYS[number], page_of(number))
    return before


@pytest.mark.parametrize("jumps", [(-3, -3, -3), (3650, -3650, 1), (0, 0, 0), (-40000, 1, 1)])
def test_the_order_of_use_outlives_jumps_of_the_clock(jumps, tmp_path, monkeypatch):
    clock = Clock(monkeypatch)
    use(tmp_path, 0, 1, 2, 3, 4)
    clock.at += jumps[0] * DAY
    assert use(tmp_path, 0, 3) == [0, 1, 2, 3, 4]
    clock.at += jumps[1] * DAY
    assert use(tmp_path, 1, 5) == [1, 2, 4, 0, 3]
    with opened(tmp_path) as storage:
        clock.at += jumps[2] * DAY  # under a store that is open
        assert same(storage.get(KEYS[2]), page_of(2))
        assert order(storage) == [4, 0, 3, 1, 5, 2]
        size = storage.used_bytes // 6
    with opened(tmp_path, 3 * size + 20) as storage:
        assert order(storage) == [1, 5, 2]
    assert use(tmp_path) == [1, 5, 2]


@pytest.mark.parametrize("date", [-(10**18), -1, 0, 1, 2**62, 2**63 - 1])
def test_files_of_any_date_are_kept_and_used(date, tmp_path, monkeypatch):
    Clock(monkeypatch)
    use(tmp_path, 0, 1, 2)
    os.utime(tmp_path / f"{KEYS[1].name}.safetensors", ns=(date, date))
    first = [0, 2, 1] if date > 2**60 else [1, 0, 2]
    assert use(tmp_path, 2, 0) == first
    assert use(tmp_path, 3) == [1, 2, 0]
    assert use(tmp_path) == [1, 2, 0, 3]


def test_a_disk_that_takes_no_dates_loses_no_page(tmp_path, monkeypatch):
    """Where nothing can be written any more, what is there can still be read."""
    use(tmp_path, 0, 1)

    def refused(*_args, **_kwargs):
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(file_storage.os, "utime", refused)
    with opened(tmp_path) as storage:
        assert same(storage.get(KEYS[0]), page_of(0))
        assert order(storage) == [1, 0]
