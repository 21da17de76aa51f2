"""A full disk under what the package writes: told by name, and no half is taken for whole.

Saves of states are in test_world_saves.py, the storage below a host tier in test_world_tier.py.
"""

import contextlib
import errno
import sys
from pathlib import Path

import jax
import pytest
from served_models import tiny
from world_faults import full_disk

import swa_jax as swa
from swa_jax import cli, debug
from swa_jax.models import load_checkpoint, random_params, save_checkpoint
from swa_jax.prefix_cache.events import AllBlocksCleared
from swa_jax.replay.event_log import EventLog
from swa_jax.replay.outfile import OutFile

FULL = Path("/dev/full")
needs_dev_full = pytest.mark.skipif(not FULL.exists(), reason="no device that is always full")


@pytest.fixture(autouse=True)
def _in_a_directory_of_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def files():
    return {path.name: path.stat().st_size for path in Path().iterdir()}


def outfile(name):
    OutFile("--json", name).write(b"x" * 1000)


def events(name):
    log = EventLog("--events", name)
    with log.writing():
        for step in range(400):
            log._write(step, [AllBlocksCleared()])


def program(name):
    calls = (debug.Call("free", {"slots": list(range(200))}),) * 2
    debug.save(debug.Program(swa.PoolConfig(16, 16, 4), calls), name)


@pytest.mark.parametrize("write", [outfile, events, program])
def test_a_file_is_written_whole_or_not_at_all(write):
    write("a")
    before = files()
    for name in ("a", "b"):
        for left in (0, 500):
            with full_disk(left), pytest.raises(ValueError, match=f"{name}: cannot be written: F"):
                write(name)
            assert files() == before
    write("b")
    assert files() == {"a": before["a"], "b": before["a"]}


@needs_dev_full
@pytest.mark.parametrize("write", [outfile, events, program])
def test_a_device_that_is_full_is_named(write):
    with pytest.raises(ValueError, match="/dev/full: cannot be written: No space left on device"):
        write(str(FULL))


def test_a_checkpoint_is_written_whole_or_not_at_all():
    model = tiny(4, attention_scale=8**-0.5, embed_scale=4.0)
    first, second = (random_params(model, jax.random.key(seed)) for seed in range(2))
    save_checkpoint("model", model, first)
    before = sorted(Path("model").iterdir())
    for left, name in ((0, "config.json"), (3000, "model.safetensors")):
        with full_disk(left), pytest.raises(OSError, match="cannot be written: File too") as told:
            save_checkpoint("model", model, second)
        assert (told.value.errno, told.value.filename) == (errno.EFBIG, f"model/{name}")
        assert sorted(Path("model").iterdir()) == before
    loaded = load_checkpoint("model")[1]
    assert jax.tree.all(jax.tree.map(lambda one, two: bool((one == two).all()), loaded, first))
    save_checkpoint("model", model, second)
    assert sorted(Path("model").iterdir()) == before


PICTURE = ["viz", "pools", "--out", "p.svg", "--json", "p.json", "--quiet"]


def test_commands_name_the_file_and_leave_none(capsys):
    with full_disk(0):
        assert cli.main(["models", "--json", "m.json"]) == 2
    said = capsys.readouterr().err
    assert said == "swa-jax: --json m.json: cannot be written: File too large\n"
    assert files() == {}


@pytest.mark.long
def test_a_picture_is_drawn_whole_or_not_at_all(capsys):
    with full_disk(100):
        assert cli.main(PICTURE) == 2
    said = capsys.readouterr().err
    assert said == "swa-jax: --out p.svg: cannot be written: File too large\n"
    assert files() == {}


@contextlib.contextmanager
def full_stream():
    """A stream on a full disk; what it could not write does not come up again when it is closed."""
    stream = FULL.open("w", buffering=1)
    yield stream
    with contextlib.suppress(OSError):
        stream.close()


@needs_dev_full
def test_an_output_that_is_full_ends_a_command_and_its_number_says_so(monkeypatch, capsys):
    with full_stream() as stdout, monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", stdout)
        assert cli.main(["models"]) == 2
    assert capsys.readouterr().err == (
        "swa-jax: the output cannot be written: No space left on device\n"
    )
    # With stderr full too nothing can be said.
    with full_stream() as stdout, full_stream() as stderr, monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", stdout)
        patch.setattr(sys, "stderr", stderr)
        assert cli.main(["models"]) == 2
        assert cli.main(["no-such-command"]) == 2
