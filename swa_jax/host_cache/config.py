"""Static sizes of the host tier."""

import dataclasses

from swa_jax.config import PoolConfig
from swa_jax.inputs import whole_number


@dataclasses.dataclass(frozen=True)
class HostConfig:
    """How many pages host memory keeps. Hashable.

    Args:
      full_tokens: rows for the full layers, a positive multiple of the page.
      swa_tokens: rows for the SWA layers, likewise. A prefix needs one window at its end, however
        long it is: `plan_host` takes one for each typical prefix.
      page_size: tokens in a page, as on the device.
      sliding_window: W as in `PoolConfig`: past tokens that the next one sees; None: all.
      chunked: the window is a chunk of W tokens.

    Raises:
      ValueError: a size that cannot work, with the size that would.
    """

    full_tokens: int
    swa_tokens: int
    page_size: int = 1
    sliding_window: int | None = None
    chunked: bool = dataclasses.field(default=False, kw_only=True)

    def __post_init__(self) -> None:
        page = whole_number("page_size", self.page_size, 1)
        for name in ("full_tokens", "swa_tokens"):
            tokens = whole_number(name, getattr(self, name), 1, 2**62)
            if tokens % page:
                near = max(page, tokens // page * page)
                raise ValueError(
                    f"{name} must be a multiple of page_size={page}, got {tokens}; try {near}"
                )
        if self.sliding_window is not None:
            whole_number("sliding_window", self.sliding_window, 1)
        elif self.chunked:
            raise ValueError("chunked=True needs sliding_window, the chunk length in tokens")

    @classmethod
    def beside(cls, pool: PoolConfig, full_tokens: int, swa_tokens: int) -> "HostConfig":
        """A tier of this size under the pools of a device.

        Raises:
          ValueError: a pool without full layers, where nothing older than a window is kept, or one
            with request rings, which has no cached prefixes.
        """
        if pool.has_rings:
            raise ValueError(
                "a pool with request rings has no prefix cache, since its SWA KV is one request's "
                "and nobody else's: a host tier has nothing to keep for it; use "
                "PoolConfig(full_tokens, swa_tokens, ...)"
            )
        if pool.pure_swa_pool:
            raise ValueError(
                "a pure SWA pool keeps no prefix longer than a window: a host tier has nothing to "
                "keep for it; use PoolConfig(full_tokens, swa_tokens, ...)"
            )
        return cls(
            full_tokens, swa_tokens, pool.page_size, pool.sliding_window, chunked=pool.chunked
        )

    @property
    def full_pages(self) -> int:
        """Rows of the full layers."""
        return self.full_tokens // self.page_size

    @property
    def swa_pages(self) -> int:
        """Rows of the SWA layers."""
        return self.swa_tokens // self.page_size

    @property
    def window_pages(self) -> int:
        """SWA pages at the end of a prefix without which it cannot be continued, at most."""
        if self.sliding_window is None:
            return self.full_pages
        return -(-self.sliding_window // self.page_size)

    @property
    def kept_pages(self) -> int:
        """SWA pages kept at each end of a branch: a window, and one page more.

        A text that comes again as it was can use all but its last page (public report B38).
        """
        return self.window_pages + 1

    def window_start(self, pages: int) -> int:
        """The first page that a prefix of `pages` pages must have in SWA.

        As `swa_jax.prefix_cache` says it on the device.
        """
        if self.sliding_window is None:
            return 0
        tokens = pages * self.page_size
        if self.chunked:
            last = max(tokens - 1, 0)
            return (last - last % self.sliding_window) // self.page_size
        return max(tokens - self.sliding_window, 0) // self.page_size
