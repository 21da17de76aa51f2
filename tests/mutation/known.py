"""Known bugs of allocators, caches and loops of this kind, put back by hand into the source.

The numbers are those of public reports that docstrings of the package and tests name. What the
design leaves no room for (two lists of free pages, contiguous placement) is not here.
"""

from __future__ import annotations

from .patch import Mutant


def bug(
    file: str, where: str, why: str, old: str, new: str, seen_by: tuple[str, str] | None = None
) -> Mutant:
    """A mutant whose `old` must stand in its file once."""
    return Mutant(f"{file}.py", where, old, new, why, seen_by=seen_by)


CORE = [
    bug(
        "plan_free",
        "plan_free_swa",
        "B01 a page is freed whole and stays mapped",
        "unmap=held & ~bare & (left == 0),",
        "unmap=jnp.zeros_like(held),",
    ),
    bug(
        "grant",
        "commit_grant",
        "B02 only pages that get an SWA side have their mapping written",
        "mapping = put(mapping, plan.map_pages, plan.map_values)",
        "mapping = put(mapping, jnp.where(plan.map_values > 0, plan.map_pages, "
        "mapping.shape[0]), plan.map_values)",
        ("test_seeds.py", "recycled"),
    ),
    bug(
        "plan_free",
        "commit_free",
        "B03 an open group leaves the mapping for later",
        "full_to_swa=put(state.full_to_swa, plan.unmap, jnp.int32(UNMAPPED)),",
        "full_to_swa=put(state.full_to_swa, jnp.where(defer, 2**30, plan.unmap), "
        "jnp.int32(UNMAPPED)),",
    ),
    bug(
        "group",
        "_begin",
        "B04 a second begin forgets the queue",
        "group_open=jnp.ones_like(state.group_open),",
        "group_open=jnp.ones_like(state.group_open), "
        "full=replace(state.full, num_pending=jnp.zeros_like(state.full.num_pending)),",
        ("test_scenarios.py", "b04"),
    ),
    bug(
        "group",
        "_end",
        "B04 the end releases one pool alone",
        "swa=settle(state.swa),",
        "swa=state.swa,",
    ),
    bug(
        "plan_free",
        "swa_side",
        "B05 a page without an SWA side frees SWA page 0",
        "return pages, once(jnp.where(pages != UNMAPPED, holders_of(state.swa, pages), 0))",
        "return pages, once(holders_of(state.swa, pages))",
    ),
    bug(
        "grant",
        "make_plan",
        "B06 full pages leave while SWA is short",
        "takes_full, takes_swa = takes_full & ok, takes_swa & ok",
        "takes_full, takes_swa = takes_full & (verdict.full_short == 0), takes_swa & ok",
    ),
    bug(
        "mapping",
        "_set",
        "B07 setting does not move: two full pages map to one SWA page",
        "mapping = jnp.where(moved, jnp.int32(UNMAPPED), state.full_to_swa)",
        "mapping = state.full_to_swa",
    ),
    bug(
        "plan_free",
        "plan_free_full",
        "B08 the full side of a mapped page goes alone",
        "full=held & ~mapped,",
        "full=held,",
    ),
    bug(
        "mapping",
        "_translate",
        "B09 the last page is outside",
        "inside = (slots >= 0) & (slots < jnp.int32(config.full_tokens + size))",
        "inside = (slots >= 0) & (slots < jnp.int32(config.full_tokens))",
    ),
    bug(
        "plan_free",
        "slots_to_pages",
        "B09 slots of the last page are a fault",
        "outside = (slots < 0) | (slots >= jnp.int32(config.full_tokens + size))",
        "outside = (slots < 0) | (slots >= jnp.int32(config.full_tokens))",
    ),
    bug(
        "pool",
        "give_back",
        "B12 what is freed outside a group waits for one to end",
        "num_free=pool.num_free + jnp.where(defer, 0, count),\n"
        "        num_pending=waiting + jnp.where(defer, count, 0),",
        "num_free=pool.num_free,\n        num_pending=waiting + count,",
    ),
    bug(
        "pool",
        "give_back",
        "B12 a free outside a group writes over what a group queued",
        "start = jnp.where(defer, pool.num_free + waiting, pool.num_free)",
        "start = pool.num_free",
    ),
    bug(
        "pool",
        "_onward",
        "the ring does not go round",
        "return jnp.where(place < 0, place + size, place)",
        "return jnp.where(place < 0, place + size, 0)",
    ),
    bug(
        "pool",
        "take",
        "granted pages are still free: nobody holds them",
        "count_holders(pool, pages, jnp.int32(1)),",
        "count_holders(pool, pages, jnp.int32(0)),",
    ),
    bug(
        "last_page",
        "look_at_last_page",
        "two rows go on in one page",
        "crooked = held & ~(straight & first) & ~shared",
        "crooked = held & ~straight & ~shared",
    ),
    bug(
        "plan_extend",
        "plan_extend",
        "B18 more tokens than the answer holds are cut off in silence",
        "faults = faults + fault_counts(bad_length=too_many)",
        "faults = faults + fault_counts(bad_length=too_many & False)",
    ),
    bug(
        "plan_extend",
        "read_rows",
        "B54 the SWA tail begins a page late",
        "swa_from = jnp.where(tail > 0, page_of(seq - tail, size), jnp.int32(_NO_PAGE))",
        "swa_from = jnp.where(tail > 0, pages_for(seq - tail, size), jnp.int32(_NO_PAGE))",
    ),
    bug(
        "window",
        "_free_out_of_window",
        "B18 a frontier past the table frees what the table has",
        "takes_part = active & ~short & ~odd & ~wide",
        "takes_part = active & ~short & ~odd",
    ),
    bug(
        "window",
        "frontier",
        "B24 the insert boundary is not heeded",
        "edge = jnp.minimum(edge, _dead_below(config, kept))",
        "edge = edge + 0 * kept",
    ),
    bug(
        "window",
        "frontier",
        "B25 the frontier runs into a page",
        "return floor_to_page(edge, config.page_size)",
        "return floor_to_page(edge + jnp.int32(config.page_size - 1), config.page_size)",
    ),
    bug(
        "window",
        "_dead_below",
        "B29 windows are left by multiples of a window",
        "return jnp.maximum(tokens - window, 0)",
        "return jnp.maximum(tokens - window - jax.lax.rem(tokens, window), 0)",
    ),
    bug(
        "window",
        "_dead_below",
        "B33 a window of one token less",
        "return jnp.maximum(tokens - window, 0)",
        "return jnp.maximum(tokens - window + 1, 0)",
    ),
    bug(
        "window",
        "free_out_of_window",
        "B34 one page a call, whatever has left the window",
        "pages = most if max_pages is None else min(int(max_pages), most)",
        "pages = 1",
    ),
    bug(
        "share",
        "_share",
        "a fork takes no share in the SWA side",
        "swa=count_holders(state.swa, swa, jnp.minimum(swa_holders, most - 1) + 1),",
        "swa=state.swa,",
    ),
    bug(
        "faults",
        "add_faults",
        "counters wrap round",
        "return jnp.where(more > _MOST - faults, jnp.int32(_MOST), faults + more)",
        "return faults + more",
    ),
]

CACHE = [
    bug(
        "prefix_cache/match",
        "usable_pages",
        "B36 a match goes across a tombstone",
        "good = (place < chain.count) & (in_window == 0)",
        "good = place < chain.count",
        ("test_prefix_scenarios.py", "b36"),
    ),
    bug(
        "prefix_cache/match",
        "window_start",
        "B37 a page of the window may be missing",
        "return jax.lax.div(frontier(config.pool, tokens, tokens), size)",
        "return jax.lax.div(frontier(config.pool, tokens, tokens), size) + 1",
        ("test_prefix_scenarios.py", "b37"),
    ),
    bug(
        "prefix_cache/evict",
        "_losing",
        "B39 the end of a branch leaves like the rest",
        "worth = jnp.where(close, 2, in_kept_window(cache.config.pool, down).astype(jnp.int32))",
        "worth = jnp.where(close, 0, in_kept_window(cache.config.pool, down).astype(jnp.int32))",
        ("test_prefix_scenarios.py", "b39"),
    ),
    bug(
        "prefix_cache/locks",
        "_unlock",
        "B41 an unlock looks up the boundary again",
        "_add(cache, node, receipt.boundary, -1)",
        "_add(cache, node, jnp.maximum(cache.depth[node] - 1, 0), -1)",
        ("test_prefix_scenarios.py", "b41"),
    ),
    bug(
        "prefix_cache/leaving",
        "may_lose_swa",
        "B44 an SWA page goes from under its lock",
        "return alone & (cache.swa_locks == 0)",
        "return alone",
        ("test_prefix_cache.py", "pinned"),
    ),
    bug(
        "prefix_cache/locks",
        "_release_swa",
        "B45 an SWA lock that was given up is given up again",
        "return receipts.renew(replace(cache, swa_locks=locks), receipt, bottom, boundary)",
        "return receipts.renew(replace(cache, swa_locks=locks), receipt, bottom, receipt.boundary)",
        ("test_prefix_scenarios.py", "b45"),
    ),
    bug(
        "prefix_cache/evict_lacking",
        "evict_lacking",
        "B46 only full pages that are lacking are evicted",
        "swa_tokens=tokens(swa, pool.swa_pages),",
        "swa_tokens=0,",
        ("test_disagg_calls.py", "b46"),
    ),
    bug(
        "prefix_cache/insert",
        "_new_length",
        "B31 a leaf may be a tombstone",
        "ends = wanted & (place < end) & own.live",
        "ends = wanted & (place < end)",
        ("test_prefix_scenarios.py", "b31|b24"),
    ),
    bug(
        "prefix_cache/insert",
        "_give_up_copies",
        "B40 a tombstone gets no SWA side of the copy",
        "recovers = copy & own.live & own.alone & ((node_swa == UNMAPPED) | (node_swa == swa))",
        "recovers = jnp.zeros_like(copy)",
        ("test_prefix_scenarios.py", "b40"),
    ),
    bug(
        "prefix_cache/insert",
        "_give_up_copies",
        "B40 the caller's copies of cached pages are not freed",
        "return free(moved, jnp.where(copy, own.pages",
        "return free(moved, jnp.where(copy & False, own.pages",
        ("test_prefix_scenarios.py", "b40|b15"),
    ),
    bug(
        "prefix_cache/find",
        "_first_bad",
        "a page is believed by its hash",
        "right = right & jnp.all(cache.tokens.at[nodes].get("
        'mode="fill", fill_value=0) == keys.tokens, 1)',
        "right = right & True",
        ("test_prefix_cache.py", "hash|collides"),
    ),
    bug(
        "prefix_cache/find",
        "_first_bad",
        "tenants see each other's pages",
        "right = right & (look_up(cache.namespace, nodes, 0) == keys.namespace)",
        "right = right & True",
        ("test_prefix_cache.py", "namespace"),
    ),
]

LOOPS = [
    bug(
        "serving/rollback",
        "roll_back",
        "B14 refused drafts keep their pages",
        "surplus = jnp.where(column < end[:, None], found, PAD_SLOT)",
        "surplus = jnp.full_like(found, PAD_SLOT)",
        ("test_serving_scenarios.py", "b14"),
    ),
    bug(
        "serving/rollback",
        "roll_back",
        "B15 the page after the kept ones stays",
        "first = pages_for(length + kept, size)",
        "first = pages_for(length + kept, size) + 1",
        ("test_serving_scenarios.py", "b14"),
    ),
    bug(
        "serving/room",
        "_short",
        "B46 the SWA shortfall is not handed to evict",
        "return wanted - full_free - full.num_pending, wanted - swa_free - of_swa.num_pending",
        "return wanted - full_free - full.num_pending, jnp.zeros_like(wanted)",
        ("test_serving_scenarios.py", "b46"),
    ),
    bug(
        "serving/admit",
        "promise_fits",
        "B47 a budget in tokens where pages are granted",
        "full_need = pages_for(known, size) - page_of(cached, size)",
        "full_need = page_of(known - cached, size)",
        ("test_serving_scenarios.py", "b47"),
    ),
    bug(
        "replay/admit",
        "_fits",
        "B50 B51 a long prompt is charged whole",
        "swa_need = most_swa_pages(config.pool, tokens)",
        "swa_need = pages_for(tokens, config.pool.page_size)",
        ("test_replay.py", "agrees.*page 4"),
    ),
    bug(
        "replay/release",
        "vacate",
        "a row that ends keeps its frontier",
        "evicted=put(rows.evicted, 0),",
        "evicted=rows.evicted,",
        ("test_replay_scenarios.py", "b5"),
    ),
    bug(
        "replay/grow",
        "_share",
        "a row behind one that was cut short goes on dealing",
        "chunk = jnp.where(most < want, 0, chunk - want)",
        "chunk = chunk - want",
        ("test_replay_shares.py", ""),
    ),
]

TIERS = [
    bug(
        "disagg/preallocate",
        "_need",
        "B54 SWA is reserved for the whole prompt",
        "edge = frontier(pool, length, kept)",
        "edge = frontier(pool, length, kept) * 0",
        ("test_disagg_calls.py", "b54"),
    ),
    bug(
        "disagg/preallocate",
        "insert_boundary",
        "B24 the window of the last whole page is not asked for",
        "return floor_to_page(whole, cache.config.pool.page_size)",
        "return whole",
        ("test_disagg_calls.py", "what_was_committed"),
    ),
    bug(
        "disagg/preallocate",
        "_make_room",
        "B46 only the full shortfall is evicted",
        "return evict_lacking(*sides, full, swa)[:2]",
        "return evict_lacking(*sides, full, jnp.zeros_like(swa))[:2]",
        ("test_disagg_calls.py", "b46"),
    ),
    bug(
        "disagg/inbox",
        "standing",
        "a spent ticket works",
        "stands = inside & same & (ticket.serial != NO_RESERVATION)",
        "stands = inside & (ticket.serial != NO_RESERVATION)",
        ("test_disagg_calls.py", "spent_ticket"),
    ),
    bug(
        "disagg/commit",
        "_commit",
        "a commit does not wait for every piece",
        "ok = stands & has_arrived(inbox)[place]",
        "ok = stands",
        ("test_disagg_calls.py", "waits_for_every"),
    ),
    bug(
        "disagg/abort",
        "_abort",
        "an abort frees the prefix, too",
        "own = own_pages(inbox)[0][place]",
        "own = inbox.table[place] > PAD_SLOT",
        ("test_disagg_calls.py", "leaves_the_prefix"),
    ),
    bug(
        "host_cache/claim",
        "claim",
        "B55 the window is not brought back",
        "lacks = in_window & ~_live(state, chain)",
        "lacks = in_window & ~_live(state, chain) & False",
        ("test_host_scenarios.py", "b55"),
    ),
]

KNOWN: list[Mutant] = [*CORE, *CACHE, *LOOPS, *TIERS]
