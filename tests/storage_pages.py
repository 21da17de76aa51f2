"""Pages of KV for the storage tests, whose content follows from their number."""

import jax.numpy as jnp
import numpy as np

from swa_jax.host_cache.storage import page_keys

FINGERPRINT = b"model a"
PAGE = 4
KEYS = page_keys(FINGERPRINT, np.arange(40 * PAGE), PAGE, namespace=3)


def page_of(number, *, with_swa=True):
    """The arrays of one page: dtypes that NumPy has, and others."""
    rng = np.random.default_rng(number)
    arrays = {
        "full.0": rng.normal(size=(PAGE, 2, 8)).astype(jnp.bfloat16),
        "full.1": rng.normal(size=(PAGE, 2, 8)).astype(np.float32),
    }
    if with_swa:
        arrays["swa.0"] = rng.normal(size=(PAGE, 2, 8)).astype(jnp.float8_e4m3fn)
    return arrays


def same(got, wanted):
    """Equal bit for bit, dtypes and shapes included."""
    return got.keys() == wanted.keys() and all(
        got[name].dtype == wanted[name].dtype
        and got[name].shape == wanted[name].shape
        and got[name].tobytes() == wanted[name].tobytes()
        for name in wanted
    )
