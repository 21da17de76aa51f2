"""Serving with a host tier: between slices of the compiled loop pages go to the host and come back.

Inside the loop nothing reaches the host. So before each slice the prompts that may be admitted get
back what the host has of them, and where only evicted pages are saved (write-back) room is made
beforehand, through the host; after each slice what is new in the cache is copied (write-through).
"""

import functools
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np

from swa_jax.counts import free_pages
from swa_jax.host_cache.prefetch import Prefetch
from swa_jax.host_cache.tier import HostCache
from swa_jax.inputs import whole_number
from swa_jax.models.decoder import DecoderConfig
from swa_jax.paging import page_of
from swa_jax.prefix_cache import (
    Receipt,
    full_evictable_size,
    lock,
    swa_evictable_size,
    unlock,
)
from swa_jax.serving.config import ServingConfig
from swa_jax.serving.finish import finish
from swa_jax.serving.model import ServingModel, as_model
from swa_jax.serving.queue import WAITING
from swa_jax.serving.serve import run_steps, unfinished
from swa_jax.serving.trees import Tree
from swa_jax.serving.world import World, add_stats
from swa_jax.serving.world_pools import with_world_pools, world_pools


def most_pages(config: ServingConfig, steps: int) -> int:
    """Pages of each kind that so many steps take at most, what the last one asks for included.

    Args:
      config: of the loop.
      steps: at least 1.
    """
    size = config.pool.page_size
    chunk = -(-config.chunk_tokens // size) + 1
    decoded = -(-steps * (1 + config.num_drafts) // size) + 1
    earlier = (steps - 1) * config.prefill_rows * chunk
    # The last step asks for a chunk of every row, though only some of them prefill.
    return earlier + config.max_running * (chunk + decoded)


class HostedServing:
    """The serving loop over a host tier.

    Args:
      host: the tier, made for the world's cache and `world_pools`.
      model: static.
      config: static; with a prefix cache.
      slice_steps: steps between two looks at the host. What is computed and evicted again within
        one slice is lost to a write-through tier; write-back takes shorter slices where room is
        short, so that nothing is.

    Raises:
      ValueError: a loop without a prefix cache.
    """

    def __init__(
        self,
        host: HostCache,
        model: ServingModel | DecoderConfig,
        config: ServingConfig,
        *,
        slice_steps: int = 16,
    ) -> None:
        """Touches no world yet."""
        if not config.prefix_cache:
            raise ValueError(
                "a host tier keeps what leaves the prefix cache: prefix_cache is False"
            )
        self.host, self.model, self.config = host, as_model(model), config
        self.slice_steps = whole_number("slice_steps", slice_steps, 1)
        self.restored_full = 0  # tokens that came back from the host
        self.restored_swa = 0
        self._fetched: dict[int, Prefetch | None] = {}  # by ticket, of those that wait

    def run(self, params: Tree, world: World, steps: int, *, draft_params: Tree = None) -> World:
        """Runs up to so many steps, or until nothing waits or runs, as `run_steps` does.

        Args:
          params: of the model.
          world: taken over: go on with what comes back.
          steps: how many.
          draft_params: of `config.draft`.
        """
        left = whole_number("steps", steps, 0)
        while left and bool(unfinished(world)):
            world, receipts = self._restore_waiting(world)
            count = min(left, self.slice_steps)
            if self.host.policy == "write_back":
                world, count = self._keep_free(world, count)
            world = _unlock_all(world, receipts)
            world = run_steps(
                self.model, params, self.config, world, count, draft_params=draft_params
            )
            if self.host.policy != "write_back":
                self.backup(world)
            left -= count
        return world

    def backup(self, world: World) -> int:
        """Copies what is new in the cache to the host; how many pages.

        Args:
          world: after any step.
        """
        assert world.cache is not None
        pools = world_pools(self.model, self.config, world)
        return self.host.backup(world.cache, world.allocator, pools)

    # ---- before a slice -------------------------------------------------------------------

    def _restore_waiting(self, world: World) -> tuple[World, list[Receipt]]:
        """Brings back what the host has of the requests that may be admitted, and locks it."""
        status, tickets, known, spaces = jax.device_get(_look(world))
        waiting = np.flatnonzero(status == WAITING)
        waiting = waiting[np.argsort(tickets[waiting])].tolist()
        self._forget({int(tickets[place]) for place in waiting})
        rows = self.config.max_running
        for place in waiting[: 2 * rows]:
            ticket = int(tickets[place])
            if ticket not in self._fetched:
                self._fetch(world, place, ticket, int(known[place]), int(spaces[place]))
        receipts = []
        for place in waiting[:rows]:  # every row may be taken by another before the slice ends
            fetched = self._fetched[int(tickets[place])]
            if fetched is not None:
                fetched.wait()
            world, receipt = self._restore(world, place, int(known[place]), int(spaces[place]))
            receipts.append(receipt)
        # Who did not fit may fit now, with less to compute.
        return replace(world, refused_at=jnp.full((), -1, jnp.int32)), receipts

    def _forget(self, waiting: set[int]) -> None:
        for ticket in set(self._fetched) - waiting:
            fetched = self._fetched.pop(ticket)
            if fetched is not None:
                self.host.release(fetched)

    def _fetch(self, world: World, place: int, ticket: int, known: int, space: int) -> None:
        """Notes a request that has come, and starts fetching its prompt where there is storage."""
        cache, allocator = world.cache, world.allocator
        assert cache is not None
        tokens, length = world.queue.tokens[place], known - 1 + self.config.key_lag
        self.host.match(cache, allocator, tokens, length, namespace=space)
        fetched = None
        if self.host.has_storage:
            fetched = self.host.prefetch(cache, allocator, tokens, length, namespace=space)
        self._fetched[ticket] = fetched

    def _restore(self, world: World, place: int, known: int, space: int) -> tuple[World, Receipt]:
        assert world.cache is not None
        cache, allocator, pools, restored = self.host.restore(
            world.cache,
            world.allocator,
            world_pools(self.model, self.config, world),
            world.queue.tokens[place],
            known - 1 + self.config.key_lag,
            namespace=space,
        )
        # The others that come back, and the room that is made, must not drive it out again.
        cache, receipt = lock(cache, allocator, restored.node)
        world = replace(world, cache=cache, allocator=allocator)
        self.restored_full += int(restored.full_tokens)
        self.restored_swa += int(restored.swa_tokens)
        return with_world_pools(self.model, self.config, world, pools), receipt

    def _keep_free(self, world: World, steps: int) -> tuple[World, int]:
        """Evicts through the host what the next steps would evict; also how many may be run."""
        free, evictable, behind_fence = jax.device_get(_room(world))
        within = min(int(free[side] + evictable[side]) for side in range(2))
        while steps > 1 and most_pages(self.config, steps) > within:
            steps //= 2
        need = most_pages(self.config, steps)
        if need > within or behind_fence:
            # The step may evict what is locked or not even cached now: all of it is saved before.
            world = _finish(self.config, world)
            self.backup(world)
            return world, 1
        lacks = [max(0, need - int(pages)) for pages in free]
        if not any(lacks):
            return world, steps
        size = self.config.pool.page_size
        assert world.cache is not None
        cache, allocator, gone = self.host.evict(
            world.cache,
            world.allocator,
            world_pools(self.model, self.config, world),
            full_tokens=lacks[0] * size,
            swa_tokens=lacks[1] * size,
        )
        world = add_stats(
            replace(world, cache=cache, allocator=allocator),
            evicted_full=page_of(gone.full_tokens, size),
            evicted_swa=page_of(gone.swa_tokens, size),
        )
        return world, steps


@jax.jit
def _look(world: World) -> tuple[jax.Array, ...]:
    queue = world.queue
    return queue.status, queue.ticket, queue.known, queue.namespace


@jax.jit
def _room(world: World) -> tuple[tuple, tuple, jax.Array]:
    assert world.cache is not None
    size = world.allocator.config.page_size
    evictable = (
        page_of(full_evictable_size(world.cache, world.allocator), size),
        page_of(swa_evictable_size(world.cache, world.allocator), size),
    )
    return free_pages(world.allocator), evictable, world.allocator.group_open


@functools.partial(jax.jit, static_argnums=0, donate_argnums=1)
def _finish(config: ServingConfig, world: World) -> World:
    return finish(config, world)


def _unlock_all(world: World, receipts: list[Receipt]) -> World:
    cache = world.cache
    assert cache is not None
    for receipt in receipts:
        cache = unlock(cache, receipt)
    return replace(world, cache=cache)
