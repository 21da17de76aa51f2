"""Random requests over a prefill and a decode side, compared with plain Python after each step.

The oracle knows counts and prefixes; that the right bytes arrived is seen in the KV itself.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from disagg_pair import WIDTH, DecodeSide, PrefillSide, Row
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from prefix_oracle import Name, OracleReceipt, PrefixOracle

import swa_jax as swa
from swa_jax import disagg

ROOM = (7, 5)  # tokens of a piece, full and SWA
_which = st.integers(0, 7)
_digits = st.lists(st.integers(0, 1), min_size=1, max_size=6)


def same(before: Any, after: Any) -> bool:
    """Bit for bit."""
    pairs = zip(jax.tree.leaves(before), jax.tree.leaves(after), strict=True)
    return all(np.array_equal(np.asarray(a), np.asarray(b)) for a, b in pairs)


@dataclasses.dataclass(eq=False)
class Pending:
    """A reservation, as the oracle has it."""

    ns: int
    tokens: list[int]
    length: int
    prefix: int
    swa_start: int
    own: list[bool]  # pages past the prefix: with an SWA side?
    mirror: OracleReceipt
    ask: disagg.Ask
    starts: list[tuple[int, int]]
    row: Row | None  # where its KV comes from, while it is there
    age: int = 0
    sent: int = 0  # pieces that arrived
    size: int = 0  # bytes of them
    last: disagg.Piece | None = None

    @property
    def ticket(self) -> disagg.Ticket:
        return self.ask.ticket


@dataclasses.dataclass(eq=False)
class Running:
    """A committed request."""

    pending: Pending
    committed: disagg.Committed
    own: list[bool]
    mirror: OracleReceipt


class DisaggMachine(RuleBasedStateMachine):
    """Subclasses name the pools."""

    decode_pool = swa.PoolConfig(64, 32, 4, 6)
    prefill_page = 2
    is_bigram = False

    def __init__(self) -> None:
        super().__init__()
        window = disagg.prefill_window(
            swa.PoolConfig(8, 8, self.prefill_page), self.decode_pool, int(self.is_bigram)
        )
        pool = swa.PoolConfig(96, 72, self.prefill_page, window)
        self.prefill = PrefillSide(pool, is_bigram=self.is_bigram)
        self.decode = DecodeSide(self.decode_pool, is_bigram=self.is_bigram)
        self.oracle = PrefixOracle(self.decode_pool, is_bigram=self.is_bigram)
        self.page, self.lag = self.decode_pool.page_size, int(self.is_bigram)
        self.rows: list[Row] = []
        self.pending: list[Pending] = []
        self.running: list[Running] = []
        self.spent: list[disagg.Ticket] = []
        self.piece: disagg.Piece | None = None
        self.refused = 0

    # ---- helpers ------------------------------------------------------------------------

    def words(self, digits: list[int], odd: int) -> list[int]:
        tokens = [digit for digit in digits for _ in range(4)]
        return [*tokens, *[7] * odd][: WIDTH if odd else WIDTH - 1]

    def need(self, length: int, prefix: int) -> tuple[int, int, int, int]:
        """Where SWA begins, the pages that are lacking of each pool, and what is never read."""
        window, size = self.decode_pool.sliding_window or 0, self.page
        boundary = max(0, length - self.lag) // size * size
        edge = max(0, min(length, boundary) - window) // size * size
        start, pages = max(prefix, edge), -(-length // size)
        return start, pages - prefix // size, pages - start // size, edge

    def unchanged(self, call: Any, *, counts: bool) -> Any:
        """What `call` answers; it must change nothing, but may count a refusal."""
        before = (*self.decode.sides, self.decode.pools)
        answer = call()
        self.refused += counts
        assert int(self.decode.inbox.refused) == self.refused
        inbox = dataclasses.replace(self.decode.inbox, refused=before[0].refused)
        assert same(before, (inbox, self.decode.state, self.decode.cache, self.decode.pools))
        return answer

    # ---- reserving ----------------------------------------------------------------------

    def reserve(self, ns: int, tokens: list[int], length: int, row: Row | None) -> None:
        oracle = self.oracle.copy()
        path: list[Name] = []
        if length > 0:
            path = oracle.match(tokens, min(length + self.lag, WIDTH), ns)
        prefix = len(path) * self.page
        start, full, of_swa, edge = self.need(length, prefix)
        mirror = oracle.release_swa_lock(oracle.lock(path), edge)
        evictable = oracle.sizes()
        short = (
            max(0, full - oracle.free_full - evictable[0] // self.page),
            max(0, of_swa - oracle.free_swa - evictable[1] // self.page),
        )
        if any(short) or len(self.pending) == 3:
            got = self.unchanged(lambda: self.decode.preallocate(tokens, length, ns), counts=False)
            assert not got.ok
            assert not got.never
            assert (int(got.full_short), int(got.swa_short)) == short
            assert int(got.length) == int(got.ticket.serial) == 0
            return
        lacking = max(0, full - oracle.free_full), max(0, of_swa - oracle.free_swa)
        if any(lacking):
            oracle.evict(full=lacking[0] * self.page, swa_tokens=lacking[1] * self.page)
        oracle.free_full -= full
        oracle.free_swa -= of_swa
        self.oracle = oracle
        got = self.decode.preallocate(tokens, length, ns)
        assert got.ok
        assert (int(got.full_start), int(got.swa_start)) == (prefix, start)
        assert (int(got.full_short), int(got.swa_short)) == (0, 0)
        own = [
            page * self.page >= start
            for page in range(prefix // self.page, prefix // self.page + full)
        ]
        assert sum(own) == of_swa
        starts = disagg.pieces(got.ask, *ROOM)
        self.pending.append(
            Pending(ns, tokens, length, prefix, start, own, mirror, got.ask, starts, row)
        )

    def give_up(self, entry: Pending) -> None:
        """What an abort does to the oracle."""
        self.pending.remove(entry)
        self.spent.append(entry.ticket)
        self.oracle.free(entry.own)
        self.oracle.unlock(entry.mirror)

    def pick(self, entries: list[Any], which: int) -> Any:
        return entries[which % len(entries)] if entries else None

    # ---- rules --------------------------------------------------------------------------

    @rule(digits=_digits, odd=st.integers(0, 3), ns=st.integers(0, 1))
    def compute(self, digits, odd, ns):
        if len(self.rows) < 3:
            row = self.prefill.prefill(ns, self.words(digits, odd))
            if row is not None:
                self.rows.append(row)

    @rule(which=_which)
    def ask(self, which):
        row = self.pick(self.rows, which)
        if row is not None:
            self.reserve(row.ns, row.tokens, row.length, row)

    @rule(digits=_digits, odd=st.integers(0, 3))
    def ask_for_what_nobody_has(self, digits, odd):
        tokens = self.words(digits, odd)
        self.reserve(0, tokens, len(tokens) - self.lag, None)

    @rule(which=_which, times=st.integers(1, 4))
    def send(self, which, times):
        entry = self.pick(self.pending, which)
        for _ in range(times):
            if entry is None or entry.row is None or entry.sent == len(entry.starts):
                return
            start = entry.starts[entry.sent]
            piece = self.prefill.pack(entry.row, entry.ask, start, ROOM)
            assert piece.ok, (entry, start)
            assert self.decode.receive(piece)
            entry.sent, entry.last, self.piece = entry.sent + 1, piece, piece
            entry.size += disagg.piece_bytes(piece)

    @rule(which=_which)
    def send_again(self, which):
        entry = self.pick(self.pending, which)
        if entry is not None and entry.last is not None:
            assert self.unchanged(lambda: self.decode.receive(entry.last), counts=False)

    @rule(which=_which, how=st.integers(0, 3))
    def send_wrong(self, which, how):
        """A piece too early, one that could not be packed, one with a made-up range or ticket."""
        entry = self.pick(self.pending, which)
        if entry is None or entry.row is None or entry.sent + 1 >= len(entry.starts):
            return
        piece = self.prefill.pack(entry.row, entry.ask, entry.starts[entry.sent + 1], ROOM)
        if how == 1:
            piece = dataclasses.replace(piece, ok=jnp.zeros((), bool))
        elif how == 2:
            count = jnp.int32(WIDTH)
            piece = dataclasses.replace(piece, full_from=entry.ask.length, full_count=count)
        elif how == 3:
            ticket = disagg.Ticket(entry.ticket.place, entry.ticket.serial + 1)
            piece = self.prefill.pack(entry.row, entry.ask, entry.starts[entry.sent], ROOM)
            piece = dataclasses.replace(piece, ticket=ticket)
        assert not self.unchanged(lambda: self.decode.receive(piece), counts=True)

    @rule(which=_which)
    def commit(self, which):
        entry = self.pick(self.pending, which)
        if entry is None:
            return
        if entry.sent < len(entry.starts):
            got = self.unchanged(lambda: self.decode.commit(entry.ticket), counts=True)
            assert not got.ok
            return
        got = self.decode.commit(entry.ticket)
        self.pending.remove(entry)
        self.spent.append(entry.ticket)
        assert got.ok
        own, before = entry.own, entry.prefix // self.page
        pages = [*[None] * before, *own]
        _, path = self.oracle.insert(entry.tokens, entry.length, pages, entry.ns)
        # With keys of pairs an insert may reach less far than the match did.
        path = path if len(path) >= before else list(entry.mirror.full)
        mirror = self.oracle.lock(path)
        self.oracle.unlock(entry.mirror)
        own, before = own[len(path) - before :], len(path)
        assert int(got.length) == entry.length
        assert int(got.owned_from) == before * self.page
        assert int(got.evicted) == max(entry.swa_start, before * self.page)
        table = np.asarray(got.table)
        last = table[(entry.length - 1) // self.page] + (entry.length - 1) % self.page
        assert int(got.last_loc) == last
        self.check_kv(entry, got)
        full, of_swa = disagg.token_bytes(self.decode.pools)
        assert entry.size == full * (entry.length - entry.prefix) + of_swa * (
            entry.length - entry.swa_start
        )
        self.running.append(Running(entry, got, own, mirror))

    def check_kv(self, entry: Pending, got: disagg.Committed) -> None:
        """All full KV, and SWA from where the next token needs it."""
        window = self.decode_pool.sliding_window or 0
        edge = max(0, entry.length - window)
        self.decode.check_kv(entry.ns, entry.tokens, entry.length, got.table, edge)

    @rule(which=_which)
    def abort(self, which):
        entry = self.pick(self.pending, which)
        if entry is not None:
            self.decode.abort(entry.ticket)
            self.give_up(entry)

    @rule(age=st.integers(1, 3))
    def time_passes(self, age):
        self.decode.inbox = disagg.tick(self.decode.inbox)
        for entry in self.pending:
            entry.age += 1
        self.decode.abort_older(age)
        for entry in [entry for entry in self.pending if entry.age >= age]:
            self.give_up(entry)

    @rule(which=_which, what=st.integers(0, 2))
    def use_a_spent_ticket(self, which, what):
        ticket = self.pick(self.spent, which)
        if ticket is None:
            return
        if what == 0:
            self.unchanged(lambda: self.decode.abort(ticket), counts=True)
        elif what == 1:
            assert not self.unchanged(lambda: self.decode.commit(ticket), counts=True).ok
        elif self.piece is not None:
            piece = dataclasses.replace(self.piece, ticket=ticket)
            assert not self.unchanged(lambda: self.decode.receive(piece), counts=True)

    @rule(which=_which)
    def finish(self, which):
        entry = self.pick(self.running, which)
        if entry is not None:
            self.check_kv(entry.pending, entry.committed)
            self.running.remove(entry)
            self.decode.let_go(entry.committed)
            self.oracle.free(entry.own)
            self.oracle.unlock(entry.mirror)

    @rule(full=st.integers(0, 2), of_swa=st.integers(0, 3))
    def evict(self, full, of_swa):
        self.decode.evict(full * self.page, of_swa * self.page)
        self.oracle.evict(full=full * self.page, swa_tokens=of_swa * self.page)

    @rule(full=st.integers(0, 3), of_swa=st.integers(0, 3))
    def evict_from_the_prefill_side(self, full, of_swa):
        self.prefill.evict(full * self.prefill_page, of_swa * self.prefill_page)

    @rule(which=_which, cancels=st.booleans())
    def row_leaves(self, which, cancels):
        row = self.pick(self.rows, which)
        if row is not None:
            self.rows.remove(row)
            (self.prefill.cancel if cancels else self.prefill.end)(row)
            for entry in self.pending:
                entry.row = None if entry.row is row else entry.row

    @rule(digits=_digits, odd=st.integers(0, 3), ns=st.integers(0, 1))
    def serve(self, digits, odd, ns):
        """A request from start to end, so that there is something to match."""
        rows, entries, running = len(self.rows), len(self.pending), len(self.running)
        self.compute(digits, odd, ns)
        if len(self.rows) == rows:
            return
        self.ask(rows)
        if len(self.pending) > entries:
            self.send(entries, WIDTH)
            self.commit(entries)
            self.finish(running)
        self.row_leaves(rows, cancels=False)

    # ---- after every step ---------------------------------------------------------------

    @invariant()
    def agree(self):
        others = sum(len(r.own) for r in self.running), sum(sum(r.own) for r in self.running)
        assert self.decode.check_all(others) == self.oracle.sizes()[:2]
        self.prefill.check()
        held = [sum(len(p.own) for p in self.pending), sum(sum(p.own) for p in self.pending)]
        assert [int(pages) for pages in disagg.reserved_pages(self.decode.inbox)] == held
        self.oracle.check(held[0] + others[0], held[1] + others[1])
        assert self.decode.left() == self.oracle.left()
        assert int(self.decode.inbox.refused) == self.refused

    def teardown(self):
        while self.running:
            self.finish(0)
        if len(self.pending) > 1:
            self.abort(0)
        self.decode.abort_older(0)
        for row in self.rows:
            self.prefill.cancel(row)
        for side in (self.decode, self.prefill):
            side.evict(side.config.full_tokens, 0)
            assert side.left() == (side.config.full_tokens, side.config.swa_tokens)
            assert int(side.cache.num_receipts) == 0
        assert not np.asarray(self.decode.inbox.serial).any()


PHASES = (Phase.explicit, Phase.reuse, Phase.generate)
KINDS: dict[str, dict[str, Any]] = {
    "small_pages_to_large": {},
    "large_pages_to_small_bigram": {
        "decode_pool": swa.PoolConfig(40, 22, 2, 3),
        "prefill_page": 4,
        "is_bigram": True,
    },
}


LONG = ("small_pages_to_large",)


@pytest.mark.parametrize(
    "kind",
    [pytest.param(kind, marks=pytest.mark.long if kind in LONG else ()) for kind in KINDS],
)
def test_two_sides_agree_with_the_oracle(kind):
    case = type("Machine", (DisaggMachine,), KINDS[kind]).TestCase
    case.settings = settings(
        max_examples=12,
        stateful_step_count=30,
        deadline=None,
        phases=PHASES,
        report_multiple_bugs=False,
        derandomize=True,
    )
    case("runTest").runTest()
