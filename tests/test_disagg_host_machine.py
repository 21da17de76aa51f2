"""A prefill side, a decode side and a host tier under the decode side's cache, step by step.

The oracle of the two sides goes on, with what the host has beside it. Pages that nobody holds are
spoiled before anything comes back, so KV is right only where it was really written.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compare import ints
from disagg_pair import WIDTH, DecodeSide, compiled
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, rule
from prefix_oracle import Name
from test_disagg_machine import PHASES, DisaggMachine, same

import swa_jax as swa
from swa_jax.host_cache import HostCache, HostConfig, Restored, tier
from swa_jax.host_cache.check import check_index, nodes_of
from swa_jax.host_cache.memory import NumpyMemory
from swa_jax.host_cache.nodes import NO_ROW

_which = st.integers(0, 7)
_digits = st.lists(st.integers(0, 1), min_size=3, max_size=6)
_spaces = st.integers(0, 1)


@jax.jit
def _spoil(state, pools):
    """The KV with every page that nobody holds overwritten."""

    def over(layers, free):
        return tuple(
            jnp.where(free.reshape(-1, *[1] * (layer.ndim - 1)), layer.dtype.type(13), layer)
            for layer in layers
        )

    return type(pools)(over(pools.full, state.full.free), over(pools.swa, state.swa.free))


class HostedSide(DecodeSide):
    """What is evicted here goes to the host first."""

    def __init__(self, config: swa.PoolConfig, pages: tuple[int, int], *, is_bigram: bool) -> None:
        super().__init__(config, is_bigram=is_bigram)
        assert self.cache is not None
        sizes = HostConfig.beside(config, pages[0] * self.page, pages[1] * self.page)
        self.host = HostCache(sizes, self.cache, self.pools, "write_back")

    def evict(self, full: int, of_swa: int) -> None:
        assert self.cache is not None
        self.cache, self.state, _ = self.host.evict(
            self.cache, self.state, self.pools, full_tokens=full, swa_tokens=of_swa
        )
        self.pools = _spoil(self.state, self.pools)

    def restore(self, tokens: list[int], length: int, ns: int) -> Restored:
        assert self.cache is not None
        self.pools = _spoil(self.state, self.pools)
        self.cache, self.state, self.pools, got = self.host.restore(
            self.cache,
            self.state,
            self.pools,
            ints(tokens, WIDTH),
            jnp.int32(length),
            namespace=jnp.int32(ns),
        )
        return jax.device_get(got)

    def check_match(self, tokens: list[int], length: int, ns: int) -> int:
        """Tokens that a match gives, every byte of them compared; no use is noted."""
        _, match = compiled("match_prefix")(
            self.cache, self.state, ints(tokens, WIDTH), jnp.int32(length), namespace=jnp.int32(ns)
        )
        found = int(match.length)
        start = self.host.config.window_start(found // self.page) * self.page
        self.check_kv(ns, tokens, found, match.slots[:: self.page], start)
        return found

    def on_host(self) -> tuple[set[Name], set[Name]]:
        """Prefixes whose last page has a full row on the host, and an SWA row."""
        full, of_swa = set(), set()
        for node in nodes_of(self.host.index):
            keys, at = [], node
            while at.parent is not None:
                assert isinstance(at.key, bytes)
                keys.append(tuple(np.frombuffer(at.key, np.int32).tolist()))
                at = at.parent
            assert isinstance(at.key, int)
            name = at.key, tuple(reversed(keys))
            full |= {name} if node.full != NO_ROW else set()
            of_swa |= {name} if node.swa != NO_ROW else set()
        return full, of_swa


class HostedMachine(DisaggMachine):
    """Subclasses name the host's pages."""

    decode_pool = swa.PoolConfig(40, 22, 2, 3)
    prefill_page = 4
    is_bigram = True
    host_pages = (400, 400)  # more than there are prefixes: nothing ever leaves the host
    decode: HostedSide

    def __init__(self) -> None:
        super().__init__()
        self.decode = HostedSide(self.decode_pool, self.host_pages, is_bigram=self.is_bigram)
        self.texts: list[tuple[int, list[int]]] = []
        self.saved: tuple[set[Name], set[Name]] = set(), set()
        self.came_back = 0  # tokens

    # ---- the host's side of the oracle --------------------------------------------------

    def drive_out(self, full: int, of_swa: int) -> None:
        """Tokens; in the oracle what left is on the host, SWA near the ends of branches only."""
        nodes, kept = self.oracle.nodes, self.decode.host.config.kept_pages
        near = {n for leaf in self.oracle._leaves() for n in self.oracle.above(leaf)[-kept:]}
        near = {name for name in near if nodes[name].live}
        before = set(nodes)
        self.decode.evict(full, of_swa)
        self.oracle.evict(full=full, swa_tokens=of_swa)
        after = self.oracle.nodes
        self.saved[0].update(before - set(after))
        self.saved[1].update(n for n in near if n not in after or not after[n].live)
        self.host_agrees()

    def usable(self, path: list[Name]) -> tuple[int, int]:
        """Pages of the longest prefix with what the host has, and without it."""
        nodes, best, alone = self.oracle.nodes, 0, 0
        for pages, name in enumerate(path, 1):
            if name not in nodes and name not in self.saved[0]:
                break
            window = path[self.oracle.window_start(pages) : pages]
            live = [n in nodes and nodes[n].live for n in window]
            best = pages if all(map(bool.__or__, live, self.has_swa(window))) else best
            alone = pages if name in nodes and all(live) else alone
        return best, alone

    def has_swa(self, names: list[Name]) -> list[bool]:
        return [name in self.saved[1] for name in names]

    def restore(self, ns: int, tokens: list[int]) -> int:
        """Brings a prompt back as the oracle says; the tokens that a match gives then."""
        length, oracle, size = len(tokens), self.oracle.copy(), self.page
        path = oracle.path(tokens, length, ns)
        pages, alone = self.usable(path)
        path = path[:pages]
        count, start = oracle.cached(path), oracle.window_start(pages)
        there, new = path[:count], path[count:]
        bare = [n for n in there[start:] if not oracle.nodes[n].live] if pages > alone else []
        need = len(new), len(bare) + sum(place >= start for place in range(count, pages))
        for name in there:
            oracle.nodes[name].full_locks += 1
        held = [name for name in there[start:] if oracle.nodes[name].live]
        for name in held:
            oracle.nodes[name].swa_locks += 1
        free, sizes = (oracle.free_full, oracle.free_swa), oracle.sizes()[:2]
        lacks = tuple(max(0, n - f) for n, f in zip(need, free, strict=True))
        short = tuple(max(0, n - s // size) for n, s in zip(lacks, sizes, strict=True))
        if pages > alone and any(short):
            return self.refused_restore(ns, tokens, short, alone)
        if any(lacks):
            oracle.evict(full=lacks[0] * size, swa_tokens=lacks[1] * size)
        for name in there:
            oracle.nodes[name].full_locks -= 1
        for name in held:
            oracle.nodes[name].swa_locks -= 1
        if pages > alone:
            oracle.free_full -= need[0]
            oracle.free_swa -= need[1]
            for name in bare:
                oracle.nodes[name].live = True
            own = [*[None] * count, *[place >= start for place in range(count, pages)]]
            oracle.insert(tokens, pages * size + self.lag, own, ns)
        self.oracle = oracle
        got = self.decode.restore(tokens, length, ns)
        assert got.ok
        assert (int(got.full_tokens), int(got.swa_tokens)) == (need[0] * size, need[1] * size)
        assert int(got.length) == pages * size
        assert self.decode.check_match(tokens, length, ns) == pages * size
        self.came_back += int(got.full_tokens) + int(got.swa_tokens)
        return pages * size

    def refused_restore(
        self, ns: int, tokens: list[int], short: tuple[int, ...], alone: int
    ) -> int:
        before = jax.device_get(self.decode.sides)
        got = self.decode.restore(tokens, len(tokens), ns)
        assert not got.ok
        assert (int(got.full_short), int(got.swa_short)) == short
        assert same(before, self.decode.sides)
        assert int(got.length) == alone * self.page
        assert self.decode.check_match(tokens, len(tokens), ns) == alone * self.page
        return alone * self.page

    # ---- rules --------------------------------------------------------------------------

    @initialize(texts=st.lists(st.tuples(_digits, _spaces), min_size=2, max_size=3))
    def begin(self, texts):
        for digits, ns in texts:
            self.serve(digits, 1, ns)
        self.evict(1, 3)

    @rule(full=st.integers(0, 4), of_swa=st.integers(0, 4))
    def evict(self, full, of_swa):
        self.drive_out(full * self.page, of_swa * self.page)

    def reserve(self, ns, tokens, length, row):
        if row is not None and (ns, tokens) not in self.texts:
            self.texts.append((ns, tokens))
        super().reserve(ns, tokens, length, row)

    @rule(which=_which, cut=st.integers(0, 6))
    def bring_back(self, which, cut):
        text = self.pick(self.texts, which)
        if text is not None:
            self.drive_out(0, cut * self.page)  # the shorter prompt ends in tombstones
            self.restore(text[0], text[1][: max(1, len(text[1]) - cut)])

    @rule(which=_which, full=st.integers(0, 6), pages=st.integers(0, 9), goes_on=_which)
    def bring_back_and_ask(self, which, full, pages, goes_on):
        """Out, back and reserved: what came back is neither sent again nor locked for nothing."""
        text = self.pick(self.texts, which)
        if text is None:
            return
        ns, tokens = text
        self.drive_out(full * self.page, pages * self.page)
        rows, entries, running = len(self.rows), len(self.pending), len(self.running)
        if rows == 3:
            return
        row = self.prefill.prefill(ns, tokens)
        if row is None:
            return
        self.rows.append(row)
        length = self.restore(ns, tokens)
        self.ask(rows)
        if len(self.pending) > entries:
            entry = self.pending[entries]
            assert int(entry.ask.full_start) == entry.prefix >= length
            self.send(entries, goes_on)
            if goes_on < 2:
                self.abort(entries)
            elif entry.sent == len(entry.starts):
                self.commit(entries)
                if goes_on > 4:
                    self.finish(running)
        if goes_on % 2:
            self.row_leaves(rows, cancels=False)

    # ---- after every step ---------------------------------------------------------------

    @invariant()
    def host_agrees(self):
        check_index(self.decode.host.index)
        has = self.decode.on_host()  # of a small host the oracle takes it over what has left
        assert has[0] <= self.saved[0]
        assert has[1] <= self.saved[1]
        if self.host_pages == HostedMachine.host_pages:
            assert has == self.saved
        self.saved = has

    def teardown(self):
        super().teardown()
        side = self.decode
        assert side.cache is not None
        assert not side.cache.in_tree.any()
        side.host.close()
        check_index(side.host.index)
        assert not any(node.pins for node in nodes_of(side.host.index))
        side.check_all()
        self.prefill.check()


# Of one shape: a second one would be as much again to compile.
KINDS: dict[str, dict[str, Any]] = {
    "host_with_room": {},
    "small_host": {"host_pages": (15, 8)},
}


def _machine(kind: str) -> type[HostedMachine]:
    return type("Machine", (HostedMachine,), KINDS[kind])


@pytest.mark.parametrize("kind", KINDS)
def test_two_sides_and_a_host_agree_with_the_oracle(kind):
    case = _machine(kind).TestCase
    case.settings = settings(
        max_examples=10,
        stateful_step_count=25,
        deadline=None,
        phases=PHASES,
        report_multiple_bugs=False,
        derandomize=True,
    )
    case("runTest").runTest()


# ---- that it would be seen ------------------------------------------------------------------


def _out_and_back() -> None:
    """A request is served, leaves for the host, and comes back into pages that were spoiled."""
    machine = _machine("host_with_room")()
    machine.serve([0, 1, 0], 1, 0)
    machine.drive_out(40, 0)
    assert machine.decode.left() == (40, 22)
    machine.bring_back_and_ask(0, 0, 0, 5)
    assert machine.came_back
    machine.teardown()


def _rows_are_one_off(patch):
    read = NumpyMemory.read
    patch.setattr(NumpyMemory, "read", lambda self, rows: read(self, [max(0, r - 1) for r in rows]))


def _swa_does_not_come_back(patch):
    whole = tier.scatter

    def scatter(layers, *rest):
        return layers if layers[0].dtype == jnp.uint16 else whole(layers, *rest)

    patch.setattr(tier, "scatter", scatter)


def test_nothing_is_wrong_as_it_is():
    _out_and_back()


@pytest.mark.parametrize("bug", [_rows_are_one_off, _swa_does_not_come_back])
def test_a_restore_that_writes_the_wrong_bytes_is_seen(bug, monkeypatch):
    bug(monkeypatch)
    with pytest.raises(AssertionError, match="not equal"):
        _out_and_back()
