"""Page maps: every page is there, looks like what it is, and can be read."""

import dataclasses
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from pictures import cells, colour_at, legend, lines, overlaps, pixels, rgb, share_of, texts

import swa_jax as swa
from swa_jax.models import get_model
from swa_jax.viz import page_map
from swa_jax.viz.examples import two_pools
from swa_jax.viz.looks import (
    BLUE,
    FREE,
    GREEN,
    MOST_OWNERS,
    ORANGE,
    OTHERS,
    PENDING,
    SKY,
    looks_of,
)
from swa_jax.viz.pool_view import view_state

POOL = swa.PoolConfig(64, 32, 4, 8)
PURE = swa.PoolConfig.pure_swa(32, 4, 8)


@pytest.fixture(scope="module")
def example():
    return two_pools()


@pytest.fixture(scope="module")
def drawn(example):
    figure = page_map(example.state, example.owners)
    return figure, pixels(figure)


def test_every_page_of_both_pools_is_drawn_as_what_it_is(example, drawn):
    figure, _ = drawn
    found = cells(figure.axes[0])
    state = example.state
    pages = {name: np.unique(slots // 4)[1:] for name, slots in example.owners.items()}
    b, c = set(pages["request B"].tolist()), set(pages["its fork C"].tolist())
    mapping, shared = np.asarray(state.full_to_swa), b & c
    only = {
        "request A": set(pages["request A"].tolist()),
        "request B": b - shared,
        "its fork C": c - shared,
    }
    for name, full in only.items():
        assert found.pop(name) == len(full) + sum(mapping[page] > 0 for page in full)
    of_shared = found.pop("shared by several")
    assert of_shared == len(shared) + sum(mapping[page] > 0 for page in shared)
    free = int(state.full.num_free) + int(state.swa.num_free)
    pending = int(state.full.num_pending) + int(state.swa.num_pending)
    assert found == {"free": free, "pending until group end": pending, "padding": 2}
    assert pending == 6


def test_each_mapped_page_has_a_line_to_its_swa_page(example, drawn):
    figure, _ = drawn
    segments = lines(figure.axes[0], "mapping")
    mapping = np.asarray(example.state.full_to_swa)
    size = 32 / 24  # of a cell: 24 fill the width
    ends = {(int(top[0] / size), int(foot[0] / size)) for top, foot in segments}
    assert ends == {(page, int(mapping[page])) for page in np.flatnonzero(mapping).tolist()}
    assert len(segments) == len(ends) > 5


def test_pixels_have_the_colours_of_the_owners(example, drawn):
    figure, image = drawn
    axes = figure.axes[0]
    width, height = figure.get_size_inches() * figure.dpi
    assert image.shape == (int(height), int(width), 3)
    boxes = {part.get_label(): part for part in axes.collections}
    for name, colour in (("request A", ORANGE), ("request B", SKY), ("its fork C", GREEN)):
        for path in boxes[name].get_paths():
            (left, top), (right, _), (_, bottom) = path.vertices[:3]
            x, y = left + 0.12 * (right - left), top + 0.12 * (bottom - top)
            assert colour_at(figure, image, axes, x, y) == rgb(colour), name
        assert share_of(image, colour) > 0.005


def test_nothing_is_told_by_colour_alone():
    names = [f"request {number}" for number in range(MOST_OWNERS)]
    looks = looks_of([*names, OTHERS])
    letters = [look.letter for look in looks if look.letter]
    assert len(set(letters)) == len(letters)
    rest = [look.hatch for look in looks if not look.letter]
    assert len(set(rest)) == len(rest)


def test_the_legend_names_and_counts_what_there_is(drawn):
    figure, _ = drawn
    assert legend(figure) == [
        "A  request A: 7 full + 3 SWA",
        "B  request B: 2 full + 2 SWA",
        "C  its fork C: 2 full + 2 SWA",
        "   free: 5 full + 4 SWA",
        "p  pending until group end: 3 full + 3 SWA",
        "s  shared by several: 4 full + 1 SWA",
        "0  padding",
        "its SWA page",
    ]


def test_letters_and_counts_stand_in_the_cells(drawn):
    figure, _ = drawn
    found = texts(figure.axes[0])
    assert found.count("A") == 10
    assert found.count("s2") == 5
    assert "15 held, 3 pending, 5 free; 4 shared" in found
    assert any("group: open" in text for text in found)


def test_texts_do_not_lie_on_each_other(drawn):
    assert not overlaps(drawn[0])


def test_without_owners_pages_are_held_or_not(example):
    figure = page_map(example.state)
    assert "h  held: 11 full + 7 SWA" in legend(figure)
    assert share_of(pixels(figure), SKY) > 0.02
    assert not overlaps(figure)


def with_arrays(state, pool, **arrays):
    """A state whose pool has other arrays: no transition needs to be compiled for it."""
    values = {name: jnp.asarray(value, jnp.int32) for name, value in arrays.items()}
    return dataclasses.replace(state, **{pool: dataclasses.replace(getattr(state, pool), **values)})


def held(state, full, of_swa, mapped):
    """A state in which the first pages of each pool are held, and some of them mapped."""
    for pool, count in (("full", full), ("swa", of_swa)):
        pages = getattr(state, pool).holders.shape[0]
        holders = (np.arange(pages) <= count).astype(np.int32)
        free = pages - 1 - count
        state = with_arrays(state, pool, holders=holders, head=count % (pages - 1), num_free=free)
    mapping = np.zeros(state.full_to_swa.shape[0], np.int32)
    mapping[full - mapped + 1 : full + 1] = np.arange(1, mapped + 1)
    return dataclasses.replace(state, full_to_swa=jnp.asarray(mapping))


def test_pools_of_some_hundred_pages_name_the_other_side_in_the_cell():
    state = held(swa.init(swa.PoolConfig(400, 100)), 90, 30, 30)
    figure = page_map(state, {"one": np.arange(1, 91)})
    found = texts(figure.axes[0])
    assert not lines(figure.axes[0], "mapping")
    assert "→61" in found  # in the cell of SWA page 1
    assert sum(text.startswith("→") for text in found) == 60
    assert cells(figure.axes[0])["one"] == 120
    assert not overlaps(figure)


def test_large_pools_are_drawn_in_tiles():
    state = held(swa.init(swa.PoolConfig(2**20, 2**16)), 400_000, 30_000, 20_000)
    owners = {f"request {n}": np.arange(1 + 2000 * n, 2001 + 2000 * n) for n in range(40)}
    owners["prefix cache"] = np.arange(100_000, 400_001)
    figure = page_map(state, owners)
    axes = figure.axes[0]
    artists = len(axes.texts) + len(axes.collections) + len(axes.images)
    assert artists < 2500
    assert len(axes.images) == 2
    labels = legend(figure)
    assert "a tile is 86 or 1,366 pages" in labels
    assert "N  prefix cache: 300,001 full + 20,000 SWA" in labels
    assert any(label.startswith("+  others: ") for label in labels)
    strip = next(part for part in axes.collections if part.get_label() == "mapped")
    widths = [np.ptp(np.asarray(path.vertices)[:, 0]) for path in strip.get_paths()]
    assert len(widths) == -(-400_000 // 1366) - 380_001 // 1366
    assert max(widths) == pytest.approx(32 / 48)
    # Three parts in eight of the full pool are held.
    image = np.asarray(axes.images[0].get_array())
    assert (image == 1).all(axis=-1).mean() == pytest.approx(1 - 400_000 / 2**20, abs=0.01)
    assert not overlaps(figure)


def test_a_single_page_of_a_large_pool_is_not_lost():
    state = held(swa.init(swa.PoolConfig(2**18, 2**12)), 1, 1, 1)
    figure = page_map(state, {"the one": np.array([1])})
    image = np.asarray(figure.axes[0].images[0].get_array())
    assert (image == np.array(rgb(ORANGE)) / 255).all(axis=-1).sum() >= 1
    assert texts(figure.axes[0]).count("A") == 2


def test_a_pure_swa_pool_is_one_pool():
    state, grant = swa.alloc(swa.init(PURE), 16, capacity=16)
    state = swa.free_swa(state, grant.slots[:4])
    figure = page_map(state, {"one": grant.slots[4:]})
    assert cells(figure.axes[0]) == {"free": 4, "left its window": 1, "one": 3, "padding": 1}
    assert "SWA pool, 8 pages" in texts(figure.axes[0])
    assert not any(text.startswith("full pool") for text in texts(figure.axes[0]))
    assert not overlaps(figure)


def test_request_rings_have_owners_of_their_own():
    config = swa.PoolConfig.request_ring(64, 3, page_size=4, sliding_window=8)
    state, grant = swa.ring_acquire(swa.init(config), [0, 0])
    figure = page_map(state, rings={"one": grant.rings[:1], "two": grant.rings[1:]})
    assert "SWA pool, 3 rings" in texts(figure.axes[0])
    assert "A  one: 1 SWA" in legend(figure)
    assert not lines(figure.axes[0], "mapping")
    with pytest.raises(ValueError, match="rings are for a pool with request rings"):
        page_map(swa.init(POOL), rings={"one": [1]})


def test_a_unified_budget_shows_what_is_in_the_other_pool():
    config = swa.PoolConfig.unified(2**26, get_model("gpt-oss-20b"), 16)
    state = swa.init(config)
    layout = config.unified_layout
    assert layout is not None
    assert state.block_is_full is not None
    blocks = int(np.sum(state.block_is_full))
    figure = page_map(state)
    absent = (layout.blocks - blocks) * layout.full_pages, blocks * layout.swa_pages
    assert f"   in the other pool: {absent[0]:,} full + {absent[1]:,} SWA" in legend(figure)
    assert cells(figure.axes[0])["in the other pool"] == sum(absent)
    assert not overlaps(figure)


def test_pending_pages_are_those_that_the_group_freed():
    state, grant = swa.alloc(swa.init(POOL), 16, capacity=16)
    state = swa.free(swa.free_group_begin(state), grant.slots[12:])
    view = view_state(state)
    assert view.full is not None
    for pool in (view.full, view.swa):
        assert np.flatnonzero(pool.kind == PENDING).tolist() == [4]
        assert (pool.kind[5:] == FREE).all()


def test_what_is_wrong_with_a_state_is_seen():
    state = held(swa.init(POOL), 4, 3, 2)
    view = view_state(state, {"one": [4, 8, 40], "two": [8, 12]})
    looks = looks_of(list(view.names))
    assert view.full is not None
    labels = {page: looks[int(kind)].label for page, kind in enumerate(view.full.kind)}
    assert labels[10] == "named, but not held"
    assert labels[1] == "one"
    assert labels[2] == "shared by several"
    assert labels[3] == "two"
    assert labels[4] == "held, owner unknown"
    assert looks[int(view.swa.kind[3])].label == "held, not mapped"


@pytest.mark.parametrize(
    ("state", "owners", "message"),
    [
        (swa.init(POOL), {"one": [68]}, "must lie within the pool, 0 .. 67; got 68 to 68"),
        (swa.init(POOL), {"one": [-2]}, "must lie within the pool"),
        (swa.init(POOL), {"one": [0.5]}, "must hold integers"),
        (jax.tree.map(lambda leaf: leaf[None], swa.init(POOL)), None, "a batch of shape (1,)"),
        (jax.eval_shape(lambda: swa.init(POOL)), None, "cannot be drawn: no values"),
        (POOL, None, "state must be an AllocatorState, got PoolConfig"),
    ],
)
def test_what_cannot_be_drawn_is_refused(state, owners, message):
    with pytest.raises(ValueError, match=message.replace("(", r"\(").replace(")", r"\)")):
        page_map(state, owners)


def test_a_traced_state_cannot_be_drawn():
    with pytest.raises(ValueError, match="cannot be drawn: traced"):
        jax.jit(page_map)(swa.init(POOL))


def test_padding_and_no_place_name_no_page():
    figure = page_map(held(swa.init(POOL), 2, 0, 0), {"one": np.array([[4, 0], [-1, 3]])})
    assert cells(figure.axes[0])["one"] == 1


def test_a_notebook_shows_a_figure(drawn):
    assert drawn[0]._repr_png_().startswith(b"\x89PNG\r\n\x1a\n")


def test_equal_states_give_equal_pictures(example):
    first, second = (pixels(page_map(example.state, example.owners)) for _ in range(2))
    assert (first == second).all()


def test_matplotlib_is_loaded_for_pictures_alone_and_asked_for_by_its_extra():
    code = """
import sys, swa_jax, swa_jax.replay.session
assert "matplotlib" not in sys.modules
sys.modules["matplotlib"] = None  # as if it were not installed
import swa_jax.viz
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert 'ImportError: swa_jax.viz needs matplotlib: pip install "swa-jax[plot]"' in done.stderr


def test_blue_is_told_from_black():
    assert looks_of(["x"] * 5)[-1].colour == BLUE
    assert looks_of(["x"] * 5)[-1].ink == "#FFFFFF"
