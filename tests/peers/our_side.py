"""swa_jax's side: a chunk of encoded calls as one compiled scan, with what is seen after each."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import swa_jax as swa
from tests.peers.calls import Call, Shape, encode

CHUNK = 256  # calls in a scan; shorter chunks are padded with calls that free nothing
_QUICKLY = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}


@dataclasses.dataclass(frozen=True)
class Seen:
    """What swa_jax shows after each call of a chunk: one entry a call in each array."""

    ok: np.ndarray  # bool[N] the grant was made; False for other calls
    slots: np.ndarray  # int32[N, width] granted full slots
    available: np.ndarray  # int32[N, 2] tokens: full, SWA
    mapping: np.ndarray  # int32[N, F+1] SWA page of each full page
    full_free: np.ndarray  # bool[N, F+1]
    swa_free: np.ndarray  # bool[N, S+1]


def _alloc(state, rows, slots, more):
    return swa.alloc(state, rows[1, 0], capacity=slots.shape[0])


def _extend(state, rows, slots, more):
    return swa.alloc_extend(state, rows[0], rows[1], rows[2], capacity=slots.shape[0])


def _tail(state, rows, slots, more):
    return swa.alloc_extend_swa_tail(state, *rows, capacity=slots.shape[0])


def _decode(state, rows, slots, more):
    state, grant = swa.alloc_decode(state, rows[1], rows[2], rows[1] > 0)
    rest = jnp.zeros(slots.shape[0] - rows.shape[1], jnp.int32)
    return state, dataclasses.replace(grant, slots=jnp.concatenate([grant.slots, rest]))


def _change(call: Callable[..., Any], lists: int) -> Callable[..., Any]:
    def op(state, rows, slots, more):
        zero = jnp.int32(0)
        none = swa.Grant(jnp.zeros_like(slots), zero, jnp.bool_(False), zero, zero)
        return call(state, *(slots, more)[:lists]), none

    return op


_ALWAYS = {
    "free": _change(swa.free, 1),
    "free_swa": _change(swa.free_swa, 1),
    "free_full": _change(swa.free_full, 1),
    "free_segment": _change(swa.free_segment, 1),
    "free_swa_segment": _change(swa.free_swa_segment, 1),
    "free_group_begin": _change(swa.free_group_begin, 0),
    "free_group_end": _change(swa.free_group_end, 0),
    "set_full_to_swa_mapping": _change(swa.set_full_to_swa_mapping, 2),
    "clear_full_to_swa_mapping": _change(swa.clear_full_to_swa_mapping, 1),
    "clear": _change(swa.clear, 0),
}
# sglang has `alloc` at page 1 alone, and the calls for batches at larger pages alone.
_BY_PAGE = {
    False: {"alloc": _alloc},
    True: {"alloc_extend": _extend, "alloc_extend_swa_tail": _tail, "alloc_decode": _decode},
}
# swa_jax has no segment form of `free_full`; all the slots mean the same. Segments that all but
# the last end on a page boundary are one segment.
_AS = {
    "free_full_segment": "free_full",
    "free_full_segments": "free_full",
    "free_segments": "free_segment",
}
_NOTHING = Call("free")


def ops_of(page: int) -> dict[str, Callable[..., Any]]:
    return {**_ALWAYS, **_BY_PAGE[page > 1]}


@functools.partial(jax.jit, donate_argnums=0, compiler_options=_QUICKLY)
def _run(state, steps):
    ops = list(ops_of(state.config.page_size).values())

    def step(state, call):
        code, rows, slots, more = call
        state, grant = jax.lax.switch(code, ops, state, rows, slots, more)
        available = [swa.full_available_size(state), swa.swa_available_size(state)]
        seen = (grant.ok, grant.slots, jnp.stack(available), state.full_to_swa)
        return state, (*seen, state.full.free, state.swa.free)

    return jax.lax.scan(step, state, steps)


class OurSide:
    """The allocator under test."""

    def __init__(self, shape: Shape) -> None:
        self.shape = shape
        config = swa.PoolConfig(shape.full_tokens, shape.swa_tokens, shape.page)
        self.state = swa.init(config)

    def run(self, calls: Sequence[Call]) -> Seen:
        """Makes the calls, `CHUNK` at most."""
        named = [dataclasses.replace(c, name=_AS.get(c.name, c.name)) for c in calls]
        named += [_NOTHING] * (CHUNK - len(calls))
        steps = encode(named, list(ops_of(self.shape.page)), self.shape.width)
        self.state, seen = _run(self.state, steps)
        return Seen(*(each[: len(calls)] for each in jax.device_get(seen)))

    def faults(self) -> dict[str, int]:
        """Misuse counted since the last `clear`, kinds that occurred only."""
        return {kind: count for kind, count in swa.faults(self.state).items() if count}
