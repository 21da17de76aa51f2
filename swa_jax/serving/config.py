"""What is static about a serving loop."""

import dataclasses
from dataclasses import dataclass

from swa_jax.config import PoolConfig
from swa_jax.inputs import whole_number
from swa_jax.prefix_cache import POLICIES
from swa_jax.serving.draft import Draft

ROLLBACKS = ("page", "snapshot")
ROLES = ("both", "prefill")


@dataclass(frozen=True)
class ServingConfig:
    """Sizes and choices of the loop. Hashable: it is static under `jit`.

    Args:
      pool: the two KV pools. Its `sliding_window` is the model's `past_window`.
      max_context: most tokens of a request, prompt and output.
      max_running: R, requests that run at once.
      chunk_tokens: most prompt tokens of one request that a step computes.
      prefill_rows: requests that prefill in one step, the oldest first.
      max_new_tokens: columns of `Served.tokens`; by default `max_context`.
      prefix_cache: finished requests stay cached, and new ones start from them.
      policy: who leaves the cache first, one of `swa_jax.prefix_cache.POLICIES`.
      draft: where speculated tokens come from; None: no speculation.
      rollback: how pages of refused drafts go back: "page" frees what is past the new length,
        "snapshot" returns to the state before the drafts and grants what was accepted.
      role: "both" computes prompts and what follows them; "prefill" computes prompts alone: a
        request is ready then, and stays until its KV was sent to a worker that decodes.

    Raises:
      ValueError: a size below 1, an unknown policy, rollback or role, pools that cannot work.
    """

    pool: PoolConfig
    max_context: int
    max_running: int = 8
    chunk_tokens: int = 256
    prefill_rows: int = 1
    max_new_tokens: int | None = None
    prefix_cache: bool = True
    policy: str = "lru"
    draft: Draft | None = None
    rollback: str = "page"
    role: str = "both"

    def __post_init__(self) -> None:
        for name in ("max_context", "max_running", "chunk_tokens", "prefill_rows"):
            object.__setattr__(self, name, whole_number(name, getattr(self, name), 1))
        if self.max_new_tokens is not None:
            most = whole_number("max_new_tokens", self.max_new_tokens, 1)
            object.__setattr__(self, "max_new_tokens", most)
        if not isinstance(self.pool, PoolConfig):
            raise ValueError(f"pool must be a PoolConfig, got {self.pool!r}")
        if not isinstance(self.prefix_cache, bool):
            raise ValueError(f"prefix_cache must be True or False, got {self.prefix_cache!r}")
        for name, known in (("policy", POLICIES), ("rollback", ROLLBACKS), ("role", ROLES)):
            value = getattr(self, name)
            if value not in known:
                raise ValueError(f"{name} must be one of {', '.join(known)}, got {value!r}")
        is_source = hasattr(self.draft, "propose") and not isinstance(self.draft, type)
        if self.draft is not None and not is_source:
            raise ValueError(
                f"draft must be a source of drafts, such as NGramDraft(4), or None, got "
                f"{self.draft!r}"
            )
        if self.pool.pure_swa_pool or self.pool.chunked or self.pool.has_rings:
            raise ValueError(
                "the loop serves models with full and sliding-window layers: give it "
                "PoolConfig(full_tokens, swa_tokens, page_size, sliding_window)"
            )
        if self.prefill_rows > self.max_running:
            object.__setattr__(self, "prefill_rows", self.max_running)
        if self.pool.swa_pages < self.min_swa_pages:
            need = self.min_swa_pages * self.pool.page_size
            raise ValueError(
                f"swa_tokens={self.pool.swa_tokens} cannot hold one window and its next page while "
                f"pages are cached by pairs of tokens; need at least {need} tokens "
                f"({self.min_swa_pages} pages of {self.pool.page_size})"
            )
        if self.most_request_pages < 1:
            raise ValueError(
                f"a budget of {self.pool.unified_layout} holds no request and its window of "
                f"{self.min_swa_pages} pages; give PoolConfig.unified more bytes"
            )

    @property
    def num_drafts(self) -> int:
        """K, tokens that a step speculates on for each row."""
        return 0 if self.draft is None else self.draft.num_drafts

    @property
    def only_prefills(self) -> bool:
        """Nobody decodes here."""
        return self.role == "prefill"

    @property
    def key_lag(self) -> int:
        """Tokens at the end of a request that no cached page can hold yet."""
        return 1 if self.draft is not None and self.draft.is_bigram else 0

    @property
    def min_swa_pages(self) -> int:
        """Fewest SWA pages with which one request can decode for ever.

        Where keys lag, the last page is cached one token late, and its window stays that long.
        """
        lag = self.key_lag if self.prefix_cache and self.pool.sliding_window is not None else 0
        return min(self.pool.full_pages, self.pool.min_swa_pages + lag)

    @property
    def most_request_pages(self) -> int:
        """The most full pages that one request can hold when it runs alone."""
        recycles = self.pool.sliding_window is not None
        return self.pool.most_pages_beside(self.min_swa_pages if recycles else None)

    @property
    def table_pages(self) -> int:
        """C, pages of a row: drafts past the longest request have their place too (B18)."""
        return -(-(self.max_context + self.num_drafts) // self.pool.page_size)

    @property
    def step_pages(self) -> int:
        """Most pages of one row that a step can push out of its window."""
        grown = max(self.chunk_tokens, 1 + self.num_drafts)
        return min(self.table_pages, grown // self.pool.page_size + 2)

    @property
    def output_columns(self) -> int:
        """Most tokens generated for one request."""
        return self.max_context if self.max_new_tokens is None else self.max_new_tokens

    def with_draft(self, draft: Draft | None) -> "ServingConfig":
        """The same loop with another source of drafts."""
        return dataclasses.replace(self, draft=draft)
