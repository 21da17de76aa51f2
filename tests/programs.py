"""Random programs as arrays: an op code, numbers for rows, and a list of slots for each step.

The same program can then run step by step, jitted, under `scan` or under `vmap`. It is drawn
beside the oracle, so that its steps name pages that a request really holds.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from oracle import Oracle, Sizes

import swa_jax as swa

ROWS, WIDTH = 3, 24


@dataclasses.dataclass
class Program:
    """One step in each place of the leading axis."""

    code: np.ndarray  # [N]
    rows: np.ndarray  # [N, 4, ROWS]: prefix, seq, last_loc, tail
    slots: np.ndarray  # [N, WIDTH]
    more: np.ndarray  # [N, WIDTH]: a second list of slots

    def steps(self) -> tuple[jax.Array, ...]:
        fields = (self.code, self.rows, self.slots, self.more)
        return tuple(jnp.asarray(each, jnp.int32) for each in fields)


def stack(programs: list[Program]) -> tuple[jax.Array, ...]:
    return tuple(jnp.stack(each) for each in zip(*(p.steps() for p in programs), strict=True))


# ---- what each op code does -----------------------------------------------------------------


def _alloc(state, rows, slots, more):
    return swa.alloc(state, rows[1, 0], capacity=WIDTH)


def _extend(state, rows, slots, more):
    return swa.alloc_extend(state, rows[0], rows[1], rows[2], capacity=WIDTH)


def _tail(state, rows, slots, more):
    return swa.alloc_extend_swa_tail(state, rows[0], rows[1], rows[2], rows[3], capacity=WIDTH)


def _decode(state, rows, slots, more):
    state, grant = swa.alloc_decode(state, rows[1], rows[2], rows[3] > 0)
    return state, dataclasses.replace(
        grant, slots=jnp.concatenate([grant.slots, jnp.zeros(WIDTH - ROWS, jnp.int32)])
    )


def _change(call: Callable[..., Any], lists: int) -> Callable[..., Any]:
    def op(state, rows, slots, more):
        return call(state, *(slots, more)[:lists]), no_grant()

    return op


def _window(state, rows, slots, more):
    table = jnp.stack([slots, more])
    state, evicted = swa.free_out_of_window(state, table, rows[1, :2], rows[0, :2])
    return state, dataclasses.replace(no_grant(), count=jnp.sum(evicted, dtype=jnp.int32))


def no_grant():
    zero = jnp.int32(0)
    return swa.Grant(jnp.zeros(WIDTH, jnp.int32), zero, jnp.bool_(False), zero, zero)


OPS = {
    "alloc": _alloc,
    "alloc_extend": _extend,
    "alloc_extend_swa_tail": _tail,
    "alloc_decode": _decode,
    "free": _change(swa.free, 1),
    "free_swa": _change(swa.free_swa, 1),
    "free_full": _change(swa.free_full, 1),
    "free_segment": _change(swa.free_segment, 1),
    "free_swa_grouped": _change(swa.free_swa_grouped, 1),
    "free_group_begin": _change(swa.free_group_begin, 0),
    "free_group_end": _change(swa.free_group_end, 0),
    "free_out_of_window": _window,
    "clear_full_to_swa_mapping": _change(swa.clear_full_to_swa_mapping, 1),
    "set_full_to_swa_mapping": _change(swa.set_full_to_swa_mapping, 2),
}
NAMES = list(OPS)


def run_step(state, step):
    """One step of a program; works in `lax.scan`."""
    code, rows, slots, more = step
    return jax.lax.switch(code, list(OPS.values()), state, rows, slots, more)


def run_step_by_step(state, steps, step_of=run_step):
    """The same with a Python loop: `lax.switch` picks its branch eagerly."""
    grants = []
    for i in range(steps[0].shape[0]):
        state, grant = step_of(state, tuple(each[i] for each in steps))
        grants.append(grant)
    return state, jax.tree.map(lambda *leaves: jnp.stack(leaves), *grants)


# ---- drawing a program ----------------------------------------------------------------------


class _Writer:
    def __init__(self, sizes: Sizes, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        self.oracle = Oracle(sizes)
        self.sizes = sizes
        self.requests: list[list[int]] = []

    def number(self, top: int) -> int:
        return int(self.rng.integers(0, top))

    def some_slots(self) -> list[int]:
        """Pages of requests, now and then spoiled: repeated, freed, padding, out of range."""
        top = self.sizes.full_tokens + self.sizes.page_size
        slots = [self.number(top + 3) - 1 for _ in range(self.number(3))]
        if self.requests:
            request = self.requests[self.number(len(self.requests))]
            slots += request[self.number(len(request)) :][: self.number(9)]
        return slots + slots[:1] * self.number(2)

    def rows(self) -> list[list[int]]:
        """Columns prefix, seq, last_loc and tail, of new requests and of different old ones."""
        picked = self.rng.permutation(len(self.requests)).tolist()[:ROWS]
        old = [[] if self.number(3) == 0 else self.requests[i] for i in picked]
        rows = []
        for slots in [*old, *[[]] * (ROWS - len(old))]:
            grow = self.number(8)
            last = slots[-1] + (self.number(20) == 0) if slots else -1
            rows.append((len(slots), len(slots) + grow, last, self.number(grow + 1)))
        return [list(column) for column in zip(*rows, strict=True)]

    def step(self, name: str) -> tuple[list[list[int]], list[int], list[int]]:
        oracle, page = self.oracle, self.sizes.page_size
        rows, slots, more = self.rows(), self.some_slots(), self.some_slots()
        if name == "alloc":
            rows[1][0] = self.number(4) * page
            self.keep([0], [rows[1][0]], oracle.alloc(rows[1][0], capacity=WIDTH).slots)
        elif name.startswith("alloc_extend"):
            args = rows if name.endswith("tail") else rows[:3]
            grant = getattr(oracle, name)(*args, capacity=WIDTH)
            if grant.ok:
                self.keep(rows[0], rows[1], grant.slots)
        elif name == "alloc_decode":
            rows[1] = [n + 1 for n in rows[0]]
            oracle.alloc_decode(rows[1], rows[2], [tail > 0 for tail in rows[3]])
        elif name == "free_out_of_window":
            slots, more = (self._padded(each[:WIDTH]) for each in self._two_requests())
            rows[0], rows[1] = [0] * ROWS, [self.number(WIDTH + 1) for _ in range(ROWS)]
            oracle.free_out_of_window([slots, more], rows[1][:2], rows[0][:2])
        elif name in ("free_group_begin", "free_group_end"):
            getattr(oracle, name)()
        elif name == "set_full_to_swa_mapping":
            slots, more = self._padded(slots), self._padded(more)
            oracle.set_full_to_swa_mapping(slots, more)
        else:
            getattr(oracle, name)(self._padded(slots))
        return rows, self._padded(slots), self._padded(more)

    def _two_requests(self) -> list[list[int]]:
        return [self.requests[-1], self.requests[0]] if self.requests else [[], []]

    def _padded(self, slots: list[int]) -> list[int]:
        return slots[:WIDTH] + [0] * (WIDTH - len(slots))

    def keep(self, prefix: list[int], seq: list[int], slots: list[int]) -> None:
        for start, end in zip(prefix, seq, strict=True):
            new, slots = slots[: end - start], slots[end - start :]
            if start == 0 and any(new):
                self.requests.append(new)
        self.requests = self.requests[-6:]


def draw(sizes: Sizes, seed: int, length: int) -> tuple[Program, Oracle]:
    """A program of `length` steps, and the oracle after it."""
    writer = _Writer(sizes, seed)
    grants = [name for name in NAMES if name.startswith("alloc")]
    names = [n for n in NAMES if not (sizes.pure and "mapping" in n)]
    names = [n for n in names if sizes.window or n != "free_out_of_window"]
    code, rows, slots, more = [], [], [], []
    for _ in range(length):
        name = writer.rng.choice(grants if writer.number(5) < 2 else names).item()
        name = "free" if writer.number(6) == 0 else name
        step = writer.step(name)
        code.append(NAMES.index(name))
        for column, value in zip((rows, slots, more), step, strict=True):
            column.append(value)
    as_array = [np.asarray(each, np.int32) for each in (code, rows, slots, more)]
    return Program(*as_array), writer.oracle
