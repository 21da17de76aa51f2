"""Which tests are asked for a mutant of which module: those most likely to notice come first."""

from __future__ import annotations

from .judge import Tests
from .patch import Mutant

WALK = Tests("test_laws.py", r"long_walk\[pages of 4-1")
ONE_POOL = Tests("test_laws.py", r"long_walk\[one pool-1")
WALKS = Tests("test_laws.py", r"long_walk\[.*-1")
LAWS = Tests("test_laws.py", r"test_law_0[1-8]|fault_kind")
FAULTS = Tests("test_laws.py", "law_04_fault|fault_kind")
SCENARIOS = Tests("test_scenarios.py")
SEEDS = Tests("test_seeds.py", r"^(?!.*soak)")
BY_SNAPSHOT = Tests("test_free_by_snapshot.py")
SHARE = Tests("test_share.py", r"^(?!.*(eager|agree_with))")
SHARE_BORDERS = Tests("test_share_borders.py")
RINGS = Tests("test_request_ring.py", r"^(?!.*(equal_bits|never_shares))")
UNIFIED = Tests("test_unified_pools.py", r"^(?!.*(published|equal_bits|known_bug))")
PAGING = Tests("test_paging.py")
RANK = Tests("test_rank.py")
POOL = Tests("test_pool_pages.py")
WINDOW = Tests("test_window_borders.py")
BLOCKS = Tests("test_free_blocks.py", r"^(?!.*no_copy)")
BROKEN_LAWS = Tests("test_check_laws.py")
DAMAGE = Tests("test_mutations.py", "damaged")
CHECK = Tests("test_check.py")
INPUTS = Tests("test_inputs.py")
CONFIG = Tests("test_config.py")
LIMITS = Tests("test_limits.py")
OWNERS = Tests("test_owners.py", r"tree|sides_of_a_mapping|rings_have|copy_belongs|each_row_of")
BY_OTHERS = Tests("test_owners.py", r"^(?!.*(each_kind_of_pool|without_its_check))")
CORE = [WALK, SEEDS, SCENARIOS, WALKS, LAWS]

PREFIX_SCENARIOS = Tests("test_prefix_scenarios.py")
COLLISIONS = Tests("test_prefix_cache.py", "under_the_same_hash|collides|never_share")
LOCKS = Tests("test_prefix_scenarios.py", "b41|b44|b45")
PREFIX_CALLS = Tests("test_prefix_cache.py")
PREFIX_MISUSE = Tests("test_prefix_misuse.py", r"^(?!.*no_call_copies)")
PREFIX_WALK = Tests("test_prefix_machine.py")
PREFIX_PIECES = Tests("test_prefix_pieces.py")
PREFIX_OWN = Tests("test_prefix_own.py")
PREFIX_SHARE = Tests("test_share_cache.py")
PREFIX = [PREFIX_SCENARIOS, PREFIX_CALLS, PREFIX_MISUSE, PREFIX_WALK, PREFIX_SHARE]

SERVING = [
    Tests("test_serving_mutations.py", "without_a_mutant"),
    Tests("test_serving_scenarios.py"),
]
DECISIONS = Tests("test_serving_pieces.py")
SPECULATION = [
    Tests("test_verify.py"),
    Tests("test_speculation.py", "chain"),
    Tests("test_speculation.py"),
]
DISAGG = [
    Tests("test_disagg_pieces.py"),
    Tests("test_disagg_calls.py"),
    Tests("test_disagg_machine.py"),
]
HOST = [
    Tests("test_host_index.py"),
    Tests("test_host_scenarios.py"),
    Tests("test_host_machine.py"),
]
REPLAY = [
    Tests("test_replay_shares.py"),
    Tests("test_replay_mutants.py", "nothing_is_noticed"),
    Tests("test_replay_scenarios.py"),
    Tests("test_replay.py"),
]

GROUPS: dict[str, tuple[str, list[Tests]]] = {
    "serving": ("finish rollback prefill", SERVING),
    "disagg": ("receive commit inbox", DISAGG),
    "host_cache": ("claim index plan", HOST),
    "replay": ("admit grow release", [Tests("test_replay_pieces.py"), *REPLAY]),
}
TESTS: dict[str, list[Tests]] = {
    "paging.py": [PAGING, RANK, *CORE, LIMITS],
    "pool.py": [POOL, *CORE, UNIFIED, LIMITS],
    "rank.py": [RANK, POOL, *CORE],
    "owners.py": [Tests("test_owners.py"), Tests("test_serving_owners.py")],
    "grant.py": [*CORE, SHARE, RINGS, BY_OTHERS],
    "plan_extend.py": [
        Tests("test_pool_pages.py", "past_the_granted|cannot_be"),
        *CORE,
        SHARE,
        BY_OTHERS,
        LIMITS,
    ],
    "plan_decode.py": [WALK, ONE_POOL, *CORE, SHARE, BY_OTHERS],
    "plan_free.py": [BY_SNAPSHOT, *CORE, SHARE, RINGS, BY_OTHERS],
    "free_blocks.py": [BLOCKS],
    "last_page.py": [WALK, ONE_POOL, BY_OTHERS, *CORE, SHARE],
    "window.py": [WINDOW, *CORE, SHARE, BY_OTHERS],
    "leave_windows.py": [Tests("test_leave_windows.py"), *REPLAY],
    "mapping.py": [*CORE, SHARE, OWNERS],
    "page_table.py": [Tests("test_page_table.py", r"^(?!.*(pallas|kernel|attention))")],
    "kv_rows.py": [Tests("test_kv_rows.py")],
    "share.py": [SHARE_BORDERS, SHARE, Tests("test_share.py", "agree_with"), OWNERS],
    "share_pages.py": [Tests("test_leave_windows.py"), *SERVING],
    "group.py": [Tests("test_pool_pages.py", "second_begin"), SEEDS, SCENARIOS, WALK],
    "request_ring.py": [RINGS, Tests("test_request_ring.py"), OWNERS],
    "rebalance.py": [UNIFIED],
    "unified.py": [UNIFIED],
    "faults.py": [FAULTS, WALK, LAWS],
    "check.py": [BROKEN_LAWS, DAMAGE, CHECK, RINGS, UNIFIED],
    "inputs.py": [INPUTS, LAWS],
    "config.py": [CONFIG, RINGS, LIMITS, UNIFIED],
    "prefix_cache/insert.py": [PREFIX_SCENARIOS, PREFIX_SHARE, OWNERS, *PREFIX],
    "prefix_cache/find.py": [COLLISIONS, *PREFIX],
    "prefix_cache/kept_windows.py": [PREFIX_PIECES, *PREFIX],
    "prefix_cache/match.py": PREFIX,
    "prefix_cache/locks.py": [LOCKS, PREFIX_MISUSE, *PREFIX],
    "prefix_cache/receipts.py": [PREFIX_MISUSE, *PREFIX],
    "prefix_cache/leaving.py": [PREFIX_SHARE, *PREFIX],
    "prefix_cache/own.py": [PREFIX_OWN, *PREFIX],
    "prefix_cache/evict.py": [PREFIX_PIECES, *PREFIX],
    "prefix_cache/evict_lacking.py": [PREFIX_PIECES, *PREFIX],
    "prefix_cache/select.py": [PREFIX_PIECES, *PREFIX],
    "prefix_cache/table.py": [PREFIX_PIECES, *PREFIX],
    "disagg/preallocate.py": [
        Tests("test_disagg_calls.py", "for_ever|nothing_to_send|missing|no_place"),
        *DISAGG,
    ],
    "disagg/abort.py": [Tests("test_disagg_calls.py", "abort|old_reservations"), *DISAGG],
    "serving/verify.py": SPECULATION,
    "serving/decode.py": [DECISIONS, *SERVING],
    "serving/admit.py": [DECISIONS, *SERVING],
    "serving/room.py": [DECISIONS, *SERVING],
    "serving/chunk.py": [DECISIONS, Tests("test_leave_windows.py"), *SERVING],
    **{
        f"{folder}/{name}.py": tests
        for folder, (names, tests) in GROUPS.items()
        for name in names.split()
    },
}


def tests_for(mutant: Mutant, first: int) -> list[Tests]:
    """The test that is meant to see a mutant, where it names one, then those of its module.

    Args:
      mutant: any.
      first: most entries.
    """
    meant = [Tests(*mutant.seen_by)] if mutant.seen_by else []
    return [*meant, *TESTS[mutant.file]][:first]
