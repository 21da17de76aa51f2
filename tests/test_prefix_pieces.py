"""The prefix cache's own tools beside plain Python: choosing, looking down a tree, its table."""

import dataclasses
import functools
import importlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import swa_jax as swa
from swa_jax import prefix_cache
from swa_jax.prefix_cache.find import table_place
from swa_jax.prefix_cache.kept_windows import in_kept_window, window_pages
from swa_jax.prefix_cache.select import least_k, over_subtrees, sum_over_subtrees, up_from
from swa_jax.prefix_cache.table import lay_out_when_worn, name_nodes, strike_out
from swa_jax.prefix_cache.tree import DELETED, EMPTY

NODES = 17


@pytest.mark.parametrize("span", [2, 2**30])
def test_the_least_by_several_keys(span):
    rng = np.random.default_rng(span)
    choose = jax.jit(least_k)
    ids = np.arange(NODES)
    for k in [*range(NODES + 1), 2**30] * 2:
        marks = rng.random(NODES) < 0.7
        keys = [rng.integers(-span, span + 1, NODES), rng.integers(0, 2, NODES), ids]
        order = sorted(ids[marks], key=lambda node: tuple(int(key[node]) for key in keys))
        got = choose(jnp.asarray(marks), [jnp.asarray(key, jnp.int32) for key in keys], k)
        assert np.flatnonzero(got).tolist() == sorted(int(node) for node in order[:k])


def trees():
    """A chain, a star, and trees that grew by chance; int32[N] parents, the root its own."""
    rng = np.random.default_rng(0)
    yield np.maximum(np.arange(NODES) - 1, 0)
    yield np.zeros(NODES, int)
    for _ in range(12):
        order = [0, *(1 + rng.permutation(NODES - 1))]
        parent = np.zeros(NODES, int)
        for place, node in enumerate(order[1:], 1):
            parent[node] = order[rng.integers(max(0, place - rng.integers(1, NODES)), place)]
        yield parent


def line_of(parent, node):
    """A node, the one above it, and so on; without the root."""
    line = []
    while node:
        line.append(node)
        node = int(parent[node])
    return line


@pytest.mark.parametrize("levels", [1, 3])
def test_up_from_marked_nodes(levels):
    rng = np.random.default_rng(levels)
    climb = jax.jit(functools.partial(up_from, levels=levels))
    for parent in trees():
        marks = rng.random(NODES) < 0.2
        marks[0] = False
        right = {node for leaf in np.flatnonzero(marks) for node in line_of(parent, leaf)[:levels]}
        got = climb(jnp.asarray(marks), jnp.asarray(parent, jnp.int32))
        assert set(np.flatnonzero(got).tolist()) == right


def test_sums_and_extremes_over_subtrees():
    rng = np.random.default_rng(1)
    sums = jax.jit(sum_over_subtrees)
    largest = jax.jit(functools.partial(over_subtrees, step=-2))
    least = jax.jit(functools.partial(over_subtrees, step=1, least=True))
    for parent in trees():
        values = rng.integers(-9, 10, NODES)
        lines = [line_of(parent, node) for node in range(NODES)]
        reach = max(map(len, lines)) - 1  # levels below the highest node other than the root
        below = [
            [
                (int(values[low]), lines[low].index(node))
                for low in range(NODES)
                if node in lines[low]
            ]
            for node in range(NODES)
        ]
        given = jnp.asarray(parent, jnp.int32), jnp.asarray(values, jnp.int32), jnp.int32(reach)
        assert sums(*given).tolist() == [sum(value for value, _ in each) for each in below]
        assert largest(*given)[1:].tolist() == [max(v - 2 * n for v, n in b) for b in below[1:]]
        assert least(*given)[1:].tolist() == [min(v + n for v, n in b) for b in below[1:]]


@pytest.mark.parametrize("few_levels", [1, 32])
def test_pages_near_the_end_of_a_branch(few_levels, monkeypatch):
    """Both ways of looking, and nodes that are gone but still say what they hung from."""
    evict = importlib.import_module("swa_jax.prefix_cache.evict")
    monkeypatch.setattr(evict, "_FEW_LEVELS", few_levels)
    empty, window = prefix_cache.init(swa.PoolConfig(NODES - 1, NODES - 1, 1, 3)), 3

    @jax.jit
    def near_leaf(in_tree, parent, children, goes):
        tree = {"in_tree": in_tree, "parent": parent, "children": children}
        return evict._near_leaf(dataclasses.replace(empty, **tree), goes)

    rng = np.random.default_rng(4)
    for parent in trees():
        lost, going = rng.random(NODES) < 0.1, rng.random(NODES) < 0.2
        lines = [line_of(parent, node) for node in range(NODES)]
        in_tree = np.array([bool(line) and not any(lost[line]) for line in lines])
        goes = np.array([bool(line) and any(going[line]) for line in lines]) & in_tree
        stays = in_tree & ~goes
        above = set(parent[stays].tolist())
        leaves = [node for node in np.flatnonzero(stays) if node not in above]
        children = np.bincount(parent[in_tree], minlength=NODES)
        given = in_tree, parent.astype(np.int32), children.astype(np.int32), goes
        near = np.asarray(near_leaf(*map(jnp.asarray, given)))
        assert set(np.flatnonzero(near & stays)) == {
            n for leaf in leaves for n in lines[leaf][:window]
        }


@pytest.mark.parametrize(
    ("pool", "pages", "ends"),
    [
        (swa.PoolConfig(64, 32, 1, 3), 3, range(16, 65, 16)),  # 12 pages apart, and so 16
        (swa.PoolConfig(64, 32, 4, 8), 2, range(8, 65, 8)),
        (swa.PoolConfig(64, 64, 4, 4), 1, range(2, 65, 2)),
        (swa.PoolConfig(64, 32, 4), 16, ()),
    ],
)
def test_a_kept_window_is_the_pages_before_its_end(pool, pages, ends):
    depth = jnp.arange(1, 65, dtype=jnp.int32)
    kept = {end - back for end in ends for back in range(pages)}
    assert window_pages(pool) == pages
    assert set(depth[in_kept_window(pool, depth)].tolist()) == kept


def test_what_is_not_lacking_is_not_evicted(monkeypatch):
    lacking = importlib.import_module("swa_jax.prefix_cache.evict_lacking")
    monkeypatch.setattr(lacking, "evict", lambda cache, state, **asked: asked)
    cache = prefix_cache.init(swa.PoolConfig(128 * 4, 64 * 4, 4, 8))
    for full in (-3, 0, 1, 5, 40):
        asked = lacking.evict_lacking(cache, None, jnp.int32(full), jnp.int32(1 - full))
        extra = [min(max(3 * max(n, 0), part), 8 * part) for n, part in ((full, 2), (1 - full, 1))]
        right = [n + more if n > 0 else 0 for n, more in zip((full, 1 - full), extra, strict=True)]
        assert [int(tokens) for tokens in asked.values()] == [4 * pages for pages in right]


def steps_to(cache, node):
    """What a search for the node's hash sees on its way to it."""
    seen = []
    for tries in range(cache.table.shape[0]):
        there = int(cache.table[table_place(cache, cache.hash[node], jnp.int32(tries))])
        if there == node:
            return seen
        seen.append(there)
    raise AssertionError(f"node {node} is not in the table")


@pytest.mark.parametrize("spread", [1, 3, 2**30])
def test_named_nodes_are_found_before_an_empty_place(spread):
    cache = prefix_cache.init(swa.PoolConfig(32, 32, 4, 8))
    nodes, outside = cache.in_tree.shape[0] - 1, cache.in_tree.shape[0]
    rng = np.random.default_rng(spread)
    hashes = jnp.asarray(rng.integers(0, spread, outside), cache.hash.dtype)
    cache = dataclasses.replace(cache, hash=hashes)
    name, strike = jax.jit(name_nodes), jax.jit(strike_out)
    named: set[int] = set()
    struck = 0
    for _turn in range(6):
        comes = [node for node in range(1, nodes + 1) if node not in named and rng.random() < 0.6]
        asked = [*comes, *[outside] * (nodes - len(comes))]
        cache = name(cache, jnp.asarray(rng.permutation(asked), jnp.int32))
        named.update(comes)
        table = cache.table.tolist()
        assert sorted(node for node in table if node > EMPTY) == sorted(named)
        assert int(cache.num_deleted) == table.count(DELETED)
        for node in named:
            assert table[int(cache.place[node])] == node
            assert EMPTY not in steps_to(cache, node)
        leaves = [node for node in named if rng.random() < 0.4]
        asked = jnp.asarray([*leaves, *[outside] * (nodes - len(leaves))], jnp.int32)
        after = strike(cache, cache.table, asked)
        assert [n for n in after.tolist() if n > EMPTY] == [
            n for n in table if n > EMPTY and n not in leaves
        ]
        named -= set(leaves)
        struck = after.tolist().count(DELETED)
        cache = dataclasses.replace(cache, table=after, num_deleted=jnp.int32(struck))
    assert struck


def test_the_table_is_laid_out_anew_once_an_eighth_is_struck_out():
    cache = prefix_cache.init(swa.PoolConfig(32, 32, 4, 8))
    places = cache.table.shape[0]
    in_tree = jnp.zeros_like(cache.in_tree).at[jnp.asarray([1, 3, 4])].set(True)
    worn = jnp.full_like(cache.table, DELETED).at[0].set(2)
    cache = dataclasses.replace(cache, in_tree=in_tree, table=worn)
    for deleted in (0, places // 8, places // 8 + 1):
        now = dataclasses.replace(cache, num_deleted=jnp.int32(deleted))
        after = lay_out_when_worn(now)
        if deleted <= places // 8:
            assert after.table.tolist() == worn.tolist()
            assert int(after.num_deleted) == deleted
            continue
        assert sorted(after.table.tolist())[-3:] == [1, 3, 4]
        assert after.table.tolist().count(EMPTY) == places - 3
        assert int(after.num_deleted) == 0
