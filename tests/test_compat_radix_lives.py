"""Lives of requests over `SWARadixCache`: whatever is called in whatever order, KV is the right KV.

The model writes into each slot, of either pool, which prefix its token ends. What a request stands
on must read as its own text: in full KV all along, in SWA KV for one window at its end.
"""

from dataclasses import replace

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
)

from swa_jax.compat.sgl_jax.keys import RadixKey
from swa_jax.compat.sgl_jax.params import DecLockRefParams, EvictParams, MatchPrefixParams
from swa_jax.compat.sgl_jax.tree_node import TreeNode
from tests.test_compat_radix_cache import FULL, SWA, WINDOW, Engine, Request

PAGE, MOST, ROWS = 2, 16, 3  # tokens in a page, tokens of a request, requests at once
Path = tuple[object, ...]  # the namespace, then tokens


class Lives(RuleBasedStateMachine):
    """Requests that come, grow, leave windows behind, share what they have, and go."""

    def __init__(self):
        super().__init__()
        self.engine = Engine(PAGE)
        self.running: dict[int, Request] = {}
        self.pins: list[tuple[TreeNode, DecLockRefParams]] = []
        self.full_kv: dict[int, Path] = {}
        self.swa_kv: dict[int, Path] = {}

    # What a request is.

    def held(self, request: Request) -> int:
        return len(request.fill_ids)

    def slots(self, request: Request) -> np.ndarray:
        return self.engine.rows.req_to_token[request.req_pool_idx, : self.held(request)]

    def text(self, request: Request) -> list[int]:
        return request.origin_input_ids + request.output_ids

    def swa_slots(self, slots: np.ndarray) -> np.ndarray:
        return np.asarray(self.engine.pool.full_to_swa_index_mapping[slots])

    # Rules.

    @precondition(lambda self: len(self.running) < ROWS)
    @rule(
        prompt=st.lists(st.integers(0, 1), min_size=1, max_size=10),
        space=st.sampled_from([None, None, "a"]),
    )
    def admit(self, prompt, space):
        row = min(set(range(ROWS)) - set(self.running))
        request = Request(prompt, row, extra_key=space)
        key = RadixKey(prompt[:-1], space)  # the last token is always computed
        expected = self.longest_usable(key)
        found = self.engine.cache.match_prefix(MatchPrefixParams(key))
        hit = len(found.device_indices)
        assert hit == expected
        request.last_node = found.last_device_node
        locked = self.engine.cache.inc_lock_ref(found.last_device_node)
        request.swa_uuid_for_lock = locked.swa_uuid_for_lock
        request.cache_protected_len = hit
        request.fill_ids = prompt[:hit]
        self.engine.rows.write((row, slice(0, hit)), found.device_indices)
        self.running[row] = request

    @precondition(lambda self: self.running)
    @rule(which=st.integers(0, ROWS - 1), tokens=st.integers(1, 6), new=st.integers(0, 1))
    def grow(self, which, tokens, new):
        """Prefills a chunk, or decodes a token."""
        request = self.pick(which)
        before = self.held(request)
        if before == len(self.text(request)):
            if before == MOST:
                return
            request.output_ids.append(new)
        after = min(before + tokens, len(self.text(request)))
        last = int(self.slots(request)[-1]) if before else -1
        pool = self.engine.pool
        slots = pool.alloc_extend([before], [after], [last], after - before)
        if slots is None:
            self.engine.cache.evict(EvictParams(after - before + PAGE, after - before + PAGE))
            slots = pool.alloc_extend([before], [after], [last], after - before)
        if slots is None:
            self.retract(which)
            return
        self.engine.rows.write((request.req_pool_idx, slice(before, after)), slots)
        request.fill_ids = self.text(request)[:after]
        of_swa = self.swa_slots(slots)
        for place in range(before, after):
            path = (request.extra_key, *request.fill_ids[: place + 1])
            self.full_kv[int(slots[place - before])] = path
            self.swa_kv[int(of_swa[place - before])] = path

    @precondition(lambda self: self.running)
    @rule(which=st.integers(0, ROWS - 1))
    def leave_window(self, which):
        request = self.pick(which)
        self.engine.cache.evict_req_swa(request, self.held(request))

    @precondition(lambda self: self.running)
    @rule(which=st.integers(0, ROWS - 1))
    def share(self, which):
        request = self.pick(which)
        if not request.fill_ids:
            return
        self.engine.cache.cache_unfinished_req(request)
        whole = len(request.fill_ids) // PAGE * PAGE
        assert request.cache_protected_len == request.last_matched_prefix_len == whole
        assert request.prefix_indices.tolist() == self.slots(request).tolist()

    @precondition(lambda self: self.running)
    @rule(which=st.integers(0, ROWS - 1))
    def finish(self, which):
        request = self.pick(which)
        request.committed = self.held(request)
        self.engine.cache.cache_finished_req(request)
        del self.running[request.req_pool_idx]

    @precondition(lambda self: self.running)
    @rule(which=st.integers(0, ROWS - 1))
    def retract(self, which):
        request = self.pick(which)
        request.committed = self.held(request)
        self.engine.cache.cache_finished_req(request, is_insert=False)
        del self.running[request.req_pool_idx]

    @rule(full=st.integers(0, 8), of_swa=st.integers(0, 8))
    def evict(self, full, of_swa):
        cache, pool = self.engine.cache, self.engine.pool
        before = self.engine.available
        could = cache.full_evictable_size(), cache.swa_evictable_size()
        total = cache.total_size()
        gone = cache.evict(EvictParams(full, of_swa))
        went = gone.num_tokens_evicted, gone.swa_num_tokens_evicted
        assert self.engine.available == (before[0] + went[0], before[1] + went[1])
        assert cache.total_size() == (total[0] - went[0], total[1] - went[1])
        assert went[0] >= min(full, could[0])
        assert went[1] >= min(of_swa, could[1])
        assert pool.available_size() == min(self.engine.available)

    @precondition(lambda self: len(self.pins) < 2)
    @rule(prompt=st.lists(st.integers(0, 1), max_size=12))
    def pin(self, prompt):
        node = self.engine.cache.match_prefix(MatchPrefixParams(RadixKey(prompt))).best_match_node
        self.pins.append((node, self.engine.cache.inc_lock_ref(node).to_dec_params()))

    @precondition(lambda self: self.pins)
    @rule()
    def unpin(self):
        node, params = self.pins.pop(0)
        assert not node.evicted
        self.engine.cache.dec_lock_ref(node, params)

    def pick(self, which: int) -> Request:
        rows = sorted(self.running)
        return self.running[rows[which % len(rows)]]

    # What must be so.

    def walk(self) -> dict[Path, tuple[int, bool]]:
        """Slot and SWA side of every token in the tree, by the prefix that it ends."""
        out: dict[Path, tuple[int, bool]] = {}
        stack: list[tuple[TreeNode, Path]] = [(self.engine.cache.root_node, ())]
        while stack:
            node, path = stack.pop()
            for child in node.children.values():
                assert child.parent is node
                key, value = child.key, child.value
                assert key is not None
                assert value is not None
                below = path or (key.extra_key,)
                for token, slot in zip(key.token_ids, value, strict=True):
                    below = (*below, token)
                    out[below] = int(slot), not child.swa_tombstone
                stack.append((child, below))
        return out

    def longest_usable(self, key: RadixKey) -> int:
        tree, best, since = self.walk(), 0, MOST
        for end in range(PAGE, len(key) + 1, PAGE):
            found = tree.get((key.extra_key, *key.token_ids[:end]))
            if found is None:
                break
            since = since + PAGE if found[1] else 0
            best = end if since >= WINDOW else best
        return best

    @invariant()
    def every_slot_holds_its_text(self):
        tree = self.walk()
        for path, (slot, live) in tree.items():
            assert self.full_kv[slot] == path
            of_swa = int(self.swa_slots(np.array([slot]))[0])
            assert (of_swa > 0) == live
            if live:
                assert self.swa_kv[of_swa] == path
        for request in self.running.values():
            slots = self.slots(request)
            of_swa, count = self.swa_slots(slots), self.held(request)
            for place, slot in enumerate(slots):
                path = (request.extra_key, *request.fill_ids[: place + 1])
                assert self.full_kv[int(slot)] == path
                if place >= count - WINDOW:
                    assert self.swa_kv[int(of_swa[place])] == path

    @invariant()
    def sizes_add_up(self):
        engine, cache = self.engine, self.engine.cache
        own = [
            {int(slot) // PAGE for slot in self.slots(r)[r.cache_protected_len :]}
            for r in self.running.values()
        ]
        full, of_swa = cache.total_size()
        assert engine.available[0] + full + sum(map(len, own)) * PAGE == FULL
        mapped = engine.pool.count_swa_mapped(np.array(sorted({p * PAGE for o in own for p in o})))
        assert engine.available[1] + of_swa + mapped * PAGE == SWA
        tree = self.walk()
        assert (full, of_swa) == (len(tree), sum(live for _, live in tree.values()))
        engine.check()

    def teardown(self):
        for row in sorted(self.running):
            self.finish(row) if row % 2 else self.retract(row)
        while self.pins:
            self.unpin()
        assert self.engine.cache.full_protected_size() == 0
        assert self.engine.cache.swa_protected_size() == 0
        self.engine.cache.evict(EvictParams(FULL))
        assert self.engine.available == (FULL, SWA)
        self.engine.check()


TestLives = Lives.TestCase
TestLives.settings = settings(max_examples=12, stateful_step_count=20, deadline=None)


def test_life_of_one_request():
    """A prompt, chunk by chunk, then decode past its window; a second one hits all of it."""
    lives = Lives()
    lives.admit([0, 1] * 4, None)
    for step in range(8):
        lives.grow(0, 4, step % 2)
        lives.leave_window(0)
        lives.share(0)
        lives.every_slot_holds_its_text()
        lives.sizes_add_up()
    request = replace(lives.pick(0))
    assert request.swa_evicted_seqlen > 0
    lives.finish(0)
    text = lives.text(request)
    assert lives.longest_usable(RadixKey(text)) == len(request.fill_ids) // PAGE * PAGE
    lives.teardown()
