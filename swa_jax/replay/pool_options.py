"""Pool sizes out of what a user gives: a memory budget, or the tokens of each pool."""

import re

from swa_jax.choices import DEFAULT_HBM
from swa_jax.config import PoolConfig
from swa_jax.models import ModelConfig, parse_bytes, plan_pools
from swa_jax.replay.trace import TraceError

_NAMES = re.compile(
    r"\b(full_tokens|swa_tokens|pool_tokens|row_tokens|page_size|max_running|chunk_tokens|"
    r"max_context)\b"
)


def in_option_names(error: ValueError) -> str:
    """The message with `page_size` and the like called as the command line calls them."""
    if isinstance(error, TraceError):  # it quotes the file, which must not be changed
        return str(error)
    return _NAMES.sub(lambda match: "--" + match[0].replace("_", "-"), str(error))


def pool_from_options(
    model: ModelConfig,
    *,
    hbm: str | None,
    full_tokens: int | None,
    swa_tokens: int | None,
    page_size: int,
    max_running: int,
    chunk_tokens: int,
    prefix_cache: bool = False,
) -> PoolConfig:
    """The pools for `model`; without any size those that `DEFAULT_HBM` has room for.

    Raises:
      ValueError: sizes that contradict each other or cannot work.
    """
    given = {"--full-tokens": full_tokens, "--swa-tokens": swa_tokens}
    given = {name: value for name, value in given.items() if value is not None}
    if not given:
        budget = DEFAULT_HBM if hbm is None else hbm
        try:
            sizes = plan_pools(
                model,
                parse_bytes(budget),
                page_size,
                max_running=max_running,
                chunk_tokens=chunk_tokens,
                prefix_cache=prefix_cache,
            )
        except ValueError as error:
            raise ValueError(f"--hbm {budget}: {error}") from None
        return _pool(model, sizes.full_tokens, sizes.swa_tokens, page_size)
    shown = " ".join(f"{name} {value}" for name, value in given.items())
    if hbm is not None:
        raise ValueError(
            f"give either --hbm or the tokens of the pools, not both; got --hbm {hbm} {shown}"
        )
    if model.pure_swa:
        if full_tokens is not None or swa_tokens is None:
            raise ValueError(
                f"{model.name} has only sliding-window layers, so one pool: give its size as "
                f"--swa-tokens alone; got {shown}"
            )
        return _pool(model, swa_tokens, swa_tokens, page_size)
    if full_tokens is None or swa_tokens is None:
        raise ValueError(
            f"{model.name} has full and sliding-window layers: give both --full-tokens and "
            f"--swa-tokens, or --hbm; got only {shown}"
        )
    return _pool(model, full_tokens, swa_tokens, page_size)


def _pool(model: ModelConfig, full_tokens: int, swa_tokens: int, page_size: int) -> PoolConfig:
    """PoolConfig counts the past tokens of a window, without the query."""
    window = model.past_window
    if model.pure_swa:
        return PoolConfig.pure_swa(swa_tokens, page_size, window, chunked=model.chunked)
    return PoolConfig(full_tokens, swa_tokens, page_size, window, chunked=model.chunked)
