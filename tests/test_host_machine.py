"""Random requests, evictions and restores over allocator, cache, host tier and storage."""

import jax
import numpy as np
from compare import assert_bitwise_equal
from host_pair import HostWorld
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

import swa_jax as swa
from swa_jax.host_cache import MemoryStorage

WIDTH = 32
_digits = st.lists(st.integers(0, 1), min_size=3, max_size=7)
_pages = st.integers(0, 4)
_amounts = st.sampled_from([0, 1, 2, 3, 6, 12])
_spaces = st.integers(0, 1)
_OTHERS = (
    "lock",
    "unlock",
    "unlock_early",
    "pin",
    "unpin",
    "hold",
    "let_go",
    "group_or_not",
    "group_or_not",
    "wait",
    "backup",
    "evict_unsaved",
)


class HostMachine(RuleBasedStateMachine):
    """Subclasses name the sizes and the options."""

    config = swa.PoolConfig(48, 24, 4, 6)
    host = (64, 24)
    options: dict = {"is_bigram": True, "policy": "write_back"}  # noqa: RUF012

    def __init__(self) -> None:
        super().__init__()
        self.world = HostWorld(self.config, *self.host, width=WIDTH, **self.options)
        self.page = self.config.page_size
        self.lag = self.world.lag
        self.others: list[list[int]] = []  # slots held outside
        self.locks: list = []
        self.pins: list = []
        self.group = False
        self.texts: list[tuple[list[int], int]] = []  # with their namespace

    # ---- helpers ------------------------------------------------------------------------

    def words(self, digits, odd):
        """Pages of one digit each, so that prefixes meet often; and part of a page."""
        tokens = [digit for digit in digits for _ in range(self.page)]
        return [*tokens, *[7] * (1 + odd)][:WIDTH]

    def make_room(self, tokens, *, past_host):
        pages = -(-tokens // self.page) * self.page
        lacks = [max(0, pages - left) for left in self.world.left]
        if any(lacks):
            drive = self.world.evict if past_host else self.world.drive_out
            drive(full=lacks[0], swa_tokens=lacks[1])

    # ---- rules --------------------------------------------------------------------------

    @initialize(texts=st.lists(st.tuples(_digits, _spaces), min_size=2, max_size=4), full=_amounts)
    def begin(self, texts, full) -> None:
        """Turns of conversations, each saved: ends in the middle of a branch become tombstones."""
        for digits, space in texts:
            self.serve(digits[:3], 0, space, 0)
            self.world.backup()
            self.serve(digits, 0, space, 0)
        self.world.drive_out(swa_tokens=self.config.swa_tokens // 2)
        self.world.drive_out(full=full * self.page)

    @precondition(lambda self: not self.group)
    @rule(digits=_digits, odd=st.integers(0, 2), space=_spaces, first=_pages)
    def serve(self, digits, odd, space, first) -> None:
        """A request, whose first pages may leave their window before it is cached."""
        tokens = self.words(digits, odd)
        self.make_room(len(tokens), past_host=first == 4)
        dead = range(min(first * self.page, (len(tokens) - self.page) // self.page * self.page))
        if self.world.serve(tokens, ns=space, dead=dead):
            self.texts.append((tokens, space))

    @rule(full=_amounts, of_swa=_amounts)
    def drive_out(self, full, of_swa) -> None:
        self.world.drive_out(full=full * self.page, swa_tokens=of_swa * self.page)

    @precondition(lambda self: self.texts)
    @rule(which=st.integers(0, 30), cut=st.integers(0, 6), ahead=st.booleans())
    def restore(self, which, cut, ahead) -> None:
        """A prompt that begins like one that was served, some of which may be on the host."""
        tokens, space = self.texts[-1 - which % len(self.texts)]
        self._restore([*tokens[: max(2, len(tokens) - cut)], 9][:WIDTH], space, ahead)

    @precondition(lambda self: self.texts)
    @rule(which=st.integers(0, 30), full=_amounts, of_swa=_amounts, ahead=st.booleans())
    def out_and_back(self, which, full, of_swa, ahead) -> None:
        self.world.drive_out(full=full * self.page, swa_tokens=of_swa * self.page)
        tokens, space = self.texts[-1 - which % len(self.texts)]
        self._restore(tokens, space, ahead)

    def _restore(self, tokens, space, ahead) -> None:
        world, length = self.world, len(tokens) - 1 + self.lag
        if ahead:
            self.prefetch(tokens, length, space)
        told = world.host_match(tokens, length, ns=space)
        had = world.check_match(tokens, length, ns=space).length
        assert told.device_length == had <= told.length
        left, before = world.left, jax.device_get((world.cache, world.state))
        got = world.restore(tokens, length, ns=space)
        if not got.ok:
            assert int(got.full_short) + int(got.swa_short) > 0
            assert self.others or self.locks or self.group, "all of it could be evicted"
            assert_bitwise_equal(before, (world.cache, world.state))
        now = world.check_match(tokens, length, ns=space).length
        assert now == int(got.length) == (told.length if got.ok else had)
        if got.ok:
            took = int(got.full_tokens), int(got.swa_tokens)
            assert took == (told.full_tokens, told.swa_tokens)
            for was, is_now, more in zip(left, world.left, took, strict=True):
                assert is_now >= was - more
                assert is_now == was - more or self.group or min(left) < max(took)

    def prefetch(self, tokens, length, space):
        world = self.world
        row, count = world._row(tokens, length)
        fetched = world.host.prefetch(world.cache, world.state, row, count, namespace=space)
        fetched.wait()
        if len(tokens) % 2:
            world.host.release(fetched)

    @rule(what=st.sampled_from(_OTHERS), which=st.integers(0, 30), pages=st.integers(1, 4))
    def somebody_else(self, what, which, pages) -> None:
        """Locks, pins, pages held by others, and free groups."""
        getattr(self, what)(which, pages)

    def lock(self, which, pages):
        if len(self.locks) < 2 and self.texts:
            tokens, space = self.texts[which % len(self.texts)]
            self.locks.append(self.world.lock(self.world.match(tokens, ns=space).node))

    def unlock(self, which, pages):
        if self.locks:
            self.world.unlock(self.locks.pop(which % len(self.locks)))

    def unlock_early(self, which, pages):
        if self.locks:
            receipt = self.locks.pop(which % len(self.locks))
            self.locks.append(self.world.release_below(receipt, pages * self.page))

    def pin(self, which, pages):
        if len(self.pins) < 2 and self.texts:
            tokens, space = self.texts[which % len(self.texts)]
            self.pins.append(self.world.host.pin(np.asarray(tokens), namespace=space))

    def unpin(self, which, pages):
        if self.pins:
            self.world.host.unpin(self.pins.pop())

    def hold(self, which, pages):
        if len(self.others) < 2 and not self.group:
            slots = self.world.try_extend([], pages * self.page)
            if slots is not None:
                self.others.append(slots)

    def let_go(self, which, pages):
        if self.others:
            self.world.free(self.others.pop())

    def group_or_not(self, which, pages):
        (self.world.end_group if self.group else self.world.begin_group)()
        self.group = not self.group

    def backup(self, which, pages):
        self.world.backup()

    def evict_unsaved(self, which, pages):
        self.world.evict(swa_tokens=pages * self.page)

    def wait(self, which, pages):
        self.world.host.wait()

    @invariant()
    def laws(self) -> None:
        held = sum(map(len, self.others))
        if self.group:
            return
        self.world.verify_all(held=held, held_live=held)


class StoredMachine(HostMachine):
    """Write-through with a storage below a host that is too small."""

    host = (32, 16)
    options = {  # noqa: RUF012
        "is_bigram": True,
        "policy": "write_through",
        "fingerprint": b"one",
    }

    def __init__(self) -> None:
        self.options = {**self.options, "storage": MemoryStorage(60)}
        super().__init__()


TestHost = HostMachine.TestCase
TestHost.settings = settings(max_examples=12, stateful_step_count=20, deadline=None)
TestStored = StoredMachine.TestCase
TestStored.settings = settings(max_examples=8, stateful_step_count=20, deadline=None)
