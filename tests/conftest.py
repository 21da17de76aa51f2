"""Settings for every test: JAX made strict, two CPU devices, Hypothesis profiles."""

import gc
import os
from collections.abc import Iterator
from pathlib import Path

import chex
import jax
import pytest
from hypothesis import settings

ROOT = Path(__file__).parent.parent
# A module that runs inside a peer's own tests, and imports what that peer needs; and this file,
# which has no docstring examples and is not the only one of its name.
collect_ignore = ["peers/levanter_named.py", "conftest.py"]
# Cases of a parametrised test of which others of the kind are always run: marked `long` here,
# where their parameters are those of a list that is used elsewhere too.
LONG_CASES = {
    "peers/test_differential.py::test_equal_after_each_of_ten_thousand_calls[4]",
    "test_benchmarks.py::test_smoke_run_with_peers",
    "test_prefix_cache.py::test_when_everything_collides_every_answer_is_the_same[config2-options2]",
    "test_replay_cache.py::test_requests_that_fill_the_pool_are_retracted_and_still_finish",
    (
        "test_serving.py::test_tokens_are_those_of_a_dense_pass"
        "[gemma, page 1, window 6-no cache-speculative]"
    ),
    "test_serving_loop.py::test_every_request_gets_its_own_text[ngram]",
    "test_serving_loop.py::test_every_request_gets_its_own_text[snapshot]",
    "test_serving_mutations.py::test_a_match_across_a_tombstone_is_seen",
    (
        "test_serving_scenarios.py::test_b14_b15_what_drafts_reserve_comes_back_to_the_last_page"
        "[snapshot]"
    ),
    (
        "test_speculation.py::test_a_head_reads_what_the_model_made_of_the_text"
        "[tree, page 1, snapshot]"
    ),
    ("test_speculation.py::test_samples_are_the_same_with_drafts[tree, page 1, cache, snapshot]"),
    "test_decoder_paged.py::test_prefill_in_chunks_and_decode_match_the_dense_pass[config2-16-5-6-False]",
    "test_decoder_paged.py::test_prefill_in_chunks_and_decode_match_the_dense_pass[config4-16-20-8-True]",
    "test_events.py::test_the_tree_of_a_replay_can_be_rebuilt",
    "test_generate.py::test_drafts_change_nothing_and_small_pools_neither",
    # These are tests of other files, run as they are.
    "test_data_parallel.py::test_ranks_over_eight_devices[1]",
    "test_prefix_cache.py::test_when_everything_collides_every_answer_is_the_same[config1-options1]",
    "test_prefix_machine.py::test_requests_agree_with_the_oracle[all_collide_fifo]",
    "test_prefix_machine.py::test_requests_agree_with_the_oracle[bigram_pages]",
    "test_replay_cache.py::test_reuse_saves_prefill_and_changes_nothing_else",
    # In the soak requests are cancelled, and wait for a place, by the thousand.
    "test_serving_loop.py::test_a_full_queue_says_so_and_release_makes_room",
    "test_serving_loop.py::test_an_end_token_ends_a_text_unless_it_is_to_be_ignored",
    "test_serving_loop.py::test_the_queue_is_served_in_the_order_of_arrival",
    "test_serving_loop.py::test_a_request_draws_the_same_in_any_company",
    "test_serving_loop.py::test_cancelled_requests_give_their_pages_back_and_harm_nobody",
    "test_serving_scenarios.py::test_pages_cached_by_pairs_serve_at_their_minimum",
    "test_prefix_machine.py::test_requests_agree_with_the_oracle[wide_window_priority]",
    "test_seeds.py::test_mixed_requests_soak",
    "test_serving_hosted.py::test_mistakes_show[nothing]",
    "test_serving_unified.py::test_more_is_held_than_any_fixed_split_of_the_bytes_could_hold",
    "test_speculation.py::test_samples_are_the_same_with_drafts[chain, page 4, cache]",
    "peers/test_example.py::test_the_example_serves_all_and_leaks_nothing",
    # A loop with a mistake in it runs in the other cases.
    "test_serving_owners.py::test_a_loop_names_nothing_of_others[plain]",
    "test_soaking.py::test_a_mistake_in_the_serving_loop_is_named_with_its_step[leak]",
    "test_soaking.py::test_a_mistake_in_the_serving_loop_is_named_with_its_step[stale mapping]",
    "test_mutations.py::test_a_check_passes_without_its_bug[free_unmapped_segment]",
    "test_mutations.py::test_a_check_passes_without_its_bug[late_free_in_group]",
    "test_mutations.py::test_a_check_passes_without_its_bug[padding_in_every_free]",
    "test_mutations.py::test_a_check_passes_without_its_bug[stay_below_the_boundary]",
    "test_mutations.py::test_a_check_passes_without_its_bug[tail_on_recycled_pages]",
    "test_bench_replay.py::test_smoke_prefix_cache_finds_the_same_on_all_sides",
    "test_disagg_host_machine.py::test_two_sides_and_a_host_agree_with_the_oracle[host_with_room]",
    "test_modes.py::test_eager_jitted_scan_and_while_give_the_same_bits[tokens]",
    "test_replay_cache.py::test_hits_are_at_least_those_of_a_host_cache_of_the_same_size",
    "test_replay_ranks.py::test_one_rank_is_a_replay",
    ("test_serving.py::test_tokens_are_those_of_a_dense_pass[gemma, page 1, window 6-cache-plain]"),
    (
        "test_serving.py::test_tokens_are_those_of_a_dense_pass"
        "[gpt-oss, page 4, window 3-cache-speculative]"
    ),
    (
        "test_serving_host_tier.py::test_tokens_are_right_and_more_of_them_come_from_the_cache"
        "[write_through]"
    ),
    "test_serving_loop.py::test_requests_added_between_calls_get_the_same_text[ngram]",
    "test_serving_loop.py::test_requests_added_between_calls_get_the_same_text[cache]",
    "test_serving_mutations.py::test_mutant_is_seen[a row that ends keeps its lock]",
    "test_serving_mutations.py::test_mutant_is_seen[a row that ends keeps its own pages (B17)]",
    "test_serving_mutations.py::test_mutant_is_seen[drafts reserve nothing]",
    "test_serving_mutations.py::test_mutant_is_seen[nobody is ever retracted]",
    "test_serving_mutations.py::test_mutant_is_seen[refused drafts keep their pages (B14, B15)]",
    "test_serving_mutations.py::test_mutant_is_seen[windows are left a page too early (B24)]",
    (
        "test_speculation.py::test_a_model_that_drafts_for_itself_is_believed_and_knows_what_it_knows"
        "[chain, page 4, cache]"
    ),
    (
        "test_speculation.py::test_a_model_that_drafts_for_itself_is_believed_and_knows_what_it_knows"
        "[tree, page 1, cache, snapshot]"
    ),
    # The soak, and others of their kind, go the same ways.
    "test_bench_replay.py::test_smoke_replay_agrees_in_every_total",
    "test_compat_vllm.py::TestOneGroup::test_a_request_that_fits_is_not_refused_for_a_copy_of_its_own_block[kinds1-32]",
    "test_determinism.py::test_bits_are_those_of_the_record[prefix cache, page 2]",
    "test_prefix_cache.py::test_a_whole_serving_loop_in_one_scan_is_its_steps[config0]",
    "test_prefix_machine.py::test_requests_agree_with_the_oracle[window_below_page_lfu]",
    (
        "test_serving.py::test_tokens_are_those_of_a_dense_pass"
        "[gemma, page 16, window 20-no cache-plain]"
    ),
    "test_serving_loop.py::test_drafts_are_accepted_where_the_text_repeats_itself",
    "test_serving_mutations.py::test_the_workload_passes_without_a_mutant",
    "test_serving_unified.py::test_the_split_moves_before_the_cache_gives_way",
    "test_soaking.py::test_a_mistake_over_an_allocator_is_named_with_its_step[leak]",
    "test_speculation.py::test_a_draft_model_that_forgets_is_wrong_and_the_text_is_not[catch up]",
    "test_speculation.py::test_a_head_that_is_right_is_believed[tree, page 1, snapshot]",
}

# JAX reads these when its first array is made, so they are set while tests are still collected.
jax.config.update("jax_platforms", os.environ.get("JAX_PLATFORMS", "cpu"))
jax.config.update("jax_num_cpu_devices", 2)
# A mix of dtypes or ranks is a mistake in an allocator, never a convenience.
jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")
# Tests compile the same small programs over and over, in every process and in every run.
jax.config.update("jax_compilation_cache_dir", str(ROOT / ".pytest_cache" / "jax"))
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)

# A first call compiles, which makes a deadline for one example meaningless.
# In CI the examples are the same every time: a red run is red for its change.
settings.register_profile(
    "default", deadline=None, max_examples=30, derandomize="CI" in os.environ, print_blob=True
)
settings.register_profile("thorough", deadline=None, max_examples=1000, print_blob=True)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))


@pytest.fixture(autouse=True)
def _fresh_trace_counter() -> None:
    """Forgets earlier traces: `chex.assert_max_traces` counts by source text, not by function."""
    chex.clear_trace_counter()


# Their programs hold the whole serving loop.
LARGE = (
    "test_serving",
    "test_speculation",
    "test_http",
    "test_generate",
    "test_readme",
    "test_disagg_serving",
    "test_disagg_processes",
    "test_soaking",
)
# What is looked at there is the compiled program itself, or it runs for long.
WELL_COMPILED = ("test_compile", "test_replay_cache")


# Linux gives a process 65,530 maps of memory, and XLA takes three for every kernel that it compiles
# for a CPU. Where none is left, it crashes in whatever it does next.
MOST_MAPS = 30_000
MOST_AT_A_MODULES_START = 12_000
MAPS = Path("/proc/self/maps")


@pytest.fixture(autouse=True)
def _programs_leave_in_time() -> Iterator[None]:
    """Drops every compiled program before the maps of this process run out."""
    yield
    _drop_programs_beyond(MOST_MAPS)


@pytest.fixture(autouse=True, scope="module")
def _programs_leave_between_modules() -> None:
    """As above, where it costs least."""
    _drop_programs_beyond(MOST_AT_A_MODULES_START)


def _drop_programs_beyond(maps: int) -> None:
    if MAPS.exists() and MAPS.read_bytes().count(b"\n") > maps:
        jax.clear_caches()
        gc.collect()


@pytest.fixture(autouse=True, scope="module")
def _large_programs_are_not_stored(request: pytest.FixtureRequest) -> Iterator[None]:
    """Keeps the largest programs out of the compilation cache, and drops them after their module.

    They are of no use to another module, and hold gigabytes.
    """
    if not _is_one_of(LARGE, request):
        yield
        return
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 1e9)
    yield
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.clear_caches()


@pytest.fixture(autouse=True, scope="module")
def _compiles_quickly(request: pytest.FixtureRequest) -> Iterator[None]:
    """Leaves most of LLVM's optimizations out: nearly all time goes into compilation."""
    jax.config.update("jax_disable_most_optimizations", not _is_one_of(WELL_COMPILED, request))
    yield
    jax.config.update("jax_disable_most_optimizations", False)


def _is_one_of(names: tuple[str, ...], request: pytest.FixtureRequest) -> bool:
    return request.module.__name__.rpartition(".")[2].startswith(names)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks the cases of `LONG_CASES`."""
    for item in items:
        if item.nodeid.removeprefix("tests/") in LONG_CASES:
            item.add_marker(pytest.mark.long)
