"""The radix cache of hybrid models, in sglang-jax's interface, over `swa_jax.prefix_cache`.

Matches, inserts, what they leave in the tree, and what is free afterwards are as there. Where the
two differ:

* `evict` takes pages and not whole nodes, so it seldom takes more than was asked for; SWA pages in
  the last window of a branch go last (public report B39).
* A lock holds one window of SWA pages, not the whole node in which the window begins.
* Undoing a lock that does not stand, and locking what has left the tree, raises and changes
  nothing.
* Slots in `value` that are the tree's under another prefix, or nobody's, are not taken and not
  freed.
* After a `clear` of the allocator, or a `restore_state` to a state from before this cache took or
  gave up pages, every call but `reset` raises: the pages are not the cache's any more.
* Nodes are views (`tree_node`): one that nobody holds may be told of together with its neighbour.
"""

import numpy as np

from swa_jax.compat.common.errors import MisuseError
from swa_jax.compat.common.host_arrays import host_int, host_ints
from swa_jax.compat.common.host_pools import HostPools
from swa_jax.compat.common.segments import check_row
from swa_jax.compat.sgl_jax.absent import NoOtherTier
from swa_jax.compat.sgl_jax.keys import RadixKey, as_key, child_key_fn
from swa_jax.compat.sgl_jax.params import (
    DecLockRefParams,
    EvictParams,
    EvictResult,
    IncLockRefResult,
    InsertParams,
    MatchPrefixParams,
    MatchResult,
)
from swa_jax.compat.sgl_jax.rank_tree import Handover, Place, RankTree
from swa_jax.compat.sgl_jax.requests import ReqToTokenPool, Request
from swa_jax.compat.sgl_jax.swa import PureSWATokenToKVPoolAllocator, SWATokenToKVPoolAllocator
from swa_jax.compat.sgl_jax.tree_node import TreeNode
from swa_jax.compat.sgl_jax.tree_shows import TreeShows
from swa_jax.inputs import whole_number
from swa_jax.prefix_cache.tree import ROOT

_NOWHERE = Place(ROOT, 0, 0)


class SWARadixCache(NoOtherTier, TreeShows):
    """Prefixes that requests share, with full KV all along and SWA KV where it is of use.

    One tree a rank of the allocator. A key's `dp_rank` chooses it, the last one if it is past the
    end, the first one for None; each value is a namespace of its own all the same.

    `copy.deepcopy` and `pickle` copy it with its allocator and pools, as they stand.

    Args:
      req_to_token_pool: has `req_to_token`, the slots of each request, and `write`.
      token_to_kv_pool_allocator: of `swa_jax.compat.sgl_jax`.
      sliding_window_size: tokens that must be live in SWA at the end of a match.
      page_size: tokens in a page of the tree: the allocator's page or a multiple of it. Keys are
        cut to whole pages.
      disable: match nothing and keep nothing.

    Raises:
      MisuseError: another allocator, or a page that is no multiple of the allocator's.
      ValueError: SWA pools that cannot hold one window.
    """

    def __init__(
        self,
        req_to_token_pool: ReqToTokenPool,
        token_to_kv_pool_allocator: SWATokenToKVPoolAllocator | PureSWATokenToKVPoolAllocator,
        sliding_window_size: int,
        page_size: int,
        disable: bool = False,
    ) -> None:
        """Empty trees; nothing of the allocator changes."""
        pools = getattr(token_to_kv_pool_allocator, "pools", None)
        if not isinstance(pools, HostPools):
            raise MisuseError(
                "the allocator must be one of swa_jax.compat.sgl_jax, got "
                f"{type(token_to_kv_pool_allocator).__name__}"
            )
        self.page_size = whole_number("page_size", page_size, 1)
        if self.page_size % pools.config.page_size:
            raise MisuseError(
                f"the tree's page must be a multiple of the allocator's "
                f"({pools.config.page_size} tokens), got {page_size}"
            )
        self.req_to_token_pool = req_to_token_pool
        self.token_to_kv_pool_allocator = token_to_kv_pool_allocator
        self.sliding_window_size = whole_number("sliding_window_size", sliding_window_size, 1)
        self.disable = disable
        self.get_child_key_fn = child_key_fn(self.page_size)
        super().__init__(pools, [] if disable else self._new_trees(pools))

    def _new_trees(self, pools: HostPools) -> list[RankTree]:
        window, page = self.sliding_window_size, self.page_size
        return [RankTree(pools, rank, window, page) for rank in range(pools.ranks)]

    # Matching and inserting.

    def match_prefix(self, params: MatchPrefixParams) -> MatchResult:
        """Finds the longest cached prefix of whole pages with its last window live in SWA.

        Args:
          params: `key`, a `RadixKey` or tokens.

        Returns:
          int32[n] slots, and the node to lock before anything else may evict.
        """
        key = as_key(params.key)
        tokens = host_ints("key", key.token_ids)
        if self.disable or len(tokens) < self.page_size:
            return self._found(np.empty(0, np.int32), self.root_node)
        rank = self._rank(key.dp_rank)
        slots, place = self._trees[rank].match(key, tokens)
        return self._found(slots, self._node(rank, place))

    @staticmethod
    def _found(slots: np.ndarray, node: TreeNode) -> MatchResult:
        return MatchResult(slots, node, node, node)

    def insert(self, params: InsertParams) -> int:
        """Hands KV over to the tree.

        All slots from `prev_prefix_len` on are the tree's afterwards, or free: copies of what was
        cached, and the end of a prompt all of whose SWA pages are gone. A tombstone gets the SWA
        page of the copy that comes by.

        Args:
          params: `key`; `value`, int[T] its slots; `prev_prefix_len`, tokens whose slots are the
            tree's already and are not looked at; `swa_evicted_seqlen`, on a page boundary:
            tokens below it count as having no SWA side, and one that is still there is freed.

        Returns:
          Tokens of the key that were cached before.

        Raises:
          MisuseError: no key, unequal numbers of tokens and slots, slots that are not those of one
            request in order, lengths below 0 or off a page; before anything has changed.
        """
        if self.disable:
            return 0
        if params.key is None:
            raise MisuseError("InsertParams.key must be a RadixKey or tokens, got None")
        key = as_key(params.key)
        value = key.token_ids if params.value is None else params.value
        done = self._insert(
            key, value, params.prev_prefix_len, params.swa_evicted_seqlen, frees_rest=True
        )
        return done.already

    def _insert(
        self, key: RadixKey, value: object, previous: int, evicted: int, *, frees_rest: bool
    ) -> Handover:
        tokens, slots = host_ints("key", key.token_ids), host_ints("value", value)
        if len(tokens) != len(slots):
            raise MisuseError(f"{len(tokens)} tokens need as many slots, got {len(slots)}")
        previous = host_int("prev_prefix_len", previous)
        evicted = host_int("swa_evicted_seqlen", evicted)
        if previous < 0 or evicted < 0:
            raise MisuseError(
                "prev_prefix_len and swa_evicted_seqlen must be 0 or more, got "
                f"{previous} and {evicted}"
            )
        if evicted % self.page_size:
            raise MisuseError(
                f"swa_evicted_seqlen must be a multiple of page_size={self.page_size}, "
                f"got {evicted}"
            )
        check_row(slots, previous, self._pools.config.page_size)
        if len(slots) == 0:
            return Handover(slots, 0, 0, _NOWHERE)
        tree = self._trees[self._rank(key.dp_rank)]
        return tree.insert(
            key, tokens, slots, previous=previous, evicted=evicted, frees_rest=frees_rest
        )

    # Requests.

    def cache_finished_req(self, req: Request, is_insert: bool = True) -> None:
        """Takes over what a request holds that is done, and its lock.

        Args:
          req: the engine's request.
          is_insert: False frees its own KV instead, as for one that is retracted.

        Raises:
          MisuseError: its lock does not stand; nothing has changed.
        """
        self._lock_of(req.last_node, req.swa_uuid_for_lock)
        length, pool = req.pop_committed_kv_cache(), self.token_to_kv_pool_allocator
        rank = self._rank(req.dp_rank)
        if self.disable:
            pool.free(self._row(req, length), dp_rank=rank)
            return
        tokens = (req.origin_input_ids + req.output_ids)[:length]
        slots = self._row(req, len(tokens))
        whole = len(slots) // self.page_size * self.page_size
        key = RadixKey(tokens[:whole], req.extra_key, req.dp_rank)
        if is_insert:
            evicted, mine = req.swa_evicted_seqlen, req.cache_protected_len
            self._insert(key, slots[:whole], mine, evicted, frees_rest=True)
            pool.free(slots[whole:], dp_rank=rank)
        else:
            pool.free(slots[req.cache_protected_len :], dp_rank=rank)
        self.dec_lock_ref(req.last_node, DecLockRefParams(req.swa_uuid_for_lock))

    def cache_unfinished_req(self, req: Request, chunked: bool = False) -> None:
        """Shares what a running request has computed so far, and moves its lock to the new end.

        The request goes on with the tree's slots where its own were copies; its row of
        `req_to_token`, `prefix_indices`, `last_node`, `swa_uuid_for_lock`,
        `last_matched_prefix_len` and `cache_protected_len` say so. What the tree does not take
        stays the request's own.

        Args:
          req: the engine's request.
          chunked: of no importance here.

        Raises:
          MisuseError: its lock does not stand, or is of a shorter prefix than it says; nothing has
            changed. Also, only after the insert, for `fill_ids` that are not what was locked.
        """
        slots = self._row(req, len(req.fill_ids))
        if self.disable:
            req.prefix_indices = slots
            return
        whole, before = len(slots) // self.page_size * self.page_size, req.cache_protected_len
        self._lock_of(req.last_node, req.swa_uuid_for_lock)
        self._check_protected(before, self._tokens_above(req.last_node))
        key = RadixKey(req.fill_ids[:whole], req.extra_key, req.dp_rank)
        done = self._insert(key, slots[:whole], before, req.swa_evicted_seqlen, frees_rest=False)
        length = done.length
        self._check_protected(before, length)
        node = self._node(self._rank(req.dp_rank), done.place)
        # The new lock first: what both hold never stands without one.
        lock = self._lock(node, whole_window=False)
        self.dec_lock_ref(req.last_node, DecLockRefParams(req.swa_uuid_for_lock))
        row = (req.req_pool_idx, slice(before, length))
        self.req_to_token_pool.write(row, done.slots[before:length])
        req.prefix_indices = np.concatenate([done.slots[:length], slots[length:]])
        req.last_node, req.swa_uuid_for_lock = node, lock
        req.last_matched_prefix_len = req.cache_protected_len = length

    def evict_req_swa(self, req: Request, pre_len: int, dp_rank: int = 0) -> None:
        """Frees a request's own SWA slots that its window has left; the tree's stay.

        Args:
          req: `swa_evicted_seqlen` of it says how far this went before, and is moved on.
          pre_len: committed tokens.
          dp_rank: whose pools.
        """
        size = self.page_size
        # Its own begin where the locked prefix ends.
        start = max(req.swa_evicted_seqlen, self._tokens_above(req.last_node))
        req.swa_evicted_seqlen = start
        end = (pre_len - self.sliding_window_size - size) // size * size
        if end <= start:
            return
        leaving = self.req_to_token_pool.req_to_token[req.req_pool_idx, start:end]
        self.token_to_kv_pool_allocator.free_swa(leaving, dp_rank=self._rank(dp_rank))
        req.swa_evicted_seqlen = end

    def _row(self, req: Request, length: int) -> np.ndarray:
        """int32[length] the request's slots, as they are now."""
        row = self.req_to_token_pool.req_to_token[req.req_pool_idx, :length]
        return np.array(row, np.int32)

    @staticmethod
    def _check_protected(claimed: int, cached: int) -> None:
        if cached < claimed:
            raise MisuseError(
                f"the request was given {claimed} cached tokens, and only {cached} of them are "
                "cached: what it stood on was not locked"
            )

    def _tokens_above(self, node: TreeNode | None) -> int:
        return 0 if node is None else node.depth * self._pools.config.page_size

    # Eviction.

    def evict(self, params: EvictParams) -> EvictResult:
        """Gives unlocked pages back until as much is free as was asked for.

        Args:
          params: `num_tokens` and `swa_num_tokens` wanted, rounded up to pages, those of the full
            pages that leave included, as much as there is where it is more; `dp_rank` of whom:
            None asks the ranks in turn.

        Returns:
          Tokens that went.

        Raises:
          MisuseError: numbers that are no integers.
        """
        gone = EvictResult()
        wanted = host_int("num_tokens", params.num_tokens)
        of_swa_wanted = host_int("swa_num_tokens", params.swa_num_tokens)
        if self.disable:
            return gone
        ranks = range(len(self._trees)) if params.dp_rank is None else [self._rank(params.dp_rank)]
        for rank in ranks:
            full = wanted - gone.num_tokens_evicted
            of_swa = of_swa_wanted - gone.swa_num_tokens_evicted
            if full > 0 or of_swa > 0:
                full, of_swa = self._trees[rank].evict(full, of_swa)
                gone.num_tokens_evicted += full
                gone.swa_num_tokens_evicted += of_swa
        return gone

    # Locks.

    def inc_lock_ref(self, node: TreeNode) -> IncLockRefResult:
        """Locks full KV from the root to a node, and SWA for one window at its end.

        Args:
          node: of a match, before anything was evicted.

        Returns:
          `swa_uuid_for_lock` for `dec_lock_ref`; None where the window reaches past the root.

        Raises:
          MisuseError: a node that has left the tree, or whose last window is not live any more.
        """
        if self.disable or node.is_root:
            return IncLockRefResult()
        return IncLockRefResult(swa_uuid_for_lock=self._lock(node, whole_window=True))

    def _lock(self, node: TreeNode, *, whole_window: bool) -> int | None:
        if node.is_root:
            return None
        tree, place = self._place(node)
        boundary = tree.lock(place, whole_window=whole_window).boundary
        if boundary == 0 and place.tokens < self.sliding_window_size:
            return None
        # Locks of one node with one boundary are alike, so they may have one number.
        return boundary * (len(self._trees) + 1) + node.rank + 1

    def dec_lock_ref(self, node: TreeNode | None, params: DecLockRefParams | None = None) -> None:
        """Undoes a lock.

        Args:
          node: that was locked.
          params: `swa_uuid_for_lock` that the lock gave. None is a lock in SWA up to the root.

        Raises:
          MisuseError: no such lock stands; nothing has changed.
        """
        lock = self._lock_of(node, None if params is None else params.swa_uuid_for_lock)
        if lock is not None:
            tree, place, boundary = lock
            tree.unlock(place, boundary)

    def _lock_of(
        self, node: TreeNode | None, number: int | None
    ) -> tuple[RankTree, Place, int] | None:
        """A lock that stands, None where there is nothing to lock; raises where it does not."""
        if self.disable or node is None or node.is_root:
            return None
        tree, place = self._place(node)
        boundary = 0
        if number is not None:
            boundary = (host_int("swa_uuid_for_lock", number) - node.rank - 1) // (
                len(self._trees) + 1
            )
        tree.standing(place, boundary)
        return tree, place, boundary

    def _place(self, node: TreeNode) -> tuple[RankTree, Place]:
        tree = self._trees[node.rank]
        if node.epoch != tree.epoch or node.tree is not self:
            raise MisuseError(f"{node!r} is of another cache, or from before a reset")
        return tree, Place(node.page, node.born, self._tokens_above(node))

    # The tree as such.

    def reset(self) -> None:
        """Forgets every prefix and lock. The pages stay held: `clear` the allocator, too."""
        self._seen.clear()
        for tree in self._trees:
            tree.reset()

    def sanity_check(self) -> None:
        """Raises `swa_jax.InvariantError` if a tree breaks one of its laws."""
        for tree in self._trees:
            tree.check()
