"""The picture of a prefix tree: every page in its place, tombstones and locks told apart."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from pictures import cells, legend, lines, overlaps, pixels, rgb, share_of, texts

import swa_jax as swa
from swa_jax import prefix_cache
from swa_jax.viz import prefix_tree
from swa_jax.viz.examples import small_tree
from swa_jax.viz.looks import SKY
from swa_jax.viz.tree_figure import LOOKS
from swa_jax.viz.tree_view import LIVE, TOMBSTONE, stretches, view_tree

LIVE_LABEL, TOMBSTONE_LABEL = LOOKS[LIVE].label, LOOKS[TOMBSTONE].label


@pytest.fixture(scope="module")
def example():
    return small_tree()


@pytest.fixture(scope="module")
def drawn(example):
    state, cache = example
    return prefix_tree(cache, state)


def test_every_page_is_drawn_once_live_or_as_a_tombstone(example, drawn):
    state, cache = example
    here, mapping = np.asarray(cache.in_tree), np.asarray(state.full_to_swa)
    live = int((here & (mapping > 0)).sum())
    dead = int((here & (mapping == 0)).sum())
    assert live > 0
    assert dead > 0
    assert cells(drawn.axes[0]) == {LIVE_LABEL: live, TOMBSTONE_LABEL: dead}
    labels = legend(drawn)
    assert labels == [
        f"→  {LIVE_LABEL}: {live}",
        f"T  {TOMBSTONE_LABEL}: {dead}",
        f"line below: full KV locked (L: locks): {int(np.sum(np.asarray(cache.full_locks) > 0))}",
        f"two lines: SWA side locked too: {int(np.sum(np.asarray(cache.swa_locks) > 0))}",
    ]
    image = pixels(drawn)
    assert share_of(image, SKY) > 0.01
    width, height = drawn.get_size_inches() * drawn.dpi
    assert image.shape[:2] == (int(height), int(width))


def test_cells_say_page_swa_page_and_locks(example, drawn):
    state, cache = example
    wanted = set()
    for page in np.flatnonzero(cache.in_tree).tolist():
        other, locks = int(state.full_to_swa[page]), int(cache.full_locks[page])
        second = f"→{other}" if other else "T"
        wanted.add(f"{page}\n{second}" + (f" L{locks}" if locks else ""))
    assert {text for text in texts(drawn.axes[0]) if "\n" in text} == wanted
    assert any(" L" in text for text in wanted)


def test_locked_pages_have_a_line_below_and_two_where_the_swa_side_is_locked(example, drawn):
    _, cache = example
    full = int((np.asarray(cache.full_locks) > 0).sum())
    of_swa = int((np.asarray(cache.swa_locks) > 0).sum())
    assert len(lines(drawn.axes[0], "line below: full KV locked (L: locks)")) == full
    assert len(lines(drawn.axes[0], "two lines: SWA side locked too")) == of_swa
    assert 0 < of_swa < full
    colours = pixels(drawn).reshape(-1, 3)
    assert (colours == np.array(rgb("#E69F00"))).all(axis=1).any()


def test_a_page_stands_in_the_column_of_its_depth_behind_its_parent(example):
    state, cache = example
    view = view_tree(cache, state)
    assert (view.depth == np.asarray(cache.depth)[view.page]).all()
    places = set(zip(view.row.tolist(), view.depth.tolist(), strict=True))
    assert len(places) == view.page.size  # no two pages in one place
    for node, above in enumerate(view.parent.tolist()):
        if above >= 0:
            assert view.depth[node] == view.depth[above] + 1
            assert view.row[node] >= view.row[above]
    assert view.rows == int((np.asarray(cache.in_tree) & (np.asarray(cache.children) == 0)).sum())
    assert sum(piece.pages for piece in stretches(view)) == view.page.size


def test_texts_do_not_lie_on_each_other(drawn):
    assert not overlaps(drawn)


def made_up(parents, mapped, namespace=None, config=None):
    """A tree by the parent of each page from 1 on; `mapped`: pages with an SWA side."""
    count = len(parents)
    config = config or swa.PoolConfig(count, count)
    state, cache = swa.init(config), prefix_cache.init(config)
    depth = np.zeros(count + 1, np.int32)
    for page, above in enumerate(parents, start=1):
        depth[page] = depth[above] + 1
    mapping = np.zeros(count + 1, np.int32)
    mapping[list(mapped)] = np.arange(1, len(mapped) + 1)
    here = np.arange(count + 1) > 0
    spaces = np.zeros(count + 1, np.int32) if namespace is None else namespace
    cache = dataclasses.replace(
        cache,
        in_tree=jnp.asarray(here),
        parent=jnp.asarray([0, *parents], jnp.int32),
        depth=jnp.asarray(depth),
        namespace=jnp.asarray(spaces, jnp.int32),
        born=jnp.arange(count + 1, dtype=jnp.int32),
    )
    return dataclasses.replace(state, full_to_swa=jnp.asarray(mapping)), cache


def test_long_prefixes_are_bars_to_scale():
    chain = list(range(200))
    state, cache = made_up([*chain, *([100, *list(range(201, 230))])], range(190, 231))
    figure = prefix_tree(cache, state)
    # The first row is a tombstone up to its window, the second one live throughout.
    assert cells(figure.axes[0]) == {LIVE_LABEL: 2, TOMBSTONE_LABEL: 1}
    assert not [text for text in texts(figure.axes[0]) if "→" in text]
    pieces = stretches(view_tree(cache, state))
    assert [(p.row, p.first, p.pages, p.kind) for p in pieces] == [
        (0, 1, 189, TOMBSTONE),
        (0, 190, 11, LIVE),
        (1, 101, 30, LIVE),
    ]
    assert not overlaps(figure)


def test_of_many_branches_the_largest_are_drawn_and_the_rest_is_counted():
    rng = np.random.default_rng(0)
    parents = [0] * 5 + [int(rng.integers(1, page)) for page in range(6, 601)]
    state, cache = made_up(parents, range(1, 601, 2))
    view = view_tree(cache, state)
    figure = prefix_tree(cache, state)
    (hidden,) = [t.get_text() for t in figure.texts if t.get_text().startswith("not drawn")]
    count = int(hidden.split()[2].replace(",", ""))
    labels = cells(figure.axes[0])
    assert view.rows > 20
    assert count + sum(labels.values()) == 600
    assert "600 pages, 300 of them tombstones" in figure.get_suptitle()
    assert not overlaps(figure)


def test_namespaces_are_named():
    state, cache = made_up([0, 1, 0, 3], [1, 2, 3, 4], namespace=[0, 0, 0, 7, 7])
    figure = prefix_tree(cache, state)
    assert [text for text in texts(figure.axes[0]) if "name" in text] == [
        "namespace\n0",
        "namespace\n7",
    ]


def test_an_empty_tree_is_a_picture_too():
    config = swa.PoolConfig(8, 8)
    figure = prefix_tree(prefix_cache.init(config), swa.init(config))
    assert not cells(figure.axes[0])
    assert pixels(figure).size


def test_what_cannot_be_drawn_is_refused(example):
    state, cache = example
    with pytest.raises(ValueError, match="a batch of shape"):
        prefix_tree(jax.tree.map(lambda leaf: leaf[None], cache), state)
    with pytest.raises(ValueError, match="cannot be drawn: traced"):
        jax.jit(prefix_tree)(cache, state)
    with pytest.raises(ValueError, match="must be a PrefixCache, got AllocatorState"):
        prefix_tree(state, state)
    with pytest.raises(ValueError, match="configuration"):
        prefix_tree(cache, swa.init(swa.PoolConfig(8, 8)))
