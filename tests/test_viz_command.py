"""`swa-jax viz`: pictures of examples, saved states and replays."""

import dataclasses
import itertools
import json
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from pictures import frames_of
from PIL import Image
from replays import made_up_run

import swa_jax as swa
from swa_jax import prefix_cache
from swa_jax.cli import main
from swa_jax.replay.shared_world import new_shared_world
from swa_jax.replay.world import Load, LoopConfig, new_world
from swa_jax.saved_state import open_state, save_state
from swa_jax.viz.examples import moving_window, small_tree
from swa_jax.viz.moment import owners_of

POOL = swa.PoolConfig(64, 32, 4, 8)

PICTURES = Path(__file__).parent.parent / "docs" / "pictures"
TRACE = "\n".join(
    json.dumps({"timestamp": at, "input_length": 600, "output_length": 20, "hash_ids": [0, at + 1]})
    for at in range(4)
)
SIZES = ["--full-tokens", "2048", "--swa-tokens", "512", "--page-size", "16", "--max-running", "2"]


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    path = tmp_path_factory.mktemp("saved")
    state, cache = small_tree()
    save_state(path, state, cache)
    return path, state, cache


def width(path):
    with Image.open(path) as image:
        return image.size[0]


def run(capsys, *argv):
    """Exit code, stdout and stderr."""
    code = main([str(word) for word in argv])
    return code, *capsys.readouterr()


def test_the_example_is_drawn_without_a_source(capsys, tmp_path):
    out = tmp_path / "pools.png"
    code, text, error = run(capsys, "viz", "pools", "--out", out, "--json", tmp_path / "pools.json")
    assert (code, error) == (0, "")
    assert "AllocatorState: 23 full and 15 SWA pages of 4 tokens" in text
    with Image.open(out) as image:
        assert min(image.size) > 300
        assert len(image.convert("RGB").getcolors(2**20) or []) > 20
    figures = json.loads((tmp_path / "pools.json").read_text())
    assert figures["ok"] is True
    assert figures["state"]["pools"]["full"]["pending"] == 3
    assert figures["owners"]["request A"] == {"full_pages": 7, "swa_pages": 3}
    runs = figures["pages"]["full"]
    assert (runs[0]["first"], runs[-1]["last"]) == (1, 23)
    assert all(one["last"] + 1 == two["first"] for one, two in itertools.pairwise(runs))


def test_a_saved_state_is_drawn(capsys, tmp_path, saved):
    path, state, cache = saved
    out = tmp_path / "pools.svg"
    code, text, error = run(capsys, "viz", "pools", path, "--out", out, "--json", "-", "--quiet")
    assert (code, error) == (0, "")
    figures = json.loads(text)
    assert figures["owners"]["prefix cache"]["full_pages"] == int(np.sum(cache.in_tree))
    assert figures["state"]["pools"]["swa"]["free"] == int(state.swa.num_free)
    assert b"<svg" in out.read_bytes()
    first = out.read_bytes()
    assert run(capsys, "viz", "pools", path, "--out", out, "-q")[:2] == (0, "")
    assert out.read_bytes() == first


def test_the_tree_of_a_saved_state_is_drawn(capsys, tmp_path, saved):
    path, state, cache = saved
    out = tmp_path / "tree.png"
    code, text, error = run(capsys, "viz", "tree", path, "--out", out, "--json", "-")
    assert code == 0
    figures = json.loads(text)
    here = np.asarray(cache.in_tree)
    assert figures["pages"] == here.sum() == 22
    assert figures["tombstones"] == (here & (np.asarray(state.full_to_swa) == 0)).sum()
    assert figures["full_locked"] * 4 == int(prefix_cache.full_protected_size(cache))
    assert "PrefixCache: lru over" in error
    assert width(out) > 500


def test_the_example_tree_is_drawn(capsys, tmp_path):
    code, text, _ = run(capsys, "viz", "tree", "--out", tmp_path / "tree.pdf")
    assert code == 0
    assert "PrefixCache: lru" in text
    assert (tmp_path / "tree.pdf").read_bytes().startswith(b"%PDF")


def test_a_window_becomes_a_film(capsys, tmp_path, monkeypatch):
    def a_few(*sizes):
        assert sizes == (8, 4, 8)
        return moving_window(*sizes)[-3:]

    monkeypatch.setattr("swa_jax.commands.viz_run.moving_window", a_few)
    out = tmp_path / "window.gif"
    words = ["viz", "window", "--out", out, "--steps", "8", "--frame-ms", "200"]
    code, text, _ = run(capsys, *words, "--json", "-", "-q")
    assert code == 0
    captions = [frame["caption"] for frame in json.loads(text)["frames"]]
    assert captions[-1].startswith("step 8: A and C decode a token")
    frames, duration = frames_of(out)
    assert (len(frames), duration) == (3, 200)


@pytest.fixture
def trace(tmp_path):
    path = tmp_path / "trace.jsonl"
    path.write_text(TRACE)
    return path


def check_drawn_at_a_step(capsys, tmp_path, trace):
    out = tmp_path / "a.png"
    words = ["viz", "pools", trace, *SIZES, "--at-step", "8", "--no-prefix-cache", "--out", out]
    code, text, error = run(capsys, *words, "--json", "-", "--quiet")
    assert (code, error) == (0, "")
    assert width(out) > 800
    figures = json.loads(text)
    owners, pools = figures["owners"], figures["state"]["pools"]
    assert owners.keys() == {"request 0", "request 1"}
    assert sum(of["full_pages"] for of in owners.values()) == pools["full"]["held"] > 0
    assert sum(of["swa_pages"] for of in owners.values()) == pools["swa"]["held"] > 0
    assert figures["state"]["faults"]["double_free"] == 0


@pytest.mark.long  # the next one has all of it but the compiled loop
def test_a_replay_is_drawn_at_a_step(capsys, tmp_path, trace):
    check_drawn_at_a_step(capsys, tmp_path, trace)


def test_a_replay_stops_at_the_step_that_was_asked_for(capsys, tmp_path, trace, monkeypatch):
    def two_requests(trace, model, pool, settings, on_slice):
        """What `run_replay` carries after a slice."""
        assert settings.slice_steps == 8
        count = jnp.zeros(len(trace), jnp.int32)
        world = new_world(LoopConfig(pool, 2, 8, 6), Load(count, count), count > 0)
        state, grant = swa.alloc(world.allocator, 64, capacity=64)
        rows = dataclasses.replace(
            world.rows,
            request=jnp.array([0, 1], jnp.int32),
            length=jnp.array([20, 25], jnp.int32),
            table=jnp.pad(grant.slots[::16].reshape(2, 2), ((0, 0), (0, 4))),
        )
        on_slice(dataclasses.replace(world, allocator=state, rows=rows))
        raise AssertionError("it goes on")

    monkeypatch.setattr("swa_jax.viz.moment.run_replay", two_requests)
    check_drawn_at_a_step(capsys, tmp_path, trace)


def test_a_replay_is_drawn_over_time(capsys, tmp_path, trace, monkeypatch):
    out, done = tmp_path / "a.png", made_up_run()
    monkeypatch.setattr("swa_jax.commands.viz_run.run_session", lambda *_: done)
    code, text, error = run(capsys, "viz", "timeline", trace, *SIZES, "--out", out, "--json", "-")
    figures = json.loads(text)
    assert code == 0
    assert "3 samples of 140 steps" in error
    assert width(out) > 800
    assert figures["completed"] == 3
    assert [sample["full_pages"] for sample in figures["samples"]] == [60, 30, 0]


def test_pages_of_the_tree_are_the_trees_also_under_a_request():
    config = LoopConfig(POOL, max_running=2, chunk_tokens=8, table_pages=6)
    load = Load(jnp.array([20, 9], jnp.int32), jnp.array([24, 9], jnp.int32))
    shared = new_shared_world(config, load, jnp.array([True, True]), "lru")
    rows = dataclasses.replace(
        shared.world.rows,
        request=jnp.array([-1, 1], jnp.int32),
        length=jnp.array([0, 9], jnp.int32),
        table=jnp.array([[4] * 6, [8, 12, 16, 0, 0, 0]], jnp.int32),
    )
    shared = dataclasses.replace(
        shared,
        world=dataclasses.replace(shared.world, rows=rows),
        cache=dataclasses.replace(shared.cache, in_tree=jnp.arange(17) == 2),
        owned_from=jnp.array([0, 4], jnp.int32),
    )
    owners = owners_of(shared)
    assert {name: slots.tolist() for name, slots in owners.items()} == {
        "prefix cache": [8],
        "request 1": [12, 16],
    }


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["pools", "--out", "a.jpg"], "--out must end in .png or .svg or .pdf, got a.jpg"),
        (["window", "--out", "a.png"], "--out must end in .gif, got a.png"),
        (["pools", "--at-step", "5", "--out", "a.png"], "--at-step is for a trace"),
        (["pools", "nowhere.jsonl", "--out", "a.png"], "nowhere.jsonl"),
        (["pools", ".", "--out", "a.png"], "no finished save in ."),
        (["pools", "--out", "no/a.png"], "--out no/a.png: cannot be written"),
        (["pools", "--out", "a.png", "--json", "a.png"], "both name a.png"),
    ],
)
def test_bad_input_is_one_line(capsys, tmp_path, monkeypatch, words, message):
    monkeypatch.chdir(tmp_path)
    code, text, error = run(capsys, "viz", *words)
    assert (code, text) == (2, "")
    assert message in error
    assert error.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_a_state_without_a_tree_says_so(capsys, tmp_path):
    save_state(tmp_path / "saved", swa.init(POOL))
    code, _, error = run(capsys, "viz", "tree", tmp_path / "saved", "--out", tmp_path / "a.png")
    assert code == 2
    assert "there is no prefix tree in" in error
    assert "none was saved" in error


def test_help_has_examples(capsys):
    code, text, _ = run(capsys, "viz")
    assert code == 0
    assert all(name in text for name in ("pools", "timeline", "tree", "window"))
    code, text, _ = run(capsys, "viz", "--help")
    assert "swa-jax viz pools --out two-pools.png" in text


@pytest.mark.parametrize(
    "config",
    [
        POOL,
        swa.PoolConfig.pure_swa(32, 4, 8, chunked=True),
        swa.PoolConfig.request_ring(64, 3, page_size=4, sliding_window=8),
    ],
    ids=str,
)
def test_a_state_is_opened_without_its_configuration(tmp_path, config):
    state = swa.init(config)
    save_state(tmp_path, state, made={"model": "any"})
    opened, cache = open_state(tmp_path)
    assert opened.config == config
    assert repr(opened) == repr(state)
    assert cache is None


def test_what_is_no_saved_state_is_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match="no finished save"):
        open_state(tmp_path)


@pytest.mark.parametrize(
    ("name", "words"),
    [("two-pools.png", ["pools"]), ("prefix-tree.png", ["tree"])],
    ids=["pools", "tree"],
)
def test_the_pictures_of_the_documentation_are_those_of_the_command(capsys, tmp_path, name, words):
    drawn = tmp_path / name
    assert run(capsys, "viz", *words, "--out", drawn, "-q")[0] == 0
    with Image.open(PICTURES / name) as kept, Image.open(drawn) as now:
        assert kept.size == now.size
        same = np.asarray(kept.convert("RGB")) == np.asarray(now.convert("RGB"))
    # Letters may differ by a pixel between versions of the fonts.
    assert same.all(axis=-1).mean() > 0.97
