"""Forks beside a prefix cache: whose share the tree takes, and who still reads what."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compare import ints
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from prefix_pair import Taken, World, compiled

import swa_jax as swa
from swa_jax import prefix_cache as pc

CONFIG = swa.PoolConfig(64, 48, 4, 6)
LONGEST = 28


@dataclasses.dataclass
class Fork:
    """A running request. Its first `tree` tokens stand on pages of the tree."""

    tokens: list[int]
    slots: list[int]
    tree: int
    node: int
    receipt: pc.Receipt
    done: int
    ns: int = 0


class Forks(World):
    """Requests, forks of them, and the text that each slot's KV was computed from."""

    def __init__(self, config: swa.PoolConfig = CONFIG) -> None:
        super().__init__(config)
        self.rows: list[Fork] = []
        self.full_kv: dict[int, tuple[int, ...]] = {}
        self.swa_kv: dict[int, tuple[int, ...]] = {}

    # ---- KV -----------------------------------------------------------------------------

    def swa_slots(self, slots: Sequence[int]) -> list[int]:
        by_page = np.asarray(self.state.full_to_swa)
        to = [int(by_page[slot // self.page]) for slot in slots]
        return [t * self.page + s % self.page if t else 0 for t, s in zip(to, slots, strict=True)]

    def compute(
        self, row: Fork, tokens: Sequence[int], slots: Sequence[int], known: int = 0
    ) -> None:
        """Writes the KV of all tokens but the first `known`."""
        row.tokens, row.slots = list(tokens), list(slots)
        of_swa = self.swa_slots(slots)
        for token in range(known, len(tokens)):
            text = (row.ns, *tokens[: token + 1])
            assert of_swa[token], "a token without an SWA slot"
            self.full_kv[slots[token]] = self.swa_kv[of_swa[token]] = text

    def room(self, slots: Sequence[int], length: int) -> list[int] | None:
        grown = self.try_extend(slots, length)
        if grown is None:
            self.evict(full=12, swa_tokens=12)
            grown = self.try_extend(slots, length)
        return grown

    # ---- requests -----------------------------------------------------------------------

    def start(self, tokens: Sequence[int], ns: int = 0) -> Fork | None:
        found = self.match(tokens, len(tokens) - 1, ns=ns)
        row = Fork([], [], found.length, found.node, self.lock(found.node), found.length, ns)
        slots = self.room(found.slots, len(tokens))
        if slots is None:
            self.unlock(row.receipt)
            return None
        self.compute(row, tokens, slots, found.length)
        self.rows.append(row)
        return row

    def fork(self, row: Fork) -> Fork:
        live = jnp.arange(self.width) >= row.done - row.tree
        own = ints(row.slots[row.tree :], self.width)
        self.state = compiled("share")(self.state, own, live)
        receipt = self.lock(row.node)
        child = dataclasses.replace(row, slots=list(row.slots), receipt=receipt)
        self.rows.append(child)
        return child

    def grow(self, row: Fork, more: Sequence[int]) -> bool:
        if not self.own_last_page(row):
            return False
        slots = self.room(row.slots, len(row.tokens) + len(more))
        if slots is None:
            return False
        self.compute(row, [*row.tokens, *more], slots, len(row.tokens))
        return True

    def own_last_page(self, row: Fork) -> bool:
        for _ in range(2):
            before = self.state
            self.state, got = compiled("copy_on_write")(
                before, ints([len(row.tokens)]), ints(row.slots[-1:])
            )
            if got.ok:
                break
            self.evict(full=4, swa_tokens=4)
        else:
            return False
        source, target = ([s for s in side[0].tolist() if s] for side in (got.source, got.target))
        if source:
            assert source == row.slots[-len(source) :]
            pairs = zip(source, target, self.swa_slots(source), self.swa_slots(target), strict=True)
            for at, to, swa_at, swa_to in list(pairs):
                self.full_kv[to] = self.full_kv[at]
                self.swa_kv[swa_to] = self.swa_kv[swa_at]
            row.slots[-len(source) :] = target
        return True

    def leave(self, row: Fork, *, keeps: bool = True) -> None:
        """Gives up what left the window; with `keeps` not what an insert would need."""
        end = len(row.tokens) // self.page * self.page if keeps else None
        row.done = self.leave_window(row.slots, row.done, insert=end)

    def give(self, row: Fork) -> Taken:
        """Inserts a request that goes on, or is about to end."""
        tokens, count = self._row(row.tokens, None)
        self.cache, self.state, got = compiled("insert")(
            self.cache,
            self.state,
            tokens,
            count,
            ints(row.slots, self.width),
            namespace=jnp.int32(row.ns),
            owned_from=jnp.int32(row.tree),
        )
        got = jax.device_get(got)
        assert int(got.length) >= row.tree
        receipt = self.lock(int(got.node))
        self.unlock(row.receipt)
        row.receipt, row.node, row.tree = receipt, int(got.node), int(got.length)
        row.slots = got.slots.tolist()[: len(row.slots)]
        row.done = max(row.done, row.tree)
        return Taken(int(got.length_already_cached), row.tree, row.slots, row.node)

    def stop(self, row: Fork) -> None:
        self.rows = [each for each in self.rows if each is not row]
        self.free(row.slots[row.tree :])
        self.unlock(row.receipt)

    def end(self, row: Fork) -> Taken:
        taken = self.give(row)
        self.stop(row)
        return taken

    # ---- the laws -----------------------------------------------------------------------

    def check_all(self) -> None:
        probe = self.probe()
        broken = [name for name, holds in {**probe.laws, **probe.tree_laws}.items() if not holds]
        assert not broken, broken
        assert not any(probe.faults.values()), probe.faults
        holders = Counter(np.flatnonzero(self.cache.in_tree).tolist())
        for row in self.rows:
            holders.update({slot // self.page for slot in row.slots[row.tree :]})
            self._check_row(row)
        full = np.asarray(self.state.full.holders)
        assert {page: int(full[page]) for page in np.flatnonzero(full).tolist() if page} == holders
        self._check_tree()

    def _check_row(self, row: Fork) -> None:
        of_swa = self.swa_slots(row.slots)
        window = max(0, len(row.tokens) - (self.config.sliding_window or 0))
        for token, (slot, to) in enumerate(zip(row.slots, of_swa, strict=True)):
            text = (row.ns, *row.tokens[: token + 1])
            assert self.full_kv[slot] == text, f"slot {slot} was written by another"
            if token >= window:
                assert to, f"slot {slot} lost its SWA side"
                assert self.swa_kv[to] == text, f"SWA slot {to} was overwritten"

    def _check_tree(self) -> None:
        for (ns, keys), page in self.nodes().items():
            tokens = [token for key in keys for token in key]
            last = page * self.page + self.page - 1
            assert self.full_kv[last] == (ns, *tokens), f"node {page} has the KV of another text"
            (to,) = self.swa_slots([last])
            assert not to or self.swa_kv[to] == (ns, *tokens), f"node {page}: SWA KV of another"

    def all_gone(self) -> None:
        for row in list(self.rows):
            self.stop(row)
        self.evict(full=self.config.full_tokens)
        assert not self.nodes()
        assert self.left == (self.config.full_tokens, self.config.swa_tokens)


def words(digits: Sequence[int], odd: int = 0) -> list[int]:
    """Pages of one digit each, so that prefixes meet often; and part of a page."""
    return [*[digit for digit in digits for _ in range(CONFIG.page_size)], *[7] * odd]


# ---- any program ----------------------------------------------------------------------------

_digits = st.lists(st.integers(0, 1), min_size=1, max_size=5)
_which = st.integers(0, 7)


class ForkMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.world = Forks()

    def pick(self, which: int) -> Fork | None:
        rows = self.world.rows
        return rows[which % len(rows)] if rows else None

    @rule(digits=_digits, odd=st.integers(0, 3), ns=st.sampled_from([0, 0, 0, 1]))
    def start(self, digits, odd, ns):
        if len(self.world.rows) < 4:
            self.world.start(words(digits, odd), ns)

    @rule(which=_which, times=st.integers(1, 2))
    def fork(self, which, times):
        row = self.pick(which)
        for _ in range(times):
            if row is not None and len(self.world.rows) < 6:
                self.world.fork(row)

    @rule(which=_which, more=st.lists(st.integers(0, 1), min_size=1, max_size=5))
    def grow(self, which, more):
        row = self.pick(which)
        if row is not None and len(row.tokens) + len(more) <= LONGEST:
            self.world.grow(row, more)

    @rule(which=_which, keeps=st.booleans())
    def leave(self, which, keeps):
        row = self.pick(which)
        if row is not None:
            self.world.leave(row, keeps=keeps)

    @rule(which=_which)
    def give(self, which):
        row = self.pick(which)
        if row is not None:
            self.world.give(row)

    @rule(which=_which, caches=st.integers(0, 3))
    def end(self, which, caches):
        row = self.pick(which)
        if row is not None:
            self.world.end(row) if caches else self.world.stop(row)

    @rule(full=st.integers(0, 2), of_swa=st.integers(0, 3))
    def evict(self, full, of_swa):
        self.world.evict(full=4 * full, swa_tokens=4 * of_swa)

    @invariant()
    def laws(self):
        self.world.check_all()

    def teardown(self):
        self.world.all_gone()


def test_forks_beside_a_cache_keep_their_pages_and_leak_none():
    case = ForkMachine.TestCase
    case.settings = settings(
        max_examples=max(settings().max_examples // 2, 10),
        stateful_step_count=25,
        deadline=None,
        phases=(Phase.explicit, Phase.reuse, Phase.generate),
        report_multiple_bugs=False,
    )
    case("runTest").runTest()


# ---- one thing each -------------------------------------------------------------------------


def begin(world: Forks, tokens: Sequence[int], ns: int = 0) -> Fork:
    row = world.start(tokens, ns)
    assert row is not None
    return row


def holders(world: Forks, slots: Sequence[int]) -> list[tuple[int, int]]:
    """How many hold the page of each slot, and its SWA side."""
    full, of_swa = (np.asarray(pool.holders) for pool in (world.state.full, world.state.swa))
    to = np.asarray(world.state.full_to_swa)
    pages = [slot // world.page for slot in slots]
    return [(int(full[page]), int(of_swa[to[page]]) if to[page] else 0) for page in pages]


def test_the_share_of_a_request_that_ends_is_the_trees():
    world = Forks()
    row = begin(world, words([0, 1, 0], 2))
    child = world.fork(row)
    assert world.end(row).length == 12
    assert holders(world, child.slots[::4]) == [(2, 2)] * 3 + [(1, 1)]
    assert world.grow(child, [1] * 7)
    world.check_all()
    assert world.evict(full=64) == (0, 0)  # what the child holds too is no page to give
    world.check_all()
    assert len(world.nodes()) == 3
    world.end(child)
    world.check_all()
    assert world.evict(full=64) == (20, 20)
    world.all_gone()


def test_the_second_fork_that_inserts_gives_its_share_up():
    world = Forks()
    row = begin(world, words([0, 1, 0], 2))
    child = world.fork(row)
    world.give(row)
    world.check_all()
    taken = world.give(child)
    assert (taken.cached, taken.length) == (12, 12)
    assert holders(world, child.slots[:12:4]) == [(1, 1)] * 3
    world.check_all()
    world.end(row)
    assert world.grow(child, [1] * 4)
    world.check_all()
    world.all_gone()


def test_without_a_boundary_a_page_of_the_tree_is_taken_for_a_matched_one():
    world = Forks()
    row = begin(world, words([0, 1]))
    child = world.fork(row)
    world.give(row)
    taken = World.insert(world, child.tokens, child.slots)
    assert (taken.cached, taken.slots) == (8, child.slots)
    assert holders(world, child.slots[::4]) == [(2, 2)] * 2
    world.check_all()


@pytest.mark.parametrize("start", [-5, 0, 1, 4, 5, 8])
def test_shares_are_given_up_from_the_boundary_on(start):
    world = Forks()
    row = begin(world, words([0, 1, 0]))
    child = world.fork(row)
    world.give(row)
    row, count = world._row(child.tokens, None)
    slots = ints(child.slots, world.width)
    _, state, _ = compiled("insert")(
        world.cache,
        world.state,
        row,
        count,
        slots,
        namespace=jnp.int32(0),
        owned_from=jnp.int32(start),
    )
    first = -(-max(start, 0) // 4)
    assert state.full.holders[slots[:12:4] // 4].tolist() == [2] * first + [1] * (3 - first)


def test_a_share_that_nobody_but_the_tree_holds_is_not_given_up():
    world = Forks()
    row = begin(world, words([0, 1, 0]))
    world.give(row)
    row.tree = 4  # it stands on the tree with all of its 12 tokens
    world.give(row)
    assert world.probe().faults["double_free"] == 2
    assert holders(world, row.slots[::4]) == [(1, 1)] * 3


def test_a_share_is_given_up_for_the_same_text_of_another_namespace():
    world = Forks()
    row = begin(world, words([0, 1]))
    child = world.fork(row)
    world.give(row)
    other = begin(world, words([0, 1]), ns=1)
    world.end(other)
    child.ns = 1
    for slot, of_swa in zip(child.slots, world.swa_slots(child.slots), strict=True):
        assert of_swa
        assert len(world.full_kv[slot]) > 1
    taken = world.give(child)
    assert taken.length == 8
    assert taken.slots == other.slots
    assert holders(world, row.slots[::4]) == [(1, 1)] * 2
    world.check_all()
    world.all_gone()


def test_the_swa_page_of_a_copy_that_others_hold_does_not_move():
    world = Forks()
    old = begin(world, words([0, 1, 0, 1]))
    world.leave(old, keeps=False)
    world.end(old)
    assert len(world.tombstones()) == 2
    row = begin(world, words([0, 1, 0, 0]))  # its match fails at the tombstones
    child = world.fork(row)
    taken = world.give(row)
    assert (taken.cached, taken.length, row.tree) == (0, 0, 0)
    world.check_all()  # both find their windows
    world.stop(child)
    taken = world.give(row)  # alone with its copies now
    assert (taken.cached, taken.length) == (12, 16)
    assert not world.tombstones()
    world.check_all()
    world.all_gone()


def test_a_node_that_others_keep_alive_has_a_share_of_its_own():
    world = Forks()
    row = begin(world, words([0, 1, 0]))
    child = world.fork(row)
    assert world.grow(row, [1] * 4)
    world.leave(row, keeps=False)  # past two pages that the child still reads
    world.end(row)
    assert len(world.tombstones()) == 0
    guest = begin(world, words([0, 1], 1))
    assert guest.tree == 8
    assert world.grow(child, [0] * 4)
    world.leave(child, keeps=False)
    world.check_all()  # the guest's window lies in these pages
    world.all_gone()


def test_evicting_swa_passes_over_pages_that_others_hold():
    world = Forks()
    row = begin(world, words([0, 1, 0]))
    child = world.fork(row)
    world.end(row)
    other = begin(world, words([1, 1]))
    world.end(other)
    assert world.evict(swa_tokens=48) == (8, 8)
    world.check_all()
    assert len(world.nodes()) == 3
    world.stop(child)
    assert world.evict(swa_tokens=48) == (12, 12)
    world.all_gone()
