"""The tree of one rank: the core's cache beside the state that the allocator holds."""

from collections import defaultdict
from dataclasses import dataclass, replace
from typing import TypeAlias

import numpy as np

import swa_jax as swa
from swa_jax import prefix_cache
from swa_jax.compat.common.errors import MisuseError
from swa_jax.compat.common.host_arrays import padded
from swa_jax.compat.common.host_pools import HostPools
from swa_jax.compat.sgl_jax import tree_calls
from swa_jax.compat.sgl_jax.keys import Names, PageCoding, RadixKey
from swa_jax.compat.sgl_jax.tree_node import Snapshot

Seen: TypeAlias = tuple[prefix_cache.PrefixCache, swa.AllocatorState]
_NAMES_BESIDE = 1024  # names that may be kept beside those in use before they are looked through


@dataclass(frozen=True)
class Place:
    """A node: its last page, that page's birth, and tokens from the root."""

    page: int
    born: int
    tokens: int


@dataclass(frozen=True)
class Handover:
    """What became of a request's KV."""

    slots: np.ndarray  # int32[T] to use from here on
    already: int  # tokens that were in the tree before
    length: int  # tokens that are now
    place: Place


@dataclass(frozen=True)
class Lock:
    """A lock that stands."""

    place: Place
    boundary: int  # pages from the root without an SWA lock of this one
    receipt: np.ndarray  # int32[4]


class RankTree:
    """A prefix tree over the pools of one rank.

    Args:
      pools: the allocator's states.
      rank: whose.
      window: tokens that must be live in SWA at the end of a match.
      page_size: tokens in a page of the tree, a multiple of the pools' page.
    """

    def __init__(self, pools: HostPools, rank: int, window: int, page_size: int) -> None:
        """Empty."""
        self.pools, self.rank, self.page_size = pools, rank, page_size
        # Tombstones begin and end on pages of the tree, so a window in whole ones is the same.
        whole = -(-window // page_size) * page_size
        self.config = replace(pools.config, sliding_window=whole)
        self.cache = prefix_cache.init(self.config)
        self.epoch = 0
        self._locks: dict[tuple[int, int, int], list[Lock]] = defaultdict(list)
        # The state that the tree's pages are of, None while it has none; see `HostPools.stamps`.
        self._stamp: object | None = None
        self._forget_names()

    def _forget_names(self) -> None:
        self.spaces: Names[tuple[str | None, int | None]] = Names()
        self.coding = PageCoding(self.page_size, self.pools.config.page_size)

    # The state changes hands with the configuration that has the window.

    @property
    def state(self) -> swa.AllocatorState:
        """The allocator's present state, to read from."""
        self.check_pools()
        return replace(self.pools.state(self.rank), config=self.config)

    def check_pools(self) -> None:
        """Raises where the pools are in a state that this tree is not of."""
        if self._stamp is not None and self._stamp not in self.pools.stamps(self.rank):
            raise MisuseError(
                "the allocator was cleared, or restored to a state from before this cache changed: "
                "its pages are not the cache's any more, so reset() it"
            )

    def _changed(self) -> None:
        """The tree has taken or given up pages: states from before this are another tree's."""
        old, self._stamp = self._stamp, object()
        self.pools.stamp(self.rank, old, self._stamp)

    def _take(self) -> swa.AllocatorState:
        self.check_pools()
        return replace(self.pools.take(self.rank), config=self.config)

    def _put(self, state: swa.AllocatorState, sizes: np.ndarray) -> None:
        state = replace(state, config=self.pools.config)
        self.pools.put(self.rank, state, (int(sizes[0]), int(sizes[1])))

    # The calls.

    def match(self, key: RadixKey, tokens: np.ndarray) -> tuple[np.ndarray, Place]:
        """int32[n] slots of the longest usable prefix of int32[T] `tokens`, and where it ends."""
        self.check_pools()
        coded = self.coding.known(tokens)
        space = self.spaces.find((key.extra_key, key.dp_rank))
        if space is None or len(coded) == 0:
            return np.empty(0, np.int32), Place(0, 0, 0)
        numbers = np.array([len(coded), space], np.int32)
        self.cache, news = tree_calls.match(self.cache, self.state, padded(coded), numbers)
        host = np.asarray(news)
        length, page, born = (int(one) for one in host[-3:])
        return host[:length].copy(), Place(page, born, length)

    def insert(
        self,
        key: RadixKey,
        tokens: np.ndarray,
        slots: np.ndarray,
        *,
        previous: int,
        evicted: int,
        frees_rest: bool,
    ) -> Handover:
        """Hands int32[T] `slots` of as many tokens over; see `tree_calls.insert`."""
        self.check_pools()
        self._prune_names()
        coded = self.coding.code(tokens)
        space = self.spaces.number((key.extra_key, key.dp_rank))
        rows = np.stack([padded(np.resize(coded, len(slots))), padded(slots)])
        marks = (min(previous, len(slots)), min(evicted, len(slots)))
        numbers = [len(coded), len(slots), space, *marks, int(frees_rest)]
        self.cache, state, news = tree_calls.insert(
            self.cache, self._take(), rows, np.array(numbers, np.int32)
        )
        host = np.asarray(news)
        already, length, page, born = (int(one) for one in host[-6:-2])
        self._put(state, host[-2:])
        self._changed()
        return Handover(host[: len(slots)].copy(), already, length, Place(page, born, length))

    def evict(self, full_tokens: int, swa_tokens: int) -> tuple[int, int]:
        """Full and SWA tokens that went."""
        size = self.page_size
        most = max(self.config.full_tokens, self.config.swa_tokens)  # nobody can want more
        wanted = [min(max(0, tokens), most) for tokens in (full_tokens, swa_tokens)]
        numbers = [-(-tokens // size) * size for tokens in wanted]
        self.cache, state, news = tree_calls.evict(
            self.cache, self._take(), np.array(numbers, np.int32)
        )
        host = np.asarray(news)
        self._put(state, host[2:])
        if host[:2].any():
            self._changed()
        return int(host[0]), int(host[1])

    def lock(self, place: Place, *, whole_window: bool) -> Lock:
        """Locks a node.

        Args:
          place: of the node.
          whole_window: refuse where a page of its last window is a tombstone; else lock the live
            pages below that.
        """
        numbers = np.array([place.page, place.born, int(whole_window)], np.int32)
        self.cache, news = tree_calls.lock(self.cache, self.state, numbers)
        known, short, *receipt = (int(one) for one in np.asarray(news))
        if not known:
            raise MisuseError(f"page {place.page} has left the tree: match again and lock at once")
        if short:
            raise MisuseError(
                f"the last window of page {place.page} has lost SWA pages: match again and lock "
                "before anything is evicted"
            )
        if receipt[0] == 0:
            raise MisuseError(f"{self.config.full_pages + 1024} locks stand: none is left")
        lock = Lock(place, receipt[1], np.array(receipt, np.int32))
        self._locks[(place.page, place.born, lock.boundary)].append(lock)
        return lock

    def standing(self, place: Place, boundary: int) -> list[Lock]:
        """The locks on a node with this boundary; raises where there is none."""
        self.check_pools()
        standing = self._locks.get((place.page, place.born, boundary))
        if not standing:
            raise MisuseError(
                f"no such lock stands on page {place.page}: give dec_lock_ref the node and the "
                "swa_uuid_for_lock of one inc_lock_ref, once"
            )
        return standing

    def unlock(self, place: Place, boundary: int) -> None:
        """Undoes one of the locks on a node with this boundary."""
        standing = self.standing(place, boundary)
        self.cache = tree_calls.unlock(self.cache, standing.pop().receipt)
        if not standing:
            del self._locks[(place.page, place.born, boundary)]

    def reset(self) -> None:
        """Forgets every prefix and lock; the pages stay held."""
        self.cache = prefix_cache.reset(self.cache)
        self._locks.clear()
        self.pools.stamp(self.rank, self._stamp, None)
        self._stamp = None
        self._forget_names()
        self.epoch += 1

    # What the host reads.

    def sizes(self) -> np.ndarray:
        """int32[4] tokens: full evictable and protected, SWA evictable and protected."""
        return np.asarray(tree_calls.sizes(self.cache, self.state))

    def snapshot(self) -> Snapshot:
        """The whole tree."""
        rows = np.asarray(tree_calls.read(self.cache, self.state))
        return Snapshot(rows, self.config.page_size)

    def check(self) -> None:
        """Raises `InvariantError` if the tree breaks a law."""
        prefix_cache.check(self.cache, self.state)

    def is_as(self, seen: Seen) -> bool:
        """Tree and allocator are the two that were seen then."""
        return seen[0] is self.cache and seen[1] is self.pools.state(self.rank)

    def now(self) -> Seen:
        """Tree and allocator, for `is_as`."""
        return self.cache, self.pools.state(self.rank)

    def _prune_names(self) -> None:
        """Forgets namespaces and pages that no node is in, before there are too many of them."""
        words = self.coding.names
        most = self.config.full_pages + _NAMES_BESIDE
        if len(self.spaces) <= most and (words is None or len(words) <= most):
            return
        tree = self.snapshot()
        nodes = tree.rows[tree.rows[:, tree_calls.IN_TREE] > 0]
        self.spaces.keep(nodes[:, tree_calls.NAMESPACE].tolist())
        if words is not None:
            first = (nodes[:, tree_calls.DEPTH] - 1) % (self.page_size // tree.page_size) == 0
            words.keep(nodes[first, tree_calls.LAST_USE + 1].tolist())
