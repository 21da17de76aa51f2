"""What a state holds, in figures on the host. `swa_jax.state_text` puts them into words.

The arrays cross from the device once, together, and are counted by NumPy. A state that has no
values to show (traced, donated, spread over processes) says so and is not waited for.
"""

from dataclasses import dataclass
from typing import Any, TypeVar

import jax
import numpy as np
from jax.core import Tracer

from swa_jax.config import PoolConfig
from swa_jax.faults import FAULT_KINDS, FOREIGN

T = TypeVar("T")
_PADDING = 1  # pages of `holders` that are no pages


class UnreadableError(ValueError):
    """A state without values to show; the message says why."""


@dataclass(frozen=True)
class PoolCounts:
    """Pages (or rings) of one pool: int64 of the batch's shape each."""

    name: str  # "full" or "SWA"
    unit: str  # "page" or "ring"
    unit_tokens: int
    size: np.ndarray  # the pool's own
    held: np.ndarray
    pending: np.ndarray
    free: np.ndarray
    shared: np.ndarray  # of the held ones, those with several holders
    absent: np.ndarray  # in blocks of the other pool

    @property
    def lost(self) -> np.ndarray:
        """Pages that are neither held nor in the ring: 0 in a state that keeps the laws."""
        return self.size - self.held - self.pending - self.free


@dataclass(frozen=True)
class StateSummary:
    """A state, or a batch of them, in figures on the host."""

    config: PoolConfig
    batch: tuple[int, ...]  # leading axes; () for one state
    pools: tuple[PoolCounts, ...]  # full and SWA; a pure SWA state has one
    mapped: np.ndarray | None  # full pages that have an SWA side; None where none ever has
    left: np.ndarray | None  # pure SWA: pages behind a window that their holders still name
    group_open: np.ndarray  # bool
    faults: np.ndarray  # int64[..., K] in the order of `fault_kinds`

    @property
    def fault_kinds(self) -> tuple[str, ...]:
        """The kinds of misuse that are counted."""
        return (*FAULT_KINDS, FOREIGN) if self.config.owner_tags else FAULT_KINDS

    def fault_counts(self) -> dict[str, int]:
        """Misuse by kind, over the batch, without kinds that did not occur."""
        totals = self.faults.reshape(-1, len(self.fault_kinds)).sum(axis=0)
        return {kind: int(n) for kind, n in zip(self.fault_kinds, totals, strict=True) if n}


def summarize(state: Any) -> StateSummary:  # noqa: ANN401 - an AllocatorState, which imports this
    """Counts what a state holds. Waits for the device.

    Args:
      state: an `AllocatorState`, also with leading axes.

    Raises:
      UnreadableError: it has no values here, or they are not what its configuration makes.
    """
    arrays = _read(state)
    config: PoolConfig = state.config
    batch = arrays["swa_free"].shape
    if not _fits(config, arrays, batch):
        raise UnreadableError("its arrays are not those of its configuration: see swa.check")
    pools = _pools(config, arrays)
    mapping, held = arrays["full_to_swa"], arrays["full_holders"] > 0
    left = None
    if config.pure_swa_pool:
        left = _count(held[..., 1:] & (arrays["swa_holders"][..., 1:] == 0))
    return StateSummary(
        config=config,
        batch=batch,
        pools=pools,
        mapped=None if config.has_rings or config.pure_swa_pool else _count(mapping != 0),
        left=left,
        group_open=arrays["group_open"].astype(bool),
        faults=_faults(arrays),
    )


def _read(state: Any) -> dict[str, np.ndarray]:  # noqa: ANN401
    arrays = {
        "full_holders": state.full.holders,
        "full_free": state.full.num_free,
        "full_pending": state.full.num_pending,
        "swa_holders": state.swa.holders,
        "swa_free": state.swa.num_free,
        "swa_pending": state.swa.num_pending,
        "full_to_swa": state.full_to_swa,
        "group_open": state.group_open,
        "faults": state.faults,
    }
    if state.block_is_full is not None:
        arrays["block_is_full"] = state.block_is_full
    if state.owner_tags is not None:
        arrays["foreign"] = state.owner_tags.foreign
    return on_host(arrays)


def on_host(tree: T) -> T:
    """All arrays of a tree on the host, in one transfer.

    Raises:
      UnreadableError: one of them has no values here.
    """
    for leaf in jax.tree.leaves(tree):
        why = _why_unreadable(leaf)
        if why:
            raise UnreadableError(why)
    return jax.tree.map(np.asarray, jax.device_get(tree))


def _why_unreadable(array: object) -> str:
    if isinstance(array, Tracer):
        return "traced: its values are there when the program runs"
    if isinstance(array, np.ndarray | np.generic):
        return ""
    if not isinstance(array, jax.Array):
        return f"no values: it is made of {type(array).__name__}, not of arrays"
    if array.is_deleted():
        return "its arrays are gone: they were donated to a later call, or deleted"
    if not (array.is_fully_addressable or array.is_fully_replicated):
        return "spread over several processes, so no one of them can read it"
    return ""


def _faults(arrays: dict[str, np.ndarray]) -> np.ndarray:
    """int64[..., K] counts of misuse, those of foreign pages last."""
    counts = [arrays["faults"]]
    if "foreign" in arrays:
        counts.append(arrays["foreign"][..., None])
    return np.concatenate(counts, axis=-1).astype(np.int64)


def _fits(config: PoolConfig, arrays: dict[str, np.ndarray], batch: tuple[int, ...]) -> bool:
    wanted = {
        "full_holders": (config.full_pages + _PADDING,),
        "full_to_swa": (config.full_pages + _PADDING,),
        "swa_holders": (config.swa_units + _PADDING,),
        "faults": (len(FAULT_KINDS),),
    }
    layout = config.unified_layout
    if ("block_is_full" in arrays) != (layout is not None):
        return False
    if ("foreign" in arrays) != config.owner_tags:
        return False
    if layout is not None:
        wanted["block_is_full"] = (layout.blocks,)
    return all(array.shape == batch + wanted.get(name, ()) for name, array in arrays.items())


def _pools(config: PoolConfig, arrays: dict[str, np.ndarray]) -> tuple[PoolCounts, ...]:
    layout, is_full = config.unified_layout, arrays.get("block_is_full")
    page, unit = config.page_size, "ring" if config.has_rings else "page"

    def own(kind: str, ids: int, blocks: np.ndarray | None, of_block: int) -> PoolCounts:
        holders = arrays[f"{kind}_holders"][..., _PADDING:]
        size = np.full(holders.shape[:-1], ids, np.int64)
        absent = np.zeros_like(size)
        if blocks is not None:
            absent = size - _count(blocks) * of_block
        is_swa = kind == "swa"
        return PoolCounts(
            name="SWA" if is_swa else "full",
            unit=unit if is_swa else "page",
            unit_tokens=config.swa_unit_tokens if is_swa else page,
            size=size - absent,
            held=_count(holders > 0),
            pending=arrays[f"{kind}_pending"].astype(np.int64),
            free=arrays[f"{kind}_free"].astype(np.int64),
            shared=_count(holders > 1),
            absent=absent,
        )

    of_full, of_swa = (layout.full_pages, layout.swa_pages) if layout else (0, 0)
    swa = own("swa", config.swa_units, None if is_full is None else ~is_full, of_swa)
    if config.pure_swa_pool:
        return (swa,)
    return own("full", config.full_pages, is_full, of_full), swa


def _count(marks: np.ndarray) -> np.ndarray:
    return np.count_nonzero(marks, axis=-1) + np.zeros(marks.shape[:-1], np.int64)


def as_dict(summary: StateSummary) -> dict[str, object]:
    """The figures of one state, ready for JSON. Pages (or rings), tokens where the name says so."""
    pools = {
        pool.name.lower(): {
            "unit": pool.unit,
            "unit_tokens": pool.unit_tokens,
            "size": int(pool.size),
            "held": int(pool.held),
            "pending": int(pool.pending),
            "free": int(pool.free),
            "shared": int(pool.shared),
            "absent": int(pool.absent),
        }
        for pool in summary.pools
    }
    return {
        "page_size": summary.config.page_size,
        "sliding_window": summary.config.sliding_window,
        "chunked": summary.config.chunked,
        "pools": pools,
        "mapped_full_pages": None if summary.mapped is None else int(summary.mapped),
        "group_open": bool(summary.group_open),
        "faults": dict(zip(summary.fault_kinds, summary.faults.tolist(), strict=True)),
    }
