"""Saves that are killed over an older one, meet a full disk, or are made while the clock jumps.

What is loaded afterwards is the old state or the new one, bit for bit, and keeps every law.
"""

import errno
import fcntl
import os
import pickle
import signal
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint
import pytest
from saving import POOL, filled, layers
from world_faults import Clock, child_environment, full_disk, python, unheard

import swa_jax as swa
from swa_jax import prefix_cache
from swa_jax.host_cache.page_file import decode, encode
from swa_jax.host_cache.storage import page_keys
from swa_jax.saved_state import failed_save, restore_state, save_state
from swa_jax.saved_state.directory import read_arrays, write_arrays
from swa_jax.saved_state.turns import saving_alone


@pytest.fixture(autouse=True)
def _threads_are_unheard():
    with unheard():
        yield


def states(count):
    """On the host, so that equality is equality of bytes."""
    made = [(*filled(seed)[:2], layers(seed)) for seed in range(count)]
    return jax.device_get(made)


def restored(path):
    """What is there, with all laws kept."""
    empty = swa.init(POOL), prefix_cache.init(POOL), jax.tree.map(jnp.zeros_like, layers(0))
    state, cache, pools = restore_state(path, *empty)
    assert cache is not None
    swa.check(state)
    prefix_cache.check(cache, state)
    assert not any(swa.faults(state).values())
    return state, cache, pools


def is_of(found, saved):
    """Bit for bit; of the KV what pages that are held have."""
    (*parts, pools), (*wanted, kv) = found, saved
    same = all(
        np.asarray(one).tobytes() == np.asarray(two).tobytes()
        for one, two in zip(jax.tree.leaves(parts), jax.tree.leaves(wanted), strict=True)
    )
    held = np.flatnonzero(np.asarray(found[0].full.holders))[1:]
    return same and all(
        np.asarray(one)[held].tobytes() == np.asarray(two)[held].tobytes()
        for one, two in zip(pools.full, kv.full, strict=True)
    )


def test_a_save_that_is_killed_over_an_older_one_leaves_the_old_or_the_new(tmp_path):
    saved = states(4)
    (tmp_path / "states").write_bytes(pickle.dumps(saved))
    command = python("world_save.py", *(tmp_path / name for name in ("states", "at", "out")), 3, 0)
    (tmp_path / "out").mkdir()
    run = subprocess.run(
        command, env=child_environment(), capture_output=True, text=True, timeout=240
    )
    assert run.returncode == 0, run.stderr
    copies = sorted((tmp_path / "out").iterdir())
    assert len(copies) == 3
    for copy in copies:
        last = int(copy.name.partition("-")[2])
        found = restored(copy)
        assert is_of(found, saved[last]) or is_of(found, saved[(last + 1) % 4])
    save_state(tmp_path / "at", *saved[0])
    assert is_of(restored(tmp_path / "at"), saved[0])
    assert len(list((tmp_path / "at").iterdir())) == 1  # no halves are left


@pytest.mark.parametrize("left", [0, 100, 2000])
def test_a_save_on_a_full_disk_leaves_the_one_before(left, tmp_path):
    (old, new), path = states(2), tmp_path / "kept"
    save_state(path, *old)
    before = sorted(p.name for p in path.iterdir())
    with full_disk(left), pytest.raises(OSError, match="cannot be saved: File too large") as told:
        save_state(path, *new)
    assert (told.value.errno, told.value.filename) == (errno.EFBIG, str(path))
    assert sorted(p.name for p in path.iterdir()) == before  # nor is room taken by half of it
    assert is_of(restored(path), old)
    save_state(path, *new)
    assert is_of(restored(path), new)


def test_several_that_save_and_read_at_once_take_turns(tmp_path):
    """Each save is whole, none of them fails, and no reader sees one go away."""

    def save(number):
        write_arrays(tmp_path, {"a": 1}, {"all": np.full(1000, number)})

    def read():
        return set(read_arrays(tmp_path, {"a": 1})["all"].tolist())

    save(0)
    with ThreadPoolExecutor(4) as pool:
        saves = [pool.submit(save, number) for number in range(1, 7)]
        reads = [pool.submit(read) for _ in range(6)]
        for done in saves:
            done.result()
    assert all(len(done.result()) == 1 for done in reads)
    assert len(list(tmp_path.iterdir())) == 1


def is_free(folder):
    """Whether nobody saves or reads there now."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    finally:
        os.close(handle)
    return True


def test_a_turn_ends_though_a_child_that_was_forked_meanwhile_lives_on(tmp_path):
    with saving_alone(tmp_path):
        child = os.fork()
        if child == 0:
            time.sleep(60)
            os._exit(0)
    try:
        assert is_free(tmp_path)
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def test_half_saves_are_cleared_while_nobody_else_saves(tmp_path, monkeypatch):
    """Else the half save of the next one in turn would go with them."""
    seen = []

    def no_space(*_args, **_kwargs):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(orbax.checkpoint.CheckpointManager, "save", no_space)
    monkeypatch.setattr(failed_save, "_remove_halves", lambda folder: seen.append(is_free(folder)))
    with pytest.raises(OSError, match="cannot be saved: No space left"):
        write_arrays(tmp_path, {}, {"a": np.zeros(4)})
    assert seen == [False]
    assert is_free(tmp_path)


def test_a_first_save_on_a_full_disk_leaves_nothing(tmp_path):
    path = tmp_path / "kept"
    with full_disk(100), pytest.raises(OSError, match="cannot be saved"):
        save_state(path, *states(1)[0])
    assert list(path.iterdir()) == []
    with pytest.raises(FileNotFoundError, match="no finished save"):
        restored(path)


def test_a_directory_that_cannot_be_made_is_named(tmp_path, monkeypatch):
    def no_space(*_args, **_kwargs):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "mkdir", no_space)
    with pytest.raises(OSError, match=r"cannot be saved: No space left on device: .*kept'"):
        save_state(tmp_path / "kept", *states(1)[0])


def test_want_of_memory_is_not_told_as_damage(tmp_path, monkeypatch):
    saved = states(1)[0]
    save_state(tmp_path, *saved)

    def no_memory(*_args, **_kwargs):
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(orbax.checkpoint.CheckpointManager, "restore", no_memory)
        with pytest.raises(MemoryError):
            restored(tmp_path)
    assert is_of(restored(tmp_path), saved)


def test_the_newest_save_counts_whatever_the_clock_says(tmp_path, monkeypatch):
    saved, clock = states(4), Clock(monkeypatch)
    for one, jump in zip(saved, (0, -9e8, 2e9, -3e9), strict=True):
        clock.at += jump
        save_state(tmp_path, *one)
        assert is_of(restored(tmp_path), one)
    assert len(list(tmp_path.iterdir())) == 1


def test_arrays_that_were_pickled_or_are_of_another_byte_order_can_be_read_again(tmp_path):
    """NumPy gives an array that comes from another process a dtype that only looks the same."""
    numbers = np.arange(6, dtype=np.int32)
    pickled = pickle.loads(pickle.dumps(numbers))
    assert pickled.dtype.isbuiltin != numbers.dtype.isbuiltin
    write_arrays(tmp_path, {}, {"pickled": pickled, "turned": numbers.astype(">i4")})
    for array in read_arrays(tmp_path, {}).values():
        assert array.tolist() == numbers.tolist()
    key = page_keys(b"model", range(4), 4)[0]
    assert decode(key, encode(key, {"a": pickled}))["a"].tolist() == numbers.tolist()
