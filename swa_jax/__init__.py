"""swa_jax: KV-slot allocation for hybrid full and sliding-window attention, on the device.

Every call is a pure function over one immutable pytree: state in, state out.
"""

from swa_jax.allocator import alloc, alloc_decode, alloc_extend, alloc_extend_swa_tail
from swa_jax.check import InvariantError, check, invariants, step_invariants
from swa_jax.config import PoolConfig
from swa_jax.faults import FAULT_KINDS
from swa_jax.free import (
    free,
    free_full,
    free_segment,
    free_swa,
    free_swa_grouped,
    free_swa_segment,
)
from swa_jax.grant import Grant
from swa_jax.group import free_group_begin, free_group_end
from swa_jax.mapping import (
    clear_full_to_swa_mapping,
    set_full_to_swa_mapping,
    translate_full_to_swa,
)
from swa_jax.owners import TREE_OWNER, hand_over, owner_of
from swa_jax.page_table import PageTables, WindowPageTables, page_tables, window_page_tables
from swa_jax.rebalance import rebalance, unified_available
from swa_jax.request_ring import RingGrant, ring_acquire, ring_release, ring_slots
from swa_jax.share import PageCopies, copy_on_write, share
from swa_jax.state import (
    AllocatorState,
    OwnerTags,
    PagePool,
    available_size,
    clear,
    faults,
    full_available_size,
    init,
    snapshot,
    state_bytes,
    swa_available_size,
)
from swa_jax.window import free_out_of_window, frontier

__version__ = "0.1.0"

__all__ = [
    "FAULT_KINDS",
    "TREE_OWNER",
    "AllocatorState",
    "Grant",
    "InvariantError",
    "OwnerTags",
    "PageCopies",
    "PagePool",
    "PageTables",
    "PoolConfig",
    "RingGrant",
    "WindowPageTables",
    "alloc",
    "alloc_decode",
    "alloc_extend",
    "alloc_extend_swa_tail",
    "available_size",
    "check",
    "clear",
    "clear_full_to_swa_mapping",
    "copy_on_write",
    "faults",
    "free",
    "free_full",
    "free_group_begin",
    "free_group_end",
    "free_out_of_window",
    "free_segment",
    "free_swa",
    "free_swa_grouped",
    "free_swa_segment",
    "frontier",
    "full_available_size",
    "hand_over",
    "init",
    "invariants",
    "owner_of",
    "page_tables",
    "rebalance",
    "ring_acquire",
    "ring_release",
    "ring_slots",
    "set_full_to_swa_mapping",
    "share",
    "snapshot",
    "state_bytes",
    "step_invariants",
    "swa_available_size",
    "translate_full_to_swa",
    "unified_available",
    "window_page_tables",
]
