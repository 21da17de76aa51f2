"""What must hold at the end of any serving."""

import jax
import numpy as np

import swa_jax as swa
from swa_jax import prefix_cache
from swa_jax.counts import held_pages
from swa_jax.serving import FINISH_REASONS
from swa_jax.state import UNMAPPED


def assert_only_the_cache_holds(allocator, cache):
    """Laws hold, nothing was misused, and what is held is the cache's."""
    swa.check(allocator)
    assert not any(swa.faults(allocator).values())
    full, of_swa = (int(pages) for pages in jax.device_get(held_pages(allocator)))
    if cache is None:
        assert (full, of_swa) == (0, 0)
        return
    prefix_cache.check(cache, allocator)
    in_tree = np.asarray(cache.in_tree)
    live = in_tree & (np.asarray(allocator.full_to_swa) != UNMAPPED)
    assert (full, of_swa) == (in_tree.sum(), live.sum())
    assert not np.asarray(cache.full_locks)[in_tree].any()


def generated(served):
    """Lists of tokens, one a request."""
    tokens, lengths = np.asarray(served.tokens), np.asarray(served.lengths)
    return [row[:length].tolist() for row, length in zip(tokens, lengths, strict=True)]


def reasons(served):
    """Finish reasons in words."""
    return [FINISH_REASONS[reason] for reason in np.asarray(served.finish_reasons)]


def figures(served):
    """The stats as ints by name."""
    return {name: int(value) for name, value in vars(served.stats).items()}
