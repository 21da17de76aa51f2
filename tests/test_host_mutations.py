"""Known bugs of host tiers put back one by one: the checks must see each of them."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from host_pair import HostWorld
from prefix_pair import QUICKLY

import swa_jax as swa
from swa_jax.host_cache import MemoryStorage, claim, images, memory, mirror, tier
from swa_jax.host_cache.check import check_index, nodes_of
from swa_jax.host_cache.index import HostIndex
from swa_jax.host_cache.memory import NumpyMemory

POOL = swa.PoolConfig(48, 24, 4, 6)
FIRST = [*[1] * 4, *[2] * 4, *[3] * 4, 7]
SECOND = [*[1] * 4, 2, *[4] * 7, 7]  # shares a page: with pairs it needs the token after it
THIRD = [*[5] * 8, 7]


def world_of(**options):
    return HostWorld(POOL, 96, 48, **{"is_bigram": True, **options})


def round_trip(**options):
    """Two prompts that share a beginning go to the host and come back, byte for byte."""
    world = world_of(**options)
    other = world.extend([], 4)  # from here on a page's two sides have different numbers
    world.free_swa(other)
    for text in (FIRST, SECOND):
        assert world.serve(text)
        world.backup()
    world.drive_out(full=48, swa_tokens=24)
    assert world.left == (44, 24)
    assert world.serve(THIRD)  # on the pages that they had
    for text in (FIRST, SECOND):
        got = world.restore([*text, 9])
        assert bool(got.ok)
        found = world.check_match([*text, 9])
        assert found.length == int(got.length) == 12
        world.verify_all(held=4)
    return world


def in_the_window(**options):
    """An inner page loses its SWA side, as a tombstone, and gets it back."""
    world = world_of(**options)
    assert world.serve(FIRST)
    receipt = world.release_below(world.lock(world.match(FIRST).node), 8)
    world.drive_out(swa_tokens=8)
    assert world.match(FIRST).length == 0
    got = world.restore(FIRST)
    assert (int(got.full_tokens), int(got.swa_tokens)) == (0, 4)
    assert world.check_match(FIRST).length == 12
    world.unlock(receipt)
    world.verify_all()


def host_pins_hold():
    world = HostWorld(POOL, 16, 16, is_bigram=True)
    assert world.serve(FIRST)
    world.backup()
    pin = world.host.pin(np.asarray(FIRST))
    world.drive_out(full=48)
    world.serve(THIRD)
    world.drive_out(full=48)
    assert int(world.restore(FIRST).length) == 12
    assert world.check_match(FIRST).length == 12
    world.host.unpin(pin)


def the_tree_changes_meanwhile():
    """What was looked up before an eviction is not taken for what is there after it."""
    world = world_of()
    assert world.serve(FIRST)
    world.backup()
    world.drive_out(full=8)
    row, count = world._row(FIRST, None)
    host = world.host
    prompt = host._prompt(world.cache, world.state, row, count, 0)
    usable, seen = host._usable(world.cache, world.state, prompt)
    assert len(usable.full) == 2
    world.evict(full=48)
    before = jax.device_get((world.cache, world.state))
    world.cache, world.state, world.pools, got = host._bring_back(
        world.cache, world.state, world.pools, prompt, usable, seen
    )
    assert not bool(got.ok)
    after = jax.device_get((world.cache, world.state))
    assert all(map(np.array_equal, *map(jax.tree.leaves, (before, after))))
    assert int(world.restore(FIRST).length) == 12  # looked up again
    assert world.check_match(FIRST).length == 12
    world.verify_all()


def a_restore_evicts_others_and_not_itself():
    world = world_of()
    assert world.serve(FIRST)
    world.backup()
    world.drive_out(full=4)  # the end of it
    assert world.serve(THIRD)
    held = world.extend([], world.left[1])
    got = world.restore(FIRST)
    assert bool(got.ok)
    assert world.check_match(FIRST).length == 12
    world.verify_all(held=len(held), held_live=len(held))


def one_is_refused_and_nothing_has_changed():
    world = world_of()
    assert world.serve(FIRST)
    world.drive_out(full=48)
    assert world.serve(THIRD)
    receipt = world.lock(world.match(THIRD).node)
    held = world.extend([], world.left[1])
    before = jax.device_get((world.cache, world.state))
    got = world.restore(FIRST)
    assert not bool(got.ok)
    assert int(got.swa_short) > 0
    after = jax.device_get((world.cache, world.state))
    assert all(map(np.array_equal, *map(jax.tree.leaves, (before, after))))
    world.free(held)
    world.unlock(receipt)
    assert bool(world.restore(FIRST).ok)


def test_rows_that_are_being_written_stay(monkeypatch) -> None:
    """Copies that never end by themselves, on a host that has room for one prompt."""
    monkeypatch.setattr(memory._Copy, "done", lambda self: self.settled)
    world = HostWorld(POOL, 12, 12, is_bigram=True)
    for text in (FIRST, THIRD, SECOND):
        world.drive_out(full=48)
        assert world.serve(text)
        assert world.backup() > 0
    world.drive_out(full=48)
    assert world.serve(THIRD)  # on the pages that are being copied
    world.evict(full=48)
    assert int(world.restore(SECOND).length) == 12
    assert world.check_match(SECOND).length == 12


def fails(*arguments):
    raise OSError(5, "it is broken")


def backed_up(world):
    world.backup()
    world.host.wait()


@pytest.mark.parametrize("half", [(NumpyMemory, "write"), (memory._Copy, "land")])
def test_a_copy_that_fails_leaves_no_pin_and_no_row_without_bytes(half, monkeypatch) -> None:
    world = world_of(policy="write_through")
    assert world.serve(FIRST)
    with monkeypatch.context() as patch:
        patch.setattr(*half, fails)
        with pytest.raises(OSError, match="broken"):
            backed_up(world)
    assert list(nodes_of(world.host.index)) == []
    check_index(world.host.index)


def test_a_storage_that_fails_is_one_that_has_nothing(monkeypatch) -> None:
    storage = MemoryStorage()
    world = world_of(policy="write_through", storage=storage, fingerprint=b"one")
    for name in ("has", "put", "get"):
        monkeypatch.setattr(storage, name, fails)
    assert world.serve(FIRST)
    assert world.backup() > 0
    world.host.wait()
    row, count = world._row(FIRST, None)
    world.host.prefetch(world.cache, world.state, row, count).wait()
    world.drive_out(full=48)
    assert int(world.restore(FIRST).length) == 12
    assert world.check_match(FIRST).length == 12
    world.host.close()
    assert world.host._stored is not None
    assert world.host._stored.worker.failed > 6
    world.drive_out(full=48)
    assert world.serve(THIRD)  # a closed one is no other
    assert world.backup() > 0
    world.host.wait()
    assert not any(node.pins for node in nodes_of(world.host.index))


CHECKS = {
    "round trip": round_trip,
    "round trip, pinned memory": lambda: round_trip(memory="pinned"),
    "round trip, write-through": lambda: round_trip(policy="write_through"),
    "in the window": in_the_window,
    "pins": host_pins_hold,
    "stale": the_tree_changes_meanwhile,
    "itself": a_restore_evicts_others_and_not_itself,
    "refused": one_is_refused_and_nothing_has_changed,
}


@pytest.mark.parametrize("check", CHECKS.values(), ids=CHECKS)
def test_nothing_is_wrong_as_it_is(check) -> None:
    check()


def traced_anew():
    """The transition as it is now: what was traced before is not looked at."""
    plain: Any = getattr(claim.claim, "__wrapped__")  # noqa: B009
    return jax.jit(lambda *arguments: plain(*arguments), compiler_options=QUICKLY)


# ---- the bugs ---------------------------------------------------------------------------------


def no_swa_is_saved(patch):
    copy_in = tier.HostRows.copy_in
    patch.setattr(
        tier.HostRows,
        "copy_in",
        lambda self, keys, space, pools, full, of_swa: copy_in(self, keys, space, pools, full, {}),
    )


def only_the_leaf_has_a_window(patch):
    near = mirror.TreeMirror.near_end
    patch.setattr(mirror.TreeMirror, "near_end", lambda self, pages: near(self, 1))


def reads_do_not_wait(patch):
    patch.setattr(NumpyMemory, "_await", lambda self, rows: None)
    patch.setattr(memory._Copy, "done", lambda self: False)


def pins_are_ignored(patch):
    patch.setattr(HostIndex, "pin", lambda self, keys, namespace=0: tier.Pin([]))


def supplies_are_not_compared(patch):
    whole = claim.claim

    def trusting(cache, state, tokens, length, namespace, pages, has_full, has_swa):
        ones = np.ones_like(has_full)
        return whole(cache, state, tokens, length, namespace, pages, ones, ones)

    patch.setattr(tier, "claim", trusting)


def rows_are_one_off(patch):
    read = NumpyMemory.read
    patch.setattr(NumpyMemory, "read", lambda self, rows: read(self, [max(0, r - 1) for r in rows]))


def images_go_to_the_next_page(patch):
    whole = images.scatter
    patch.setattr(
        tier,
        "scatter",
        lambda layers, of_place, places, image: whole(layers, jnp.roll(of_place, 1), places, image),
    )


def the_swa_side_is_read_by_full_page(patch):
    look = mirror.TreeMirror.look

    def mixed(self, cache, state):
        look(self, cache, state)
        self.swa = np.where(self.swa > 0, np.arange(len(self.swa)) % 7, 0).astype(np.int32)

    patch.setattr(mirror.TreeMirror, "look", mixed)


def the_chain_is_not_held(patch):
    patch.setattr(claim, "_hold", lambda cache, *rest: cache)
    patch.setattr(tier, "claim", traced_anew())


def namespaces_and_keys_are_forgotten(patch):
    path = mirror.TreeMirror.path

    def shorter(self, page):
        found = path(self, page)
        return dataclasses.replace(found, keys=[key[:4] for key in found.keys])

    patch.setattr(mirror.TreeMirror, "path", shorter)


def it_evicts_before_it_knows(patch):
    """The pages are there, so it says, and what could be evicted has been."""
    patch.setattr(claim, "_short", lambda cache, state, full, of_swa: (full * 0, of_swa * 0))
    patch.setattr(tier, "claim", traced_anew())


BUGS = {
    no_swa_is_saved: "round trip",
    only_the_leaf_has_a_window: "round trip",
    reads_do_not_wait: "round trip",
    pins_are_ignored: "pins",
    supplies_are_not_compared: "stale",
    rows_are_one_off: "round trip",
    images_go_to_the_next_page: "round trip",
    the_swa_side_is_read_by_full_page: "round trip",
    the_chain_is_not_held: "itself",
    namespaces_and_keys_are_forgotten: "round trip",
    it_evicts_before_it_knows: "refused",
}


LONG = (the_chain_is_not_held, it_evicts_before_it_knows)  # each compiles `claim` anew


@pytest.mark.parametrize(
    "bug",
    [pytest.param(bug, marks=pytest.mark.long if bug in LONG else ()) for bug in BUGS],
    ids=lambda bug: bug.__name__,
)
def test_each_bug_is_seen(bug, monkeypatch) -> None:
    bug(monkeypatch)
    with pytest.raises((AssertionError, KeyError, IndexError)):
        CHECKS[BUGS[bug]]()
