"""Who gets which page when every active row grows by one token: the hot path, kept short."""

import jax
import jax.numpy as jnp

from swa_jax.faults import fault_counts
from swa_jax.grant import GrantPlan, judge, make_plan
from swa_jax.last_page import look_at_last_page
from swa_jax.pool import peek
from swa_jax.rank import ranks
from swa_jax.state import PAD_SLOT, AllocatorState


def plan_decode(
    state: AllocatorState,
    seq_lens: jax.Array,
    last_loc: jax.Array,
    active: jax.Array,
    by: jax.Array | None = None,
) -> GrantPlan:
    """The plan of `alloc_decode`: a row takes a page when its last one is full."""
    config = state.config
    bad = active & (seq_lens < 1)
    grows = active & ~bad
    last = look_at_last_page(state, seq_lens - 1, last_loc, grows, by)
    needs_page = grows & (~last.goes_on | last.absent)
    needs_swa = grows & ~last.has_swa
    # One pass counts everything: a decode step is made of such small things.
    marks = jnp.stack([needs_page, needs_swa, bad, last.lost, last.crooked, last.shared])
    place, total = ranks(marks)
    (full_rank, swa_rank), (num_full, num_swa) = place[:2], total[:2]
    faults = fault_counts(
        bad_length=total[2], out_of_range=total[3], misaligned=total[4], still_mapped=total[5]
    )
    verdict = judge(state, ~jnp.any(faults > 0), num_full, num_swa, last.foreign)
    swa_pages = peek(state.swa, swa_rank)
    # A pure SWA row that goes on has its one side already, so both ranks agree.
    new_pages = swa_pages if config.pure_swa_pool else peek(state.full, full_rank)
    first = new_pages * jnp.int32(config.page_size)
    if config.pure_swa_pool:
        first = first + jnp.where(last.absent, last.filled, 0)
    slots = jnp.where(needs_page, first, last_loc + 1)
    return make_plan(
        state,
        verdict,
        slots=jnp.where(grows, slots, PAD_SLOT),
        count=jnp.sum(grows, dtype=jnp.int32),
        new_pages=new_pages,
        takes_full=needs_page,
        swa_pages=swa_pages,
        takes_swa=needs_swa,
        map_pages=jnp.where(needs_page, new_pages, last.page),
        num_full=num_full,
        num_swa=num_swa,
        faults=faults,
        foreign=last.foreign,
        scratch=last.scratch,
    )
