"""A random walk over every public transition, with honest and hostile arguments.

Small integers are read as a recipe against the present state, so that most calls name pages
that exist. Drawn by hypothesis, failing walks shrink to short ones; `long_walk` draws the same
recipes evenly, and so gets into more corners in the same time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule
from oracle import OracleGrant, Sizes
from pair import BATCH, Ask, Pair, granted

INT_MAX, INT_MIN = 2**31 - 1, -(2**31)
FREES = ("free", "free_swa", "free_full")

_number = st.integers(0, 1023)
_recipe = st.lists(_number, max_size=10)
_row = st.tuples(st.integers(0, 7), st.integers(0, 11), st.integers(0, 63), st.integers(0, 15))
_batch = st.lists(_row, min_size=1, max_size=BATCH)


class AllocatorMachine(RuleBasedStateMachine):
    """Subclasses name the sizes."""

    sizes = Sizes(16, 16)
    max_pages: int | None = None

    def __init__(self) -> None:
        super().__init__()
        self.pair = Pair(self.sizes)
        self.requests: list[list[int]] = []  # full slots in token order
        self.evicted: list[int] = []
        self.saved: list[Pair] = []

    # ---- recipes --------------------------------------------------------------------------

    def pick_slots(self, recipe: Sequence[int]) -> list[int]:
        slots: list[int] = []
        for number in recipe:
            kind, which = number % 16, number // 16
            slots += self._pick(kind, which, slots)
        return slots[: self.pair.width]

    def _pick(self, kind: int, which: int, so_far: Sequence[int]) -> list[int]:
        page, last = self.sizes.page_size, self.sizes.full_tokens + self.sizes.page_size
        request = self.requests[which % len(self.requests)] if self.requests else []
        if kind < 6:  # one token of a request
            return [request[(which // 3) % len(request)]] if request else []
        if kind < 8:  # the pages of a request
            return list(request[::page])
        if kind < 12:  # any page, held or not
            return [page + (which * 7) % (last - page)]
        if kind == 12:
            return [which % page]  # padding
        if kind == 13:
            return list(so_far[-2:])  # again
        if kind == 14:
            return [-1 - which % 3]
        return [(last + which % 3, INT_MAX, INT_MIN, last + page)[which % 4]]

    def row(self, who: int, grow: int, trick: int, tail: int) -> tuple[int, Ask]:
        """A request that grows, or a new one; `trick` from 21 to 31 spoils an argument."""
        slots = self.requests[who] if who < len(self.requests) else []
        prefix, last = len(slots), slots[-1] if slots else -1
        ask = Ask(prefix, prefix + grow, last, min(tail, grow))
        spoiled: dict[int, Ask] = {
            21: Ask(prefix, prefix - 1 - grow, last),
            22: Ask(-1 - grow, prefix, last),
            23: Ask(prefix, prefix + grow, last + 1, min(tail, grow)),
            24: Ask(prefix, prefix + grow, -1, min(tail, grow)),
            25: Ask(prefix, prefix + grow, (0, INT_MAX, INT_MIN, -5)[tail % 4], min(tail, grow)),
            26: Ask(prefix, (INT_MAX, 1000, 40)[tail % 3], last),
            27: Ask(prefix, prefix + grow, last, grow + 1 + tail),
            28: Ask(prefix, prefix + grow, last, -1 - tail),
            29: Ask(prefix + 1, prefix + 1 + grow, 5 + 3 * tail, min(tail, grow)),
            30: Ask(0, INT_MAX, -1, INT_MAX),
            31: Ask(INT_MAX - grow, INT_MAX, last, min(tail, grow)),
        }
        return who, spoiled.get(trick, ask)

    def grow(self, call: Callable[..., OracleGrant], batch: Sequence[tuple[int, ...]]) -> None:
        rows = [self.row(*recipe) for recipe in batch]
        grant = call(*(ask for _, ask in rows))
        if not grant.ok:
            return
        slots = granted(grant)
        for who, ask in rows:
            new, slots = slots[: ask.seq - ask.prefix], slots[ask.seq - ask.prefix :]
            self.remember(who, ask.prefix, new)

    def remember(self, who: int, prefix: int, new: Sequence[int]) -> None:
        if not new:
            return
        if who < len(self.requests) and prefix == len(self.requests[who]):
            self.requests[who] += new
        elif prefix == 0 and len(self.requests) < 8:
            self.requests.append(list(new))
            self.evicted.append(0)

    # ---- grants ---------------------------------------------------------------------------

    @rule(pages=st.integers(0, 3))
    def alloc(self, pages):
        grant = self.pair.alloc(pages * self.sizes.page_size)
        if grant.ok:
            self.remember(len(self.requests), 0, granted(grant))

    @rule(tokens=st.sampled_from([-1, 3, 18, 33, 64, INT_MAX, INT_MIN]))
    def alloc_any(self, tokens):
        self.pair.alloc(tokens)

    @rule(batch=_batch)
    def alloc_extend(self, batch):
        self.grow(self.pair.alloc_extend, batch)

    @rule(batch=_batch)
    def alloc_extend_swa_tail(self, batch):
        self.grow(self.pair.alloc_extend_swa_tail, batch)

    @rule(batch=_batch, active=st.integers(0, 2**BATCH - 1))
    def alloc_decode(self, batch, active):
        rows = [self.row(who, 1, trick, tail) for who, _, trick, tail in batch]
        mask = [bool(active >> i & 1) for i in range(len(rows))]
        grant = self.pair.alloc_decode(
            [ask.seq for _, ask in rows], [ask.last_loc for _, ask in rows], mask
        )
        if grant.ok:
            for (who, ask), slot, used in zip(rows, grant.slots, mask, strict=False):
                if used:
                    self.remember(who, ask.seq - 1, [slot])

    # ---- frees ----------------------------------------------------------------------------

    @rule(recipe=_recipe, how=st.sampled_from(FREES))
    def free_some(self, recipe, how):
        getattr(self.pair, how)(self.pick_slots(recipe))

    @rule(recipe=_recipe)
    def free_swa_grouped(self, recipe):
        self.pair.free_swa_grouped(self.pick_slots(recipe))

    @rule(who=st.integers(0, 7), start=st.integers(0, 20), how=st.booleans())
    def free_segment(self, who, start, how):
        """From a page boundary of a request, or, at times, from the middle of a page."""
        slots = self.requests[who % len(self.requests)] if self.requests else []
        page = self.sizes.page_size
        start = start if start % 5 == 0 else start // page * page
        call = self.pair.free_segment if how else self.pair.free_swa_segment
        call(slots[start:][: self.pair.width])

    @rule(recipe=_recipe, how=st.booleans())
    def free_any_segment(self, recipe, how):
        call = self.pair.free_segment if how else self.pair.free_swa_segment
        call(self.pick_slots(recipe))

    @rule(who=st.integers(0, 7))
    def finish(self, who):
        if self.requests:
            who %= len(self.requests)
            self.pair.free(self.requests[who][:: self.sizes.page_size])
            del self.requests[who], self.evicted[who]

    @rule(keep=st.integers(0, 20), who=st.integers(0, 7))
    def roll_back(self, keep, who):
        """Gives up the tokens past `keep`: pages wholly above it are freed."""
        if self.requests:
            slots = self.requests[who % len(self.requests)]
            page = self.sizes.page_size
            self.pair.free(slots[-(-keep // page) * page :][: self.pair.width])
            del slots[keep:]

    @rule(begin=st.integers(0, 2))
    def group(self, begin):
        if begin == 1:
            self.pair.free_group_begin()
        else:
            self.pair.free_group_end()

    # ---- ownership and mapping ------------------------------------------------------------

    @rule(which=st.integers(0, 2))
    def save(self, which):
        self.saved[which : which + 1] = [self.pair.snapshot()]

    @rule(recipe=_recipe, which=st.integers(0, 2))
    def free_swa_of_owner(self, recipe, which):
        if self.saved:
            owner = self.saved[which % len(self.saved)]
            self.pair.free_swa(self.pick_slots(recipe), owner=owner)

    @rule(recipe=_recipe)
    def clear_mapping(self, recipe):
        if not self.sizes.pure:
            self.pair.clear_mapping(self.pick_slots(recipe[:3]))

    @rule(recipe=_recipe, others=_recipe, honest=st.booleans())
    def set_mapping(self, recipe, others, honest):
        if self.sizes.pure:
            return
        full = self.pick_slots(recipe)
        swa = self.pick_slots(others)
        swa = (swa + [0] * len(full))[: len(full)]
        if honest:  # the offset of the full slot, in a page of the SWA pool
            page = self.sizes.page_size
            top = self.sizes.swa_tokens // page
            swa = [
                (1 + to // page % top) * page + at % page for at, to in zip(full, swa, strict=True)
            ]
        self.pair.set_mapping(full, swa)

    @rule(recipe=_recipe)
    def translate(self, recipe):
        self.pair.swa_of(self.pick_slots(recipe))

    # ---- window ---------------------------------------------------------------------------

    @rule(
        lags=st.lists(st.integers(0, 40), min_size=BATCH, max_size=BATCH), mask=st.integers(0, 15)
    )
    def free_out_of_window(self, lags, mask):
        """Lags above 30 spoil an argument of their row."""
        rows = [(i, self.requests[i][:32]) for i in range(min(BATCH, len(self.requests)))]
        seq = [len(slots) for _, slots in rows]
        done = [self.evicted[i] for i, _ in rows]
        inserts = []
        for i, (_, slots) in enumerate(rows):
            lag = lags[i]
            inserts.append(max(0, len(slots) - lag if lag <= 8 else len(slots)))
            seq[i] = {31: 500, 32: -3, 33: INT_MAX}.get(lag, seq[i])
            inserts[i] = seq[i] if lag in (31, 33) else inserts[i]
            done[i] = {34: -4, 35: done[i] + 1, 36: INT_MIN, 37: 512}.get(lag, done[i])
        active = [bool(mask >> i & 1) for i in range(len(rows))]
        new = self.pair.free_out_of_window(
            [slots for _, slots in rows],
            seq,
            done,
            insert_lens=inserts,
            active=active,
            max_pages=self.max_pages,
        )
        for i, (which, _) in enumerate(rows):
            if lags[i] <= 30:
                self.evicted[which] = new[i]

    @rule(sure=st.integers(0, 9))
    def clear(self, sure):
        if sure == 0:
            self.pair.clear()
            self.requests, self.evicted = [], []


def long_walk(machine: AllocatorMachine, seed: int, steps: int) -> None:
    """The same steps with even odds."""
    rng = np.random.default_rng(seed)

    def number(top: int) -> int:
        return int(rng.integers(0, top))

    def recipe() -> list[int]:
        return [number(1024) for _ in range(number(6))]

    def batch() -> list[tuple[int, ...]]:
        return [(number(8), number(12), number(100), number(16)) for _ in range(1 + number(3))]

    moves: list[tuple[int, Callable[[], None]]] = [
        (2, lambda: machine.alloc(number(4))),
        (8, lambda: machine.alloc_extend(batch())),
        (6, lambda: machine.alloc_extend_swa_tail(batch())),
        (6, lambda: machine.alloc_decode(batch(), number(16))),
        (2, lambda: machine.free_some(recipe(), FREES[number(3)])),
        (1, lambda: machine.free_swa_grouped(recipe())),
        (2, lambda: machine.free_segment(number(8), number(20), number(2) == 0)),
        (1, lambda: machine.free_any_segment(recipe(), number(2) == 0)),
        (8, lambda: machine.finish(number(8))),
        (3, lambda: machine.roll_back(number(21), number(8))),
        (4, lambda: machine.group(number(3))),
        (1, lambda: machine.save(number(3))),
        (2, lambda: machine.free_swa_of_owner(recipe(), number(3))),
        (1, lambda: machine.clear_mapping(recipe())),
        (2, lambda: machine.set_mapping(recipe(), recipe(), number(3) > 0)),
        (1, lambda: machine.translate(recipe())),
        (6, lambda: machine.free_out_of_window([number(45) for _ in range(BATCH)], number(16))),
        (1, lambda: machine.clear(0)),
    ]
    odds = np.asarray([weight for weight, _ in moves], float)
    for move in rng.choice(len(moves), size=steps, p=odds / odds.sum()).tolist():
        moves[move][1]()
