"""The allocator and the oracle side by side: every call goes to both and is compared in full.

Arrays are padded to fixed lengths, so each transition compiles once for each configuration.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Collection, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from compare import (
    assert_bitwise_equal,
    assert_same,
    config_of,
    counts,
    fault_counts,
    ints,
    mapping,
)
from oracle import FAULT_KINDS, Oracle, OracleGrant, Sizes

import swa_jax as swa

BATCH = 4

_STATIC = ("capacity", "max_pages", "stride")
_COMPILED: dict[str, Any] = {}
# Most of the time goes into compiling; integers come out the same, whatever the effort.
_QUICKLY = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}


def compiled(name: str) -> Any:
    """The public transition, jitted once for the whole test run."""
    if name not in _COMPILED:
        function = getattr(swa, name)
        arguments = inspect.signature(function).parameters
        static = tuple(each for each in _STATIC if each in arguments)
        _COMPILED[name] = jax.jit(function, static_argnames=static, compiler_options=_QUICKLY)
    return _COMPILED[name]


@functools.partial(jax.jit, compiler_options=_QUICKLY)
def _laws_hold(state):
    return swa.invariants(state)


@dataclasses.dataclass(frozen=True)
class Ask:
    """One row of a batch that grows. `tail` is only read by `alloc_extend_swa_tail`."""

    prefix: int
    seq: int
    last_loc: int = -1
    tail: int = 0


class Pair:
    """One state under test and one oracle. `width` is the padded length of every slot array."""

    def __init__(self, sizes: Sizes, width: int = 32) -> None:
        self.sizes = sizes
        self.width = width
        self.state = swa.init(config_of(sizes))
        self.oracle = Oracle(sizes)
        self.rest = np.asarray(self.state.scratch).copy()
        self.lawful = True  # False once a test has damaged the state on purpose

    # ---- checks ---------------------------------------------------------------------------

    def verify(self) -> None:
        if self.oracle.unsure:
            self._adopt_fault_counts()
        assert_same(self.state, self.oracle)
        np.testing.assert_array_equal(np.asarray(self.state.scratch), self.rest)
        if self.lawful:
            self.oracle.check()
            held = jax.device_get(_laws_hold(self.state))
            assert all(bool(holds) for holds in held.values()), held

    def _adopt_fault_counts(self) -> None:
        """A call that breaks several rules must be counted, but may be counted under any."""
        got = fault_counts(self.state)
        assert sum(got.values()) > self.faults_before
        self.oracle.faults.update({kind: got[kind] - self.oracle.faults[kind] for kind in got})
        self.oracle.unsure = False

    @property
    def left(self) -> tuple[int, int]:
        """`full_available / swa_available` in tokens."""
        return counts(self.state)

    @property
    def map(self) -> dict[int, int]:
        return mapping(self.state)

    @property
    def faults(self) -> dict[str, int]:
        return {kind: count for kind, count in fault_counts(self.state).items() if count}

    def swa_of(self, slots: Sequence[int]) -> list[int]:
        got = compiled("translate_full_to_swa")(self.state, self._slots(slots))
        got = np.asarray(got).tolist()[: len(slots)]
        assert got == self.oracle.translate_full_to_swa(slots)
        return got

    # ---- grants ---------------------------------------------------------------------------

    def alloc(self, num_tokens: int) -> OracleGrant:
        expected = self._expect("alloc", num_tokens, capacity=self.width)
        return self._grant("alloc", expected, jnp.int32(num_tokens), capacity=self.width)

    def alloc_extend(self, *asks: Ask) -> OracleGrant:
        rows = self._rows(asks)
        prefix, seq, last = ([getattr(row, f) for row in rows] for f in _ROW_FIELDS)
        expected = self._expect("alloc_extend", prefix, seq, last, capacity=self.width)
        arrays = (ints(prefix), ints(seq), ints(last))
        return self._grant("alloc_extend", expected, *arrays, capacity=self.width)

    def alloc_extend_swa_tail(self, *asks: Ask) -> OracleGrant:
        rows = self._rows(asks)
        prefix, seq, last = ([getattr(row, f) for row in rows] for f in _ROW_FIELDS)
        tail = [row.tail for row in rows]
        name = "alloc_extend_swa_tail"
        expected = self._expect(name, prefix, seq, last, tail, capacity=self.width)
        arrays = (ints(prefix), ints(seq), ints(last), ints(tail))
        before_tail = self._before_tail(rows) if self.sizes.pure and expected.ok else ()
        return self._grant(name, expected, *arrays, capacity=self.width, free_form=before_tail)

    def alloc_decode(
        self, seq: Sequence[int], last: Sequence[int], active: Sequence[bool] | None = None
    ) -> OracleGrant:
        active = [True] * len(seq) if active is None else list(active)
        pad = BATCH - len(seq)
        seq, last = [*seq, *[0] * pad], [*last, *[-1] * pad]
        active += [False] * pad
        expected = self._expect("alloc_decode", seq, last, active)
        return self._grant(
            "alloc_decode", expected, ints(seq), ints(last), jnp.asarray(np.asarray(active))
        )

    def _rows(self, asks: Sequence[Ask]) -> list[Ask]:
        return [*asks, *[Ask(0, 0)] * (BATCH - len(asks))]

    def _before_tail(self, rows: Sequence[Ask]) -> set[int]:
        """Places of the tokens before the tail: with one pool they may or may not have a slot."""
        places, first = set(), 0
        for row in rows:
            grows = row.seq - row.prefix
            places |= set(range(first, first + grows - row.tail))
            first += grows
        return places

    def _expect(self, name: str, *args: Any, **static: Any) -> OracleGrant:
        self.faults_before = sum(fault_counts(self.state).values())
        return getattr(self.oracle, name)(*args, **static)

    def _grant(
        self,
        name: str,
        expected: OracleGrant,
        *args: Any,
        free_form: Collection[int] = (),
        **static: Any,
    ) -> OracleGrant:
        before = self.state
        self.state, grant = compiled(name)(before, *args, **static)
        grant = jax.device_get(grant)
        slots = grant.slots.tolist()
        for place in free_form:
            assert slots[place] in (0, expected.slots[place])
            slots[place] = expected.slots[place]
        got = OracleGrant(
            slots, int(grant.count), bool(grant.ok), int(grant.full_short), int(grant.swa_short)
        )
        assert got == expected, (name, got, expected)
        if not got.ok:
            assert_bitwise_equal(self.state, before, but_faults=True)
        self.verify()
        return got

    # ---- frees ----------------------------------------------------------------------------

    def free(self, slots: Sequence[int]) -> None:
        self._change("free", slots)

    def free_swa(self, slots: Sequence[int], owner: Pair | None = None) -> None:
        if owner is None:
            self._change("free_swa", slots)
            return
        self.oracle.free_swa(slots, owner=owner.oracle)
        self.state = compiled("free_swa")(self.state, self._slots(slots), owner=owner.state)
        self.verify()

    def free_full(self, slots: Sequence[int]) -> None:
        self._change("free_full", slots)

    def free_segment(self, slots: Sequence[int]) -> None:
        self._change("free_segment", slots)

    def free_swa_segment(self, slots: Sequence[int]) -> None:
        self._change("free_swa_segment", slots)

    def free_swa_grouped(self, slots: Sequence[int]) -> None:
        self._change("free_swa_grouped", slots)

    def free_group_begin(self) -> None:
        self._change("free_group_begin")

    def free_group_end(self) -> None:
        self._change("free_group_end")

    def set_mapping(self, full_slots: Sequence[int], swa_slots: Sequence[int]) -> None:
        self._change("set_full_to_swa_mapping", full_slots, swa_slots)

    def clear_mapping(self, full_slots: Sequence[int]) -> None:
        self._change("clear_full_to_swa_mapping", full_slots)

    def clear(self) -> None:
        self._change("clear")

    def free_out_of_window(
        self,
        table: Sequence[Sequence[int]],
        seq_lens: Sequence[int],
        evicted: Sequence[int],
        *,
        insert_lens: Sequence[int] | None = None,
        active: Sequence[bool] | None = None,
        max_pages: int | None = None,
        stride: int = 1,
    ) -> list[int]:
        """Rows and columns are padded. The padded columns count as columns of the table."""
        rows, pad = len(table), BATCH - len(table)
        lists = [[*row, *[0] * (self.width - len(row))] for row in table]
        lists += [[0] * self.width] * pad
        active = [*(active or [True] * rows), *[False] * pad]
        seq_lens, evicted = [*seq_lens, *[0] * pad], [*evicted, *[0] * pad]
        insert = None if insert_lens is None else [*insert_lens, *[0] * pad]
        static = {"max_pages": max_pages, "stride": stride}
        self.faults_before = sum(fault_counts(self.state).values())
        expected = self.oracle.free_out_of_window(
            lists, seq_lens, evicted, insert_lens=insert, active=active, **static
        )
        self.state, new_evicted = compiled("free_out_of_window")(
            self.state,
            jnp.asarray(np.asarray(lists, np.int32)),
            ints(seq_lens),
            ints(evicted),
            insert_lens=None if insert is None else ints(insert),
            active=jnp.asarray(np.asarray(active)),
            **static,
        )
        assert np.asarray(new_evicted).tolist() == expected
        self.verify()
        return expected[:rows]

    def _change(self, name: str, *slot_lists: Sequence[int]) -> None:
        getattr(self.oracle, name)(*slot_lists)
        self.state = compiled(name)(self.state, *map(self._slots, slot_lists))
        self.verify()

    def _slots(self, slots: Sequence[int]) -> jax.Array:
        return ints(slots, self.width)

    # ---- more -----------------------------------------------------------------------------

    def snapshot(self) -> Pair:
        twin = Pair.__new__(Pair)
        twin.__dict__.update(self.__dict__)
        twin.state, twin.oracle = swa.snapshot(self.state), self.oracle.copy()
        return twin

    def inject_mapping(self, pages: dict[int, int]) -> None:
        """Damages the state on purpose: mapping entries that no call would leave behind."""
        self.lawful = False
        by_page = self.state.full_to_swa
        for full, to in pages.items():
            by_page = by_page.at[full].set(to)
            self.oracle.map[full] = to
            if not to:
                del self.oracle.map[full]
        self.state = dataclasses.replace(self.state, full_to_swa=by_page)

    def extend(self, prefix: int, seq: int, last_loc: int = -1) -> list[int]:
        """One request; the new slots. Fails when refused."""
        return granted(self.alloc_extend(Ask(prefix, seq, last_loc)))

    def no_faults(self) -> bool:
        return not any(fault_counts(self.state)[kind] for kind in FAULT_KINDS)


_ROW_FIELDS = ("prefix", "seq", "last_loc")


def granted(grant: OracleGrant) -> list[int]:
    assert grant.ok, grant
    return grant.slots[: grant.count]


def pages_of(slots: Sequence[int], page: int) -> list[int]:
    """The distinct pages, in order."""
    return list(dict.fromkeys(slot // page for slot in slots))
