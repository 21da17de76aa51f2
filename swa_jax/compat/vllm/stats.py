"""How much of the prompts was cached."""

from dataclasses import dataclass


@dataclass
class PrefixCacheStats:
    """Look-ups since the figures were last taken."""

    reset: bool = False  # the cache was reset in between
    requests: int = 0
    queries: int = 0  # tokens
    hits: int = 0  # tokens

    def record(self, num_tokens: int, num_hits: int) -> None:
        """Counts one look-up."""
        self.requests += 1
        self.queries += num_tokens
        self.hits += num_hits
