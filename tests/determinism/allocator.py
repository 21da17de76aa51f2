"""Long programs of all calls of the allocator, on each kind of pools.

Four rows grow, leave their windows, fork and end, as the numbers of each step say; now and then a
call names what it should not. What a refused or odd call does is part of the bits.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np

import swa_jax as swa
from swa_jax.unified import UnifiedLayout

from .numbers import words
from .program import Program

ROWS, STEPS, EVERY, WORDS = 4, 512, 64, 6


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["state", "earlier", "table", "lens", "evicted", "rings"],
    meta_fields=[],
)
@dataclass(frozen=True)
class Carry:
    """An allocator and four rows. C tokens of a row at most."""

    state: swa.AllocatorState
    earlier: swa.AllocatorState  # a snapshot: who owned what when somebody looked last
    table: jax.Array  # int32[4, C] full slots
    lens: jax.Array  # int32[4] tokens
    evicted: jax.Array  # int32[4] tokens that have left the window
    rings: jax.Array  # int32[4]


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["slots", "numbers"], meta_fields=[]
)
@dataclass(frozen=True)
class Answer:
    """What any call says."""

    slots: jax.Array  # int32[C]
    numbers: jax.Array  # int32[4]


Op = Callable[[Carry, jax.Array], tuple[Carry, Answer]]


def _answer(carry: Carry, slots: jax.Array | None = None, *numbers: jax.Array) -> Answer:
    width = carry.table.shape[1]
    slots = jnp.zeros(0, jnp.int32) if slots is None else slots.reshape(-1)[:width]
    values = [jnp.asarray(number, jnp.int32) for number in numbers]
    values += [jnp.zeros((), jnp.int32)] * (4 - len(values))
    return Answer(jnp.pad(slots, (0, width - slots.shape[0])), jnp.stack(values))


def _of_grant(carry: Carry, grant: swa.Grant) -> Answer:
    return _answer(carry, grant.slots, grant.ok, grant.count, grant.full_short, grant.swa_short)


def _row_of(carry: Carry, word: jax.Array) -> tuple[jax.Array, jax.Array]:
    """A row, and its slots: int32[C]."""
    row = jax.lax.rem(word, jnp.int32(ROWS))
    place = jnp.arange(carry.table.shape[1], dtype=jnp.int32)
    return row, jnp.where(place < carry.lens[row], carry.table[row], 0)


def _some(word: jax.Array) -> jax.Array:
    """bool[4] rows, by the bits of a number."""
    return (jax.lax.shift_right_logical(word, jnp.arange(ROWS, dtype=jnp.int32)) & 1) > 0


def _last(carry: Carry) -> jax.Array:
    """int32[4] slot of each row's last token, -1 for none."""
    at = jnp.maximum(carry.lens - 1, 0)
    return jnp.where(carry.lens > 0, carry.table[jnp.arange(ROWS), at], -1)


def _grown(carry: Carry, state: swa.AllocatorState, ends: jax.Array, grant: swa.Grant) -> Carry:
    """Rows up to `ends`, where it was granted."""
    grows = ends - carry.lens
    place = jnp.arange(carry.table.shape[1], dtype=jnp.int32)[None, :]
    new = (place >= carry.lens[:, None]) & (place < ends[:, None]) & grant.ok
    first = (jnp.cumsum(grows, dtype=jnp.int32) - grows - carry.lens)[:, None]
    at = jnp.clip(first + place, 0, grant.slots.shape[0] - 1)
    return replace(
        carry,
        state=state,
        table=jnp.where(new, grant.slots[at], carry.table),
        lens=jnp.where(grant.ok, ends, carry.lens),
    )


def _emptied(carry: Carry, state: swa.AllocatorState, row: jax.Array) -> Carry:
    def without(values: jax.Array) -> jax.Array:
        return values.at[row].set(0, mode="drop")

    return replace(
        carry,
        state=state,
        table=without(carry.table),
        lens=without(carry.lens),
        evicted=without(carry.evicted),
    )


# ---- grants ---------------------------------------------------------------------------------


def _ends(carry: Carry, word: jax.Array, *, only_new: bool = False) -> jax.Array:
    """int32[4] lengths that some rows grow to, together by no more than an answer holds."""
    width = carry.table.shape[1]
    more = jax.lax.rem(word >> jnp.arange(4, 4 + ROWS, dtype=jnp.int32), jnp.int32(width // ROWS))
    takes = _some(word) & (~jnp.bool_(only_new) | (carry.lens == 0))
    return jnp.minimum(carry.lens + jnp.where(takes, more + 1, 0), jnp.int32(width))


def _extend(carry: Carry, given: jax.Array) -> tuple[Carry, Answer]:
    ends, width = _ends(carry, given[0]), carry.table.shape[1]
    state, grant = swa.alloc_extend(carry.state, carry.lens, ends, _last(carry), capacity=width)
    return _grown(carry, state, ends, grant), _of_grant(carry, grant)


def _tail(carry: Carry, given: jax.Array) -> tuple[Carry, Answer]:
    ends, width = _ends(carry, given[0], only_new=True), carry.table.shape[1]
    tails = jax.lax.rem(given[1] >> jnp.arange(ROWS, dtype=jnp.int32), ends - carry.lens + 1)
    state, grant = swa.alloc_extend_swa_tail(
        carry.state, carry.lens, ends, _last(carry), tails, capacity=width
    )
    return _grown(carry, state, ends, grant), _of_grant(carry, grant)


def _alloc(carry: Carry, given: jax.Array) -> tuple[Carry, Answer]:
    """Whole pages for a row that has none; a row that has some is asked for in vain."""
    row, _ = _row_of(carry, given[0])
    size, width = carry.state.config.page_size, carry.table.shape[1]
    pages = jax.lax.rem(given[1], jnp.int32(width // size + 1))
    tokens = jnp.where(carry.lens[row] > 0, -1, pages * size)
    state, grant = swa.alloc(carry.state, tokens, capacity=width)
    takes = grant.ok & (jnp.arange(ROWS) == row)
    carry_on = replace(
        carry,
        state=state,
        table=jnp.where(takes[:, None], grant.slots[None, :], carry.table),
        lens=jnp.where(takes, tokens, carry.lens),
    )
    return carry_on, _of_grant(carry, grant)


def _decode(carry: Carry, given: jax.Array) -> tuple[Carry, Answer]:
    active = (_some(given[0]) | _some(given[1])) & (carry.lens < carry.table.shape[1])
    state, grant = swa.alloc_decode(carry.state, carry.lens + 1, _last(carry), active)
    grows = active & grant.ok
    at = jnp.where(grows, carry.lens, carry.table.shape[1])
    table = carry.table.at[jnp.arange(ROWS), at].set(grant.slots, mode="drop")
    carry_on = replace(carry, state=state, table=table, lens=carry.lens + grows.astype(jnp.int32))
    return carry_on, _of_grant(carry, grant)


# ---- frees ----------------------------------------------------------------------------------


def _ended(call: Callable[..., swa.AllocatorState]) -> Op:
    """A row gives back all that it has."""

    def op(carry: Carry, given: jax.Array) -> tuple[Carry, Answer]:
        row, slots = _row_of(carry, given[0])
        return _emptied(carry, call(carry.state, slots), row), _answer(carry)

    return op


def _both_sides(state: swa.AllocatorState, slots: jax.Array) -> swa.AllocatorState:
    return swa.free_full(swa.free_swa(state, slots), slots)


def _part(call: Callable[..., swa.AllocatorState]) -> Op:
    """A row gives up some of its tokens on one side."""

    def op(carry: Carry, given: jax.Array) -> tuple[Carry, Answer]:
        row, slots = _row_of(carry, given[0])
        end = jax.lax.rem(given[1], carry.lens[row] + 1)
        named = jnp.where(jnp.arange(slots.shape[0], dtype=jnp.int32) < end, slots, 0)
        return replace(carry, state=call(carry.state, named)), _answer(carry)

    return op


def _late(carry: Carry, given: jax.Array) -> tuple[Carry, Answer]:
    """As `free_swa`, of the SWA pages that a snapshot names."""
    return _part(functools.partial(swa.free_swa, owner=carry.earlier))(carry, given)


def _look(carry: Carry, given: jax.Array) -> tuple[Carry, Answer]:
    state = carry.state
    sizes = swa.full_available_size(state), swa.swa_available_size(state), swa.available_size(state)
    return replace(carry, earlier=state), _answer(carry, None, *sizes)


def _misuse(call: Callable[..., swa.AllocatorState]) -> Op:
    """Two slots from anywhere, one of them past either end now and then."""

    def op(carry: Carry, given: jax.Array) -> tuple[Carry, Answer]:
        config = carry.state.config
        top = config.full_tokens + 3 * config.page_size
        slots = jax.lax.rem(given[:2], jnp.int32(top)) - 2
        slots = jnp.pad(slots, (0, carry.table.shape[1] - 2))
        return replace(carry, state=call(carry.state, slots)), _answer(carry)

    return op


def _window(carry: Carry, given: jax.Array) -> tuple[Carry, Answer]:
    state, evicted = swa.free_out_of_window(
        carry.state, carry.table, carry.lens, carry.evicted, active=_some(given[0])
    )
    return replace(carry, state=state, evicted=evicted), _answer(carry, evicted)


def _group(call: Callable[..., swa.AllocatorState]) -> Op:
    def op(carry: Carry, given: jax.Array) -> tuple[Carry, Answer]:
        return replace(carry, state=call(carry.state)), _answer(carry)

    return op


def _clear(carry: Carry, given: jax.Array) -> tuple[Carry, Answer]:
    nothing = {name: jnp.zeros_like(getattr(carry, name)) for name in ("table", "lens", "evicted")}
    state, rings = swa.clear(carry.state), jnp.zeros_like(carry.rings)
    return replace(carry, state=state, rings=rings, **nothing), _answer(carry)


# ---- the map, shares, rings, one budget -----------------------------------------------------


def _swap(carry: Carry, given: jax.Array) -> tuple[Carry, Answer]:
    """The last pages of two rows exchange their SWA sides."""
    one, other = (jax.lax.rem(word, jnp.int32(ROWS)) for word in (given[0], given[1]))
    size = carry.state.config.page_size
    last = _last(carry)
    starts = jnp.where(last > 0, last - jax.lax.rem(last, jnp.int32(size)), 0)
    full = jnp.stack([starts[one], starts[other]])
    to = swa.translate_full_to_swa(carry.state, full)
    state = swa.set_full_to_swa_mapping(carry.state, full, to[::-1])
    return replace(carry, state=state), _answer(carry, to)


def _unmap(carry: Carry, given: jax.Array) -> tuple[Carry, Answer]:
    return _part(swa.clear_full_to_swa_mapping)(carry, given)


def _fork(carry: Carry, given: jax.Array) -> tuple[Carry, Answer]:
    """The text of a row becomes that of another row too, where that one is empty."""
    row, slots = _row_of(carry, given[0])
    to = jax.lax.rem(given[1], jnp.int32(ROWS))
    free = (carry.lens[to] == 0) & (to != row)
    live = jnp.arange(slots.shape[0], dtype=jnp.int32) >= carry.evicted[row]
    state = swa.share(carry.state, jnp.where(free, slots, 0), live)
    takes = free & (jnp.arange(ROWS) == to)
    carry_on = replace(
        carry,
        state=state,
        table=jnp.where(takes[:, None], slots[None, :], carry.table),
        lens=jnp.where(takes, carry.lens[row], carry.lens),
        evicted=jnp.where(takes, carry.evicted[row], carry.evicted),
    )
    return carry_on, _answer(carry, None, free)


def _copy(carry: Carry, given: jax.Array) -> tuple[Carry, Answer]:
    size, rows = carry.state.config.page_size, _some(given[0]) | _some(given[1])
    state, copies = swa.copy_on_write(carry.state, carry.lens, _last(carry), rows)
    first = carry.lens - jax.lax.rem(carry.lens, jnp.int32(size))
    place = jnp.arange(carry.table.shape[1], dtype=jnp.int32)[None, :]
    offset = jnp.clip(place - first[:, None], 0, size - 1)
    own = jnp.take_along_axis(copies.target, offset, axis=1)
    inside = (place >= first[:, None]) & (place < carry.lens[:, None]) & (own > 0)
    said = _answer(carry, copies.source, copies.ok, copies.full_short, copies.swa_short)
    return replace(carry, state=state, table=jnp.where(inside, own, carry.table)), said


def _acquire(carry: Carry, given: jax.Array) -> tuple[Carry, Answer]:
    state, grant = swa.ring_acquire(carry.state, carry.rings, _some(given[0]))
    places = swa.ring_slots(carry.state.config, grant.rings, carry.lens)
    said = _answer(carry, places, grant.ok, grant.short)
    return replace(carry, state=state, rings=grant.rings), said


def _release(carry: Carry, given: jax.Array) -> tuple[Carry, Answer]:
    rings = jnp.where(_some(given[0]), carry.rings, 0)
    left = jnp.where(_some(given[0]), 0, carry.rings)
    return replace(carry, state=swa.ring_release(carry.state, rings), rings=left), _answer(carry)


def _rebalance(carry: Carry, given: jax.Array) -> tuple[Carry, Answer]:
    full, of_swa = (jax.lax.rem(word, jnp.int32(20)) for word in (given[0], given[1]))
    state = swa.rebalance(carry.state, full, of_swa)
    return replace(carry, state=state), _answer(carry, None, *swa.unified_available(state))


# A step is one of these, as often as the number says.
_COMMON: dict[str, tuple[Op, int]] = {
    "extend": (_extend, 5),
    "tail": (_tail, 3),
    "alloc": (_alloc, 2),
    "decode": (_decode, 8),
    "free": (_ended(swa.free), 2),
    "free_segment": (_ended(swa.free_segment), 2),
    "free_swa then free_full": (_ended(_both_sides), 2),
    "free_swa": (_part(swa.free_swa), 1),
    "free_swa_segment": (_part(swa.free_swa_segment), 1),
    "free_swa_grouped": (_part(swa.free_swa_grouped), 1),
    "free_out_of_window": (_window, 4),
    "free_group_begin": (_group(swa.free_group_begin), 1),
    "free_group_end": (_group(swa.free_group_end), 3),
    "look": (_look, 1),
    "late free_swa": (_late, 1),
    "odd free": (_misuse(swa.free), 1),
    "odd free_full": (_misuse(swa.free_full), 1),
}
_CLEAR = {"clear": (_clear, 1)}
_MAP = {"swap": (_swap, 1), "unmap": (_unmap, 1)}
_SHARES = {"fork": (_fork, 5), "copy": (_copy, 5)}
_RINGS = {"acquire": (_acquire, 5), "release": (_release, 3)}
_BUDGET = {"rebalance": (_rebalance, 4)}

_UNIFIED = UnifiedLayout(8, 6, 2, 3, 16)  # 8 blocks, each 3 full pages or 2 SWA pages
_KINDS = {
    "page 1": (swa.PoolConfig(72, 48, 1, 8), 24, _MAP | _CLEAR),
    "page 16": (swa.PoolConfig(512, 320, 16, 40), 96, _MAP | _CLEAR),
    "pure SWA": (swa.PoolConfig.pure_swa(48, 4, 9), 24, _SHARES | _CLEAR),
    "chunked": (swa.PoolConfig(80, 56, 4, 8, chunked=True), 24, _MAP | _CLEAR),
    "one budget": (swa.PoolConfig(48, 32, 2, 5, unified_layout=_UNIFIED), 16, _BUDGET | _CLEAR),
    "rings": (
        swa.PoolConfig.request_ring(96, 3, page_size=4, sliding_window=9, extra_tokens=2),
        24,
        _RINGS | _CLEAR,
    ),
    "forks": (swa.PoolConfig(96, 64, 4, 8), 24, _SHARES | _CLEAR),
}


def _program(kind: str, seed: int) -> Program:
    config, width, more = _KINDS[kind]
    ops = _COMMON | more
    bag = [at for at, (_, times) in enumerate(ops.values()) for _ in range(times)]

    def start(rank: int) -> Carry:
        def zeros(*shape: int) -> jax.Array:
            return jnp.zeros(shape, jnp.int32)

        state, rows = swa.init(config), [zeros(ROWS) for _ in range(3)]
        return Carry(state, swa.init(config), zeros(ROWS, width), *rows)

    def inputs(rank: int) -> dict[str, np.ndarray]:
        drawn = words(seed + rank, STEPS, WORDS)
        code = np.asarray(bag, np.int32)[drawn[:, -1] % len(bag)]
        return {"code": code, "words": drawn[:, :-1]}

    def step(carry: Carry, given: dict[str, jax.Array]) -> tuple[Carry, Answer]:
        return jax.lax.switch(given["code"], [op for op, _ in ops.values()], carry, given["words"])

    return Program(f"allocator, {kind}", start, inputs, step, EVERY)


PROGRAMS = [_program(kind, 1000 * at) for at, kind in enumerate(_KINDS, start=1)]
