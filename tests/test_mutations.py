"""Each known bug is put back, and a check must notice it.

Run without `jit`: a function compiled before a patch would not see it.
"""

import dataclasses

import jax
import jax.numpy as jnp
import mutants
import pair
import pytest
import test_laws as laws
import test_scenarios as scenarios
import test_seeds as seeds
from compare import config_of
from machine import long_walk
from oracle import Sizes
from pair import Ask, Pair, granted

import swa_jax as swa

SIZES = Sizes(32, 24, 4, window=4)


# ---- short programs, for bugs that no other test names ---------------------------------------


def free_twice():
    state = Pair(SIZES)
    slots = state.extend(0, 8)
    state.extend(0, 4)
    state.free(slots)
    state.free(slots)


def free_tokens_of_one_page():
    state = Pair(SIZES)
    state.free(state.extend(0, 6))


def free_beside_a_queue():
    state = Pair(SIZES)
    slots = state.extend(0, 16)
    state.free_swa_grouped(slots[:8])
    state.free(slots[8:])
    state.free_group_end()


def grow_where_swa_is_gone():
    state = Pair(SIZES)
    slots = state.extend(0, 6)
    state.free_swa(slots)
    state.extend(6, 7, slots[-1])


def two_rows_go_on_in_one_page():
    state = Pair(SIZES)
    last = state.extend(0, 2)[-1]
    state.alloc_extend(Ask(2, 3, last), Ask(2, 3, last))


def more_than_the_answer_holds():
    Pair(SIZES, width=8).alloc_extend(Ask(0, 6), Ask(0, 6))


def free_late_what_has_a_new_owner():
    state = Pair(SIZES)
    slots = granted(state.alloc(24))
    then = state.snapshot()
    state.free(slots)
    state.free(granted(state.alloc_extend_swa_tail(Ask(0, 4))))  # now the pools are out of step
    granted(state.alloc(24))
    state.free_swa(slots, owner=then)


def round_the_ring():
    state = Pair(SIZES)
    for _ in range(4):
        state.free(state.extend(0, 12))


def free_in_a_window():
    state = Pair(SIZES)
    slots = state.extend(0, 11)
    state.free_out_of_window([slots], [11], [0])


def tail_on_recycled_pages():
    seeds.test_swa_tail_clears_recycled_mappings(4, True)


def late_free_in_group():
    seeds.test_free_swa_group_owns_mapping_at_enqueue_time("set, then clear", "group")


def late_free_in_group_other_order():
    seeds.test_free_swa_group_owns_mapping_at_enqueue_time("clear, then set", "group")


def padding_in_every_free():
    laws.test_law_01_the_padding_page_is_never_granted_or_freed(laws.PAGES)


def free_unmapped_segment():
    scenarios.test_b05_unmapped_tokens_free_nothing_on_any_path("free_swa_segment")


def stay_below_the_boundary():
    scenarios.test_b24_the_frontier_stops_one_window_before_the_insert_boundary()


PROGRAMS = {
    free_twice: [mutants.double_free_accepted, mutants.pages_handed_out_but_still_free],
    free_tokens_of_one_page: [
        mutants.each_slot_frees_its_page,
        mutants.mapping_not_cleared_on_free,
        mutants.scratch_left_dirty,
    ],
    free_beside_a_queue: [mutants.pending_pages_overwritten],
    grow_where_swa_is_gone: [mutants.tokens_written_to_a_page_without_swa],
    two_rows_go_on_in_one_page: [mutants.two_rows_share_a_last_page],
    more_than_the_answer_holds: [mutants.capacity_not_checked],
    free_late_what_has_a_new_owner: [mutants.owner_does_not_ask_who_maps_now],
    round_the_ring: [mutants.ring_does_not_go_round],
    free_in_a_window: [mutants.frontier_inside_a_page],
    tail_on_recycled_pages: [mutants.stale_mapping_before_the_tail],
    late_free_in_group: [mutants.late_look_up_in_a_group, mutants.set_does_not_move],
    late_free_in_group_other_order: [mutants.late_look_up_in_a_group],
    padding_in_every_free: [mutants.padding_page_freed],
    free_unmapped_segment: [mutants.unmapped_page_frees_page_zero],
    stay_below_the_boundary: [mutants.insert_boundary_ignored],
    scenarios.test_b01_one_token_of_an_swa_page_frees_it_once: [
        mutants.page_freed_again_for_each_token
    ],
    scenarios.test_b04_a_nested_begin_loses_nothing: [mutants.nested_begin_drops_the_queue],
    scenarios.test_b06_a_refused_decode_keeps_both_pools: [
        mutants.full_pages_taken_while_swa_is_short,
        mutants.refused_but_slots_handed_out,
    ],
    scenarios.test_b08_free_full_is_for_pages_without_an_swa_side: [
        mutants.free_full_of_a_mapped_page
    ],
    scenarios.test_b33_a_window_of_four_holds_four: [mutants.window_one_token_short],
    laws.test_law_04_fault_counters_saturate: [mutants.fault_counters_wrap],
    seeds.test_swa_memory_pool_paged_free_clears_full_page_mapping: [
        mutants.page_freed_again_for_each_token,
        mutants.mapping_not_cleared_on_free,
    ],
}
PAIRS = [(program, bug) for program, bugs in PROGRAMS.items() for bug in bugs]


HERE = [program for program in PROGRAMS if program.__module__ == __name__]


@pytest.mark.parametrize("program", HERE, ids=lambda f: f.__name__)
def test_a_check_passes_without_its_bug(program):
    program()


@pytest.mark.parametrize(("program", "bug"), PAIRS, ids=lambda f: f.__name__)
def test_a_check_notices_its_bug(program, bug, monkeypatch):
    monkeypatch.setattr(pair, "_COMPILED", {})  # it remembers functions
    with jax.disable_jit():
        bug(monkeypatch)
        with pytest.raises(AssertionError):
            program()


@pytest.mark.parametrize(
    "bug",
    [
        mutants.double_free_accepted,
        mutants.tokens_written_to_a_page_without_swa,
        mutants.full_pages_taken_while_swa_is_short,
        mutants.pending_pages_overwritten,
        mutants.set_does_not_move,
    ],
    ids=lambda f: f.__name__,
)
def test_a_random_walk_notices(bug, monkeypatch):
    """The walk knows nothing of the bug, so this says that it gets around."""
    monkeypatch.setattr(pair, "_COMPILED", {})  # it remembers functions
    with jax.disable_jit():
        bug(monkeypatch)
        with pytest.raises(AssertionError):
            long_walk(laws.walker(laws.PAGES)(), seed=1, steps=400)


# ---- the on-device checks see a damaged state ------------------------------------------------


def lawful_state():
    state = swa.init(config_of(SIZES))
    state, _ = swa.alloc(state, 16, capacity=16)
    state = swa.free_group_begin(state)
    state = swa.free(state, jnp.asarray([4], jnp.int32))
    return swa.free_swa(state, jnp.asarray([8], jnp.int32))


def with_mapping(full, to):
    return lambda s: dataclasses.replace(s, full_to_swa=s.full_to_swa.at[full].set(to))


def with_pool(side, **change):
    def damage(state):
        pool = getattr(state, side)
        fields = {name: edit(getattr(pool, name)) for name, edit in change.items()}
        return dataclasses.replace(state, **{side: dataclasses.replace(pool, **fields)})

    return damage


DAMAGE = {
    "two pages map to one": with_mapping(3, 4),
    "a free page is mapped": with_mapping(8, 3),
    "a pending page is mapped": with_mapping(1, 3),
    "a held page maps to a free one": with_mapping(2, 6),
    "a held page maps to a pending one": with_mapping(2, 2),
    "the padding page is mapped": with_mapping(0, 3),
    "a mapping out of the pool": with_mapping(2, 99),
    "a negative mapping": with_mapping(2, -1),
    "a held page is marked released": with_pool("full", holders=lambda x: x.at[2].set(0)),
    "a free page is marked held": with_pool("swa", holders=lambda x: x.at[6].set(1)),
    "the padding page is released": with_pool("full", holders=lambda x: x.at[0].set(0)),
    "a page is queued twice": with_pool("full", ring=lambda x: x.at[5].set(x[4])),
    "the padding page is queued": with_pool("swa", ring=lambda x: x.at[4].set(0)),
    "more free pages than there are": with_pool("full", num_free=lambda x: x + 4),
    "fewer free pages than there are": with_pool("swa", num_free=lambda x: x - 1),
    "a pending page is forgotten": with_pool("swa", num_pending=lambda x: x - 1),
    "a negative count": with_pool("swa", num_pending=lambda x: x - 3, num_free=lambda x: x + 3),
    "the head is past the end": with_pool("full", head=lambda x: x + 8),
    "scratch is dirty": lambda s: dataclasses.replace(s, scratch=s.scratch.at[3].set(0)),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_a_damaged_state_is_seen_and_named(name):
    state = lawful_state()
    swa.check(state)
    damaged = DAMAGE[name](state)
    assert not all(bool(holds) for holds in swa.invariants(damaged).values())
    with pytest.raises(swa.InvariantError, match=r"\d"):
        swa.check(damaged)
