"""A prefix cache and its allocator behind plain Python calls: lists in, numbers out.

Arrays are padded to one length and every operation is compiled once for each configuration.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from compare import ints

import swa_jax as swa
from swa_jax import prefix_cache as pc

WIDTH = 32
# Most of the time goes into compiling; integers come out the same, whatever the effort.
QUICKLY = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}


class Sizes(NamedTuple):
    """In tokens, as the cache reports them."""

    full_evictable: int
    swa_evictable: int
    full_protected: int
    swa_protected: int


class Found(NamedTuple):
    length: int
    slots: list[int]  # of these tokens
    node: int


class Taken(NamedTuple):
    cached: int  # tokens that were there before
    length: int  # tokens that are there now
    slots: list[int]  # of all the request's tokens
    node: int


class Probe(NamedTuple):
    laws: dict[str, Any]
    tree_laws: dict[str, Any]
    sizes: Sizes
    left: tuple[int, int]
    faults: dict[str, int]


def _probe(cache, state):
    traced: Any = Sizes  # scalars of the device here, ints once they are fetched
    sizes = traced(
        pc.full_evictable_size(cache),
        pc.swa_evictable_size(cache, state),
        pc.full_protected_size(cache),
        pc.swa_protected_size(cache, state),
    )
    left = (swa.full_available_size(state), swa.swa_available_size(state))
    return swa.invariants(state), pc.invariants(cache, state), sizes, left, state.faults


_STATIC = {"alloc": ("capacity",), "alloc_extend": ("capacity",)}


@functools.cache
def compiled(name: str) -> Any:
    """A public operation of the cache or the allocator, jitted once for the whole run."""
    function = _probe if name == "probe" else getattr(pc, name, None) or getattr(swa, name)
    static = _STATIC.get(name, ())
    return jax.jit(function, static_argnames=static, compiler_options=QUICKLY)


class World:
    """Side effects for tests: each call replaces `cache` and `state`."""

    def __init__(self, config: swa.PoolConfig, *, width: int = WIDTH, **options: Any) -> None:
        self.config = config
        self.page = config.page_size
        self.width = width
        self.state = swa.init(config)
        self.cache = pc.init(config, **options)

    def copy(self) -> World:
        twin = World.__new__(World)
        twin.__dict__.update(self.__dict__)
        return twin

    # ---- the allocator ------------------------------------------------------------------

    def try_extend(self, slots: Sequence[int], length: int) -> list[int] | None:
        """The request's slots after growing to `length` tokens, None if refused."""
        last = slots[-1] if slots else -1
        self.state, grant = compiled("alloc_extend")(
            self.state, ints([len(slots)]), ints([length]), ints([last]), capacity=self.width
        )
        grant = jax.device_get(grant)
        return [*slots, *grant.slots.tolist()[: int(grant.count)]] if grant.ok else None

    def extend(self, slots: Sequence[int], length: int) -> list[int]:
        grown = self.try_extend(slots, length)
        assert grown is not None
        return grown

    def free(self, slots: Sequence[int]) -> None:
        self.state = compiled("free")(self.state, ints(slots, self.width))

    def free_swa(self, slots: Sequence[int]) -> None:
        self.state = compiled("free_swa")(self.state, ints(slots, self.width))

    def leave_window(
        self, slots: Sequence[int], done: int, n: int | None = None, insert: int | None = None
    ) -> int:
        """Frees the SWA pages from `done` on that have left the window; up to where."""
        row = ints(slots, self.width)[None, :]
        kept = None if insert is None else ints([insert])
        self.state, new = compiled("free_out_of_window")(
            self.state, row, ints([len(slots) if n is None else n]), ints([done]), insert_lens=kept
        )
        return int(new[0])

    def begin_group(self) -> None:
        self.state = compiled("free_group_begin")(self.state)

    def end_group(self) -> None:
        self.state = compiled("free_group_end")(self.state)

    # ---- the cache ----------------------------------------------------------------------

    def _row(self, tokens: Sequence[int], length: int | None) -> tuple[jax.Array, jax.Array]:
        return ints(tokens, self.width), jnp.int32(len(tokens) if length is None else length)

    def match(self, tokens: Sequence[int], length: int | None = None, *, ns: int = 0) -> Found:
        row, count = self._row(tokens, length)
        self.cache, got = compiled("match_prefix")(
            self.cache, self.state, row, count, namespace=jnp.int32(ns)
        )
        got = jax.device_get(got)
        slots = got.slots.tolist()
        assert not any(slots[int(got.length) :])
        return Found(int(got.length), slots[: int(got.length)], int(got.node))

    def insert(
        self,
        tokens: Sequence[int],
        slots: Sequence[int],
        length: int | None = None,
        *,
        ns: int = 0,
        priority: int = 0,
    ) -> Taken:
        row, count = self._row(tokens, length)
        self.cache, self.state, got = compiled("insert")(
            self.cache,
            self.state,
            row,
            count,
            ints(slots, self.width),
            namespace=jnp.int32(ns),
            priority=jnp.int32(priority),
        )
        got = jax.device_get(got)
        now = got.slots.tolist()[: len(slots)]
        return Taken(int(got.length_already_cached), int(got.length), now, int(got.node))

    def finish(
        self,
        tokens: Sequence[int],
        slots: Sequence[int],
        length: int | None = None,
        *,
        ns: int = 0,
        priority: int = 0,
    ) -> Taken:
        """Inserts, and frees what the tree did not take."""
        taken = self.insert(tokens, slots, length, ns=ns, priority=priority)
        self.free(taken.slots[taken.length :])
        return taken

    def put(self, tokens: Sequence[int], *, dead: Sequence[int] = (), ns: int = 0) -> Taken:
        """A whole request at once: extend, lose the SWA side of the `dead` tokens, finish."""
        slots = self.extend([], len(tokens))
        self.free_swa([slots[token] for token in dead])
        return self.finish(tokens, slots, ns=ns)

    def lock(self, node: int) -> pc.Receipt:
        self.cache, receipt = compiled("lock")(self.cache, self.state, jnp.int32(node))
        return receipt

    def unlock(self, receipt: pc.Receipt) -> None:
        self.cache = compiled("unlock")(self.cache, receipt)

    def release_swa_lock(self, receipt: pc.Receipt) -> pc.Receipt:
        return self.release_below(receipt, 2**31 - 1)

    def release_below(self, receipt: pc.Receipt, tokens: int) -> pc.Receipt:
        self.cache, rest = compiled("release_swa_lock")(self.cache, receipt, jnp.int32(tokens))
        return rest

    def evict(self, *, full: int = 0, swa_tokens: int = 0) -> tuple[int, int]:
        self.cache, self.state, got = compiled("evict")(
            self.cache, self.state, full_tokens=jnp.int32(full), swa_tokens=jnp.int32(swa_tokens)
        )
        return int(got.full_tokens), int(got.swa_tokens)

    # ---- looking ------------------------------------------------------------------------

    def probe(self) -> Probe:
        laws, tree_laws, sizes, left, faults = jax.device_get(
            compiled("probe")(self.cache, self.state)
        )
        named = dict(zip(swa.faults(self.state), faults.tolist(), strict=True))
        return Probe(
            laws, tree_laws, Sizes(*(int(s) for s in sizes)), (int(left[0]), int(left[1])), named
        )

    @property
    def left(self) -> tuple[int, int]:
        """`full_available / swa_available` in tokens."""
        return int(swa.full_available_size(self.state)), int(swa.swa_available_size(self.state))

    @property
    def sizes(self) -> Sizes:
        return self.probe().sizes

    def live(self, slots: Sequence[int]) -> list[bool]:
        by_page = np.asarray(self.state.full_to_swa)
        return [bool(by_page[slot // self.page]) for slot in slots]

    def locks(self, slots: Sequence[int]) -> list[tuple[int, int]]:
        """(full, SWA) locks of the page of each slot."""
        full, of_swa = np.asarray(self.cache.full_locks), np.asarray(self.cache.swa_locks)
        return [(int(full[s // self.page]), int(of_swa[s // self.page])) for s in slots]

    def nodes(self) -> dict[tuple[int, tuple[tuple[int, ...], ...]], int]:
        """(namespace, page keys from the root) -> page, read off the arrays."""
        host = jax.device_get(self.cache)
        found: dict[tuple[int, tuple[tuple[int, ...], ...]], int] = {}
        for page in np.flatnonzero(host.in_tree).tolist():
            keys, at = [], page
            while at:
                assert len(keys) < len(host.in_tree), "a loop of parents"
                keys.append(tuple(host.tokens[at].tolist()))
                at = int(host.parent[at])
            name = (int(host.namespace[page]), tuple(reversed(keys)))
            assert name not in found, f"cached twice: {name}"
            found[name] = page
        return found

    def tombstones(self) -> set[tuple[int, tuple[tuple[int, ...], ...]]]:
        by_page = np.asarray(self.state.full_to_swa)
        return {name for name, page in self.nodes().items() if not by_page[page]}

    # ---- the laws -----------------------------------------------------------------------

    def verify(self, *, held: int = 0, held_live: int = 0, pending: int = 0) -> Probe:
        """Every law, no fault, and rule R11 with what requests hold outside the tree."""
        probe = self.probe()
        broken = [name for name, holds in {**probe.laws, **probe.tree_laws}.items() if not holds]
        assert not broken, broken
        assert not any(probe.faults.values()), probe.faults
        sizes, left = probe.sizes, probe.left
        full = left[0] + sizes.full_evictable + sizes.full_protected + held + pending
        of_swa = left[1] + sizes.swa_evictable + sizes.swa_protected + held_live + pending
        assert (full, of_swa) == (self.config.full_tokens, self.config.swa_tokens), probe
        return probe


def damaged(world: World, pages: dict[int, int]) -> None:
    """Mapping entries that no call would leave behind, written over what is there."""
    by_page = world.state.full_to_swa
    for page, to in pages.items():
        by_page = by_page.at[page].set(to)
    world.state = dataclasses.replace(world.state, full_to_swa=by_page)
