"""Pools for serving a checkpoint: of the sizes given, or as large as is of use."""

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from swa_jax.config import PoolConfig
from swa_jax.models import ModelConfig
from swa_jax.models.planning import window_pages
from swa_jax.out_of_memory import device_memory, is_out_of_memory
from swa_jax.replay.pool_options import pool_from_options
from swa_jax.serving import NGramDraft, ServingConfig

DEFAULT_HBM = "1GiB"
_FULL_CONTEXTS = 8  # for each running request: more than that is of little use to a cache


@dataclass(frozen=True)
class ServingOptions:
    """What the user says about memory and batching; None where nothing was said."""

    hbm: str | None
    full_tokens: int | None
    swa_tokens: int | None
    page_size: int
    max_running: int
    chunk_tokens: int
    prefix_cache: bool
    draft: str | None

    @property
    def has_sizes(self) -> bool:
        """The user has said how large the pools are."""
        return any(size is not None for size in (self.hbm, self.full_tokens, self.swa_tokens))


def pool_as_asked(model: ModelConfig, options: ServingOptions) -> PoolConfig:
    """The pools of the sizes given, or what `DEFAULT_HBM` has room for.

    Raises:
      ValueError: sizes that cannot work, in the words of the command line.
    """
    if model.pure_swa:
        raise ValueError(f"{model.name} has no full layers; serving needs both kinds")
    return pool_from_options(
        model,
        hbm=options.hbm if options.has_sizes else DEFAULT_HBM,
        full_tokens=options.full_tokens,
        swa_tokens=options.swa_tokens,
        page_size=options.page_size,
        max_running=options.max_running,
        chunk_tokens=options.chunk_tokens,
        prefix_cache=options.prefix_cache,
    )


def config_for_server(
    model: ModelConfig, options: ServingOptions, max_context: int | None
) -> ServingConfig:
    """The loop of a server that requests of any length come to.

    Args:
      model: what is served.
      options: of the user.
      max_context: most tokens of a request; by default as many as model and pool allow.

    Raises:
      ValueError: sizes that cannot work.
    """
    pool = pool_as_asked(model, options)
    longest = pool.full_tokens if model.max_context is None else model.max_context
    if max_context is not None and max_context > min(longest, pool.full_tokens):
        raise ValueError(
            f"max_context must be at most {min(longest, pool.full_tokens)}: the model takes "
            f"{longest} tokens and the full pool {pool.full_tokens}; got {max_context}"
        )
    context = max_context or min(longest, pool.full_tokens)
    if not options.has_sizes:
        most = _FULL_CONTEXTS * options.max_running * -(-context // pool.page_size)
        pages = min(pool.full_pages, most)
        swa_pages = min(pool.swa_pages, pages)
        size = pool.page_size
        pool = replace(pool, full_tokens=pages * size, swa_tokens=swa_pages * size)
    return _config(pool, options, context)


def config_for_requests(
    model: ModelConfig, options: ServingOptions, lengths: Sequence[int]
) -> ServingConfig:
    """The loop for requests that are known beforehand.

    Args:
      model: what is served.
      options: of the user; without any size the pools just hold what runs at once.
      lengths: most tokens of each request, prompt and output.

    Raises:
      ValueError: sizes that cannot work, or a request that they can never serve.
    """
    longest = max(lengths)
    if model.max_context is not None and longest > model.max_context:
        raise ValueError(
            f"the model takes {model.max_context} tokens, but a prompt and --max-new-tokens are "
            f"{longest}; shorten either"
        )
    size = options.page_size
    if options.has_sizes:
        pool = pool_as_asked(model, options)
        if longest > pool.full_tokens:
            raise ValueError(
                f"a prompt and --max-new-tokens are {longest} tokens, and the full pool has "
                f"{pool.full_tokens}: shorten either or give a larger pool"
            )
    else:
        # A page more each: for drafts, and for what a prefix that others share keeps back.
        full = [-(-length // size) + 2 for length in lengths]
        live = window_pages(model, size) + -(-options.chunk_tokens // size) + 2
        swa = [min(pages, live) for pages in full]
        running = options.max_running
        full_pages, swa_pages = (sum(sorted(kind)[-running:]) for kind in (full, swa))
        pool = PoolConfig(full_pages * size, swa_pages * size, size, model.past_window)
    options = replace(options, max_running=min(options.max_running, len(lengths)))
    return _config(pool, options, longest)


def _config(pool: PoolConfig, options: ServingOptions, max_context: int) -> ServingConfig:
    return ServingConfig(
        pool,
        max_context=max_context,
        max_running=options.max_running,
        chunk_tokens=options.chunk_tokens,
        prefix_cache=options.prefix_cache,
        draft=NGramDraft() if options.draft == "ngram" else None,
    )


@contextlib.contextmanager
def memory_for(pool: PoolConfig) -> Iterator[None]:
    """Says what to do where the memory does not suffice.

    Raises:
      ValueError: it does not.
    """
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        raise ValueError(
            f"no memory for the model beside {pool.full_tokens:,} full and {pool.swa_tokens:,} SWA "
            f"tokens of KV: give a smaller --hbm, or --dtype bfloat16{device_memory()}"
        ) from None
