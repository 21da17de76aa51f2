"""What sglang's scheduler asks every allocator, whatever its kind: does it fit, make room.

Answers are for pools of fixed sizes that nothing else shares. A budget of a prefill pass is an
object of sglang's own, which is imported when one is asked for. Radix caches are sglang's: of one
only `supports_prefix_sharing()` and `evict_for_alloc(params)` are used.
"""

import sys
from collections.abc import Hashable
from dataclasses import dataclass
from importlib import import_module

import swa_jax as swa
from swa_jax.compat.common.host_pools import HostPools
from swa_jax.compat.common.types import HostInts, Plain

_BUDGETS = "sglang.srt.mem_cache.prefill_budget"
_CACHES = "sglang.srt.mem_cache.base_prefix_cache"


@dataclass
class _EvictParams:
    """Tokens wanted of a cache, where sglang's own class of them is not in use."""

    num_tokens: int = 0
    swa_num_tokens: int = 0
    mamba_num: int = 0


def _evict(tree_cache: Plain, full_tokens: int, swa_tokens: int = 0) -> None:
    # A cache of sglang has brought the module along; no other needs it.
    params = getattr(sys.modules.get(_CACHES), "EvictParams", _EvictParams)
    tree_cache.evict_for_alloc(params(num_tokens=full_tokens, swa_num_tokens=swa_tokens))


def _can_evict(tree_cache: Plain) -> bool:
    return tree_cache is not None and tree_cache.supports_prefix_sharing()


def _budget(name: str, *args: Plain, **kwargs: Plain) -> Plain:
    try:
        module = import_module(_BUDGETS)
    except ImportError as error:
        raise NotImplementedError(
            f"a prefill budget is an object of sglang's scheduler ({_BUDGETS}.{name}), which "
            "cannot be imported here"
        ) from error
    return getattr(module, name)(*args, **kwargs)


class SchedulerHooks:
    """The questions to an allocator of one pool."""

    size: int
    page_size: int
    pools: HostPools

    @property
    def size_full(self) -> int:
        """Tokens that hold KV of full layers: all."""
        return self.size

    def available_size(self, dp_rank: int = 0) -> int:
        """Tokens that can be granted."""
        raise NotImplementedError

    def create_prefill_budget(
        self, tree_cache: Plain, *, num_mixed_decode_tokens: int = 0
    ) -> Plain:
        """What a prefill pass may take, as an object of sglang's.

        Args:
          tree_cache: sglang's radix cache over this allocator.
          num_mixed_decode_tokens: tokens that decodes in the same pass need.

        Raises:
          NotImplementedError: sglang cannot be imported.
        """
        return _budget(
            "PrefillBudget", self, tree_cache, num_mixed_decode_tokens=num_mixed_decode_tokens
        )

    def request_slot_reserve(self, *, has_req_pool_slot: bool, prefill_tokens: int = 0) -> int:
        """Slots that a request needs beside those of its tokens: 0."""
        return 0

    def max_new_tokens_for_memory(
        self,
        input_tokens: int,
        max_new_tokens: int,
        *,
        token_capacity: int,
        sliding_window_size: int | None,
        chunk_size: int | None,
    ) -> int | None:
        """How many tokens a request could generate if it had the pools to itself.

        Args:
          input_tokens: of the prompt.
          max_new_tokens: asked for; the answer is no more than this.
          token_capacity: tokens that the pools hold, as the scheduler counts them.
          sliding_window_size: not needed.
          chunk_size: not needed.

        Returns:
          Tokens, with a page and one token left as a margin; 0 where the prompt leaves no room.
        """
        prompt = -(-input_tokens // self.page_size) * self.page_size
        room = token_capacity - prompt - (self.page_size + 1)
        return min(max(room, 0), max(max_new_tokens, 0))

    def prealloc_fits_assumes_reclaim(self) -> bool:
        """Whether `prealloc_fits` counts what could be evicted: no, the budgets given do."""
        return False

    def prealloc_ceiling_fits(self, full_tokens: int, swa_tokens: int) -> bool | None:
        """None: the scheduler's own token capacity is the only bound."""
        return None

    def prealloc_fits(
        self,
        tree_cache: Plain,
        full_tokens: int,
        swa_tokens: int,
        *,
        full_budget_tokens: int,
        swa_budget_tokens: int | None = None,
    ) -> bool:
        """Whether tokens of either kind are within the scheduler's budgets for them.

        Args:
          tree_cache: not asked: what it could give is in the budgets.
          full_tokens: wanted.
          swa_tokens: wanted.
          full_budget_tokens: allowed.
          swa_budget_tokens: allowed, None for any number.
        """
        of_swa = swa_tokens if swa_budget_tokens is None else swa_budget_tokens
        return full_tokens <= full_budget_tokens and swa_tokens <= of_swa

    def get_extend_allocation_demand(
        self,
        prefix_lens_cpu: HostInts,
        seq_lens_cpu: HostInts,
        *,
        conservative_num_tokens: int,
        shard_size: int,
    ) -> int:
        """Tokens to have free before an extend: the scheduler's own estimate."""
        return conservative_num_tokens

    def evict_to_free_tokens(self, tree_cache: Plain, num_tokens: int) -> bool | None:
        """Evicts what is lacking for `num_tokens`; None: `available_size` says what came of it."""
        lacking = num_tokens - self.available_size()
        if _can_evict(tree_cache) and lacking > 0:
            _evict(tree_cache, lacking)
        return None

    def check_decode_capacity(
        self,
        *,
        num_tokens: int,
        tree_cache: Plain,
        requests: Plain = None,
        spec_algorithm: Plain = None,
    ) -> bool:
        """Whether `num_tokens` can be granted, after evicting for them.

        Args:
          num_tokens: of the next decode step.
          tree_cache: to evict from; None for none.
          requests: not needed.
          spec_algorithm: not needed.
        """
        self.evict_to_free_tokens(tree_cache, num_tokens)
        return self.available_size() >= num_tokens

    def verify_byte_accounting(self) -> list[str]:
        """Checks every law of the state, which waits for the device: what is broken, in words."""
        broken = []
        for rank in range(self.pools.ranks):
            try:
                swa.check(self.pools.state(rank))
            except swa.InvariantError as error:
                broken.append(str(error))
        return broken

    def mamba_full_cache_donor(self) -> None:
        """None: no pool is shared with Mamba states."""

    def set_hicache_transfer_done_event(self, transfer_key: Hashable, event: Plain) -> None:
        """Nothing to note: no page here waits for a transfer."""


class SwaSchedulerHooks(SchedulerHooks):
    """The questions to an allocator with an SWA pool, or of that pool alone."""

    def full_available_size(self, dp_rank: int = 0) -> int:
        """Full tokens that can be granted."""
        raise NotImplementedError

    def swa_available_size(self, dp_rank: int = 0) -> int:
        """SWA tokens that can be granted."""
        raise NotImplementedError

    def create_prefill_budget(
        self, tree_cache: Plain, *, num_mixed_decode_tokens: int = 0
    ) -> Plain:
        """As for one pool, an object that counts both kinds."""
        # The one-pool kind has its own word here; where it is not needed it is not said.
        pure = {"all_swa": True} if self.pools.config.pure_swa_pool else {}
        decodes = {"num_mixed_decode_tokens": num_mixed_decode_tokens}
        return _budget("SWAPrefillBudget", self, tree_cache, **decodes, **pure)

    def evict_to_free_tokens(self, tree_cache: Plain, num_tokens: int) -> bool | None:
        """Evicts what either pool lacks for `num_tokens`; None, as for one pool."""
        full = max(0, num_tokens - self.full_available_size())
        of_swa = max(0, num_tokens - self.swa_available_size())
        if _can_evict(tree_cache) and (full or of_swa):
            _evict(tree_cache, full, of_swa)
        return None

    def reclaim_for_prealloc(
        self, tree_cache: Plain, full_tokens: int, swa_tokens: int
    ) -> str | None:
        """Evicts until `swa_tokens` can be granted.

        Args:
          tree_cache: to evict from.
          full_tokens: not needed: the caller's budget has them.
          swa_tokens: wanted.

        Returns:
          None if there is room, else what is lacking, in words.
        """
        lacking = swa_tokens - self.swa_available_size()
        if lacking > 0:
            _evict(tree_cache, 0, lacking)
            lacking = swa_tokens - self.swa_available_size()
        if lacking > 0:
            return f"{swa_tokens} SWA tokens wanted, {lacking} of them lacking after eviction"
        return None

    def swa_capacity_and_available(
        self, *, full_capacity: int, swa_capacity: int
    ) -> tuple[tuple[int, int], tuple[int, int]]:
        """For either pool the capacity given, and the tokens that can be granted."""
        full, of_swa = self.full_available_size(), self.swa_available_size()
        return (full_capacity, full), (swa_capacity, of_swa)
