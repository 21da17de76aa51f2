"""Public reports on host offload, by number, with their figures."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
from compare import ints
from host_pair import HostWorld

import swa_jax as swa
from swa_jax.host_cache import token_keys
from swa_jax.host_cache.claim import claim

# The pools of every test of the tier. What a report has less is held by somebody else.
POOL = swa.PoolConfig(48, 24, 4, 6)
TEXT = [1, 1, 1, 1, 2, 2, 2, 2, 3]  # with pairs as keys, a page needs the token after it
REQUEST = [*TEXT, 4]


def a_and_b(policy="write_back", **options):
    """B55: F=S=16, A(4) - B(4 leaf), both live."""
    world = HostWorld(POOL, 64, 64, policy, is_bigram=True, **options)
    world.free_swa(world.extend([], 24))
    world.extend([], 8)
    assert world.left == (16, 16)
    assert world.serve(TEXT)
    assert world.left == (8, 8)
    return world


def check(world):
    world.verify_all(held=32, held_live=8)


def only_b_locked_in_swa(world):
    """A lock whose request has left A's window: then A's SWA side is what evict finds."""
    return world.release_below(world.lock(world.match(TEXT).node), 4)


def page_of_a(world):
    return next(page for name, page in world.nodes().items() if len(name[1]) == 1)


@pytest.mark.parametrize("memory", ["numpy", "pinned"])
def test_b55_a_tombstone_is_saved_before_it_loses_its_swa_side(memory) -> None:
    world = a_and_b(memory=memory)
    receipt = only_b_locked_in_swa(world)
    assert world.drive_out(swa_tokens=4) == (0, 4)
    assert world.left == (8, 12)
    a = world.host.index.find(token_keys(TEXT, 4, is_bigram=True))[0]
    assert a.full < 0 <= a.swa
    # In the report A's full KV stays on the device: here while something holds it.
    kept = world.release_swa_lock(world.lock(page_of_a(world)))
    world.unlock(receipt)
    assert world.drive_out(full=4) == (4, 4)
    assert world.left == (12, 16)
    got = world.restore(REQUEST)
    assert (bool(got.ok), int(got.length)) == (True, 8)
    assert (int(got.full_tokens), int(got.swa_tokens)) == (4, 8)
    assert world.left == (8, 8)
    assert world.check_match(REQUEST).length == 8
    world.unlock(kept)
    check(world)


def test_b55_by_the_trees_own_rules_both_pages_leave() -> None:
    """Nothing live hangs from A once B is gone, so A leaves with it: to the host as well."""
    world = a_and_b()
    receipt = only_b_locked_in_swa(world)
    world.drive_out(swa_tokens=4)
    world.unlock(receipt)
    assert world.drive_out(full=4) == (8, 4)
    assert world.left == (16, 16)
    got = world.restore(REQUEST)
    assert (int(got.length), int(got.full_tokens), int(got.swa_tokens)) == (8, 8, 8)
    assert world.left == (8, 8)
    assert world.check_match(REQUEST).length == 8
    check(world)


def test_b55_without_the_copy_the_honest_match_is_0() -> None:
    world = a_and_b()
    receipt = only_b_locked_in_swa(world)
    world.evict(swa_tokens=4)  # past the host
    world.unlock(receipt)
    world.drive_out(full=4)
    assert world.host_match(REQUEST).length == 0
    assert int(world.restore(REQUEST).length) == 0


def test_b07_a_recovered_tombstone_gives_nobodys_page_away() -> None:
    """The SWA pages that N had are R's by now.

    The host brings N's side back on a page of its own; R's stays R's.
    """
    world = HostWorld(POOL, 64, 64, is_bigram=True)
    assert world.serve(TEXT)
    kept = world.release_swa_lock(world.lock(world.match(TEXT).node))
    assert world.drive_out(swa_tokens=8) == (0, 8)
    assert world.left == (40, 24)
    other = world.extend([], 24)  # R has every SWA page, those that N had too
    assert world.left == (16, 0)
    refused = world.restore(REQUEST)
    assert (bool(refused.ok), int(refused.swa_short)) == (False, 2)
    world.free(other[:8])
    got = world.restore(REQUEST)
    assert (int(got.full_tokens), int(got.swa_tokens)) == (0, 8)
    assert world.left == (24, 0)
    assert world.check_match(REQUEST).length == 8
    assert all(world.live(other[8:]))
    world.free(other[8:])
    world.unlock(kept)
    assert world.left == (40, 16)
    assert world.sizes.full_evictable == world.sizes.swa_evictable == 8
    world.verify_all()


def moved(world, cache, **changes):
    """What the tier takes for the path that ends in B, when it finds these values at some pages."""
    parts = {}
    for name, (pages, values) in changes.items():
        part = np.array(getattr(cache, name))
        part[pages] = np.asarray(values)
        parts[name] = jnp.asarray(part)
    world.host.tree.look(dataclasses.replace(cache, **parts), world.state)


def test_a_node_whose_stamps_are_equal_but_that_hangs_from_another_is_another() -> None:
    """As after a reset: A came again on another page at the same time, and B where it was."""
    world = HostWorld(POOL, 64, 64, is_bigram=True)
    assert world.serve(TEXT)
    cache, tree = world.cache, world.host.tree
    tree.look(cache, world.state)
    a, b = tree.find(token_keys(TEXT, 4, is_bigram=True), 0)
    c, first = max(a, b) + 1, np.asarray(cache.tokens[a])
    moved(
        world,
        cache,
        in_tree=(c, True),
        born=([a, c], [int(cache.clock) + 1, int(cache.born[a])]),
        hash=([a, c], [7, int(cache.hash[a])]),
        depth=(c, cache.depth[a]),
        tokens=([a, c], np.stack([first + 1, first])),
        parent=(b, c),
    )
    assert tree.path(b).nodes == [c, b]
    assert tree.path(b).keys == token_keys(TEXT, 4, is_bigram=True)


def test_a_tree_whose_clock_went_back_is_read_again() -> None:
    world = HostWorld(POOL, 64, 64, is_bigram=True)
    assert world.serve(TEXT)
    tree, cache = world.host.tree, dataclasses.replace(world.cache, clock=world.cache.clock + 9)
    tree.look(cache, world.state)
    a, b = tree.find(token_keys(TEXT, 4, is_bigram=True), 0)
    moved(world, world.cache, tokens=([a], cache.tokens[a] + 1))
    assert tree.path(b).keys[0] == (cache.tokens[a] + 1).tobytes()


@pytest.mark.parametrize(
    ("pages", "ok"), [(-1, False), (0, False), (1, True), (2, True), (3, False)]
)
def test_a_claim_is_of_whole_pages_of_the_prompt(pages, ok) -> None:
    world = HostWorld(POOL, 64, 64, is_bigram=True)
    tokens = ints(TEXT, world.width)
    yes = np.ones((world.width - 1) // 4, bool)
    numbers = (jnp.int32(number) for number in (len(TEXT), 0, pages))
    cache, state, got = claim(world.cache, world.state, tokens, *numbers, yes, yes)
    assert bool(got.ok) == ok
    assert int(cache.in_tree.sum()) == int((state.full.holders[1:] > 0).sum()) == pages * ok
    assert (int(got.full_short), int(got.swa_short)) == (0, 0)
