"""The allocator and the tree as they are now, for one engine, and what the host reads of them."""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import jax
import numpy as np

import swa_jax as swa
from swa_jax import prefix_cache
from swa_jax.compat.vllm import calls
from swa_jax.compat.vllm.namespaces import Namespaces
from swa_jax.compat.vllm.requests import Request, namespace_of, tokens_of
from swa_jax.prefix_cache import Receipt
from swa_jax.prefix_cache.events import AllBlocksCleared, Event, empty_record, tree_events

Rest: TypeAlias = Any  # what a call returns beside the two
_FEWEST = 16  # pages of the shortest padded row
_NAMES_BESIDE = 64  # namespaces that nothing is cached in any more, before they are forgotten


def room_for(pages: int) -> int:
    """Padded pages: 16, 64, 256 and so on, so that few programs are compiled."""
    room = _FEWEST
    while room < pages:
        room *= 4
    return room


def page_row(pages: Sequence[int], room: int | None = None) -> np.ndarray:
    """int32[N] pages, padded with 0."""
    out = np.zeros(room_for(len(pages)) if room is None else room, np.int32)
    out[: len(pages)] = pages
    return out


@dataclass(frozen=True)
class Room:
    """Pages that are free, and that eviction can free beside them."""

    full: int
    swa: int
    full_evictable: int
    swa_evictable: int

    def has(self, full: int, of_swa: int) -> bool:
        """Whether so many pages can be had."""
        most = self.full + self.full_evictable, self.swa + self.swa_evictable
        return full <= most[0] and of_swa <= most[1]


class Store:
    """One allocator and one tree.

    Args:
      pool: the pools.
      keep_events: keep what is stored and removed until it is taken.
    """

    def __init__(self, pool: swa.PoolConfig, *, keep_events: bool = False) -> None:
        """Everything is free and nothing cached."""
        self.pool = pool
        self.state = swa.init(pool)
        self.cache = prefix_cache.init(pool)
        self.spaces, self._most_spaces = Namespaces(), pool.full_pages + _NAMES_BESIDE
        self._record = empty_record(self.cache.config)
        self._keeps_events = keep_events
        self._events: list[Event] = []

    def text(self, space: Hashable, tokens: np.ndarray, pages: int = 0) -> calls.Text:
        """int32[n] tokens in a namespace, padded to `pages` pages or more."""
        size = self.pool.page_size
        row = np.zeros(room_for(max(pages, -(-len(tokens) // size))) * size, np.int32)
        row[: len(tokens)] = tokens
        number = self._number(space) if len(tokens) else 0
        return calls.Text(row, np.int32(len(tokens)), np.int32(number))  # type: ignore[arg-type]

    def _number(self, space: Hashable) -> int:
        if self.spaces.find(space) is None and len(self.spaces) > self._most_spaces:
            in_tree, namespace = self.read("in_tree", "namespace")
            self.spaces.keep(namespace[in_tree].tolist())
        return self.spaces.number(space)

    def look(self, request: Request, length: int) -> tuple[int, list[int], list[int]]:
        """The longest usable prefix of `length` tokens: its tokens, its pages, their SWA sides."""
        tokens, space = tokens_of(request, 0, length), namespace_of(request)
        if self.spaces.find(space) is None:  # nothing is cached there, and no name is kept for it
            return 0, [], []
        news = jax.device_get(self.run(calls.look, self.text(space, tokens)))
        found, *both = news.tolist()
        count, room = found // self.pool.page_size, len(both) // 2
        return found, both[:count], both[room : room + count]

    def run(self, call: Callable[..., Any], *args: object, **static: object) -> Rest:
        """One of `calls`: the state and the tree go in, and what comes out of them is kept."""
        out = call(self.cache, self.state, *args, **static)
        both, *rest = out if isinstance(out[0], tuple) else (out,)
        self.cache, self.state = both
        return rest[0] if len(rest) == 1 else rest

    def room(self) -> Room:
        """What can be had now."""
        return Room(*jax.device_get(calls.room(self.cache, self.state)).tolist())

    def grow(
        self, held: int, wanted: int, swa_from: int, spare: int = 0
    ) -> tuple[list[int], list[int]] | None:
        """Whole pages from `held` tokens to `wanted`, evicting what is lacking.

        Args:
          held: tokens, whole pages.
          wanted: tokens, whole pages.
          swa_from: tokens before it need no SWA side.
          spare: full pages that must be left.

        Returns:
          The pages and their SWA sides, 0 for none; None where there is no room, and nothing has
          changed.
        """
        size = self.pool.page_size
        if wanted <= held:
            return [], []
        full, of_swa = (wanted - held) // size, (wanted - swa_from) // size
        room = self.room()
        if not room.has(full + spare, of_swa):
            return None
        lacking = max(0, full - room.full), max(0, of_swa - room.swa)
        if any(lacking):
            self.run(calls.evict, np.array(lacking, np.int32))
        count = room_for(full)
        args = (np.int32(held), np.int32(wanted - swa_from), np.int32(wanted))
        news = jax.device_get(self.run(calls.grant, *args, capacity=count * size))
        if not news[0]:
            return None
        return news[1 : 1 + full].tolist(), news[1 + count : 1 + count + full].tolist()

    def lock(self, page: int) -> Receipt:
        """Keeps a cached block and all before it."""
        self.cache, receipt = prefix_cache.lock(self.cache, self.state, page)
        return receipt

    def unlock(self, receipt: Receipt) -> None:
        """Undoes one lock."""
        self.cache = prefix_cache.unlock(self.cache, receipt)

    def read(self, *names: str) -> tuple[np.ndarray, ...]:
        """Arrays of the state or the tree on the host, by their paths (`full.holders`)."""
        return jax.device_get(tuple(self._leaf(name) for name in names))

    def _leaf(self, name: str) -> jax.Array:
        value: Any = self.cache if hasattr(self.cache, name) else self.state
        for part in name.split("."):
            value = getattr(value, part)
        return value

    # The cached texts.

    def hashes(self) -> np.ndarray:
        """uint64[F+1] the hash of the text that ends with each page; 0 for one not cached."""
        self._look_at_tree()
        return np.where(self._record.born >= 0, self._record.hash, 0)

    def take_events(self) -> list[Event]:
        """What was stored and removed since the last call."""
        self._look_at_tree()
        events, self._events = self._events, []
        return events

    def _look_at_tree(self) -> None:
        self._record, events = tree_events(self._record, self.cache)
        self._events += events if self._keeps_events else []

    def forget(self) -> None:
        """Gives every cached block back. Nobody may use one."""
        self._look_at_tree()
        everything = np.array([self.pool.full_pages, self.pool.swa_pages], np.int32)
        self.run(calls.evict, everything)
        self.cache = prefix_cache.reset(self.cache)
        self._record = empty_record(self.cache.config)
        self._events += [AllBlocksCleared()] if self._keeps_events else []
