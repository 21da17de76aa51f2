"""Why a case of a peer's test file says nothing about ours: it looks inside, or asks for a bug.

By file, class and name of the case. What is not listed here must pass.
"""

ORDER = (
    "inside: takes the head of `free_pages` for what was freed last. There freed pages are granted "
    "first; here they are granted last, and `free_pages` shows the order of grants"
)
SORTED = "inside: counts pages that wait to be sorted; here a freed page can be granted at once"
FREED_SLOT = (
    "asks for what our laws exclude: maps an SWA slot to a full slot that it has just freed in the "
    "same group, so that a free page is mapped when the group ends (laws 3 and 7). It is refused"
)
QUEUE = "inside: the length of one of its two queues of SWA frees by name"
ASSERT_ASYNC = (
    "inside: reads the predicate passed to `torch._assert_async`; here a fault is counted"
)
BROKEN_MAP = (
    "inside: writes mappings of parts of pages, two to one page, and asks for the text of an "
    "assertion; here the mapping is kept by page and one-to-one, so there is nothing to find"
)
FACTORY = (
    "asks which class a factory of the peer's own makes: it makes the peer's cache, here over our "
    "allocator, and only the class that the test compares it with has changed"
)
_CPU = "test_allocator_cpu.py::"
_SEGMENT = "test_paged_free_segment.py::"
_SGLANG_SWA = "test_swa_allocator.py::"
_CONTRACT = f"{_SGLANG_SWA}TestSWAPeerMappedContract."

REASONS: dict[str, str] = {
    "test_kv_cache_builder.py::TestBuildKVCache.test_hybrid_returns_swa_radix_cache": FACTORY,
    "test_unified_radix_tree_flag.py::TestUnifiedRadixTreeFlag."
    "test_factory_flag_on_hybrid_unaffected": FACTORY,
    f"{_CPU}TestTokenAllocatorFree.test_need_sort_free_goes_to_release_pages": SORTED,
    f"{_SEGMENT}TestFreeSegment.test_group_owns_deferred_page_representatives": ORDER,
    f"{_SEGMENT}TestFreeSegment.test_matches_unique_over_tail_alignments": ORDER,
    f"{_SEGMENT}TestFreeSegment.test_need_sort_defers_released_pages": SORTED,
    f"{_SEGMENT}TestFreeSegments.test_page_aligned_segments": ORDER,
    f"{_SEGMENT}TestFreeSegments.test_page_aligned_segments_no_trim": ORDER,
    f"{_SEGMENT}TestFreeSegments.test_partial_tail_then_next_page": ORDER,
    f"{_SGLANG_SWA}TestSWA.test_free_group_owns_mapping_at_enqueue_time": FREED_SLOT,
    f"{_SGLANG_SWA}TestSWA.test_free_swa_group_owns_deferred_indices": QUEUE,
    f"{_CONTRACT}test_free_swa_flags_a_slot_whose_peer_is_already_gone": ASSERT_ASYNC,
    f"{_CONTRACT}test_segment_free_flags_a_page_whose_peer_is_already_gone": ASSERT_ASYNC,
    f"{_SGLANG_SWA}TestSWAPageRepsFree."
    "test_free_swa_segment_debug_rejects_invalid_page_mappings": BROKEN_MAP,
    f"{_SGLANG_SWA}TestSWAPageRepsFree."
    "test_segment_free_releases_the_mapped_pages_for_every_tail": ORDER,
}
