"""The blocks of one group: what is free, what is cached, who uses what."""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence

import numpy as np

import swa_jax as swa
from swa_jax.compat.common.errors import MisuseError
from swa_jax.compat.vllm import calls
from swa_jax.compat.vllm.blocks import NULL_BLOCK, FreeBlocks, KVCacheBlock, named
from swa_jax.compat.vllm.requests import Request, namespace_of, tokens_of
from swa_jax.compat.vllm.store import Store, page_row
from swa_jax.inputs import whole_number
from swa_jax.prefix_cache import Receipt, no_receipt
from swa_jax.prefix_cache.events import Event

Users = Callable[[], Counter[int]]


class BlockPool:
    """A pool of blocks, alone or as one group of a `KVCacheManager`.

    Alone it is driven by its caller: blocks are taken, cached, used by others (`touch`) and freed,
    and a cached block that nobody uses any more stays until its place is needed. Of a manager's
    pools only the first (of full attention) can be used so, beside its requests.

    What is cached is a tree: while a block is in use, no block before it in its text leaves, also
    where nobody uses that one any more. Such a block has `ref_cnt` 0 and is not free. A caller that
    frees blocks of a text from its end, as a manager does, has none.

    Args:
      num_gpu_blocks: blocks, the null block included.
      enable_caching: keep what is given to `cache_full_blocks`.
      hash_block_size: tokens in a block.
      enable_kv_cache_events: record what is stored and removed.
    """

    def __init__(
        self,
        num_gpu_blocks: int,
        enable_caching: bool,
        hash_block_size: int = 16,
        enable_kv_cache_events: bool = False,
    ) -> None:
        """Every block but the null block is free."""
        blocks = whole_number("num_gpu_blocks", num_gpu_blocks, 2)
        size = whole_number("hash_block_size", hash_block_size, 1)
        store = Store(
            swa.PoolConfig.pure_swa((blocks - 1) * size, size), keep_events=enable_kv_cache_events
        )
        self._set_up(store, Counter, False, enable_caching, enable_kv_cache_events)

    @classmethod
    def of_group(
        cls, store: Store, users: Users, *, of_swa: bool, caching: bool, events: bool
    ) -> "BlockPool":
        """The blocks of one group of a manager.

        Args:
          store: the manager's.
          users: how often its requests use a block without holding a share.
          of_swa: the group whose blocks are SWA pages.
          caching: as the manager's.
          events: likewise.
        """
        pool = cls.__new__(cls)
        pool._set_up(store, users, of_swa, caching, events)
        return pool

    def _set_up(
        self, store: Store, users: Users, of_swa: bool, caching: bool, events: bool
    ) -> None:
        self._store, self._users, self._of_swa = store, users, of_swa
        self.enable_caching, self.enable_kv_cache_events = caching, events
        pages = store.pool.swa_pages if of_swa else store.pool.full_pages
        self.num_gpu_blocks = pages + 1
        self.blocks = named(range(self.num_gpu_blocks), self)
        self.null_block = self.blocks[NULL_BLOCK]
        self.free_block_queue = FreeBlocks(self)
        self._pins: dict[int, Receipt] = {}  # cached blocks in use: the tree keeps them

    # What there is to know.

    def get_num_free_blocks(self) -> int:
        """Blocks that can be allocated, cached ones that nobody uses included."""
        room = self._store.room()
        return room.swa + room.swa_evictable if self._of_swa else room.full + room.full_evictable

    def get_usage(self) -> float:
        """The part of the blocks that is in use, 0.0 to 1.0."""
        total = self.num_gpu_blocks - 1
        return 1.0 - self.get_num_free_blocks() / total

    def ref_cnt(self, block_id: int) -> int:
        """Requests that use a block."""
        used = self._users()[block_id]
        if self._of_swa:
            return used
        holders, in_tree = self._store.read("full.holders", "in_tree")
        return int(holders[block_id]) - int(in_tree[block_id]) + used

    def block_hash(self, block_id: int) -> int | None:
        """The hash of the text that ends with a block, None where it is not cached."""
        page = self._page_of(block_id)
        return int(self._store.hashes()[page]) or None if page else None

    def _page_of(self, block_id: int) -> int:
        """The full page of a block, 0 for an SWA page that belongs to none."""
        if not self._of_swa:
            return block_id
        (mapping,) = self._store.read("full_to_swa")
        pages = np.flatnonzero(mapping == block_id)
        return int(pages[0]) if pages.size else 0

    def free_ids(self) -> list[int]:
        """Blocks that can be allocated, in the order in which they will be."""
        store = self._store
        shared = self._of_swa or store.pool.pure_swa_pool
        names = [f"{'swa' if shared else 'full'}.{part}" for part in ("ring", "head", "num_free")]
        ring, head, count = store.read(*names)
        free = np.roll(ring, -int(head))[: int(count)]
        last_use, depth, mapping = store.read("last_use", "depth", "full_to_swa")
        leaving = np.asarray(calls.leaving(store.cache, store.state))
        pages = np.flatnonzero(leaving[int(self._of_swa)])
        pages = pages[np.lexsort((pages, -depth[pages], last_use[pages]))]
        return [*free.tolist(), *(mapping[pages] if self._of_swa else pages).tolist()]

    def get_cached_block(
        self, block_hash: int, kv_cache_group_ids: Sequence[int] = (0,)
    ) -> list[KVCacheBlock] | None:
        """The cached block with this hash, one for each group named; None where there is none."""
        pages = np.flatnonzero(self._store.hashes() == np.uint64(block_hash))
        if not pages.size or not block_hash:
            return None
        page = int(pages[0])
        if self._of_swa:
            page = int(self._store.read("full_to_swa")[0][page])
        return named([page] * len(kv_cache_group_ids), self) if page else None

    def take_events(self) -> list[Event]:
        """What was stored and removed since the last call; nothing where events are off."""
        return self._store.take_events() if self.enable_kv_cache_events else []

    # What there is to do.

    def get_new_blocks(self, num_blocks: int) -> list[KVCacheBlock]:
        """Takes blocks, evicting cached ones that nobody uses.

        Raises:
          MisuseError: fewer than `num_blocks` are free.
        """
        self._needs_full_side("get_new_blocks")
        tokens = whole_number("num_blocks", num_blocks, 0) * self._store.pool.page_size
        grown = self._store.grow(0, tokens, 0)
        if grown is None:
            raise MisuseError(
                f"cannot take {num_blocks} blocks, {self.get_num_free_blocks()} are free"
            )
        return named(grown[0], self)

    def touch(self, blocks: Iterable[KVCacheBlock | Sequence[KVCacheBlock]]) -> None:
        """One more user for each block; a cached one that was free is so no longer.

        Args:
          blocks: of this pool, or lists of them.

        Raises:
          MisuseError: a block that is neither in use nor cached, or another pool's.
        """
        self._needs_full_side("touch")
        parts = [[part] if isinstance(part, KVCacheBlock) else part for part in blocks]
        pages = self._ids("touch", [block for part in parts for block in part])
        holders, in_tree = self._store.read("full.holders", "in_tree")
        gone = [page for page in pages if holders[page] == 0]
        if gone:
            raise MisuseError(f"blocks {gone} are neither in use nor cached")
        self._pin([page for page in pages if in_tree[page]])
        self._each_share(calls.share, pages)

    def free_blocks(self, ordered_blocks: Iterable[KVCacheBlock]) -> None:
        """One user less for each block; those that nobody uses are taken again in this order.

        Raises:
          MisuseError: a block freed more often than it is used, or another pool's.
        """
        self._needs_full_side("free_blocks")
        pages = self._ids("free_blocks", ordered_blocks)
        holders, in_tree = self._store.read("full.holders", "in_tree")
        wrong = [
            page for page, n in Counter(pages).items() if n > holders[page] - int(in_tree[page])
        ]
        if wrong:
            raise MisuseError(f"blocks {wrong} are freed more often than they are used")
        self._each_share(calls.free, pages)
        (holders,) = self._store.read("full.holders")
        for page in dict.fromkeys(pages):
            if holders[page] == 1 and page in self._pins:
                self._store.unlock(self._pins.pop(page))

    def cache_full_blocks(
        self,
        request: Request,
        blocks: Sequence[KVCacheBlock],
        num_cached_blocks: int,
        num_full_blocks: int,
        block_size: int | None = None,
        kv_cache_group_id: int = 0,
    ) -> None:
        """Caches blocks of a request from number `num_cached_blocks` up to `num_full_blocks`.

        They stay their request's. Of a text that is cached already the first block is the one
        that is found, as long as it is there; what comes after another block of that text is not
        cached until the first one has left.

        Args:
          request: its `all_token_ids` say what the blocks hold.
          blocks: all of its blocks.
          num_cached_blocks: of them that were given before.
          num_full_blocks: of them that are full.
          block_size: tokens in a block; the pool's.
          kv_cache_group_id: not looked at, a pool is one group's.

        Raises:
          ValueError: numbers that are none.
          MisuseError: too few blocks or too short a text, blocks that are not in use or another
            pool's, or of another size.
        """
        self._needs_full_side("cache_full_blocks")
        size = self._store.pool.page_size
        if block_size not in (None, size):
            raise MisuseError(f"blocks hold {size} tokens here, got block_size={block_size}")
        begin = whole_number("num_cached_blocks", num_cached_blocks, 0)
        full = whole_number("num_full_blocks", num_full_blocks, 0)
        if not self.enable_caching or full <= begin:
            return
        if full > len(blocks):
            raise MisuseError(f"num_full_blocks={full}, but there are {len(blocks)} blocks")
        pages = self._ids("cache_full_blocks", blocks[:full], nulls=True)
        in_tree, holders = self._store.read("in_tree", "full.holders")
        unused = [page for page in pages if page and not holders[page]]
        if unused:
            raise MisuseError(f"cache_full_blocks: blocks {unused} are not in use")
        tokens = tokens_of(request, 0, full * size)
        given = [0 if in_tree[page] else page for page in pages]
        text = self._store.text(namespace_of(request), tokens)
        row = page_row(given, len(text.tokens) // size)
        receipt, ends = self._store.run(calls.give, text, row, no_receipt(), np.int32(0))
        begin, end = ends.tolist()
        self._pin(pages[begin:end])
        self._store.unlock(receipt)

    def reset_prefix_cache(self) -> bool:
        """Forgets what is cached; False, and nothing happens, while a block is in use."""
        if self.get_num_free_blocks() != self.num_gpu_blocks - 1:
            return False
        self._store.forget()
        return True

    def _ids(self, call: str, blocks: Iterable[KVCacheBlock], *, nulls: bool = False) -> list[int]:
        """The ids of blocks that must be this pool's, the null block's left out if not wanted."""
        all_of_them = list(blocks)
        foreign = [
            block
            for block in all_of_them
            if not (isinstance(block, KVCacheBlock) and block.is_of(self))
        ]
        if foreign:
            raise MisuseError(f"{call}: {foreign} are not blocks of this pool")
        return [block.block_id for block in all_of_them if nulls or not block.is_null]

    def _pin(self, pages: Iterable[int]) -> None:
        for page in pages:
            if page not in self._pins:
                self._pins[page] = self._store.lock(page)

    def _each_share(self, call: Callable[..., swa.AllocatorState], pages: list[int]) -> None:
        """A call counts a page once, so a page named n times takes n calls."""
        counts = Counter(pages)
        for nth in range(max(counts.values(), default=0)):
            these = [page for page in dict.fromkeys(pages) if counts[page] > nth]
            self._store.state = call(self._store.state, page_row(these))

    def _needs_full_side(self, call: str) -> None:
        if self._of_swa:
            raise MisuseError(
                f"{call}: an SWA block comes and goes with the full block of its tokens; use the "
                "pool of the group with full attention, or the manager"
            )
