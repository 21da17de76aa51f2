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
    "free_blocks:_distinct: replace(state) => without scratch": (
        "a block puts its pages in scratch to rest; where they were never marked they are at rest"
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
    "paging:first_places: put(marked, reset) => past the end is the end": (
        "puts the last page's place to rest, which the first place that names that page does anyway"
    ),
    "pool:peek: look_up(pool.ring, _place(pool, safe)) => past the end is the end": (
        "a ring place is never past the ring's end"
    ),
    "pool:take: jnp.minimum(count, jnp.int32(pool.ring.shape[0] - 1)) => (count)": (
        "only where all pages are taken, and then the head stays where it is (`whole`)"
    ),
    "pool:take: pool.ring.shape[0] - 1 => (pool.ring.shape[0])": (
        "only where all pages are taken, and then the head stays where it is (`whole`)"
    ),
    "pool:give_back: where defer => defer & False #2": (
        "moves pending pages to places that all are written right after, by the pages that come in"
    ),
    'rank:read: mode="fill" => mode="clip"': (
        "the first word has no marks before it, so some word fits"
    ),
    'rank:read: mode="fill" => mode="clip" #2': (
        "the first word has no marks before it, so some word fits"
    ),
    "rank:_words: n < _EXACT => n <= _EXACT": "2^24 itself is exact in float32, too",
    "rank:read_runs: put(jnp.zeros(count + 1, jnp.int32), jnp.where(some, nth + 1, count + 1)) "
    "=> past the end is the end": (
        "an empty run writes at the number that the last run has where none is empty"
    ),
    "plan_extend:parts_of: look_up(new_pages, jnp.maximum(starts.new + rows.new - 1, 0)) => past "
    "the end is the end": (
        "past the list only where the call is refused, and then all pages are padding"
    ),
    **{
        f"plan_extend:slots_by_token: look_up({of}) => past the end is the end": (
            "a place that is real belongs to a row of the batch; what others read is not used"
        )
        for of in (
            "rows.fill, runs.run",
            "starts.new, runs.run",
            "last_first, runs.run",
            "new_pages, look_up(starts.new, runs.run, 0) + page_of(fresh, size)",
        )
    },
    "plan_free:swa_side: look_up(state.full_to_swa, named.pages) => past the end is the end": (
        "a place that names no page is nobody's, and all that is done with its SWA side asks `held`"
    ),
    "plan_free:plan_free_swa_as_of: look_up(state.full_to_swa, named.pages) => past the end is "
    "the end": "a place that names no page `had` none",
    "plan_free:plan_free_swa_as_of: look_up(mapped_now, pages_then) => past the end is the end": (
        "the mapping holds ids of SWA pages alone (law 5), so no index is outside"
    ),
    "free_blocks:_distinct: look_up(marked, pages) => past the end is the end": (
        "a place that names no page is not the place that marked the last page"
    ),
    "free_blocks:_block: put(state.scratch, pages) => past the end is the end": (
        "puts the last page's mark to rest early, and marks are not read any more"
    ),
    'leave_windows:leave_windows.free_rows: mode="drop" => mode="clip"': (
        "the rows are all rows, or the place of a largest value: never outside"
    ),
    "share_pages:share_pages: jnp.minimum(exclusive_sum(need), pages) => (exclusive_sum(need))": (
        "where the rows before need more than there is, one of them is cut short: this one gets 0"
    ),
    "share_pages:share_pages: jnp.minimum(pages - taken, need) => (pages - taken)": (
        "a row takes what it wants at most, and the pages of a pool have room for int32 tokens"
    ),
    "inputs:as_int32: isinstance(value, np.ndarray) or value.dtype == jnp.int32 => (value.dtype == "
    "jnp.int32)": "what comes from the host is int32 already",
    "inputs:as_int32: isinstance(value, np.ndarray) or value.dtype == jnp.int32 => "
    "(isinstance(value, np.ndarray))": "clipping and converting int32 to int32 changes nothing",
    "inputs:as_int32: info.max > _MOST => info.max >= _MOST": (
        "only int32 ends there, and int32 arrays came back before"
    ),
    "last_page:look_at_last_page: look_up(state.full_to_swa, page) => past the end is the end": (
        "asks `inside` as well, and a page is past the end just where that says no"
    ),
    "mapping:pair_pages: look_up(named_swa, by_full) => past the end is the end": (
        "past the list only where the place itself is not straight, and then it does not agree"
    ),
    "mapping:pair_pages: look_up(named_full, by_swa) => past the end is the end": (
        "past the list only where the place itself is not straight, and then it does not agree"
    ),
    "mapping:_translate: look_up(state.full_to_swa, page_of(known, size)) => past the end is the "
    "end": "slots past the pool are read as slot 0",
    "mapping:_set: look_up(owner, state.full_to_swa) => past the end is the end": (
        "the mapping holds ids of SWA pages alone (law 5), so no index is outside"
    ),
    "share:_copy_on_write: look_up(state.full_to_swa, named.pages) => past the end is the end": (
        "a place that names no page is nobody's, and all that asks for its SWA side asks `held` too"
    ),
    'serving/verify:verify: mode="clip" => mode="fill"': "nodes are numbers of the tree's nodes",
    'serving/verify:verify: mode="clip" => mode="fill" #2': "nodes are numbers of the tree's nodes",
    "page_table:_both_sides: slots > 0 => slots >= 0": (
        "slot 0 lies in page 0, and a place that is not used reads slot 0"
    ),
    "page_table:_both_sides: look_up(state.full_to_swa, jnp.where(seen, full, PAD_PAGE)) => past "
    "the end is the end": (
        "every slot that is looked up lies inside the pool, so its page has a place in the mapping"
    ),
    "prefix_cache/select:up_from: carry[1] < starts.count => carry[1] <= starts.count": (
        "one more block may be read, past the last mark, where every place reads as past the nodes"
    ),
    "prefix_cache/evict:_commit: carry[3] < leaving.count => carry[3] <= leaving.count": (
        "one more block may be read, past the last mark, where every place names no page"
    ),
    "prefix_cache/select:least_k: k > 0 => k >= 0": "where none is wanted, none is found: slower",
    "serving/admit:promised: where open_rows => open_rows | True #2": (
        "a row that is not open lacks no pages, so it is promised none"
    ),
    "host_cache/index:usable: page < device_pages and dead_alone < start => (dead_alone < start)": (
        "a page that the device has not is dead there itself, so its window is not live"
    ),
    "host_cache/index:usable: page < device_pages => page <= device_pages #2": (
        "a page that the device has not is dead there itself, so its window is not live"
    ),
    "disagg/receive:fits: self.count > 0 => self.count >= 0": "0 tokens fit, as it says first",
    "prefix_cache/select:_first_of: left > 0 => left >= 0": (
        "fewer than wanted lie below the value that splits, so some are left for those that tie"
    ),
    "prefix_cache/select:_first_of: tied & (left > 0) => (tied)": (
        "fewer than wanted lie below the value that splits, so some are left for those that tie"
    ),
    "prefix_cache/select:_split: where marks => marks | True": (
        "the range that is halved begins lower and ends at the same value"
    ),
    "prefix_cache/select:_split: where marks => marks | True #2": (
        "the range ends higher: where all are taken, all lie below it instead of some at its end"
    ),
    "prefix_cache/select:_split: marked <= k => marked < k": (
        "with as many as wanted, halving ends at the largest of them, too"
    ),
    "prefix_cache/select:_split: k <= 0 => k < 0": "asked for at least one, as `least_k` does",
    "serving/verify:verify: alive & has_drafts => (has_drafts)": (
        "a row that has stopped stands still, so it gets the same answer again"
    ),
    "serving/verify:verify: where alive => alive | True": (
        "moves rows that have stopped, whose nodes past `count` mean nothing"
    ),
    'serving/room:fitting_rows: mode="drop" => mode="clip"': "an order of rows has no row outside",
    "serving/room:fitting_rows: counts > 0 => counts >= 0": (
        "a row that asks for nothing needs no page wherever it stands in the order"
    ),
    "prefix_cache/select:_split.halve: jnp.sum(marks & (key <= middle), dtype=jnp.int32) >= k => "
    "jnp.sum(marks & (key <= middle), dtype=jnp.int32) > k": (
        "just as many as wanted lie below the next value then, and none is left for those at it"
    ),
    "disagg/inbox:standing: look_up(inbox.serial, place) => past the end is the end": (
        "a place that is not inside is read as place 0"
    ),
    **{
        f"disagg/inbox:standing: {change}": (
            "a place that is not there reads as free, and a ticket of no reservation never stands"
        )
        for change in (
            "(ticket.place >= 0) & (ticket.place < inbox.serial.shape[0]) => (ticket.place >= 0)",
            (
                "(ticket.place >= 0) & (ticket.place < inbox.serial.shape[0]) => "
                "(ticket.place < inbox.serial.shape[0])"
            ),
            "ticket.place < inbox.serial.shape[0] => ticket.place <= inbox.serial.shape[0]",
            "where inside => inside | True",
        )
    },
    "replay/grow:_share: where prefilling(rows) => prefilling(rows) | True": (
        "a row that does not prefill has at least its prompt already, so nothing of it is left"
    ),
    **{
        f'{place}: mode="drop" => mode="clip"{again}': (
            "the row, or the request, is the place of a largest value: never outside"
        )
        for place, again in (
            ("replay/grow:_grow_prompt", ""),
            ("replay/grow:_grow_prompt", " #2"),
            ("replay/grow:grow.one", ""),
            ("replay/admit:admit.one", ""),
            ("replay/admit:admit.one", " #2"),
            ("replay/admit:admit.one", " #3"),
            ("serving/finish:finish.one", ""),
        )
    },
    **{
        f'replay/release:retract: mode="drop" => mode="clip"{again}': (
            "a row is sent back while several run, and the newest of them has its request"
        )
        for again in ("", " #2")
    },
    **{
        f'serving/prefill:_note: mode="drop" => mode="clip"{again}': (
            "the rows of a chunk are the first of an order of all rows: never outside"
        )
        for again in ("", " #2", " #3", " #4")
    },
    **{
        f'prefix_cache/locks:_add.up: mode="drop" => mode="clip"{again}': (
            "a walk up the tree passes nothing but nodes"
        )
        for again in ("", " #2")
    },
    **{
        f"prefix_cache/match:note_use: {change}": "the first `pages` nodes of a path are real nodes"
        for change in (
            "nodes > ROOT => nodes >= ROOT",
            "(place < pages) & (nodes > ROOT) => (place < pages)",
        )
    },
    **{
        f"prefix_cache/insert:_read_own: where named => named | True{again}": (
            "a place that is not named is not held, and nothing else is read of its page"
        )
        for again in ("", " #2")
    },
    "prefix_cache/insert:_give_up_copies: replace(state) => without scratch": (
        "scratch comes back as it was; to hand it on only lets the compiler reuse its buffer"
    ),
    "prefix_cache/evict:_losing.choose: look_up(near, some) => past the end is the end": (
        "a place past the nodes is not real, so it is not chosen whatever its keys are"
    ),
    "prefix_cache/evict:_near_leaf: pages > _FEW_LEVELS => pages >= _FEW_LEVELS": (
        "chooses between two ways that find the same nodes"
    ),
    "prefix_cache/evict:_fallen.fall: look_up(inside, cache.parent) => past the end is the end": (
        "a parent is a node, so it has a place"
    ),
    "prefix_cache/leaving:held_by_others: where jnp.any(shared) => jnp.any(shared) | True": (
        "where nothing is shared nothing is found, after a longer look"
    ),
    "prefix_cache/leaving:held_by_others: cache.in_tree & (above > 0) => (above > 0)": (
        "what is above a node is a node or the root, and `may_leave` asks `in_tree` as well"
    ),
    "prefix_cache/table:name_nodes: look_up(cache.hash, nodes) => past the end is the end": (
        "one past the end seeks no place, whatever its hash"
    ),
    "prefix_cache/match:_match: look_up(nodes, jnp.maximum(pages - 1, 0)) => past the end is the "
    "end": "a match has no more pages than the chain has places",
    "prefix_cache/locks:_lock: where inside => inside | True": (
        "what is read for a node outside is not used: `inside` is asked as well"
    ),
    "prefix_cache/locks:_lock: top > ROOT => top >= ROOT": "the root's depth is 0",
    "prefix_cache/own:give_to_tree: column < pages => column <= pages": (
        "of a path the first `pages` nodes are read"
    ),
    "host_cache/claim:_live: look_up(state.full_to_swa, chain.nodes) => past the end is the end": (
        "a chain is of nodes and the root, which all have a place"
    ),
    "request_ring:_acquire: active & (rings != NO_RING) => (active)": (
        "a place that names no ring reads as ring 0 either way"
    ),
    'check:law_says: (LAWS | OWNER_LAWS)[name].__doc__ or "" => '
    "((LAWS | OWNER_LAWS)[name].__doc__)": "every law has a docstring",
    "request_ring:_slots: where known => known | True": "a base is read of known rings alone",
    "request_ring:_look_at: rings < end => rings <= end": (
        "the end stands for places that name no ring, and nobody holds it"
    ),
    "share:_share: jnp.minimum(holders, most - 1) => (holders)": (
        "a page with the most holders is not among those whose count is written"
    ),
    "share:_look: held & ~odd => (held)": "an odd row is a fault: the call is refused whole",
    "rebalance:room_of: where is_full => is_full | True": (
        "full pages of a block of the other kind are absent: not grantable, and in no tree"
    ),
    'rebalance:_refill: mode="drop" => mode="clip"': "an order of blocks has no block outside",
    **{
        f"prefix_cache/select:sum_over_subtrees.look: {change}": (
            "what is above a node is a node, and the root's own place is 0"
        )
        for change in (
            'mode="drop" => mode="clip"',
            'mode="drop" => mode="clip" #2',
            "look_up(above, above) => past the end is the end",
        )
    },
    "plan_free:plan_free_swa: held & ~bare & (left == 0) => (left == 0)": (
        "a page that nobody holds, or that is bare, maps to nothing already (law 7), and a place "
        "that names no page writes past the end"
    ),
    "unified:_block_units: block * BUDGET_SHARE <= units => block * BUDGET_SHARE < units": (
        "at that many units the least wasteful of the small blocks is this one"
    ),
    "faults:fault_counts: count.ndim > 0 and count.size < _MANY => (count.ndim > 0)": (
        "chooses between two ways to count that agree; the arrays of a call are of one length"
    ),
    "plan_free:name_pages: pages < jnp.int32(nowhere(state.full)) => "
    "pages <= jnp.int32(nowhere(state.full))": (
        "first_places marks no place that names no page: such a place reads the end of the list"
    ),
    "disagg/commit:: PrefixCache | None => (PrefixCache)": "a name of a type, for type checkers",
    "disagg/commit:_holding: look_up(table, page_of(last, size)) => past the end is the end": (
        "a table has a place for every page that a reservation can have"
    ),
    "disagg/commit:_holding: first > PAD_SLOT => first >= PAD_SLOT": (
        "the page of the last token is there: no window leaves that one"
    ),
    "disagg/preallocate:_preallocate: where good => good | True": (
        "a length that cannot be is refused for ever, whatever is cached"
    ),
    "serving/decode:_choose: stops & takes_part => (stops)": (
        "a row that takes no part has no new token, and only rows with new ones get a reason"
    ),
    "serving/decode:_note: (count > 0) & (reason > 0) => (count > 0)": (
        "the reason of a row that goes on is 0, and the larger of two is kept"
    ),
    'serving/rollback:roll_back: mode="clip" => mode="fill"': (
        "a path is of numbers of the tree's nodes"
    ),
    "replay/grow:_grow_prompt: first < after => first <= after": (
        "a page that begins where the row ends has its column written when it is opened"
    ),
    "inputs:whole_number: bool | np.bool_ => (bool)": (
        "operator.index refuses the bools of NumPy 2 by itself"
    ),
}
