"""A prefill side and a decode side behind plain Python calls, with KV that tells what it is.

The KV of a token is a hash of everything it may depend on: the namespace, the tokens up to it, the
kind of layer. So a page of somebody else, a wrong offset or a stale row shows as a wrong number.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import zlib
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from compare import ints
from prefix_pair import QUICKLY

import swa_jax as swa
from swa_jax import disagg
from swa_jax import prefix_cache as pc
from swa_jax.kv_rows import read_rows, write_rows
from swa_jax.models.decoder.kv_pool import KVPool
from swa_jax.prefix_cache.evict_lacking import evict_lacking
from swa_jax.prefix_cache.own import give_to_tree

WIDTH = 24  # T, tokens of a row


# ---- what KV holds ------------------------------------------------------------------------


@functools.cache
def content(ns: int, tokens: tuple[int, ...], kind: str) -> np.ndarray:
    """int32[len(tokens)] the KV of each token in a layer of this kind.

    A draft layer's KV depends on the next token too: there is none for the last token.
    """
    values, seen = [], zlib.crc32(f"{ns}".encode())
    for token in tokens:
        seen = zlib.crc32(f"{token},".encode(), seen)
        values.append(zlib.crc32(kind.encode(), seen))
    values = values[1:] if kind == "draft" else values
    return np.asarray(values, np.uint32).view(np.int32)


def new_pools(config: swa.PoolConfig, *, draft: bool) -> KVPool:
    """Layers of more than one dtype and shape; the draft's is addressed by full slot too."""
    full, of_swa = (
        (config.full_pages + 1, config.page_size),
        (config.swa_pages + 1, config.page_size),
    )
    layers = (jnp.zeros((*full, 1), jnp.int32),) + (jnp.zeros(full, jnp.int32),) * draft
    return KVPool(full=layers, swa=(jnp.zeros((*of_swa, 2), jnp.uint16),))


def rows_of(ns: int, tokens: Sequence[int], *, draft: bool) -> KVPool:
    """The right rows of WIDTH tokens, 0 past the end."""
    known = tuple(tokens)

    def row(kind: str) -> np.ndarray:
        values = np.zeros(WIDTH, np.int32)
        right = content(ns, known, kind)
        values[: len(right)] = right[:WIDTH]
        return values

    full = [row("full")[:, None]] + ([row("draft")] if draft else [])
    return KVPool(
        tuple(jnp.asarray(r) for r in full),
        (jnp.asarray(row("swa").view(np.uint16).reshape(WIDTH, 2)),),
    )


# ---- compiled calls -----------------------------------------------------------------------

_STATIC = {"pack": ("full_capacity", "swa_capacity")}


_JITTED: dict[str, Any] = {}


def compiled(name: str) -> Any:
    """A function of this file, of `swa_jax.disagg` or of the cache, jitted once for the run."""
    if name not in _JITTED:
        _JITTED[name] = _jit(name)
    return _JITTED[name]


def _jit(name: str) -> Any:
    function = globals().get(f"_{name}") or getattr(disagg, name, None) or getattr(pc, name)

    def fresh(*args: Any, **kwargs: Any) -> Any:  # so that nothing traced earlier is found again
        return function(*args, **kwargs)

    return jax.jit(fresh, static_argnames=_STATIC.get(name, ()), compiler_options=QUICKLY)


@contextlib.contextmanager
def traced_anew(*names: str) -> Iterator[None]:
    """Inside, these functions are jitted for themselves, and forgotten afterwards."""
    kept = dict(_JITTED)
    _JITTED.update({name: _jit(name) for name in names})
    yield
    _JITTED.update(kept)
    for name in set(names) - set(kept):
        del _JITTED[name]


def _prefill(state, cache, pools, tokens, length, namespace, rows, lag):
    """What a prefill worker does with one request, at once: every token's KV, a window kept."""
    page = state.config.page_size
    cache, match = pc.match_prefix(cache, state, tokens, length + lag, namespace=namespace)
    cache, receipt = pc.lock(cache, state, match.node)
    lacks = (length + page - 1) // page - match.length // page
    full = lacks - state.full.num_free
    cache, state, _ = evict_lacking(cache, state, full, lacks - state.swa.num_free)
    last = jnp.where(match.length > 0, match.slots[match.length - 1], -1)
    state, grant = swa.alloc_extend(
        state, match.length[None], length[None], last[None], capacity=WIDTH
    )
    cache = jax.lax.cond(grant.ok, lambda c: c, lambda c: pc.unlock(c, receipt), cache)
    token = jnp.arange(WIDTH, dtype=jnp.int32)
    own = grant.slots[jnp.maximum(token - match.length, 0)]
    slots = jnp.where(token < match.length, match.slots, own)
    slots = jnp.where(token < length, slots, 0)
    new = jnp.where(grant.ok & (token >= match.length), slots, 0)
    pools = KVPool(
        write_rows(pools.full, new, rows.full),
        write_rows(pools.swa, swa.translate_full_to_swa(state, new), rows.swa),
    )
    table = jnp.where(grant.ok, slots[::page], 0)
    if state.config.sliding_window is not None:
        kept = jnp.maximum(length - lag, 0) // page * page
        state, _ = swa.free_out_of_window(
            state,
            table[None],
            length[None],
            match.length[None],
            insert_lens=kept[None],
            active=grant.ok[None],
            stride=page,
        )
    return state, cache, pools, (grant.ok, table, match.length, receipt)


def _end_prefill(state, cache, tokens, length, namespace, table, receipt):
    """Gives the request to the tree and lets go of it."""
    page = state.config.page_size
    tokens = jnp.pad(tokens, (0, table.shape[0] * page - WIDTH))
    cache, state, held = give_to_tree(cache, state, tokens, length, table, receipt, namespace)
    return _let_go(state, cache, length, held.table, held.owned_from, held.receipt)


def _let_go(state, cache, length, table, owned_from, receipt):
    first = jnp.arange(table.shape[0], dtype=jnp.int32) * state.config.page_size
    own = (first >= owned_from) & (first < length)
    state = swa.free(state, jnp.where(own, table, 0))
    return state, cache if cache is None else pc.unlock(cache, receipt)


def _read(state, pools, table, length):
    """KV by token: full rows, SWA rows (0 where gone), and where SWA is live."""
    page = state.config.page_size
    token = jnp.arange(WIDTH, dtype=jnp.int32)
    slots = jnp.where(token < length, table[token // page] + token % page, 0)
    of_swa = swa.translate_full_to_swa(state, slots)
    return read_rows(pools.full, slots), read_rows(pools.swa, of_swa), of_swa > 0


def _probe(inbox, state, cache, others):
    """Every law, the faults, and what may leave the tree."""
    laws = {"allocator": swa.invariants(state), "faults": state.faults}
    sizes = ()
    if cache is not None:
        laws["tree"] = pc.invariants(cache, state)
        sizes = pc.full_evictable_size(cache), pc.swa_evictable_size(cache, state)
    if inbox is not None:
        laws["inbox"] = disagg.invariants(inbox, state, cache, others=others)
    return laws, sizes


# ---- the two sides ------------------------------------------------------------------------


@dataclasses.dataclass(eq=False)
class Row:
    """A request on the prefill side: all its KV is computed."""

    ns: int
    tokens: list[int]  # one more than have KV where keys lag
    length: int
    table: jax.Array
    owned_from: jax.Array
    receipt: pc.Receipt


class Side:
    """An allocator, a cache and KV."""

    def __init__(
        self, config: swa.PoolConfig, *, is_bigram: bool = False, cached: bool = True
    ) -> None:
        self.config, self.page, self.lag = config, config.page_size, int(is_bigram)
        self.state = swa.init(config)
        self.cache = pc.init(config, is_bigram=is_bigram) if cached else None
        self.pools = new_pools(config, draft=is_bigram)

    def evict(self, full: int, of_swa: int) -> None:
        self.cache, self.state, _ = compiled("evict")(
            self.cache, self.state, full_tokens=jnp.int32(full), swa_tokens=jnp.int32(of_swa)
        )

    def left(self) -> tuple[int, int]:
        return int(self.state.full.num_free) * self.page, int(self.state.swa.num_free) * self.page

    def check(
        self, inbox: disagg.Inbox | None = None, others: tuple[int, int] = (0, 0)
    ) -> tuple[int, ...]:
        """Every law holds and no fault was counted; the evictable sizes."""
        held = jnp.int32(others[0]), jnp.int32(others[1])
        laws, sizes = jax.device_get(
            compiled("probe")(inbox, self.state, self.cache, held if inbox is not None else None)
        )
        assert not laws.pop("faults").any(), swa.faults(self.state)
        broken = [f"{of} {name}" for of in laws for name in laws[of] if not laws[of][name]]
        assert not broken, broken
        return tuple(int(size) for size in sizes)


class PrefillSide(Side):
    """Rows that are computed at once and then wait to be fetched."""

    def prefill(self, ns: int, tokens: Sequence[int]) -> Row | None:
        """None if it does not fit."""
        length = len(tokens) - self.lag
        self.state, self.cache, self.pools, (ok, table, owned, receipt) = compiled("prefill")(
            self.state,
            self.cache,
            self.pools,
            ints(tokens, WIDTH),
            jnp.int32(length),
            jnp.int32(ns),
            rows_of(ns, tokens, draft=bool(self.lag)),
            jnp.int32(self.lag),
        )
        return Row(ns, list(tokens), length, table, owned, receipt) if ok else None

    def end(self, row: Row) -> None:
        self.state, self.cache = compiled("end_prefill")(
            self.state,
            self.cache,
            ints(row.tokens, WIDTH),
            jnp.int32(row.length),
            jnp.int32(row.ns),
            row.table,
            row.receipt,
        )

    def cancel(self, row: Row) -> None:
        self.state, self.cache = compiled("let_go")(
            self.state, self.cache, jnp.int32(row.length), row.table, row.owned_from, row.receipt
        )

    def pack(
        self, row: Row, ask: disagg.Ask, start: tuple[int, int], room: tuple[int, int]
    ) -> disagg.Piece:
        return compiled("pack")(
            self.state,
            self.pools,
            row.table,
            jnp.int32(row.length),
            ask,
            full_capacity=room[0],
            swa_capacity=room[1],
            full_from=jnp.int32(start[0]),
            swa_from=jnp.int32(start[1]),
        )


class DecodeSide(Side):
    """An inbox beside it."""

    def __init__(self, config: swa.PoolConfig, *, places: int = 3, **options: Any) -> None:
        super().__init__(config, **options)
        self.inbox = disagg.new_inbox(config, places, WIDTH)

    @property
    def sides(self) -> tuple[Any, ...]:
        return self.inbox, self.state, self.cache

    def preallocate(self, tokens: Sequence[int], length: int, ns: int = 0) -> disagg.Reserved:
        *sides, reserved = compiled("preallocate")(
            *self.sides, ints(tokens, WIDTH), jnp.int32(length), namespace=jnp.int32(ns)
        )
        self.inbox, self.state, self.cache = sides
        return reserved

    def receive(self, piece: disagg.Piece) -> bool:
        self.inbox, self.pools, accepted = compiled("receive")(
            self.inbox, self.state, self.pools, piece
        )
        return bool(accepted)

    def commit(self, ticket: disagg.Ticket) -> disagg.Committed:
        *sides, committed = compiled("commit")(*self.sides, ticket)
        self.inbox, self.state, self.cache = sides
        return committed

    def abort(self, ticket: disagg.Ticket) -> None:
        self.inbox, self.state, self.cache = compiled("abort")(*self.sides, ticket)

    def abort_older(self, age: int) -> None:
        self.inbox, self.state, self.cache = compiled("abort_older")(*self.sides, jnp.int32(age))

    def let_go(self, committed: disagg.Committed) -> None:
        self.state, self.cache = compiled("let_go")(
            self.state,
            self.cache,
            committed.length,
            committed.table,
            committed.owned_from,
            committed.receipt,
        )

    def read(
        self, table: jax.Array, length: int
    ) -> tuple[list[np.ndarray], np.ndarray, np.ndarray]:
        full, of_swa, live = jax.device_get(
            compiled("read")(self.state, self.pools, table, jnp.int32(length))
        )
        return list(full), of_swa[0], live

    def check_kv(
        self, ns: int, tokens: Sequence[int], length: int, table: jax.Array, swa_from: int
    ) -> None:
        """Every token's KV is its own, SWA from `swa_from` on."""
        right = jax.device_get(rows_of(ns, tokens, draft=bool(self.lag)))
        full, of_swa, live = self.read(table, length)
        for mine, wanted in zip(full, right.full, strict=True):
            np.testing.assert_array_equal(mine[:length], wanted[:length])
        assert live[swa_from:length].all(), (swa_from, length, live)
        where = live[:length]
        np.testing.assert_array_equal(of_swa[:length][where], right.swa[0][:length][where])

    def check_all(self, others: tuple[int, int] = (0, 0)) -> tuple[int, ...]:
        """`check`, with the reservations; `others` are pages of running requests."""
        return self.check(self.inbox, others)
