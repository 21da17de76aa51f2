"""A prefix cache over a host tier, with KV whose bytes say which token of which prefix they are.

The KV of a token is a hash of the namespace, of all tokens up to it (and the next one, with pairs),
of its place and of the layer: a page of somebody else, or one that was never written, shows.
"""

from __future__ import annotations

import hashlib

import jax
import jax.numpy as jnp
import numpy as np
from compare import ints
from prefix_pair import QUICKLY, World

import swa_jax as swa
from swa_jax.host_cache import HostCache, HostConfig
from swa_jax.host_cache.check import check_index
from swa_jax.kv_rows import read_rows, write_rows
from swa_jax.models import KVPool

_FULL = ("full 0", "full 1", "full 2")
_SWA = ("swa 0",)


@jax.jit
def _write(pools, full_slots, swa_slots, full, of_swa):
    return KVPool(
        write_rows(pools.full, full_slots, full), write_rows(pools.swa, swa_slots, of_swa)
    )


@jax.jit
def _read(pools, full_slots, swa_slots):
    return read_rows(pools.full, full_slots), read_rows(pools.swa, swa_slots)


_translate = jax.jit(swa.translate_full_to_swa, compiler_options=QUICKLY)


def new_pools(config: swa.PoolConfig) -> KVPool:
    """Two groups of full layers and one SWA layer, of several dtypes."""
    full, of_swa = config.full_pages + 1, config.swa_pages + 1
    size = config.page_size
    return KVPool(
        full=(
            jnp.zeros((full, size, 2), jnp.int32),
            jnp.zeros((full, size), jnp.bfloat16),
            jnp.zeros((full, size, 2), jnp.int32),
        ),
        swa=(jnp.zeros((of_swa, size, 3), jnp.uint8),),
    )


def _number(layer: str, ns: int, prefix: list[int]) -> int:
    """0 .. 199, never 0: small enough for each dtype."""
    text = f"{layer} {ns} {len(prefix)} {prefix}".encode()
    return 1 + int.from_bytes(hashlib.blake2b(text, digest_size=4).digest(), "little") % 199


class HostWorld(World):
    """Requests are computed, cached, driven out to the host and brought back."""

    def __init__(self, config, full_tokens, swa_tokens, policy="write_back", **options):
        known = {name: options.pop(name) for name in ("min_hits", "memory") if name in options}
        tier = {name: options.pop(name) for name in ("storage", "fingerprint") if name in options}
        super().__init__(config, **options)
        self.lag = int(options.get("is_bigram", False))
        self.pools = new_pools(config)
        self.host = HostCache(
            HostConfig.beside(config, full_tokens, swa_tokens),
            self.cache,
            self.pools,
            policy,
            **known,
            **tier,
        )

    # ---- content --------------------------------------------------------------------------

    def content(self, layer, ns, tokens, place):
        return _number(layer, ns, tokens[: place + 1 + self.lag])

    def rows(self, names, like, ns, tokens, places):
        """The KV that these tokens should have, padded to the width."""
        out = []
        for name, layer in zip(names, like, strict=True):
            values = [self.content(name, ns, tokens, place) for place in places]
            flat = np.zeros((self.width, *layer.shape[2:]), np.dtype(layer.dtype))
            flat[: len(values)] = np.asarray(values).reshape(-1, *[1] * (flat.ndim - 1))
            out.append(flat)
        return tuple(out)

    def compute(self, ns, tokens, slots, start, end):
        """Writes the KV of some tokens of a request where they are held."""
        places = list(range(start, end))
        full = ints([slots[place] for place in places], self.width)
        self.pools = _write(
            self.pools,
            full,
            _translate(self.state, full),
            self.rows(_FULL, self.pools.full, ns, tokens, places),
            self.rows(_SWA, self.pools.swa, ns, tokens, places),
        )

    def check_match(self, tokens, length=None, *, ns=0):
        """Matches, and compares every byte that a request would read with what it should be."""
        found = self.match(tokens, length, ns=ns)
        full = ints(found.slots, self.width)
        of_swa = _translate(self.state, full)
        got_full, got_swa = jax.device_get(_read(self.pools, full, of_swa))
        places = list(range(found.length))
        wanted = self.rows(_FULL, self.pools.full, ns, tokens, places)
        for got, right in zip(got_full, wanted, strict=True):
            np.testing.assert_array_equal(got[: found.length], right[: found.length])
        start = self.host.config.window_start(found.length // self.page) * self.page
        wanted = self.rows(_SWA, self.pools.swa, ns, tokens, places)
        for got, right in zip(got_swa, wanted, strict=True):
            np.testing.assert_array_equal(got[start : found.length], right[start : found.length])
        return found

    # ---- requests -------------------------------------------------------------------------

    def serve(self, tokens, *, ns=0, dead=()):
        """A whole request at once, on top of what is cached; False where memory is short.

        `dead` tokens lose their SWA side before the request's pages go to the tree.
        """
        length = len(tokens) - 1 + self.lag
        if self.host.policy == "write_through_selective":
            self.host_match(tokens, length, ns=ns)  # counts the use
        found = self.check_match(tokens, length, ns=ns)
        receipt = self.lock(found.node)
        slots = self.try_extend(found.slots, len(tokens))
        if slots is not None:
            self.compute(ns, tokens, slots, found.length, len(tokens))
            self.free_swa([slots[token] for token in dead if token >= found.length])
            self.finish(tokens, slots, ns=ns)
        self.unlock(receipt)
        return slots is not None

    # ---- the tier -------------------------------------------------------------------------

    def drive_out(self, *, full=0, swa_tokens=0):
        self.cache, self.state, gone = self.host.evict(
            self.cache, self.state, self.pools, full_tokens=full, swa_tokens=swa_tokens
        )
        return int(gone.full_tokens), int(gone.swa_tokens)

    def backup(self):
        return self.host.backup(self.cache, self.state, self.pools)

    def host_match(self, tokens, length=None, *, ns=0):
        row, count = self._row(tokens, length)
        return self.host.match(self.cache, self.state, row, count, namespace=ns)

    def restore(self, tokens, length=None, *, ns=0):
        row, count = self._row(tokens, length)
        self.cache, self.state, self.pools, got = self.host.restore(
            self.cache, self.state, self.pools, row, count, namespace=ns
        )
        return jax.device_get(got)

    def verify_all(self, **held):
        check_index(self.host.index)
        return self.verify(**held)
