"""Sizes that a pool can have."""

from swa_jax.compat.common.errors import MisuseError
from swa_jax.compat.common.host_arrays import host_int


def rank_tokens(name: str, tokens: int, page_size: int, dp_size: int = 1) -> int:
    """Tokens of one rank, in whole pages; what is left over is not used.

    Args:
      name: of the pool's size, for the message.
      tokens: of all ranks together.
      page_size: tokens in a page.
      dp_size: ranks.

    Raises:
      MisuseError: no page for a rank, or other than integers from 1 on.
    """
    for what, value in (("page_size", page_size), ("dp_size", dp_size)):
        if host_int(what, value) < 1:
            raise MisuseError(f"{what} must be 1 or more, got {value!r}")
    pages = host_int(name, tokens) // page_size // dp_size
    if pages < 1:
        raise MisuseError(
            f"{name} must hold a page of {page_size} tokens for each of {dp_size} rank(s), "
            f"got {tokens!r}"
        )
    return pages * page_size
