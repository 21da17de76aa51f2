"""Mutants that change nothing that a caller can see, and why.

A reason must hold for every argument that the code around the change can pass, not only for those
that the tests pass.
"""

# For slots >= 0 a shift and a mask give what a division and a remainder give; slots below 0 are
# never read from these two: every caller masks the places whose slots are outside.
_BOTH_WAYS = "chooses between two ways to divide that agree for slots >= 0, the only ones read"

EXPLAINED: dict[str, str] = {
    "paging:page_of: page_size & (page_size - 1) => (page_size)": _BOTH_WAYS,
    "paging:page_of: page_size & (page_size - 1) => (page_size - 1)": _BOTH_WAYS,
    "paging:page_of: page_size - 1 => (page_size)": _BOTH_WAYS,
    "paging:offset_of: page_size & (page_size - 1) => (page_size)": _BOTH_WAYS,
    "paging:offset_of: page_size & (page_size - 1) => (page_size - 1)": _BOTH_WAYS,
    "paging:offset_of: page_size - 1 => (page_size)": _BOTH_WAYS,
    "pool:peek: most >= size => most > size": (
        "with as many places as the ring has, both ways read ring[head + rank] for every rank "
        "below its size, and ranks past it must not be used"
    ),
    "pool:peek: ranks < size => ranks <= size": (
        "a rank of the ring's size goes round to the head, which is where rank 0 stands"
    ),
    "rank:exclusive_sum: step < values.shape[-1] => step <= values.shape[-1]": (
        "one more doubling shifts all values out and adds zeros"
    ),
    "plan_free:name_pages: first & named => (first)": (
        "first_places marks no place that names no page: such a place reads the end of the list"
    ),
    "request_ring:_look_at: first & inside => (first)": (
        "first_places marks no place that names no ring: such a place reads the end of the list"
    ),
    "plan_free:plan_free: jnp.maximum(holders - 1, 0) => (holders - 1)": (
        "below 0 only where nobody holds the page, and every use of it asks for `held` as well"
    ),
    'plan_free:plan_free_swa_as_of: mode="drop" => mode="clip"': (
        "the mapping holds ids of SWA pages alone (law 5), so no index is outside"
    ),
    "plan_free:plan_free_swa_as_of: jnp.maximum(holders - 1, 0) => (holders - 1)": (
        "below 0 only where the SWA page is released: nobody maps to it then (law 7), so neither "
        "`still_here` nor a count is read"
    ),
    "free_blocks:pays: state.config.page_size > 1 => state.config.page_size >= 1": (
        "chooses between two ways that give the same state; blocks cost more with pages of a token"
    ),
    "mapping:_translate: (slots >= 0) & (slots < jnp.int32(config.full_tokens + size)) => "
    "(slots >= 0)": "a slot past the pool has a page past the mapping, which reads as unmapped",
    "mapping:_translate: slots >= 0 => slots > 0": (
        "slot 0 is looked up as slot 0 where it counts as inside and where it does not"
    ),
    "mapping:_set: (new_owner != 0) & (new_owner != page) => (new_owner != 0)": (
        "a page that keeps its SWA page is among the pages whose mapping is written right after"
    ),
    "mapping:_set: replace(state) => without scratch": (
        "scratch comes back as it was; to hand it on only lets the compiler reuse its buffer"
    ),
    "mapping:_clear: replace(state) => without scratch": (
        "scratch comes back as it was; to hand it on only lets the compiler reuse its buffer"
    ),
    "share:_share: swa_holders > 0 => swa_holders >= 0": (
        "no holders and yet a share: that is SWA page 0, whose count is written as the 1 that it is"
    ),
    "share:_share: jnp.minimum(swa_holders, most - 1) => (swa_holders)": (
        "an SWA side has no more holders than its page (law 3), and a page at the limit is refused"
    ),
    'check:_queued: mode="drop" => mode="clip" #2': "the index is the padding page's, 0",
    'check:_mapped: mode="drop" => mode="clip" #2': "the index is the padding page's, 0",
    "last_page:look_at_last_page: straight & first => (first)": (
        "only straight rows name a page, and first_places marks no place that names none"
    ),
    "check:_group_queue: jnp.maximum(pool.ring, 0) => (pool.ring) #2": (
        "a pending place below 0 breaks this law already, by the padding page's count, which is 1 "
        "wherever law 3 holds"
    ),
    "check:_group_queue: jnp.maximum(pool.ring, 0) => (pool.ring)": (
        "absent counts as 1 holder, and so does the padding page wherever law 3 holds"
    ),
    "check:_queued: used & inside => (used)": (
        "a place that names no page is counted at the padding page as well, which breaks both laws "
        "that read these counts"
    ),
    "check:_one_to_one: ok & jnp.all(jnp.where(live, state.full_to_swa == own, ~has)) => "
    "(jnp.all(jnp.where(live, state.full_to_swa == own, ~has)))": (
        "in a pure pool each page maps to itself or to none, so no two can map to one"
    ),
}
