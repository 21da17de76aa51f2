"""Files written at the end of a run: checked first, whole or not at all."""

import os
import stat
from pathlib import Path

import pytest

from swa_jax.replay.outfile import OutFile


def files():
    return [path.name for path in Path().iterdir()]


@pytest.fixture(autouse=True)
def _in_a_directory_of_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def test_writes_and_leaves_nothing_else():
    OutFile("--json", "a.json").write(b"one")
    OutFile("--json", "a.json").write(b"two")
    assert Path("a.json").read_bytes() == b"two"
    assert files() == ["a.json"]


def test_the_check_makes_no_file():
    OutFile("--json", "a.json")
    assert files() == []


def test_a_failure_leaves_the_old_file(monkeypatch):
    Path("a.json").write_bytes(b"old")
    out = OutFile("--json", "a.json")

    def full(_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(ValueError, match=r"^--json a\.json: cannot be written: No space left"):
        out.write(b"new")
    assert Path("a.json").read_bytes() == b"old"
    assert files() == ["a.json"]


def test_permissions_are_those_of_the_old_file_or_the_umask():
    Path("old").write_bytes(b"")
    Path("old").chmod(0o640)
    mask = os.umask(0o027)
    try:
        for name in ("old", "new"):
            OutFile("--json", name).write(b"x")
    finally:
        os.umask(mask)
    assert stat.S_IMODE(Path("old").stat().st_mode) == 0o640
    assert stat.S_IMODE(Path("new").stat().st_mode) == 0o640


def test_a_link_stays_a_link():
    Path("real").write_bytes(b"old")
    Path("link").symlink_to("real")
    OutFile("--json", "link").write(b"new")
    assert Path("link").is_symlink()
    assert Path("real").read_bytes() == b"new"


def test_a_device_is_written_to_not_replaced():
    OutFile("--json", "/dev/null").write(b"x")
    assert stat.S_ISCHR(Path("/dev/null").stat().st_mode)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("", "the name is empty"),
        (".", "this is a directory"),
        ("no/such/a.json", "no directory"),
        ("file/a.json", "Not a directory|no directory"),
        ("a\0b", "null"),
        ("x" * 300, "too long"),
    ],
)
def test_refused_before_the_run(name, reason):
    Path("file").write_bytes(b"")
    with pytest.raises(ValueError, match=rf"(?s)^--plot .*cannot be written: .*({reason})"):
        OutFile("--plot", name)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_refused_without_permission():
    Path("locked").mkdir(mode=0o500)
    Path("a.json").touch(mode=0o400)
    for name in ("locked/a.json", "a.json"):
        with pytest.raises(ValueError, match="ermission"):
            OutFile("--json", name)


def test_same_file():
    Path("real").write_bytes(b"")
    Path("link").symlink_to("real")
    Path("hard").hardlink_to("real")
    out = OutFile("--json", "real")
    assert all(out.same_file(name) for name in ("real", "link", "hard", "./real"))
    assert not any(out.same_file(name) for name in ("other", "a\0b", "."))
    Path("saved/arrays").mkdir(parents=True)
    assert OutFile("--json", "saved/arrays/manifest").same_file("saved")
    assert OutFile("--json", "new").same_file("./new")
