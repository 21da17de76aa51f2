"""Random requests over allocator and cache together, compared with the oracle after each step."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from prefix_oracle import Name, OracleReceipt, PrefixOracle
from prefix_pair import WIDTH, Taken, World

import swa_jax as swa
from swa_jax import prefix_cache as pc

_digits = st.lists(st.integers(0, 1), min_size=1, max_size=7)
_few = st.lists(st.integers(0, 1), min_size=1, max_size=3)
_which = st.integers(0, 7)
_pages = st.integers(0, 2)


@dataclasses.dataclass
class Request:
    """One running request. Its first `tree` pages are the tree's, the others its own."""

    ns: int
    tokens: list[int]
    slots: list[int]
    tree: int
    own: list[bool]  # is the page live in SWA?
    receipt: pc.Receipt
    mirror: OracleReceipt
    done: int  # tokens whose SWA pages were given back
    priority: int


class PrefixMachine(RuleBasedStateMachine):
    """Subclasses name the sizes and the cache's options."""

    config = swa.PoolConfig(24, 16, 1, 4)
    options: dict[str, Any] = {}  # noqa: RUF012

    def __init__(self) -> None:
        super().__init__()
        self.world = World(self.config, **self.options)
        known = {key: value for key, value in self.options.items() if key != "hash_bits"}
        self.oracle = PrefixOracle(self.config, **known)
        self.page = self.config.page_size
        self.requests: list[Request] = []

    # ---- helpers ------------------------------------------------------------------------

    def words(self, digits: list[int], odd: int) -> list[int]:
        """Pages of one digit each, so that prefixes meet often; and part of a page."""
        tokens = [digit for digit in digits for _ in range(self.page)]
        return [*tokens, *[7] * (odd % self.page)][:WIDTH]

    def pick(self, which: int) -> Request | None:
        return self.requests[which % len(self.requests)] if self.requests else None

    def boundary(self, length: int) -> int:
        """Tokens of a request that an insert would take."""
        return max(0, length - bool(self.options.get("is_bigram"))) // self.page * self.page

    def evict_both(self, full: int, swa_tokens: int) -> None:
        got = self.world.evict(full=full, swa_tokens=swa_tokens)
        assert got == self.oracle.evict(full=full, swa_tokens=swa_tokens)

    def make_room(self, pages: int) -> None:
        short = [max(0, pages * self.page - left) for left in self.oracle.left()]
        if any(short):
            self.evict_both(*short)

    def grow_slots(self, slots: list[int], length: int, own: list[bool]) -> list[int] | None:
        """Grows in both, evicting what is short; None if it was refused."""
        pages = -(-length // self.page) - -(-len(slots) // self.page)
        self.make_room(pages)
        granted = self.oracle.grant(pages)
        grown = self.world.try_extend(slots, length)
        assert (grown is not None) == granted
        if granted:
            own += [True] * pages
        return grown

    def give_up(self, request: Request) -> None:
        self.requests.remove(request)
        self.world.free(request.slots[request.tree * self.page :])
        self.oracle.free(request.own)
        self.world.unlock(request.receipt)
        self.oracle.unlock(request.mirror)

    def insert_both(self, request: Request, length: int) -> tuple[Taken, list[Name]]:
        """Inserts and swaps the lock; the request's pages past the insert stay its own."""
        own = [*[None] * request.tree, *request.own]
        taken = self.world.insert(
            request.tokens, request.slots, length, ns=request.ns, priority=request.priority
        )
        before, path = self.oracle.insert(request.tokens, length, own, request.ns, request.priority)
        assert (taken.cached, taken.length) == (before * self.page, len(path) * self.page)
        assert len(path) >= request.tree
        nodes = self.world.nodes()
        assert [s // self.page for s in taken.slots[: taken.length : self.page]] == [
            nodes[name] for name in path
        ]
        assert taken.node == (nodes[path[-1]] if path else 0)
        assert taken.slots[taken.length :] == request.slots[taken.length :]
        request.slots = taken.slots
        request.own = request.own[len(path) - request.tree :]
        request.tree = len(path)
        request.done = max(request.done, taken.length)
        return taken, path

    # ---- rules --------------------------------------------------------------------------

    @rule(
        digits=_digits,
        odd=st.integers(0, 3),
        ns=st.integers(0, 1),
        all_of_it=st.booleans(),
        priority=st.integers(-2, 2),
    )
    def start(self, digits, odd, ns, all_of_it, priority):
        if len(self.requests) >= 3:
            return
        tokens = self.words(digits, odd)
        length = len(tokens) if all_of_it else len(tokens) - 1
        found = self.world.match(tokens, length, ns=ns)
        path = self.oracle.match(tokens, length, ns)
        assert found.length == len(path) * self.page
        nodes = self.world.nodes()
        assert found.node == (nodes[path[-1]] if path else 0)
        receipt, mirror = self.world.lock(found.node), self.oracle.lock(path)
        own: list[bool] = []
        slots = self.grow_slots(found.slots, len(tokens), own)
        if slots is None:
            self.world.unlock(receipt)
            self.oracle.unlock(mirror)
            return
        self.requests.append(
            Request(
                ns, tokens, slots, len(path), own, receipt, mirror, len(path) * self.page, priority
            )
        )

    @rule(which=_which, digits=_few)
    def decode(self, which, digits):
        request = self.pick(which)
        if request is None:
            return
        tokens = [*request.tokens, *digits][:WIDTH]
        slots = self.grow_slots(request.slots, len(tokens), request.own)
        if slots is not None:
            request.tokens, request.slots = tokens, slots

    @rule(which=_which)
    def leave_window(self, which):
        request = self.pick(which)
        if request is None or self.config.sliding_window is None:
            return
        n = len(request.tokens)
        start = max(request.done, request.tree * self.page)
        done = self.world.leave_window(request.slots, start, insert=self.boundary(n))
        window = self.config.sliding_window
        edge = min(max(0, n - window), max(0, self.boundary(n) - window)) // self.page
        assert done == max(start, edge * self.page)
        for page in range(request.tree, done // self.page):
            self.oracle.free_swa += request.own[page - request.tree]
            request.own[page - request.tree] = False
        request.done = done

    @rule(which=_which)
    def go_on_in_the_tree(self, which):
        """An unfinished request: insert, then lock the longer path instead of the shorter."""
        request = self.pick(which)
        if request is None:
            return
        taken, path = self.insert_both(request, len(request.tokens))
        self.world.unlock(request.receipt)
        self.oracle.unlock(request.mirror)
        request.receipt, request.mirror = self.world.lock(taken.node), self.oracle.lock(path)

    @rule(which=_which, anyway=st.booleans())
    def release_early(self, which, anyway):
        """The SWA part of the lock: as far as it has left the window, or all of it."""
        request = self.pick(which)
        if request is None or self.config.sliding_window is None:
            return
        edge = max(0, self.boundary(len(request.tokens)) - self.config.sliding_window)
        edge = 2**31 - 1 if anyway else edge
        request.receipt = self.world.release_below(request.receipt, edge)
        request.mirror = self.oracle.release_swa_lock(request.mirror, edge)

    @rule(which=_which, uncommitted=st.integers(0, 3))
    def finish(self, which, uncommitted):
        request = self.pick(which)
        if request is None:
            return
        in_tree = request.tree * self.page
        in_tree += bool(self.options.get("is_bigram")) if in_tree else 0
        length = max(len(request.tokens) - uncommitted, in_tree)
        self.insert_both(request, length)
        self.give_up(request)

    @rule(digits=_digits, odd=st.integers(0, 3), ns=st.integers(0, 1), leaves=st.booleans())
    def serve(self, digits, odd, ns, leaves):
        """A request from start to end, so that there is something to match."""
        running = len(self.requests)
        self.start(digits, odd, ns, all_of_it=True, priority=0)
        if len(self.requests) > running:
            if leaves:
                self.leave_window(running)
            self.finish(running, uncommitted=0)

    @rule(digits=_digits, more=_few, leaves=st.booleans())
    def come_back(self, digits, more, leaves):
        """Two turns of one conversation."""
        self.serve(digits, 0, 0, leaves)
        self.serve([*digits, *more][:7], 0, 0, leaves)

    @rule(which=_which)
    def finish_all(self, which):
        while self.requests:
            self.finish(which, uncommitted=0)

    @rule(which=_which, sure=st.integers(0, 3))
    def abort(self, which, sure):
        request = self.pick(which)
        if request is not None and sure == 0:
            self.give_up(request)

    @rule(full=_pages, of_swa=_pages, odd=st.integers(0, 1))
    def evict(self, full, of_swa, odd):
        self.evict_both(full * self.page + odd, of_swa * self.page - odd)

    @rule(digits=_digits, odd=st.integers(0, 3), ns=st.integers(0, 1))
    def ask(self, digits, odd, ns):
        tokens = self.words(digits, odd)
        found = self.world.match(tokens, ns=ns)
        path = self.oracle.match(tokens, len(tokens), ns)
        nodes = self.world.nodes()
        pages = [slot // self.page for slot in found.slots[:: self.page]]
        assert pages == [nodes[name] for name in path]

    # ---- after every step ---------------------------------------------------------------

    @invariant()
    def agree(self):
        held = sum(len(request.own) for request in self.requests)
        live = sum(sum(request.own) for request in self.requests)
        self.oracle.check(held, live)
        probe = self.world.verify(held=held * self.page, held_live=live * self.page)
        assert probe.left == self.oracle.left()
        assert probe.sizes == self.oracle.sizes()
        nodes = self.world.nodes()
        assert set(nodes) == set(self.oracle.nodes)
        assert self.world.tombstones() == self.oracle.tombstones()
        names = list(nodes)
        locks = self.world.locks([nodes[name] * self.page for name in names])
        mirror = [self.oracle.nodes[name] for name in names]
        assert locks == [(node.full_locks, node.swa_locks) for node in mirror]

    def teardown(self):
        for request in list(self.requests):
            self.give_up(request)
        self.world.evict(full=self.config.full_tokens)
        assert not self.world.nodes()
        assert self.world.verify().left == (self.config.full_tokens, self.config.swa_tokens)


# Shrinking a walk of many steps takes minutes: look at the walk as it was found.
PHASES = (Phase.explicit, Phase.reuse, Phase.generate)
STEPS = 40
TOKENS, SMALL, WIDE = (
    swa.PoolConfig(28, 20, 1, 4),
    swa.PoolConfig(96, 64, 4, 2),
    swa.PoolConfig(112, 80, 4, 6),
)
KINDS = {
    "lru": (TOKENS, {}),
    "all_collide_fifo": (TOKENS, {"hash_bits": 0, "policy": "fifo", "is_bigram": True}),
    "window_below_page_lfu": (SMALL, {"hash_bits": 3, "policy": "lfu"}),
    "wide_window_priority": (WIDE, {"hash_bits": 0, "policy": "priority"}),
    "bigram_pages": (WIDE, {"is_bigram": True}),
}


@pytest.mark.parametrize("kind", KINDS)
def test_requests_agree_with_the_oracle(kind):
    machine = type(
        "Machine", (PrefixMachine,), {"config": KINDS[kind][0], "options": KINDS[kind][1]}
    )
    case = machine.TestCase
    case.settings = settings(
        stateful_step_count=STEPS, deadline=None, phases=PHASES, report_multiple_bugs=False
    )
    case("runTest").runTest()
