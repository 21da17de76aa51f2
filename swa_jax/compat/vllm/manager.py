"""The blocks of running requests: what of a prompt is cached, what a step needs, what ends."""

from collections import Counter
from collections.abc import Sequence

import numpy as np

from swa_jax.compat.common.errors import MisuseError
from swa_jax.compat.vllm import calls
from swa_jax.compat.vllm.block_pool import BlockPool
from swa_jax.compat.vllm.blocks import KVCacheBlock, KVCacheBlocks, empty_blocks, named
from swa_jax.compat.vllm.config import AnyConfig, read_groups
from swa_jax.compat.vllm.requests import Request, namespace_of, tokens_of
from swa_jax.compat.vllm.rows import Row
from swa_jax.compat.vllm.stats import PrefixCacheStats
from swa_jax.compat.vllm.store import Store
from swa_jax.inputs import whole_number
from swa_jax.prefix_cache.events import Event


class KVCacheManager:
    """Block tables of requests over pools with full-attention and sliding-window layers.

    A request is any object with `request_id`, `all_token_ids`, `num_tokens` and
    `num_computed_tokens`; `cache_salt`, `lora_request`, `mm_features`,
    `skip_reading_prefix_cache` and `num_in_flight_tokens` are read where it has them.

    A request may have a block of its own of a text that is cached already: the last one of a prompt
    that ends with a block, whose last token is computed again, or one that another request computed
    at the same time. Unlike vLLM's, what follows it is cached only when the other one has been
    evicted or the request ends: until then that one must be free to leave.

    Args:
      kv_cache_config: groups and blocks, see `KVCacheConfig`.
      max_model_len: tokens of the longest request.
      enable_caching: keep blocks for requests that begin alike.
      use_eagle: leave the last matched block out, for a draft head that needs its hidden states.
      log_stats: count look-ups and hits.
      enable_kv_cache_events: record what is stored and removed.
      watermark: part of the blocks that new requests must leave free, 0.0 to 1.0.

    Raises:
      ValueError: groups that there are no pools for, or another watermark.
    """

    def __init__(
        self,
        kv_cache_config: AnyConfig,
        max_model_len: int,
        enable_caching: bool = True,
        use_eagle: bool = False,
        log_stats: bool = False,
        enable_kv_cache_events: bool = False,
        *,
        watermark: float = 0.0,
    ) -> None:
        """Every block is free."""
        self.kv_cache_config = kv_cache_config
        self.max_model_len = whole_number("max_model_len", max_model_len, 1)
        self.enable_caching, self.use_eagle, self.log_stats = enable_caching, use_eagle, log_stats
        self.prefix_cache_stats = PrefixCacheStats() if log_stats else None
        self.groups = read_groups(kv_cache_config, self.max_model_len)
        self.num_kv_cache_groups = self.groups.count
        self.block_size = self.groups.block_size
        if not 0 <= watermark <= 1:
            raise ValueError(f"watermark is a part of the blocks, 0.0 to 1.0, got {watermark!r}")
        self.watermark_blocks = int(watermark * kv_cache_config.num_blocks)
        self.empty_kv_cache_blocks = empty_blocks(self.num_kv_cache_groups)
        self._store = Store(self.groups.pool, keep_events=enable_kv_cache_events)
        self._rows: dict[str, Row] = {}
        self.block_pools = tuple(
            BlockPool.of_group(
                self._store,
                self._users_of_swa if index == self.groups.window else self._users_by_lock,
                of_swa=index == self.groups.window,
                caching=enable_caching,
                events=enable_kv_cache_events,
            )
            for index in range(self.num_kv_cache_groups)
        )
        self.block_pool = self.block_pools[self.groups.full or 0]

    # Looking.

    @property
    def usage(self) -> float:
        """The part of the blocks that is in use, 0.0 to 1.0: of the group that is fuller."""
        return max(pool.get_usage() for pool in self.block_pools)

    def make_prefix_cache_stats(self) -> PrefixCacheStats | None:
        """The figures since the last call; None where they are off."""
        stats = self.prefix_cache_stats
        self.prefix_cache_stats = None if stats is None else PrefixCacheStats()
        return stats

    def get_computed_blocks(self, request: Request) -> tuple[KVCacheBlocks, int]:
        """What of a request is cached, whole blocks, its last token always left out.

        Nothing is taken: `allocate_slots` does that with what is returned here.

        Returns:
          The blocks by group, the null block where no window needs one, and the tokens in them.

        Raises:
          MisuseError: tokens that are no int32.
        """
        if not self.enable_caching or getattr(request, "skip_reading_prefix_cache", False):
            return self.empty_kv_cache_blocks, 0
        length, pages, swa = self._store.look(request, request.num_tokens - 1)
        if self.use_eagle and length:
            # With less before it, what is left must still have a window of its own (B37).
            length, pages, swa = self._store.look(request, length - self.block_size)
        if self.prefix_cache_stats is not None:
            self.prefix_cache_stats.record(request.num_tokens, length)
        behind = min(self._behind(length), len(pages))
        return self._tables(pages, [0] * behind + swa[behind:]), length

    def get_blocks(self, request_id: str) -> KVCacheBlocks:
        """All blocks of a request; none for one that is not known."""
        row = self._rows.get(request_id, Row())
        return self._tables(row.pages, row.swa)

    def get_block_ids(self, request_id: str) -> tuple[list[int], ...]:
        """The ids of all blocks of a request, by group."""
        return self.get_blocks(request_id).get_block_ids()

    def create_kv_cache_blocks(self, blocks: tuple[Sequence[KVCacheBlock], ...]) -> KVCacheBlocks:
        """The blocks of each group as one object."""
        return KVCacheBlocks(blocks) if any(blocks) else self.empty_kv_cache_blocks

    def create_empty_block_list(self) -> KVCacheBlocks:
        """No blocks, in every group."""
        return self.empty_kv_cache_blocks

    def get_num_common_prefix_blocks(self, running_request_id: str) -> list[int]:
        """Blocks at the start of a request that all requests with blocks use, by group.

        0 for a group with a window: what its requests have in common is the null block.
        """
        common = [0] * self.num_kv_cache_groups
        row = self._rows.get(running_request_id)
        if row is not None and self.groups.full is not None:
            others = [other.pages for other in self._rows.values()]
            same = 0
            for same, pages in enumerate(zip(*others, strict=False), start=1):
                if len(set(pages)) > 1:
                    same -= 1
                    break
            common[self.groups.full] = same
        return common

    def take_events(self) -> list[Event]:
        """What was stored in the cache and removed from it since the last call."""
        return self.block_pool.take_events()

    # Growing.

    def allocate_slots(
        self,
        request: Request,
        num_new_tokens: int,
        num_new_computed_tokens: int = 0,
        new_computed_blocks: KVCacheBlocks | None = None,
        num_lookahead_tokens: int = 0,
        num_external_computed_tokens: int = 0,
        delay_cache_blocks: bool = False,
        num_encoder_tokens: int = 0,
        *,
        full_sequence_must_fit: bool = False,
        reserved_blocks: int = 0,
    ) -> KVCacheBlocks | None:
        """Blocks for the tokens that a request computes next, or none of them.

        What its window has left behind is given up first, also where there is no room then.

        Args:
          request: `num_computed_tokens` of it are in its blocks.
          num_new_tokens: to compute, drafts included.
          num_new_computed_tokens: of `get_computed_blocks`, for a request without blocks.
          new_computed_blocks: likewise; read only where the number is not given.
          num_lookahead_tokens: more tokens to have room for, of drafts to come.
          num_external_computed_tokens: after those computed; their KV arrives from elsewhere, and
            layers with a window get blocks for the last window of them alone.
          delay_cache_blocks: the KV is not there yet; `cache_blocks` caches them later.
          num_encoder_tokens: 0; there is no group of cross attention.
          full_sequence_must_fit: refuse where the whole request has no room.
          reserved_blocks: blocks that must be left.

        Returns:
          The new blocks by group; None where there is no room.

        Raises:
          ValueError: a number below 0, or that is none.
          MisuseError: nothing to allocate for, blocks that are not cached any more, cached
            blocks for a request that has blocks already, tokens of an encoder, or tokens of the
            request that are no int32. Nothing has changed then.
        """
        in_flight = getattr(request, "num_in_flight_tokens", 0)
        _check_counts(
            num_new_tokens=num_new_tokens,
            num_new_computed_tokens=num_new_computed_tokens,
            num_lookahead_tokens=num_lookahead_tokens,
            num_external_computed_tokens=num_external_computed_tokens,
            reserved_blocks=reserved_blocks,
            num_computed_tokens=request.num_computed_tokens,
            num_in_flight_tokens=in_flight,
        )
        if num_new_tokens <= 0 and num_external_computed_tokens <= 0:
            raise MisuseError(
                f"there must be a token to allocate for, got num_new_tokens={num_new_tokens}"
            )
        if num_encoder_tokens:
            raise MisuseError(f"no group is of cross attention, got {num_encoder_tokens=}")
        if new_computed_blocks is not None and not num_new_computed_tokens:
            num_new_computed_tokens = len(new_computed_blocks.blocks[0]) * self.block_size
        known = self._rows.get(request.request_id)
        if known is not None and num_new_computed_tokens:
            raise MisuseError(
                f"request {request.request_id!r} has blocks already: cached ones are for its start"
            )
        here = request.num_computed_tokens + num_new_computed_tokens
        computed = min(here + num_external_computed_tokens, self.max_model_len)
        full = min(computed + num_new_tokens, request.num_tokens, self.max_model_len)
        begin = num_new_computed_tokens if known is None else known.cached
        news = self._uncached(request, begin, 0 if delay_cache_blocks else full)
        row = self._stand(request, num_new_computed_tokens) if known is None else known
        self._leave(row, computed - in_flight)
        spare = reserved_blocks + (self.watermark_blocks if known is None and self._rows else 0)
        wanted = min(computed + num_new_tokens + num_lookahead_tokens, self.max_model_len)
        fits = not full_sequence_must_fit or self._fits(row, request, spare)
        external = num_external_computed_tokens > 0
        grown = self._grow(row, wanted, computed if external else 0, spare) if fits else None
        if grown is None:
            if known is None:
                self._end(row)
            return None
        self._rows[request.request_id] = row
        self._cache(row, news)
        return self._tables(*grown)

    def _stand(self, request: Request, tokens: int) -> Row:
        """A row that stands on cached blocks, kept by its lock and its shares."""
        row = Row(space=namespace_of(request))
        if not tokens:
            return row
        length, pages, swa = self._store.look(request, tokens)
        if length != tokens:
            raise MisuseError(
                f"{tokens} tokens of request {request.request_id!r} are not cached (any more), "
                f"{length} are: ask get_computed_blocks again"
            )
        row.behind = behind = self._behind(tokens)
        row.extend(pages, [0] * behind + swa[behind:], in_tree=True, shared_from=behind)
        row.receipt = self._store.run(calls.stand, np.int32(pages[-1]), row.pick(in_tree=True))
        row.text = tokens_of(request, 0, tokens)
        return row

    def _grow(
        self, row: Row, wanted: int, arrives: int, spare: int
    ) -> tuple[list[int], list[int]] | None:
        """Blocks up to `wanted` tokens; SWA sides from the window of token `arrives` on."""
        size, start = self.block_size, len(row.pages)
        held, end = start * size, -(-wanted // size) * size
        swa_from = min(max(held, self._behind(arrives) * size), max(held, end))
        grown = self._store.grow(held, end, swa_from, spare)
        if grown is not None:
            row.extend(*grown, in_tree=False, shared_from=start)
        return grown

    def _fits(self, row: Row, request: Request, spare: int) -> bool:
        """Whether there is room for all of a request, its window being recycled."""
        pages = -(-min(request.num_tokens, self.max_model_len) // self.block_size)
        full = max(0, pages - len(row.pages))
        most = self.groups.pool.window_pages
        return self._store.room().has(full + spare, full if most is None else min(full, most))

    def _leave(self, row: Row, computed: int) -> None:
        """Gives up what the window of the next token does not read."""
        edge = min(self._behind(computed), len(row.pages))
        if edge <= row.behind:
            return
        shares = row.pick(in_tree=True, begin=row.behind, end=edge)
        own = row.pick(in_tree=False, begin=row.behind, end=edge)
        live = np.zeros_like(own)
        live[: len(row.swa)] = np.asarray(row.swa) > 0  # what came without an SWA side has none
        tokens = np.int32(edge * self.block_size)
        row.receipt = self._store.run(calls.leave, row.receipt, tokens, shares, own * live)
        row.leave(edge)

    def _behind(self, tokens: int) -> int:
        """Blocks that the window of the token after `tokens` has left."""
        window = self.groups.pool.sliding_window
        if window is None or tokens <= 0:
            return 0
        edge = tokens - tokens % window if self.groups.pool.chunked else tokens - window
        return max(edge, 0) // self.block_size

    def cache_blocks(self, request: Request, num_computed_tokens: int) -> None:
        """Caches the full blocks of the first `num_computed_tokens` tokens of a request.

        What was cached before is not read again: it stays what its blocks hold.

        Raises:
          ValueError: a number below 0, or that is none.
          MisuseError: more than the request has tokens or blocks for, or tokens that are no int32.
        """
        _check_counts(num_computed_tokens=num_computed_tokens)
        row = self._rows.get(request.request_id)
        if row is None:
            return
        room = len(row.pages) * self.block_size
        if num_computed_tokens > min(room, request.num_tokens):
            raise MisuseError(
                f"request {request.request_id!r} has {request.num_tokens} tokens, and blocks for "
                f"{room}, got num_computed_tokens={num_computed_tokens}"
            )
        self._cache(row, self._uncached(request, row.cached, num_computed_tokens))

    def _uncached(self, request: Request, begin: int, computed: int) -> np.ndarray:
        """int32[n] the tokens after `begin` in full blocks of those computed."""
        end = computed // self.block_size * self.block_size if self.enable_caching else 0
        return tokens_of(request, begin, end)

    def _cache(self, row: Row, news: np.ndarray) -> None:
        """Gives the tree what it can have of a row, whose text goes on with `news`."""
        if not len(news):
            return
        row.text = np.concatenate([row.text, news])
        text = self._store.text(row.space, row.text, len(row.pages))
        pages = row.pick(in_tree=False, end=row.cached // self.block_size)
        behind = np.int32(row.behind * self.block_size)
        row.receipt, ends = self._store.run(calls.give, text, pages, row.receipt, behind)
        first, last = ends.tolist()
        for place in range(first, last):
            row.in_tree[place] = True
        late = row.pick(in_tree=True, end=row.behind)  # these a window has left already
        if late.any():
            self._store.state = calls.free(self._store.state, late)
            row.behind, behind = 0, row.behind
            row.leave(behind)

    # Ending.

    def free(self, request: Request) -> None:
        """Ends a request: its blocks are free, the last ones first; cached ones stay cached.

        They stay under the text that they were computed for, whatever the request's is by now.
        """
        row = self._rows.get(request.request_id)
        if row is not None:
            self._end(row)
            del self._rows[request.request_id]

    def _end(self, row: Row) -> None:
        text = self._store.text(row.space, row.text, len(row.pages))
        own, shares = (row.pick(in_tree=kind) for kind in (False, True))
        self._store.run(calls.end, text, own, shares, row.receipt)

    def reset_prefix_cache(self) -> bool:
        """Forgets what is cached; False, and nothing happens, while a request has blocks."""
        if self._rows or not self.block_pool.reset_prefix_cache():
            return False
        if self.prefix_cache_stats is not None:
            self.prefix_cache_stats.reset = True
        return True

    def new_step_starts(self) -> None:
        """Nothing is kept from step to step."""

    # The two sides as groups.

    def _tables(self, pages: list[int], swa: list[int]) -> KVCacheBlocks:
        sides = [
            swa if index == self.groups.window else pages for index in range(self.groups.count)
        ]
        pairs = zip(sides, self.block_pools, strict=True)
        return self.create_kv_cache_blocks(tuple(named(ids, pool) for ids, pool in pairs))

    def _users_of_swa(self) -> Counter[int]:
        return Counter(block for row in self._rows.values() for block in row.swa if block)

    def _users_by_lock(self) -> Counter[int]:
        """Requests that stand on a page of the tree by their lock alone."""
        return Counter(
            page
            for row in self._rows.values()
            for page, share in zip(row.pages, row.shares, strict=True)
            if not share
        )


def _check_counts(**counts: object) -> None:
    for name, value in counts.items():
        whole_number(name, value, 0)
