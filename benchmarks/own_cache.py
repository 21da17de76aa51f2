"""The prefix cache of swa_jax on a list of prompts: a call at a time, and in one compiled loop.

A prompt's life: match and lock what is cached of it, evict what its other pages lack, grant them,
give all to the cache, unlock. Prompts are padded to one of a few lengths; each compiles once. In
the loop they lie one after the other in one array.
"""

import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

import swa_jax as swa
from swa_jax import prefix_cache as pc
from swa_jax.counts import free_pages
from swa_jax.only_if import only_if
from swa_jax.paging import pages_for
from swa_jax.prefix_cache.evict_lacking import evict_lacking

World = tuple[swa.AllocatorState, pc.PrefixCache]
_Step = Callable[[World, jax.Array, jax.Array], tuple[World, jax.Array]]


def new_world(config: swa.PoolConfig, longest: int) -> World:
    """Nothing granted, nothing cached; prompts of up to `longest` tokens."""
    return swa.init(config), pc.init(config, max_prefix_tokens=longest)


def match(world: World, tokens: jax.Array, length: jax.Array) -> tuple[World, pc.Match, pc.Receipt]:
    """What is cached of int32[T] tokens, without the last of int32[] `length`, locked."""
    state, cache = world
    cache, found = pc.match_prefix(cache, state, tokens, length - 1)
    cache, receipt = pc.lock(cache, state, found.node)
    return (state, cache), found, receipt


def make_room(world: World, pages: jax.Array) -> World:
    """Evicts what int32[] `pages` of each kind lack."""
    full_free, swa_free = free_pages(world[0])
    full, swa_side = pages - full_free, pages - swa_free

    def evict(world: World) -> World:
        state, cache = world
        cache, state, _ = evict_lacking(cache, state, full, swa_side)
        return state, cache

    return only_if((full > 0) | (swa_side > 0), evict, world)


def grant(world: World, found: pc.Match, length: jax.Array) -> tuple[World, jax.Array]:
    """Slots for the rest of a prompt; int32[T] those of all of it."""
    state, cache = world
    room = found.slots.shape[0]
    last = jnp.where(found.length > 0, found.slots[jnp.maximum(found.length - 1, 0)], -1)
    state, given = swa.alloc_extend(
        state, found.length[None], length[None], last[None], capacity=room
    )
    place = found.length + jnp.arange(room, dtype=jnp.int32)
    return (state, cache), found.slots.at[place].set(given.slots, mode="drop")


def finish(
    world: World, tokens: jax.Array, length: jax.Array, slots: jax.Array, receipt: pc.Receipt
) -> World:
    """Gives a prompt's pages to the cache; what is no whole page is freed."""
    state, cache = world
    size = state.config.page_size
    cache, state, done = pc.insert(cache, state, tokens, length, slots)
    # Only the last page is not whole.
    rest = jnp.where(length > done.length, jnp.int32(slots.shape[0] - 1), jnp.int32(-1))
    at = jnp.where(rest >= 0, done.length, jnp.int32(0))
    tail = jnp.where(rest >= 0, slots[jnp.minimum(at, rest)], 0)
    state = swa.free(state, jnp.where(jnp.arange(size) == 0, tail, 0))
    return state, pc.unlock(cache, receipt)


def unlock(world: World, receipt: pc.Receipt) -> World:
    """Gives up a match."""
    return world[0], pc.unlock(world[1], receipt)


class OwnStore:
    """The calls as a `Store` of one row: jitted, the world donated, every answer waited for."""

    name = "swa_jax, a call at a time"
    hashed_s = 0.0

    def __init__(self, config: swa.PoolConfig, rooms: Sequence[int]) -> None:
        """All free; prompts are padded to one of `rooms`."""
        self.size, self.rooms = config.page_size, rooms
        self.config = config
        self.clear()
        self._match, self._grant, self._finish, self._make_room, self._unlock = (
            jax.jit(call, donate_argnums=0) for call in (match, grant, finish, make_room, unlock)
        )

    def clear(self) -> None:
        """All free again; nothing compiles anew."""
        self.world = new_world(self.config, max(self.rooms))

    def prepare(self, tokens: list[np.ndarray], prompts: list[int]) -> None:
        """On the device, padded."""
        self.requests = []
        for each, length in zip(tokens, prompts, strict=True):
            room = next(room for room in self.rooms if room >= length)
            padded = np.zeros(room, np.int32)
            padded[:length] = each[:length]
            self.requests.append(jax.device_put(padded))

    def match(self, row: int, request: int, length: int) -> int:
        """See `Store`."""
        del row
        self.tokens = self.requests[request]
        self.world, self.found, self.receipt = self._match(
            self.world, self.tokens, np.int32(length)
        )
        return int(self.found.length)

    def unmatch(self, row: int) -> None:
        """See `Store`."""
        del row
        self.world = self._unlock(self.world, self.receipt)
        jax.block_until_ready(self.world[1].clock)

    def make_room(self, pages: int) -> None:
        """See `Store`."""
        self.world = self._make_room(self.world, np.int32(pages))
        jax.block_until_ready(self.world[1].clock)

    def prefill(self, row: int, length: int, tokens: int) -> None:
        """See `Store`."""
        del row
        self.world, self.slots = self._grant(self.world, self.found, np.int32(length + tokens))
        jax.block_until_ready(self.slots)

    def finish(self, row: int, length: int, evicted: int) -> None:
        """See `Store`."""
        del row, evicted
        self.world = self._finish(
            self.world, self.tokens, np.int32(length), self.slots, self.receipt
        )
        jax.block_until_ready(self.world[1].clock)

    def held(self) -> tuple[int, int]:
        """See `Store`."""
        state = self.world[0]
        full, swa_free = (int(pages) for pages in free_pages(state))
        return state.config.full_pages - full, state.config.swa_pages - swa_free


class OwnLoop:
    """The same prompts in one program."""

    name = "swa_jax, in a loop"

    def __init__(
        self,
        config: swa.PoolConfig,
        rooms: Sequence[int],
        tokens: list[np.ndarray],
        lengths: Sequence[int],
    ) -> None:
        """Lays the prompts out; compiles when first run."""
        self.config, self.rooms = config, tuple(rooms)
        flat = np.concatenate([each[:length] for each, length in zip(tokens, lengths, strict=True)])
        self.flat = jnp.asarray(np.pad(flat, (0, max(rooms))))
        counts = np.asarray(lengths, np.int32)
        starts = np.concatenate([[0], np.cumsum(counts)[:-1]]).astype(np.int32)
        which = np.searchsorted(np.asarray(rooms), counts).astype(np.int32)
        self.prompts = tuple(jnp.asarray(each) for each in (starts, counts, which))
        self._serve, self._match = _programs(self.rooms)

    def new_world(self) -> World:
        """All free."""
        return new_world(self.config, max(self.rooms))

    def serve(self, world: World) -> tuple[World, np.ndarray]:
        """The life of every prompt; int32[N] tokens found of each."""
        world, hits = self._serve(world, self.flat, self.prompts)
        return world, np.asarray(jax.block_until_ready(hits))

    def match(self, world: World) -> tuple[World, np.ndarray]:
        """Every prompt matched, locked and unlocked; int32[N] tokens found of each."""
        world, hits = self._match(world, self.flat, self.prompts)
        return world, np.asarray(jax.block_until_ready(hits))


@functools.cache
def _programs(rooms: tuple[int, ...]) -> tuple[Callable, Callable]:
    """A prompt's life, and a match alone, for all prompts."""
    return tuple(  # type: ignore[return-value]
        jax.jit(functools.partial(_scan, rooms, one), donate_argnums=0) for one in (_live, _look)
    )


def _scan(
    rooms: tuple[int, ...], one: _Step, world: World, flat: jax.Array, prompts: tuple
) -> tuple[World, jax.Array]:
    """`one` for each prompt, padded to the least of `rooms` that holds it."""

    def step(world: World, prompt: tuple) -> tuple[World, jax.Array]:
        start, length, which = prompt
        carry = world, jnp.int32(0)
        for index, room in enumerate(rooms):

            def padded(carry: tuple[World, jax.Array], room: int = room) -> tuple[World, jax.Array]:
                return one(carry[0], jax.lax.dynamic_slice(flat, (start,), (room,)), length)

            carry = only_if(which == index, padded, carry)
        return carry

    return jax.lax.scan(step, world, prompts)


def _live(world: World, tokens: jax.Array, length: jax.Array) -> tuple[World, jax.Array]:
    world, found, receipt = match(world, tokens, length)
    size = world[0].config.page_size
    world = make_room(world, pages_for(length, size) - pages_for(found.length, size))
    world, slots = grant(world, found, length)
    return finish(world, tokens, length, slots, receipt), found.length


def _look(world: World, tokens: jax.Array, length: jax.Array) -> tuple[World, jax.Array]:
    world, found, receipt = match(world, tokens, length)
    return unlock(world, receipt), found.length
