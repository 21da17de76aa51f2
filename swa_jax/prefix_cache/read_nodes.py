"""Reading some nodes of a tree on the host: only these cross from the device."""

import jax
import numpy as np

from swa_jax.paging import look_up
from swa_jax.prefix_cache.tree import PrefixCache

ABSENT = -1  # stands for the birth of a node that is not there: no clock is negative
_LEAST_READ = 64  # nodes; sizes of reads are powers of two from here, so that few are compiled


@jax.jit
def _read(cache: PrefixCache, nodes: jax.Array) -> tuple[jax.Array, ...]:
    fields = (cache.parent, cache.depth, cache.namespace)
    tokens = cache.tokens.at[nodes].get(mode="fill", fill_value=0)
    return *(look_up(values, nodes, 0) for values in fields), tokens


def read_nodes(cache: PrefixCache, nodes: np.ndarray) -> tuple[np.ndarray, ...]:
    """int32[K] parent, depth and namespace, and int32[K, key_tokens] tokens of int[K] nodes.

    Waits for the device.
    """
    room = max(_LEAST_READ, 1 << (nodes.size - 1).bit_length())
    padded = np.zeros(room, np.int32)
    padded[: nodes.size] = nodes
    return tuple(np.asarray(part)[: nodes.size] for part in jax.device_get(_read(cache, padded)))
