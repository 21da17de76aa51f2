"""The state: an immutable pytree, the same for every transition.

Legend: F full pages, S SWA pages, P page_size (tokens), B blocks of a unified budget. Page 0 is
padding in both pools.
"""

import functools
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from swa_jax.config import PoolConfig
from swa_jax.faults import FAULT_KINDS, FOREIGN, zero_faults
from swa_jax.state_text import as_html, as_text, pool_as_text

PAD_PAGE = 0  # never granted, never freed; its slots 0 .. P-1 fill unused places
PAD_SLOT = 0  # what unused places of an array of slots hold
UNMAPPED = 0  # value of `full_to_swa` where a full page has no SWA page
NOBODY = 2**31 - 1  # value of `scratch` at rest


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["holders", "ring", "head", "num_free", "num_pending"],
    meta_fields=[],
)
@dataclass(frozen=True)
class PagePool:
    """One pool of N pages. `ring` is the free list and the pending-free buffer in one.

    Counted from `head` and round the end: the first `num_free` places can be granted, the next
    `num_pending` are queued until `free_group_end`, the rest is unused.
    """

    holders: jax.Array  # int32[N+1] by page id: how many hold it; 0: released (free or pending)
    ring: jax.Array  # int32[N] page ids (one unused place where the pool has its holders alone)
    head: jax.Array  # int32[] place of the next page to grant
    num_free: jax.Array  # int32[] pages
    num_pending: jax.Array  # int32[] pages

    @property
    def free(self) -> jax.Array:
        """bool[N+1] by page id: released, that is free or pending. A pass over the pool."""
        return self.holders == 0

    def __repr__(self) -> str:
        return pool_as_text(self)


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["full", "swa", "heir", "foreign"],
    meta_fields=[],
)
@dataclass(frozen=True)
class OwnerTags:
    """Whose each page is, by the rules of `swa_jax.owners`. Of a released page: whose it was."""

    full: jax.Array  # int32[F+1] owner by page id, while several hold it
    swa: jax.Array  # int32[S+1] owner by page id, or by ring
    heir: jax.Array  # int32[F+1] owner of a full page that one alone holds
    foreign: jax.Array  # int32[] what was refused since it is somebody else's


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=[
        "full",
        "swa",
        "full_to_swa",
        "group_open",
        "faults",
        "scratch",
        "block_is_full",
        "owner_tags",
    ],
    meta_fields=["config"],
)
@dataclass(frozen=True)
class AllocatorState:
    """Both pools and the mapping between them. Make one with `init`, never by hand.

    A pure SWA state has one ring, that of `swa`; its `full` only remembers which pages their
    holders have not given back yet, and a live page maps to itself.

    With one budget for both pools, each block of it is the one pool's or the other's. To the other
    its pages are *absent*: held by nobody and not in the ring, so that they are never
    granted, and a slot that names one is as stale as any.

    With request rings (`PoolConfig.request_ring`) the S pages of `swa` are rings and nothing is
    mapped.
    """

    full: PagePool
    swa: PagePool
    full_to_swa: jax.Array  # int32[F+1] SWA page of each full page, 0 = unmapped
    group_open: jax.Array  # bool[]
    faults: jax.Array  # int32[7] in the order of FAULT_KINDS
    scratch: jax.Array  # int32[F+1] NOBODY between transitions
    block_is_full: jax.Array | None  # bool[B] whose a block is; None without a unified budget
    config: PoolConfig  # static
    owner_tags: OwnerTags | None = None  # None where the configuration has none

    def __repr__(self) -> str:
        return as_text(self)

    def _repr_html_(self) -> str | None:
        return as_html(self)


def _new_pool(pages: int, *, with_ring: bool, first: int = 0, count: int | None = None) -> PagePool:
    """All of `pages` pages are free, or `count` of them from the one after `first` on."""
    holders = jnp.zeros(pages + 1, jnp.int32).at[PAD_PAGE].set(1, mode="drop")
    ring = jnp.arange(1, pages + 1, dtype=jnp.int32) if with_ring else jnp.zeros(1, jnp.int32)
    count = (pages if count is None else count) if with_ring else 0
    return PagePool(holders, ring, jnp.int32(first), jnp.int32(count), jnp.int32(0))


def init(config: PoolConfig) -> AllocatorState:
    """A state in which every page is free.

    Args:
      config: the sizes of the pools.

    Returns:
      `AllocatorState`, 16 bytes for a full page and 8 for an SWA page (`state_bytes`), and one for
      each block of a unified budget, which starts with about as many pages of either kind; with
      owner tags 8 more for a full page and 4 for an SWA page.
    """
    return _init(config)


def _init(config: PoolConfig) -> AllocatorState:
    pages, layout, block_is_full = config.full_pages, config.unified_layout, None
    if layout is None:
        full = _new_pool(pages, with_ring=not config.pure_swa_pool)
        of_swa = _new_pool(config.swa_units, with_ring=True)
    else:
        blocks = layout.first_full_blocks
        full = _new_pool(pages, with_ring=True, count=blocks * layout.full_pages)
        first = blocks * layout.swa_pages
        count = config.swa_pages - first
        of_swa = _new_pool(config.swa_pages, with_ring=True, first=first, count=count)
        block_is_full = jnp.arange(layout.blocks, dtype=jnp.int32) < blocks
    return AllocatorState(
        full=full,
        swa=of_swa,
        full_to_swa=jnp.full(pages + 1, UNMAPPED, jnp.int32),
        group_open=jnp.zeros((), bool),
        faults=zero_faults(),
        scratch=jnp.full(pages + 1, NOBODY, jnp.int32),
        block_is_full=block_is_full,
        config=config,
        owner_tags=_no_owners(full, of_swa) if config.owner_tags else None,
    )


def _no_owners(full: PagePool, swa: PagePool) -> OwnerTags:
    sizes = (full.holders.shape, swa.holders.shape, full.holders.shape, ())
    return OwnerTags(*(jnp.zeros(shape, jnp.int32) for shape in sizes))


def clear(state: AllocatorState) -> AllocatorState:
    """Gives everything back at once: the state is as new, counters included.

    Args:
      state: any state; nothing of it but the configuration is read.

    Returns:
      The state that `init` gives for the same configuration, bit for bit.
    """
    must_be_state(state)
    return _init(state.config)


def must_be_state(state: object, name: str = "the first argument") -> None:
    """Refuses anything else where a state belongs: JAX's own words for it help nobody.

    Raises:
      ValueError: it is none.
    """
    if not isinstance(state, AllocatorState):
        raise ValueError(
            f"{name} must be an AllocatorState, as swa_jax.init gives it, got "
            f"{type(state).__name__}"
        )


def snapshot(state: AllocatorState) -> AllocatorState:
    """A copy that outlives donation of the original.

    Without donation a plain reference is a snapshot already: states never change. A transition
    that is compiled with `donate_argnums` takes the buffers of the state it is given, so keep
    `snapshot(state)` where you want to come back, or to give `free_swa` as `owner`.
    """
    must_be_state(state)
    return jax.tree.map(jnp.copy, state)


def full_available_size(state: AllocatorState) -> jax.Array:
    """int32[] tokens that the full pool can still grant (pages queued by a group excluded)."""
    must_be_state(state)
    pool = state.swa if state.config.pure_swa_pool else state.full
    return pool.num_free * jnp.int32(state.config.page_size)


def swa_available_size(state: AllocatorState) -> jax.Array:
    """int32[] tokens that the SWA pool can still grant (pages queued by a group excluded).

    With request rings: the places of all free rings.
    """
    must_be_state(state)
    return state.swa.num_free * jnp.int32(state.config.swa_unit_tokens)


def available_size(state: AllocatorState) -> jax.Array:
    """int32[] tokens that both pools can still grant: the smaller of the two.

    With request rings: what the full pool can grant, since a ring is as long as it is however many
    tokens pass through it.
    """
    must_be_state(state)
    if state.config.has_rings:
        return full_available_size(state)
    return jnp.minimum(full_available_size(state), swa_available_size(state))


def faults(state: AllocatorState) -> dict[str, int]:
    """Misuse counted so far, by kind, over all of a batch of states. Waits for the device.

    The kinds are those of `FAULT_KINDS`, and "foreign" where pages carry owner tags.
    """
    must_be_state(state)
    values = jax.device_get(state.faults).reshape(-1, len(FAULT_KINDS)).sum(axis=0)
    counted = {kind: int(value) for kind, value in zip(FAULT_KINDS, values, strict=True)}
    if state.owner_tags is not None:
        counted[FOREIGN] = int(jax.device_get(state.owner_tags.foreign).sum())
    return counted


def state_bytes(config: PoolConfig) -> int:
    """Bytes that the arrays of a state take on the device."""
    leaves = jax.tree.leaves(jax.eval_shape(lambda: _init(config)))
    return sum(leaf.size * leaf.dtype.itemsize for leaf in leaves)
