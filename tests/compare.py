"""Read a device state as plain Python and set it beside the oracle."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from oracle import FAULT_KINDS, Oracle, OracleGrant, Sizes

import swa_jax as swa


def config_of(sizes: Sizes) -> swa.PoolConfig:
    if sizes.pure:
        return swa.PoolConfig.pure_swa(
            sizes.full_tokens, page_size=sizes.page_size, sliding_window=sizes.window
        )
    return swa.PoolConfig(
        sizes.full_tokens,
        sizes.swa_tokens,
        page_size=sizes.page_size,
        sliding_window=sizes.window,
        chunked=sizes.chunked,
    )


def ints(values: Iterable[int] | Iterable[bool], length: int | None = None) -> jax.Array:
    """An int32 array, padded with 0 up to `length`."""
    data = [int(value) for value in values]
    if length is not None:
        assert len(data) <= length, (len(data), length)
        data += [0] * (length - len(data))
    return jnp.asarray(np.asarray(data, np.int32))


def free_queue(pool) -> list[int]:
    """The pages that can be granted, next one first."""
    ring = np.asarray(pool.ring)
    places = (int(pool.head) + np.arange(int(pool.num_free))) % max(len(ring), 1)
    return ring[places].tolist()


def pending_queue(pool) -> list[int]:
    ring = np.asarray(pool.ring)
    first = int(pool.head) + int(pool.num_free)
    return ring[(first + np.arange(int(pool.num_pending))) % max(len(ring), 1)].tolist()


def held_pages(pool) -> set[int]:
    bitmap = np.asarray(pool.free)
    return {page for page in range(1, len(bitmap)) if not bitmap[page]}


def mapping(state) -> dict[int, int]:
    """Full page -> SWA page, of the mapped pages only."""
    by_page = np.asarray(state.full_to_swa)
    return {page: int(to) for page, to in enumerate(by_page.tolist()) if to}


def counts(state) -> tuple[int, int]:
    """`full_available / swa_available` in tokens."""
    return int(swa.full_available_size(state)), int(swa.swa_available_size(state))


def fault_counts(state) -> dict[str, int]:
    return dict(zip(FAULT_KINDS, np.asarray(state.faults).tolist(), strict=True))


def swa_slots(state, slots: Sequence[int]) -> list[int]:
    return np.asarray(swa.translate_full_to_swa(state, ints(slots))).tolist()


def assert_bitwise_equal(left, right, *, but_faults: bool = False) -> None:
    """Same tree, same dtypes, same bits in every leaf."""
    if but_faults:
        left = dataclasses.replace(left, faults=right.faults)
    assert jax.tree.structure(left) == jax.tree.structure(right)
    for (path, a), b in zip(
        jax.tree_util.tree_leaves_with_path(left), jax.tree.leaves(right), strict=True
    ):
        name = jax.tree_util.keystr(path)
        assert a.dtype == b.dtype, f"{name}: {a.dtype} and {b.dtype}"
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b), err_msg=name)


def assert_counts_match(state, oracle: Oracle) -> None:
    """Free of the order of granting: what is left, and which faults were counted."""
    assert counts(state) == (oracle.full_available_size(), oracle.swa_available_size())
    assert int(swa.available_size(state)) == oracle.available_size()
    assert bool(state.group_open) == oracle.group_open
    assert fault_counts(state) == dict(oracle.faults)


def assert_same(state, oracle: Oracle) -> None:
    """Everything, page by page: queues in order, bitmaps, mapping, faults."""
    assert_counts_match(state, oracle)
    assert mapping(state) == oracle.map
    pools = [("swa", state.swa, oracle.swa)]
    if not oracle.sizes.pure:
        pools.append(("full", state.full, oracle.full))
    for name, pool, expected in pools:
        assert free_queue(pool) == list(expected.free), f"{name}: free pages"
        assert pending_queue(pool) == expected.pending, f"{name}: pending pages"
        assert held_pages(pool) == expected.held, f"{name}: held pages"


def assert_invariants(state) -> None:
    broken = [name for name, holds in swa.invariants(state).items() if not bool(holds)]
    assert not broken, broken


def assert_grant(grant, expected: OracleGrant) -> None:
    got = OracleGrant(
        np.asarray(grant.slots).tolist(),
        int(grant.count),
        bool(grant.ok),
        int(grant.full_short),
        int(grant.swa_short),
    )
    assert got == expected
