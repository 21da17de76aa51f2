"""The host tier: what leaves the device's cache is kept in host memory and comes back on a hit.

Control is plain Python between two calls of compiled code; the device does three things: pages are
gathered to be copied out, pages are claimed for what comes back, images are written into them.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from swa_jax.host_cache.claim import Seen, claim, marks_of, see
from swa_jax.host_cache.config import HostConfig
from swa_jax.host_cache.images import scatter
from swa_jax.host_cache.index import HostIndex, Pin, Usable
from swa_jax.host_cache.mirror import TreeMirror, token_keys
from swa_jax.host_cache.prefetch import Prefetch, land, staged_for, start_reads
from swa_jax.host_cache.results import Matched, Prompt, Restored, prompt_of, restored_of
from swa_jax.host_cache.rows import HostRows, Staged
from swa_jax.host_cache.spared import Spared
from swa_jax.host_cache.storage import Storage
from swa_jax.host_cache.storage_worker import StorageWorker
from swa_jax.host_cache.stored import stored_in
from swa_jax.inputs import Ints, as_int32, whole_number
from swa_jax.kv_layers import KnownLayers
from swa_jax.models.decoder.kv_pool import KVPool
from swa_jax.prefix_cache import evict
from swa_jax.prefix_cache.arguments import check_pair
from swa_jax.prefix_cache.evict import Evicted
from swa_jax.prefix_cache.tree import PrefixCache
from swa_jax.state import UNMAPPED, AllocatorState

POLICIES = ("write_through", "write_back", "write_through_selective")
_MOST_PREFETCHES = 64


class HostCache:
    """Host memory under the prefix cache of one device.

    Args:
      config: rows of each kind; `HostConfig.beside` or `plan_host` makes one.
      cache: the device's tree, for its configuration.
      pools: the KV, or its shapes; without layers everything works but there are no bytes.
      policy: "write_through": what `backup` finds new in the tree is copied. "write_back": only
        what `evict` drives out is. "write_through_selective": as write-through, but only what was
        of use `min_hits` times, its computation included.
      min_hits: for "write_through_selective".
      memory: "numpy", "pinned" (JAX's pinned host memory), or "auto": pinned where the backend is
        no CPU and has it.
      storage: below host memory: what is copied to the host goes there too, and `prefetch` brings
        it back; None: there is none.
      fingerprint: names model, weights and layout in the storage, as `kv_fingerprint` makes it.

    Raises:
      ValueError: an unknown policy or memory, a tier for other pages and windows, KV that is not
        the cache's, something that is no storage, or a storage without a fingerprint.
    """

    def __init__(
        self,
        config: HostConfig,
        cache: PrefixCache,
        pools: KVPool,
        policy: str = "write_through",
        *,
        min_hits: int = 2,
        memory: str = "auto",
        storage: Storage | StorageWorker | None = None,
        fingerprint: bytes = b"",
    ) -> None:
        """Nothing is on the host yet."""
        if policy not in POLICIES:
            raise ValueError(f"policy must be one of {', '.join(POLICIES)}, got {policy!r}")
        wanted = HostConfig.beside(cache.config.pool, config.full_tokens, config.swa_tokens)
        if config != wanted:
            raise ValueError(
                f"the tier must fit the device's pages and window: {wanted}, got {config}"
            )
        self.config, self.policy = config, policy
        self._layers = KnownLayers(cache.config.pool, pools)
        self.min_hits = whole_number("min_hits", min_hits, 1)
        self.tree = TreeMirror(cache.config)
        self._lag = cache.config.key_tokens - config.page_size
        self._stored = stored_in(storage, fingerprint, config.page_size, self._lag > 0)
        self.rows = HostRows(config, pools, memory, self._stored)
        self._prefetches: list[Prefetch] = []
        self._spared = Spared()

    @property
    def failed(self) -> int:
        """Copies for which memory was lacking, on the host or the device. It goes on without."""
        return self._spared.count

    @property
    def index(self) -> HostIndex:
        """What host memory has."""
        return self.rows.index

    @property
    def has_storage(self) -> bool:
        """Whether there is a storage below."""
        return self._stored is not None

    # ---- device -> host -------------------------------------------------------------------

    def backup(self, cache: PrefixCache, state: AllocatorState, pools: KVPool) -> int:
        """Starts copying what is new in the tree: full KV, and SWA by one window at each end.

        Args:
          cache: the tree; nothing here is changed, and all of it may be donated right after.
          state: the allocator.
          pools: the KV.

        Returns:
          Pages that are being copied. None of what has been copied before, and under the selective
          policy none that was of too little use.
        """
        self._check(cache, state)
        self._layers.check(pools)
        tree = self.tree
        tree.look(cache, state)
        wanted = tree.in_tree
        if self.policy == "write_through_selective":
            wanted = wanted & (tree.uses >= self.min_hits)
        near = tree.near_end(self.config.kept_pages) & (tree.swa != UNMAPPED)
        full, of_swa = wanted & ~tree.saved_full, wanted & near & ~tree.saved_swa
        return self._copy_out(full, of_swa, pools)

    def evict(
        self,
        cache: PrefixCache,
        state: AllocatorState,
        pools: KVPool,
        *,
        full_tokens: ArrayLike = 0,
        swa_tokens: ArrayLike = 0,
    ) -> tuple[PrefixCache, AllocatorState, Evicted]:
        """Evicts from the device, and copies to the host first what is leaving it.

        What leaves is full KV, and SWA where an end's window needs it, also of pages that stay as
        tombstones. Arguments and results as for `prefix_cache.evict`, with the KV.

        Rules R9 to R11; public report B55.
        """
        self._check(cache, state)
        self._layers.check(pools)
        before = np.asarray(cache.in_tree), np.asarray(state.full_to_swa)
        after, left, evicted = evict(cache, state, full_tokens=full_tokens, swa_tokens=swa_tokens)
        tree = self.tree
        tree.look(cache, state)
        there, swa = np.asarray(after.in_tree), np.asarray(left.full_to_swa)
        gone = before[0] & ~there
        bare = before[0] & (before[1] != UNMAPPED) & (gone | (swa == UNMAPPED))
        bare &= tree.near_end(self.config.kept_pages)
        if self.policy == "write_through_selective":
            used = tree.uses >= self.min_hits
            gone, bare = gone & used, bare & used
        self._copy_out(gone, bare, pools)
        return after, left, evicted

    def _copy_out(self, full: np.ndarray, of_swa: np.ndarray, pools: KVPool) -> int:
        """Copies marked nodes, bool[F+1], a path at a time from the deepest; how many pages."""
        self.poll()
        tree, count = self.tree, 0
        for path in tree.paths(full | of_swa):
            nodes = np.asarray(path.nodes)
            of_full = {at: int(nodes[at]) for at in np.flatnonzero(full[nodes]).tolist()}
            swa = {at: int(tree.swa[nodes[at]]) for at in np.flatnonzero(of_swa[nodes]).tolist()}
            with self._spared:
                count += self.rows.copy_in(path.keys, path.namespace, pools, of_full, swa)
            have_full, have_swa = self.rows.have(path.keys, path.namespace)
            tree.saved_full[nodes[list(have_full)]] = True
            tree.saved_swa[nodes[list(have_swa)]] = True
        return count

    # ---- host -> device -------------------------------------------------------------------

    def match(
        self,
        cache: PrefixCache,
        state: AllocatorState,
        tokens: Ints,
        length: ArrayLike,
        *,
        namespace: ArrayLike = 0,
    ) -> Matched:
        """What device and host have of a prompt. Notes a use of it on the host.

        Args:
          cache: the tree.
          state: the allocator.
          tokens: int32[T] the prompt, padded.
          length: int32[] tokens of it that count, as for `match_prefix`.
          namespace: int32[].
        """
        prompt = self._prompt(cache, state, tokens, length, namespace)
        usable, _ = self._usable(cache, state, prompt)
        self.index.touch(prompt.keys, prompt.space)
        for node in self.tree.find(prompt.keys[: usable.pages], prompt.space):
            self.tree.uses[node] += 1
        size = self.config.page_size
        return Matched(
            usable.pages * size,
            usable.device_pages * size,
            len(usable.full) * size,
            len(usable.swa) * size,
        )

    def restore(
        self,
        cache: PrefixCache,
        state: AllocatorState,
        pools: KVPool,
        tokens: Ints,
        length: ArrayLike,
        *,
        namespace: ArrayLike = 0,
    ) -> tuple[PrefixCache, AllocatorState, KVPool, Restored]:
        """Brings back what makes the longest match of a prompt usable on the device.

        Args:
          cache: taken over, as state and pools: go on with what comes back.
          state: the allocator.
          pools: the KV.
          tokens: int32[T] the prompt, padded; each T compiles once.
          length: int32[] tokens of it that count, as for `match_prefix`.
          namespace: int32[].

        Returns:
          The cache, the allocator, the KV and `Restored`. Lock `Restored.node` before anything
          else may evict. Refused, and the device as it was, where the pages that are free or can be
          evicted are too few, or where the tree is no longer as it was looked at: try again.

        Rules R3, R8, R9 and R11; public reports B07, B55.
        """
        self._layers.check(pools)
        prompt = self._prompt(cache, state, tokens, length, namespace)
        usable, seen = self._usable(cache, state, prompt)
        after = self._bring_back(cache, state, pools, prompt, usable, seen)
        for prefetch in [p for p in self._prefetches if p.is_of(prompt.keys, prompt.space)]:
            self.release(prefetch)
        return after

    def prefetch(
        self,
        cache: PrefixCache,
        state: AllocatorState,
        tokens: Ints,
        length: ArrayLike,
        *,
        namespace: ArrayLike = 0,
    ) -> Prefetch:
        """Starts fetching a prompt that will be restored soon: from storage, and to the device.

        Args:
          cache: the tree; nothing changes in it.
          state: the allocator.
          tokens: int32[T] the prompt, padded.
          length: int32[] tokens of it that count, as for `match_prefix`.
          namespace: int32[].

        Returns:
          What `release` ends. Until then, or until the prompt is restored, what the host has of it
          does not leave. Only so many are kept: the oldest is released for one more.
        """
        prompt = self._prompt(cache, state, tokens, length, namespace)
        usable, seen = self._usable(cache, state, prompt)
        pin = self.index.pin(prompt.keys, prompt.space)
        prefetch = Prefetch(prompt.keys, prompt.space, pin)
        live, places = seen.live.tolist(), seen.live.shape[0]
        try:
            start_reads(self.config, self.rows, self._stored, prefetch, int(seen.count), live)
            if not prefetch.full and not prefetch.swa and usable.pages > usable.device_pages:
                prefetch.staged = self._stage(prompt, usable, places)
        except BaseException:
            self.index.unpin(pin)
            raise
        self._prefetches.append(prefetch)
        if len(self._prefetches) > _MOST_PREFETCHES:
            self.release(self._prefetches[0])
        return prefetch

    def release(self, prefetch: Prefetch) -> None:
        """Ends a prefetch; doing so again changes nothing."""
        if prefetch in self._prefetches:
            self._prefetches.remove(prefetch)
            self.index.unpin(prefetch.pin)

    def _bring_back(
        self,
        cache: PrefixCache,
        state: AllocatorState,
        pools: KVPool,
        prompt: Prompt,
        usable: Usable,
        seen: Seen,
    ) -> tuple[PrefixCache, AllocatorState, KVPool, Restored]:
        size, zero = self.config.page_size, jnp.int32(0)
        before = jnp.int32(usable.device_pages * size)
        # The images first: once pages are claimed, nothing may fail before they are written.
        staged = None
        places = seen.live.shape[0]
        if usable.full or usable.swa:
            staged = staged_for(self._prefetches, prompt.keys, prompt.space, usable)
            staged = staged or self._stage(prompt, usable, places)
        if staged is None:
            done = Restored(jnp.asarray(True), before, zero, zero, zero, zero, zero)
            return cache, state, pools, done
        cache, state, claimed = claim(
            cache,
            state,
            prompt.tokens,
            prompt.length,
            prompt.namespace,
            jnp.int32(usable.pages),
            marks_of(usable.full, places),
            marks_of(usable.swa, places),
        )
        layers_full, layers_swa = pools.full, pools.swa
        for at, images in staged.full:
            layers_full = scatter(layers_full, claimed.full, at, images)
        for at, images in staged.swa:
            layers_swa = scatter(layers_swa, claimed.swa, at, images)
        self.index.touch(prompt.keys[: usable.pages], prompt.space, hit=False)
        restored = restored_of(claimed, jnp.int32(usable.pages * size), before, size)
        return cache, state, KVPool(layers_full, layers_swa), restored

    def _stage(self, prompt: Prompt, usable: Usable, places: int) -> Staged | None:
        """Images on their way to the device; None where there is no memory for them."""
        with self._spared:
            return self.rows.stage(prompt.keys, prompt.space, usable, places)
        return None

    def _check(self, cache: PrefixCache, state: AllocatorState) -> None:
        check_pair(cache, state)
        if cache.config != self.tree.config:
            raise ValueError(
                f"the tier was made for a tree of {self.tree.config}, got one of {cache.config}"
            )

    def _prompt(
        self,
        cache: PrefixCache,
        state: AllocatorState,
        tokens: Ints,
        length: ArrayLike,
        namespace: ArrayLike,
    ) -> Prompt:
        self._check(cache, state)
        return prompt_of(cache.config, tokens, length, namespace)

    def _usable(
        self, cache: PrefixCache, state: AllocatorState, prompt: Prompt
    ) -> tuple[Usable, Seen]:
        self.poll()
        seen = jax.device_get(see(cache, state, prompt.tokens, prompt.length, prompt.namespace))
        here = {"device_pages": int(seen.count), "device_live": seen.live.tolist()}
        return self.index.usable(prompt.keys, prompt.space, **here), seen

    # ---- pins and fences ------------------------------------------------------------------

    def pin(self, tokens: Ints, *, namespace: int = 0) -> Pin:
        """Keeps what the host has of a text until `unpin`.

        Args:
          tokens: int32[T] the text, all of which counts.
          namespace: of the text.
        """
        keys = token_keys(tokens, self.config.page_size, is_bigram=self._lag > 0)
        return self.index.pin(keys, int(as_int32("namespace", namespace, 0)))

    def unpin(self, pin: Pin) -> None:
        """Ends a pin; doing so again changes nothing."""
        self.index.unpin(pin)

    def poll(self) -> None:
        """Takes over what has been copied or read by now. Waits for nothing."""
        with self._spared:
            self.rows.poll()
        for prefetch in self._prefetches:
            if (prefetch.full or prefetch.swa) and prefetch.done():
                with self._spared:
                    land(self.rows, prefetch)

    def wait(self) -> None:
        """Waits for every copy and every read under way."""
        with self._spared:
            self.rows.wait()
        for prefetch in self._prefetches:
            prefetch.wait()
        self.poll()

    def close(self) -> None:
        """Finishes every copy, also those into storage."""
        self.wait()
        for prefetch in list(self._prefetches):
            self.release(prefetch)
        if self._stored is not None:
            self._stored.close()
