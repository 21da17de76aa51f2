"""State on disk and back: bit for bit, refused where it does not fit, whole after a kill."""

import dataclasses
import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from saving import PAGE, POOL, filled, layers, prompt

import swa_jax as swa
from swa_jax import prefix_cache
from swa_jax.models.decoder import KVPool
from swa_jax.saved_state import directory, restore_state, save_state
from swa_jax.saved_state.directory import read_arrays, write_arrays

TESTS = Path(__file__).parent


def same(a, b):
    leaves, others = jax.tree.leaves(a), jax.tree.leaves(b)
    return jax.tree.structure(a) == jax.tree.structure(b) and all(
        np.asarray(one).tobytes() == np.asarray(two).tobytes() and one.dtype == two.dtype
        for one, two in zip(leaves, others, strict=True)
    )


def empty(pool=POOL, **options) -> tuple:
    return (
        swa.init(pool),
        prefix_cache.init(pool, **options),
        jax.tree.map(jnp.zeros_like, layers(0, pool)),
    )


def test_all_comes_back_bit_for_bit_and_goes_on(tmp_path):
    state, cache, receipt = filled(0)
    pools = layers(7)
    save_state(tmp_path, state, cache, pools)
    again, tree, kv = restore_state(tmp_path, *empty())
    assert same(again, state)
    assert same(tree, cache)
    for kind, pool in (("full", state.full), ("swa", state.swa)):
        held = np.flatnonzero(~np.asarray(pool.free))[1:]
        for layer, wanted in zip(getattr(kv, kind), getattr(pools, kind), strict=True):
            assert np.asarray(layer)[held].tobytes() == np.asarray(wanted)[held].tobytes()
            rest = np.delete(np.asarray(layer), held, axis=0)
            assert not rest.astype(np.float32).any()
    assert tree is not None
    swa.check(again)
    prefix_cache.check(tree, again)
    tree, match = prefix_cache.match_prefix(tree, again, prompt(1), 20)
    assert int(match.length) == 20
    assert int(prefix_cache.full_protected_size(tree)) == 20
    tree = prefix_cache.unlock(tree, receipt)  # of before the restart: it is the same lock
    assert int(prefix_cache.full_protected_size(tree)) == 0


def test_the_allocator_alone_and_without_kv(tmp_path):
    state, cache, _ = filled(0)
    save_state(tmp_path / "a" / "b", state)
    assert same(restore_state(tmp_path / "a" / "b", swa.init(POOL))[0], state)
    save_state(tmp_path / "c", state, cache)
    assert same(restore_state(tmp_path / "c", *empty()[:2])[:2], (state, cache))


def test_a_pool_without_a_page_in_use_is_saved_too(tmp_path):
    state, cache, pools = empty()
    save_state(tmp_path, state, cache, layers(1))
    again, tree, kv = restore_state(tmp_path, *empty())
    assert same((again, tree, kv), (state, cache, pools))


def test_the_newest_save_counts_and_replaces_the_one_before(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "100").mkdir()
    states = [filled(seed) for seed in range(3)]
    for state, cache, _ in states:
        save_state(tmp_path, state, cache, layers(0))
    assert same(restore_state(tmp_path, *empty())[:2], states[-1][:2])
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["100", "notes.txt", "swa_jax_2"]


def test_where_arrays_lay_before_they_lie_again(tmp_path):
    second = jax.devices()[1]
    state, cache, _ = filled(0)
    save_state(tmp_path, state, cache, layers(0))
    likes = jax.device_put(empty(), second)
    for leaf in jax.tree.leaves(restore_state(tmp_path, *likes)):
        assert leaf.devices() == {second}


@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e5m2", "int4", "bool", "int32", "float64"])
def test_every_dtype_and_shape_comes_back(tmp_path, dtype):
    values = np.random.default_rng(0).normal(size=(2, 3, 4)) * 3
    array = values.astype(jnp.dtype(dtype))
    arrays = {"a.b": array, "turned": array.T, "one": array[0, 0, 0].reshape(()), "no": array[:0]}
    write_arrays(tmp_path, {"x": [1, None, "y"]}, arrays)
    read = read_arrays(tmp_path, {"x": [1, None, "y"]})
    assert read.keys() == arrays.keys()
    for name, wanted in arrays.items():
        assert (read[name].dtype, read[name].shape) == (wanted.dtype, wanted.shape)
        assert read[name].tobytes() == wanted.tobytes()


def test_what_json_holds_otherwise_is_the_same_for_a_save_and_a_restore(tmp_path):
    made = {1: (2, 3)}
    write_arrays(tmp_path, made, {})
    assert read_arrays(tmp_path, made) == {}
    with pytest.raises(ValueError, match="another configuration"):
        read_arrays(tmp_path, {1: (2, 4)})


class TestRefusals:
    @pytest.fixture(autouse=True)
    def _saved(self, tmp_path):
        state, cache, _ = filled(0)
        self.path = tmp_path / "saved"
        save_state(self.path, state, cache, layers(0), made={"model": {"layers": 3}})

    def restore(self, likes: tuple | None = None, **options):
        options = {"made": {"model": {"layers": 3}}, **options}
        return restore_state(self.path, *(likes or empty()), **options)

    def test_as_it_was_saved_it_is_taken(self):
        self.restore()

    @pytest.mark.parametrize(
        ("likes", "made", "message"),
        [
            (empty(swa.PoolConfig(64, 32, PAGE, 6)), 3, "pool.swa_tokens was 48 and is 32"),
            (empty(swa.PoolConfig(64, 48, 2, 6)), 3, "pool.page_size was 4 and is 2"),
            (empty(policy="lfu"), 3, "cache.policy was 'lru' and is 'lfu'"),
            (empty(is_bigram=True), 3, "cache.is_bigram was False and is True"),
            (empty()[:2], 3, "layers was .* and is None"),
            (empty()[:1], 3, "cache was .* and is None"),
            (empty(), 4, "made.model.layers was 3 and is 4"),
        ],
    )
    def test_another_configuration_is_refused_by_name(self, likes, made, message):
        with pytest.raises(ValueError, match=f"another configuration: .*{message}"):
            self.restore(likes, made={"model": {"layers": made}})

    def test_what_a_save_says_of_itself_is_not_believed_when_it_was_changed(self):
        (about,) = self.path.rglob("about/metadata")
        changed = about.read_text().replace('"layers": 3', '"layers": 4')
        assert changed != about.read_text()
        about.write_text(changed)
        with pytest.raises(ValueError, match="is damaged: its description is not as saved"):
            self.restore(made={"model": {"layers": 4}})

    def test_kv_of_another_dtype_is_refused(self):
        state, cache, pools = empty()
        other = KVPool(tuple(layer.astype(jnp.float32) for layer in pools.full), pools.swa)
        with pytest.raises(ValueError, match=r"layers.full was .*bfloat16.* and is .*float32"):
            self.restore((state, cache, other))

    def test_kv_of_other_pools_is_refused(self):
        small = swa.PoolConfig(32, 32, PAGE, 6)
        with pytest.raises(ValueError, match=r"full layer 0 must be \[17, 4, \.\.\.\]"):
            self.restore((*empty()[:2], empty(small)[2]))
        with pytest.raises(ValueError, match="full layer 0 must be"):
            save_state(self.path, swa.init(POOL), None, empty(small)[2])
        with pytest.raises(ValueError, match="cache and state must have one configuration"):
            save_state(self.path, swa.init(POOL), prefix_cache.init(small))
        self.restore()

    def test_no_saved_state_is_not_found(self, tmp_path):
        with pytest.raises(FileNotFoundError, match="there is no directory"):
            restore_state(tmp_path / "none", swa.init(POOL))
        (tmp_path / "other").mkdir()
        (tmp_path / "other" / "swa_jax_9.txt").write_text("")
        with pytest.raises(FileNotFoundError, match="no finished save in"):
            restore_state(tmp_path / "other", swa.init(POOL))
        assert [path.name for path in (tmp_path / "other").iterdir()] == ["swa_jax_9.txt"]

    def test_a_directory_that_is_called_as_a_save_is_let_alone(self):
        other = self.path / "swa_jax_99"
        other.mkdir()
        (other / "hello").write_text("mine")
        self.restore()  # the save beside it
        with pytest.raises(ValueError, match="swa_jax_99 is called as a saved state and is none"):
            save_state(self.path, swa.init(POOL))
        assert (other / "hello").read_text() == "mine"
        self.restore()

    @pytest.mark.parametrize("made", [float("nan"), {1, 2}, {"a": object()}, {"a": 1, 2: 3}])
    def test_what_json_cannot_hold_is_refused(self, made):
        for call in (save_state, restore_state):
            with pytest.raises(ValueError, match="made must be plain data"):
                call(self.path, *empty(), made={"model": made})
        self.restore()

    def test_a_file_is_no_directory(self, tmp_path):
        (tmp_path / "file").write_text("")
        with pytest.raises(ValueError, match="must be a directory"):
            save_state(tmp_path / "file", swa.init(POOL))
        with pytest.raises(FileNotFoundError, match="no directory"):
            restore_state(tmp_path / "file", swa.init(POOL))

    def test_a_foreign_save_is_refused(self, monkeypatch):
        monkeypatch.setattr(directory, "_VERSION", 2)
        with pytest.raises(ValueError, match=r"is no swa_jax saved state of version 2: it says"):
            self.restore()


def test_a_save_that_is_killed_leaves_the_one_before_and_damage_is_found_out(tmp_path):
    """SIGKILL at moments by chance: what is there afterwards is one of the saves, whole."""
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(TESTS.parent), str(TESTS)]),
        "JAX_PLATFORMS": "cpu",
    }
    path = tmp_path / "saved"
    command = [sys.executable, str(TESTS / "saving_crash.py"), str(path), "6", "0"]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240)
    assert run.returncode == 0, run.stderr
    refused, files = map(int, run.stdout.split())
    assert refused > files / 2
    write_arrays(path, {"of": "tests"}, {})
    assert len(list(path.iterdir())) == 1  # no halves are left


def test_without_orbax_the_extra_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "orbax.checkpoint", None)
    for call in (save_state, restore_state):
        with pytest.raises(ImportError, match=r"pip install 'swa-jax\[checkpoint\]'"):
            call(tmp_path, swa.init(POOL))


def test_a_save_does_not_touch_what_it_saves(tmp_path):
    state, cache, _ = filled(0)
    before = jax.tree.map(np.array, (state, cache))
    save_state(tmp_path, state, cache, layers(0))
    assert same((state, cache), before)
    assert dataclasses.is_dataclass(state)
