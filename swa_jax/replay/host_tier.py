"""A host tier under the replay's prefix cache: what the device evicts can come back.

A replay has no KV, so nothing is copied: the tier keeps account of what host memory would hold.
The loop stops after each step. What has left the tree since goes to the host (write-back, the
oldest rows making room), and before the next step the request that is about to be admitted gets
back what makes its longest match usable, by the same transition on the device as a server's.
"""

import functools
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np

from swa_jax.host_cache.claim import claim, see
from swa_jax.host_cache.config import HostConfig
from swa_jax.host_cache.index import HostIndex, Usable
from swa_jax.host_cache.mirror import TreeMirror, token_keys
from swa_jax.prefix_cache.tree import CacheConfig
from swa_jax.replay.content import Content, request_tokens
from swa_jax.replay.shared_world import SharedWorld
from swa_jax.replay.world import LoopConfig, prefilling, running
from swa_jax.state import UNMAPPED

NOTHING = -1


@dataclass(frozen=True)
class HostFigures:
    """What a host tier did; all zero without one."""

    host_full_tokens: int = 0  # rows of host memory for full layers
    host_swa_tokens: int = 0
    host_hit_tokens: int = 0  # brought back to the device
    host_swa_hit_tokens: int = 0  # SWA sides brought back
    host_stored_tokens: int = 0  # that left the device and went to the host
    host_dropped_tokens: int = 0  # full rows that made room for others


class HostTier:
    """The tier of one replay.

    Args:
      config: rows of each kind.
      cache: configuration of the device's tree.
      loop: what is static about the replay.
      content: of the trace.
    """

    def __init__(
        self,
        config: HostConfig,
        cache: CacheConfig,
        loop: LoopConfig,
        content: Content,
    ) -> None:
        """Nothing is on the host yet."""
        self._index = HostIndex(config)
        self._tree = TreeMirror(cache)
        self._loop, self._content = loop, content
        self._next: tuple[int, jax.Array, list[bytes]] = (NOTHING, jnp.zeros(0, jnp.int32), [])
        self._hit = self._swa_hit = self._stored = 0

    def bring_back(self, shared: SharedWorld) -> SharedWorld:
        """Restores what host memory has of the request that is admitted next.

        Args:
          shared: taken over; who is done has left already.
        """
        request, target = (int(value) for value in jax.device_get(_next_request(shared)))
        if request == NOTHING:
            return shared
        tokens, keys = self._prompt(request)
        # The last token is always computed: its output is the first one generated.
        keys = keys[: max(target - 1, 0) // self._loop.pool.page_size]
        length, space = jnp.int32(target - 1), jnp.int32(0)
        allocator = shared.world.allocator
        seen = jax.device_get(see(shared.cache, allocator, tokens, length, space))
        usable = self._index.usable(
            keys, device_pages=int(seen.count), device_live=seen.live.tolist()
        )
        self._index.touch(keys)
        if not usable.full and not usable.swa:
            return shared
        return self._claim(shared, tokens, length, usable, seen.live.shape[0])

    def note_left(self, shared: SharedWorld) -> None:
        """Stores what has left the device's tree since the last call. Waits for the device.

        Full rows of what is gone; SWA rows where an end of a branch needs them, also of pages that
        are tombstones now.
        """
        tree, window = self._tree, self._index.config.kept_pages
        stamps = tree.stamps(shared.cache, shared.world.allocator)
        gone = tree.in_tree & stamps.changed
        lost = tree.in_tree & (tree.swa != UNMAPPED) & (gone | (stamps.swa == UNMAPPED))
        if gone.any() or lost.any():
            lost &= tree.near_end(window)
            self._store(gone, lost)
        tree.learn(shared.cache, stamps)

    def figures(self) -> HostFigures:
        """What it did so far."""
        config, index = self._index.config, self._index
        size = config.page_size
        return HostFigures(
            host_full_tokens=config.full_tokens,
            host_swa_tokens=config.swa_tokens,
            host_hit_tokens=self._hit,
            host_swa_hit_tokens=self._swa_hit,
            host_stored_tokens=self._stored * size,
            host_dropped_tokens=index.dropped_full * size,
        )

    def _prompt(self, request: int) -> tuple[jax.Array, list[bytes]]:
        """A request's tokens and the keys of its pages; the last one asked for is remembered."""
        if self._next[0] != request:
            room = self._loop.table_pages * self._loop.pool.page_size
            tokens = _tokens(self._content, jnp.int32(request), room)
            keys = token_keys(np.asarray(tokens), self._loop.pool.page_size)
            self._next = (request, tokens, keys)
        return self._next[1:]

    def _claim(
        self,
        shared: SharedWorld,
        tokens: jax.Array,
        length: jax.Array,
        usable: Usable,
        places: int,
    ) -> SharedWorld:
        has = np.zeros((2, places), bool)
        has[0, list(usable.full)] = has[1, list(usable.swa)] = True
        cache, allocator, claimed = claim(
            shared.cache,
            shared.world.allocator,
            tokens,
            length,
            jnp.int32(0),
            jnp.int32(usable.pages),
            has[0],
            has[1],
        )
        full, of_swa = np.asarray(claimed.full), np.asarray(claimed.swa)
        size = self._loop.pool.page_size
        self._hit += int((full > 0).sum()) * size
        self._swa_hit += int((of_swa > 0).sum()) * size
        return replace(shared, cache=cache, world=replace(shared.world, allocator=allocator))

    def _store(self, full: np.ndarray, of_swa: np.ndarray) -> None:
        """Gives rows to marked nodes, bool[F+1], a path at a time from the deepest."""
        for path in self._tree.paths(full | of_swa):
            placed = self._index.put(
                path.keys,
                path.namespace,
                full=np.flatnonzero(full[path.nodes]).tolist(),
                swa=np.flatnonzero(of_swa[path.nodes]).tolist(),
            )
            self._stored += len(placed.full)


@jax.jit
def _next_request(shared: SharedWorld) -> tuple[jax.Array, jax.Array]:
    """int32[] the request that the next step tries to admit, and its tokens; -1 for none."""
    world = shared.world
    busy = running(world.rows)
    may_try = jnp.any(~busy) & ~jnp.any(prefilling(world.rows)) & jnp.any(world.waiting)
    changed = (world.tally.completed != shared.refused_at) | ~jnp.any(busy)
    may_try = may_try & changed
    request = jnp.argmax(world.waiting).astype(jnp.int32)
    return jnp.where(may_try, request, NOTHING), world.progress[request]


@functools.partial(jax.jit, static_argnums=2)
def _tokens(content: Content, request: jax.Array, room: int) -> jax.Array:
    return request_tokens(content, request, room)
