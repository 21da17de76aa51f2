"""Numbers for programs: the same on every machine, with every NumPy and every JAX.

NumPy keeps the raw stream of a bit generator the same over versions, and promises nothing of the
kind for `Generator.integers` and its like. So words are raw, and cut to size here.
"""

import numpy as np


def words(seed: int, *shape: int) -> np.ndarray:
    """int32[shape] numbers from 0 to 2^31 - 1."""
    raw = np.random.PCG64(seed).random_raw(int(np.prod(shape)))
    return (raw >> np.uint64(33)).astype(np.int32).reshape(shape)


def below(top: int, seed: int, *shape: int) -> np.ndarray:
    """int32[shape] numbers from 0 to top - 1."""
    return words(seed, *shape) % np.int32(top)
