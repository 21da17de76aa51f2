"""Owners that fork, grow, leave their windows and finish, with a model of what their KV holds.

KV is named by the text that it was computed from. Every write goes where the allocator said, and
after each step every owner must find its own text in each slot that it would read.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections import Counter
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from compare import config_of, fault_counts, ints
from oracle import Sizes
from pair import compiled
from share_oracle import ShareOracle

import swa_jax as swa

ROWS, WIDTH, CAPACITY = 4, 32, 12


@dataclasses.dataclass
class Owner:
    text: list[int]  # one number a token, never used twice: equal numbers are equal prefixes
    slots: list[int]
    done: int = 0  # tokens whose SWA pages it has given up


class Family:
    """One state under test, the oracle, the owners and their KV. Refusals are checked, too."""

    def __init__(self, sizes: Sizes) -> None:
        self.sizes, self.page = sizes, sizes.page_size
        self.state: Any = swa.init(config_of(sizes))
        self.oracle = ShareOracle(sizes)
        self.owners: list[Owner] = []
        self.full_kv: dict[int, int] = {}
        self.swa_kv: dict[int, int] = {}
        self.words = itertools.count(1)

    # ---- KV -----------------------------------------------------------------------------

    def _swa_slot(self, slot: int) -> int:
        page = self.oracle.map.get(slot // self.page, 0)
        return page * self.page + slot % self.page if page else 0

    def _write(self, owner: Owner, slots: Sequence[int]) -> None:
        for slot in slots:
            owner.text.append(next(self.words))
            owner.slots.append(slot)
            self.full_kv[slot] = owner.text[-1]
            assert self._swa_slot(slot), "a token without an SWA slot"
            self.swa_kv[self._swa_slot(slot)] = owner.text[-1]

    def _learn(self, slots: Sequence[int], *, takes: Sequence[int]) -> None:
        """Tells the oracle which pages a grant took."""
        mapping = np.asarray(self.state.full_to_swa)
        fresh = {slot // self.page for slot in takes}
        grown = {slot // self.page for slot in slots}
        new = {page for page in grown if page in fresh or page not in self.oracle.map}
        self.oracle.granted(sorted(fresh), {page: int(mapping[page]) for page in sorted(new)})

    # ---- growing ------------------------------------------------------------------------

    def grow(self, who: Sequence[int], more: Sequence[int], *, decode: bool = False) -> bool:
        """Copies on write, then grows each of these owners; False where memory was short."""
        rows = [self.owners[each] for each in who]
        if not self.copy_on_write(who):
            return False
        lens = [len(row.text) for row in rows]
        last = [row.slots[-1] if row.slots else -1 for row in rows]
        full = sum(
            self.oracle.pages_for(n + k) - self.oracle.pages_for(n)
            for n, k in zip(lens, more, strict=True)
        )
        bare = sum(
            k > 0 and n % self.page != 0 and at // self.page not in self.oracle.map
            for n, k, at in zip(lens, more, last, strict=True)
        )
        short = self.oracle.short(full, full + bare)
        if decode:
            active = [True] * len(rows) + [False] * (ROWS - len(rows))
            self.state, grant = compiled("alloc_decode")(
                self.state, ints([n + 1 for n in lens], ROWS), ints(last, ROWS), jnp.array(active)
            )
        else:
            ends = [n + k for n, k in zip(lens, more, strict=True)]
            self.state, grant = compiled("alloc_extend")(
                self.state, ints(lens, ROWS), ints(ends, ROWS), ints(last, ROWS), capacity=CAPACITY
            )
        assert (int(grant.full_short), int(grant.swa_short)) == short
        assert bool(grant.ok) == (short == (0, 0))
        if not grant.ok:
            return False
        slots = np.asarray(grant.slots).tolist()
        parts, at = [], 0
        for k in more:
            parts.append(slots[at : at + k])
            at += k
        takes = []
        for n, part in zip(lens, parts, strict=True):
            takes += [slot for i, slot in enumerate(part) if (n + i) % self.page == 0]
        self._learn([slot for part in parts for slot in part], takes=takes)
        for row, part in zip(rows, parts, strict=True):
            self._write(row, part)
        return True

    def copy_on_write(self, who: Sequence[int]) -> bool:
        rows = [self.owners[each] for each in who]
        lens = [len(row.text) for row in rows]
        last = [row.slots[-1] if row.slots else -1 for row in rows]
        copies = self.oracle.copies(list(zip(lens, last, strict=True)))
        mapped = [at // self.page in self.oracle.map for at in last]
        wants = sum(copies), sum(c and m for c, m in zip(copies, mapped, strict=True))
        short = self.oracle.short(*wants)
        active = [True] * len(rows) + [False] * (ROWS - len(rows))
        before = self.state
        self.state, got = compiled("copy_on_write")(
            self.state, ints(lens, ROWS), ints(last, ROWS), jnp.array(active)
        )
        got = jax.device_get(got)
        assert (int(got.full_short), int(got.swa_short)) == short
        assert bool(got.ok) == (short == (0, 0))
        if not got.ok:
            assert not got.source.any()
            assert not got.target.any()
            assert got.last_loc.tolist()[: len(rows)] == last
            same = jax.tree.map(lambda a, b: bool(jnp.array_equal(a, b)), self.state, before)
            assert jax.tree.all(same)
            return False
        self._copy(rows, copies, lens, got)
        return True

    def _copy(self, rows: list[Owner], copies: list[bool], lens: list[int], got: Any) -> None:
        reads, moves, pairs = [], [], {}
        by_page = np.asarray(self.state.full_to_swa)
        for i, (row, copied, n) in enumerate(zip(rows, copies, lens, strict=True)):
            source = [slot for slot in got.source[i].tolist() if slot]
            target = [slot for slot in got.target[i].tolist() if slot]
            assert len(source) == len(target) == copied * (n % self.page), (source, target)
            assert int(got.last_loc[i]) == (target[-1] if copied else (row.slots or [-1])[-1])
            if not copied:
                continue
            assert source == row.slots[-len(source) :]
            reads += [(at, to, self.full_kv.get(at)) for at, to in zip(source, target, strict=True)]
            new, old = target[0] // self.page, source[0] // self.page
            moves.append((row, target, old, new))
            if old in self.oracle.map:
                pairs[new] = int(by_page[new])
        swa_reads = [self.swa_kv.get(self._swa_slot(at)) for at, _, _ in reads]
        assert not got.source[len(rows) :].any()
        for _, _, old, _ in moves:
            self.oracle.moved(old)
        self.oracle.granted([new for *_, new in moves], pairs)
        for (_, to, what), of_swa in zip(reads, swa_reads, strict=True):
            assert what is not None
            self.full_kv[to] = what
            if self._swa_slot(to) and of_swa is not None:
                self.swa_kv[self._swa_slot(to)] = of_swa
        for row, target, *_ in moves:
            row.slots[-len(target) :] = target

    # ---- owners come and go -------------------------------------------------------------

    def start(self, length: int) -> bool:
        self.owners.append(Owner([], []))
        if self.grow([len(self.owners) - 1], [length]):
            return True
        self.owners.pop()
        return False

    def fork(self, which: int, drop: int = 0) -> bool:
        """A new owner of all but the last `drop` tokens, if the window it needs is live."""
        parent = self.owners[which]
        length = len(parent.text) - drop
        window = max(0, length - (self.sizes.window or length))
        needs = parent.slots[window : max(length, 0)]
        if length < 1 or not all(self._swa_slot(slot) for slot in needs):
            return False
        # A shorter one may need what its parent has given up and a third still holds.
        done = min(parent.done, window // self.page * self.page)
        if self.sizes.pure and done < parent.done:
            return False
        child = Owner(parent.text[:length], parent.slots[:length], done)
        self.share(child.slots, [token >= done for token in range(length)])
        self.owners.append(child)
        return True

    def leave(self, who: Sequence[int], *, together: bool = True) -> None:
        """The SWA pages of these owners that have left their windows, one call or one each."""
        if self.sizes.window is None:
            return
        for each in [who] if together else [[one] for one in who]:
            rows = [self.owners[one] for one in each]
            table = np.zeros((ROWS, WIDTH), np.int32)
            for i, row in enumerate(rows):
                table[i, : len(row.slots)] = row.slots
            lens = [len(row.text) for row in rows]
            active = [True] * len(rows) + [False] * (ROWS - len(rows))
            self.state, new = compiled("free_out_of_window")(
                self.state,
                jnp.asarray(table),
                ints(lens, ROWS),
                ints([row.done for row in rows], ROWS),
                active=jnp.array(active),
            )
            leaves: Counter[int] = Counter()
            for i, row in enumerate(rows):
                edge = max(row.done, self.oracle.edge(len(row.text)))
                assert int(new[i]) == edge
                for token in range(row.done, edge, self.page):
                    leaves[row.slots[token] // self.page] += 1
                row.done = edge
            for page, times in leaves.items():
                for _ in range(times):
                    if page in self.oracle.map:
                        self.oracle.leave(page)

    def leave_by_hand(self, which: int) -> None:
        """The same for one owner with `free_swa`, which names mapped pages only."""
        row = self.owners[which]
        edge = max(row.done, self.oracle.edge(len(row.text)))
        dead = row.slots[row.done : edge : self.page]
        self.free_swa([slot for slot in dead if slot // self.page in self.oracle.map])
        row.done = edge

    def finish(self, which: int, *, swa_first: bool = False) -> None:
        """Gives everything up, with `free`, or the SWA sides first and then the full sides."""
        row = self.owners.pop(which)
        live = row.slots[row.done // self.page * self.page :]
        if self.sizes.pure:
            self.free(live)
            return
        mine, oracle = {slot // self.page for slot in live}, self.oracle
        kept = [  # longer than needed, by the rule of `free`: there it is the only way
            page
            for page in {slot // self.page for slot in row.slots} & oracle.map.keys()
            if oracle.swa[oracle.map[page]] - (page in mine) >= oracle.full[page]
        ]
        if swa_first and not kept:
            self.free_swa([slot for slot in live if slot // self.page in oracle.map])
            self.free_full(row.slots)
        else:
            self.free(row.slots)

    # ---- calls as they are --------------------------------------------------------------

    def _name(self, call: str, slots: Sequence[int]) -> None:
        self.state = compiled(call)(self.state, ints(slots, WIDTH))
        getattr(self.oracle, call)(slots)

    def share(self, slots: Sequence[int], live: Sequence[bool] | None = None) -> None:
        if self.sizes.pure and live is not None:  # what has left a window there is nobody's
            slots, live = [s for s, both in zip(slots, live, strict=True) if both], None
        marks = None if live is None else ints(live, WIDTH) > 0
        self.state = compiled("share")(self.state, ints(slots, WIDTH), marks)
        self.oracle.share(slots, live)

    def free(self, slots: Sequence[int]) -> None:
        self._name("free", slots)

    def free_swa(self, slots: Sequence[int]) -> None:
        self._name("free_swa", slots)

    def free_full(self, slots: Sequence[int]) -> None:
        self._name("free_full", slots)

    def group(self, *, begin: bool) -> None:
        self.state = compiled("free_group_begin" if begin else "free_group_end")(self.state)
        self.oracle.group(begin=begin)

    # ---- the laws -----------------------------------------------------------------------

    def verify(self) -> None:
        laws, state = jax.device_get((_laws(self.state), self.state))
        broken = [name for name, holds in laws.items() if not holds]
        assert not broken, broken
        self._counts_agree(state)
        self._nobody_lost_a_page(state)

    def _counts_agree(self, state: Any) -> None:
        oracle, pure = self.oracle, self.sizes.pure
        assert _counted(state.swa) == dict(oracle.swa)
        mapped = {page: int(to) for page, to in enumerate(state.full_to_swa.tolist()) if to}
        assert mapped == oracle.map
        if pure:  # who left his window is not asked about the full side again
            held = {page: n for page, n in _counted(state.full).items() if page in mapped}
            assert held == {page: n for page, n in oracle.full.items() if page in mapped}
        else:
            assert _counted(state.full) == dict(oracle.full)
            assert int(state.full.num_pending) == oracle.pending[0]
            assert int(state.full.num_free) == oracle.left()[0]
        assert int(state.swa.num_pending) == oracle.pending[1]
        assert int(state.swa.num_free) == oracle.left()[1]
        assert fault_counts(state) == dict(oracle.faults)

    def _nobody_lost_a_page(self, state: Any) -> None:
        needs, lives = Counter(), Counter()
        for owner in self.owners:
            first = owner.done if self.sizes.pure else 0
            needs.update({slot // self.page for slot in owner.slots[first:]})
            lives.update({slot // self.page for slot in owner.slots[owner.done :]})
            window = max(0, len(owner.text) - (self.sizes.window or len(owner.text)))
            for token in range(first, len(owner.text)):
                slot, word = owner.slots[token], owner.text[token]
                assert self.full_kv[slot] == word, f"slot {slot} was written by another"
                if token >= window:
                    of_swa = self._swa_slot(slot)
                    assert of_swa, f"slot {slot} lost its SWA side"
                    assert self.swa_kv[of_swa] == word, f"SWA slot {of_swa} was overwritten"
        full, of_swa = state.full.holders, state.swa.holders
        for page, times in needs.items():
            assert self.sizes.pure or int(full[page]) == times, f"page {page}"
        for page, times in lives.items():
            to = int(state.full_to_swa[page])
            assert not to or int(of_swa[to]) >= min(times, int(full[page])), f"page {page}"

    def all_gone(self) -> None:
        """The last one has left: nothing is held."""
        assert not self.owners
        full, of_swa = swa.full_available_size(self.state), swa.swa_available_size(self.state)
        assert (int(full), int(of_swa)) == (self.sizes.full_tokens, self.sizes.swa_tokens)


def _counted(pool: Any) -> dict[int, int]:
    return {page: int(n) for page, n in enumerate(pool.holders.tolist()) if page and n}


def _invariants(state: Any) -> dict[str, jax.Array]:
    return swa.invariants(state)


_laws = jax.jit(_invariants, compiler_options={"xla_backend_optimization_level": 0})
