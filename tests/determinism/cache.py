"""Programs of the prefix cache: requests that match, run, insert and end, locks, evictions."""

import dataclasses
import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import swa_jax as swa
from swa_jax import prefix_cache as pc
from swa_jax.prefix_cache.events import empty_record, tree_events
from swa_jax.prefix_cache.evict_lacking import evict_lacking
from swa_jax.prefix_cache.own import give_to_tree

from .numbers import below, words
from .program import Program, Watch

ROWS, WIDTH, STEPS, EVERY = 3, 24, 384, 48


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["cache", "state", "tokens", "lens", "evicted", "table", "owned_from", "receipts"],
    meta_fields=[],
)
@dataclass(frozen=True)
class Carry:
    """A tree, its allocator, and three requests."""

    cache: pc.PrefixCache
    state: swa.AllocatorState
    tokens: jax.Array  # int32[3, WIDTH]
    lens: jax.Array  # int32[3] tokens with KV, 0 for nobody
    evicted: jax.Array  # int32[3] tokens
    table: jax.Array  # int32[3, pages] first full slots
    owned_from: jax.Array  # int32[3] tokens that stand on the tree
    receipts: pc.Receipt  # [3]


Given = dict[str, jax.Array]
Op = Callable[[Carry, Given, jax.Array], tuple[Carry, jax.Array]]


def _says(*numbers: jax.Array | int) -> jax.Array:
    """int32[4]"""
    values = [jnp.asarray(number, jnp.int32) for number in numbers]
    return jnp.stack(values + [jnp.zeros((), jnp.int32)] * (4 - len(values)))


def _put(carry: Carry, row: jax.Array, **values: Any) -> Carry:
    """The same with some values of one row changed; past the last row: nothing."""
    new = {
        name: jax.tree.map(
            lambda old, value: old.at[row].set(value, mode="drop"), getattr(carry, name), value
        )
        for name, value in values.items()
    }
    return replace(carry, **new)


def _receipt(carry: Carry, row: jax.Array) -> pc.Receipt:
    return jax.tree.map(lambda values: values[row], carry.receipts)


def _begin(carry: Carry, given: Given, row: jax.Array) -> tuple[Carry, jax.Array]:
    """A request comes to a row that is idle: match, lock, make room, extend."""
    size, lag = carry.state.config.page_size, int(carry.cache.config.is_bigram)
    idle, tokens, length = carry.lens[row] == 0, given["tokens"], given["length"]
    known = jnp.where(idle, length + lag, 0)
    cache, match = pc.match_prefix(
        carry.cache, carry.state, tokens, known, namespace=given["namespace"]
    )
    cache, receipt = pc.lock(cache, carry.state, match.node)
    lacks = jnp.where(idle, (length + size - 1) // size - match.length // size, 0)
    cache, state, gone = evict_lacking(
        cache, carry.state, lacks - carry.state.full.num_free, lacks - carry.state.swa.num_free
    )
    last = jnp.where(match.length > 0, match.slots[match.length - 1], -1)
    end = jnp.where(idle, length, match.length)
    state, grant = swa.alloc_extend(
        state, match.length[None], end[None], last[None], capacity=WIDTH
    )
    enters = idle & grant.ok
    cache = jax.lax.cond(enters, lambda c: c, lambda c: pc.unlock(c, receipt), cache)
    place = jnp.arange(WIDTH, dtype=jnp.int32)
    own = grant.slots[jnp.maximum(place - match.length, 0)]
    slots = jnp.where(place < match.length, match.slots, own)
    slots = jnp.where(place < length, slots, 0)
    carry = _put(
        replace(carry, cache=cache, state=state),
        jnp.where(enters, row, ROWS),
        tokens=tokens,
        lens=length,
        evicted=match.length,
        table=slots[::size],
        owned_from=match.length,
        receipts=receipt,
    )
    return carry, _says(match.length, grant.ok, gone.full_tokens, gone.swa_tokens)


def _decode(carry: Carry, given: Given, row: jax.Array) -> tuple[Carry, jax.Array]:
    size, length = carry.state.config.page_size, carry.lens[row]
    runs = (length > 0) & (length < WIDTH - 2)
    lacks = (runs & (length % size == 0)).astype(jnp.int32)
    cache, state, gone = evict_lacking(
        carry.cache,
        carry.state,
        lacks - carry.state.full.num_free,
        lacks - carry.state.swa.num_free,
    )
    at = jnp.maximum(length - 1, 0)
    last = carry.table[row, at // size] + at % size
    state, grant = swa.alloc_decode(state, (length + 1)[None], last[None], runs[None])
    grows = runs & grant.ok
    opens = jnp.where(grows & (length % size == 0), length // size, carry.table.shape[1])
    table = carry.table.at[row, opens].set(grant.slots[0], mode="drop")
    tokens = carry.tokens.at[row, length + 1].set(given["tokens"][0], mode="drop")
    carry = replace(carry, cache=cache, state=state, table=table, tokens=tokens)
    carry = _put(carry, jnp.where(grows, row, ROWS), lens=length + 1)
    return carry, _says(grant.slots[0], grant.ok, gone.full_tokens, gone.swa_tokens)


def _window(carry: Carry, given: Given, row: jax.Array) -> tuple[Carry, jax.Array]:
    size = carry.state.config.page_size
    kept = jnp.maximum(carry.lens - 1, 0) // size * size
    state, evicted = swa.free_out_of_window(
        carry.state,
        carry.table,
        carry.lens,
        carry.evicted,
        insert_lens=kept,
        active=carry.lens > 0,
        stride=size,
    )
    return replace(carry, state=state, evicted=evicted), _says(*evicted)


def _release(carry: Carry, given: Given, row: jax.Array) -> tuple[Carry, jax.Array]:
    cache, receipt = pc.release_swa_lock(carry.cache, _receipt(carry, row), given["amounts"][0])
    return _put(replace(carry, cache=cache), row, receipts=receipt), _says(receipt.boundary)


def _insert(carry: Carry, given: Given, row: jax.Array) -> tuple[Carry, jax.Array]:
    """What a running request has so far goes to the tree, and it stands on that."""
    cache, state, held = give_to_tree(
        carry.cache,
        carry.state,
        jnp.pad(carry.tokens[row], (0, 2)),
        carry.lens[row],
        carry.table[row],
        _receipt(carry, row),
        given["namespace"],
    )
    carry = _put(
        replace(carry, cache=cache, state=state),
        row,
        table=held.table,
        owned_from=held.owned_from,
        receipts=held.receipt,
    )
    return carry, _says(held.owned_from)


def _end(carry: Carry, given: Given, row: jax.Array) -> tuple[Carry, jax.Array]:
    size, length = carry.state.config.page_size, carry.lens[row]
    first = jnp.arange(carry.table.shape[1], dtype=jnp.int32) * size
    own = (first >= carry.owned_from[row]) & (first < length)
    state = swa.free(carry.state, jnp.where(own, carry.table[row], 0))
    cache = pc.unlock(carry.cache, _receipt(carry, row))
    carry = replace(carry, cache=cache, state=state)
    carry = _put(carry, row, lens=0, evicted=0, owned_from=0, receipts=pc.no_receipt())
    return carry, _says(length)


def _finish(carry: Carry, given: Given, row: jax.Array) -> tuple[Carry, jax.Array]:
    return _end(_insert(carry, given, row)[0], given, row)


def _evict(carry: Carry, given: Given, row: jax.Array) -> tuple[Carry, jax.Array]:
    full, of_swa = given["amounts"][0], given["amounts"][1]
    cache, state, gone = pc.evict(carry.cache, carry.state, full_tokens=full, swa_tokens=of_swa)
    return replace(carry, cache=cache, state=state), _says(gone.full_tokens, gone.swa_tokens)


def _sizes(carry: Carry, given: Given, row: jax.Array) -> tuple[Carry, jax.Array]:
    cache, state = carry.cache, carry.state
    return carry, _says(
        pc.full_evictable_size(cache),
        pc.swa_evictable_size(cache, state),
        pc.full_protected_size(cache),
        pc.swa_protected_size(cache, state),
    )


_OPS: dict[Op, int] = {
    _begin: 6,
    _decode: 6,
    _window: 3,
    _release: 1,
    _insert: 2,
    _finish: 4,
    _end: 1,
    _evict: 1,
    _sizes: 1,
}


def _event_watch(new_cache: Callable[[], pc.PrefixCache]) -> Callable[[], Watch]:
    """Looks for block events as a router's feed does; they are part of the bits."""

    def make() -> Watch:
        record = empty_record(new_cache().config)

        def look(carry: Carry) -> np.ndarray:
            nonlocal record
            record, events = tree_events(record, carry.cache)
            said = [(type(event).__name__, dataclasses.astuple(event)) for event in events]
            return np.frombuffer(repr(said).encode(), np.uint8)

        return look

    return make


def _program(name: str, seed: int, config: swa.PoolConfig, **options: Any) -> Program:
    pages = -(-WIDTH // config.page_size)
    bag = [at for at, times in enumerate(_OPS.values()) for _ in range(times)]

    def new_cache() -> pc.PrefixCache:
        return pc.init(config, max_prefix_tokens=32, **options)

    def start(rank: int) -> Carry:
        def zeros(*shape: int) -> jax.Array:
            return jnp.zeros(shape, jnp.int32)

        return Carry(
            cache=new_cache(),
            state=swa.init(config),
            tokens=zeros(ROWS, WIDTH),
            lens=zeros(ROWS),
            evicted=zeros(ROWS),
            table=zeros(ROWS, pages),
            owned_from=zeros(ROWS),
            receipts=pc.no_receipt(ROWS),
        )

    def inputs(rank: int) -> dict[str, np.ndarray]:
        """Texts begin as one of three do, up to anywhere."""
        at = seed + 20 * rank
        beginnings = below(50, seed, 3, WIDTH)
        drawn = words(at + 1, STEPS, 4)
        alike = np.arange(WIDTH) < below(WIDTH, at + 2, STEPS, 1)
        texts = np.where(alike, beginnings[drawn[:, 0] % 3], below(50, at + 3, STEPS, WIDTH))
        return {
            "code": np.asarray(bag, np.int32)[drawn[:, 1] % len(bag)],
            "row": drawn[:, 2] % ROWS,
            "tokens": texts.astype(np.int32),
            "length": below(WIDTH - 6, at + 4, STEPS) + 1,
            "namespace": (drawn[:, 3] % 8 == 0).astype(np.int32),
            "amounts": below(16, at + 5, STEPS, 2),
        }

    def step(carry: Carry, given: Given) -> tuple[Carry, jax.Array]:
        return jax.lax.switch(given["code"], list(_OPS), carry, given, given["row"])

    return Program(f"prefix cache, {name}", start, inputs, step, EVERY, _event_watch(new_cache))


PROGRAMS = [
    _program("page 2", 20_000, swa.PoolConfig(72, 48, 2, 5)),
    _program(
        "page 1, pairs, lfu", 21_000, swa.PoolConfig(64, 40, 1, 4), is_bigram=True, policy="lfu"
    ),
]
