"""Public reports that concern a prefix cache, reduced to small cases with hand-worked values.

A comment names the report of each case. `a/b` is full_available / swa_available in tokens.
"""

import jax.numpy as jnp
import pytest
from compare import mapping
from prefix_pair import Sizes, World, compiled, damaged

import swa_jax as swa

ABC = list(range(100, 132))  # 32 tokens that are all different
LONG = list(range(100, 148))


def world_of(full, swa_tokens, page=1, window=4, **options):
    return World(swa.PoolConfig(full, swa_tokens, page, window), **options)


# ---- A. the tree's side of a stale mapping --------------------------------------------------


@pytest.mark.parametrize("stale", [False, True])
def test_b07_recovery_takes_the_new_data_and_not_what_a_mapping_once_said(stale):
    # sgl-project/sglang#27586
    world = world_of(32, 32)
    node = world.put(ABC[:4])
    receipt = world.release_swa_lock(world.lock(node.node))
    world.evict(swa_tokens=4)
    assert world.left == (28, 32)
    request = world.extend([], 4)
    before = mapping(world.state)
    assert world.left == (24, 28)
    if stale:  # N's pages name the SWA pages that are R's by now
        to = [before[slot] for slot in request]
        damaged(world, dict(zip(node.slots, to, strict=True)))
    taken = world.insert(ABC[:4], request)
    world.unlock(receipt)
    assert (taken.cached, taken.length) == (4, 4)
    assert world.verify().sizes == Sizes(4, 4, 0, 0)
    assert world.left == (28, 28)
    now = mapping(world.state)
    assert set(now) == set(taken.slots)
    assert set(taken.slots) in (set(node.slots), set(request))
    assert [now[slot] for slot in taken.slots] == [before[slot] for slot in request]
    assert world.match(ABC[:4]).slots == taken.slots


# ---- B. finish with insert ------------------------------------------------------------------


def test_b14_speculation_ends_in_the_tree():
    # sgl-project/sglang-jax#1098
    world = world_of(32, 32, 4, 28)
    slots, committed, seen = world.extend([], 6), 6, []
    for _ in range(3):
        slots = world.extend(slots, committed + 4)
        committed += 2
        seen.append((len(slots), world.left))
    assert seen == [(10, (20, 20)), (12, (20, 20)), (14, (16, 16))]
    taken = world.finish(ABC[:12], slots)
    assert taken.length == 12
    assert world.left == (20, 20)
    assert world.verify().sizes == Sizes(12, 12, 0, 0)


def test_b15_a_reserved_page_does_not_follow_into_the_tree():
    # sgl-project/sglang#31616
    world = world_of(32, 32, 4, 28)
    slots = world.extend(world.extend([], 6), 10)
    assert world.left == (20, 20)
    taken = world.finish(ABC[:7], slots)
    assert taken.length == 4
    assert world.left == (28, 28)
    assert world.verify().sizes == Sizes(4, 4, 0, 0)


# ---- C. window frontier and insert boundary -------------------------------------------------


def test_b24_the_insert_boundary_holds_the_frontier_back():
    # sgl-project/sglang#22470
    world = world_of(64, 64, 8)
    slots = world.extend([], 20)
    assert world.left == (40, 40)
    assert world.leave_window(slots, 0, insert=16) == 8
    assert world.left == (40, 48)
    taken = world.finish(ABC[:20], slots)
    assert (taken.cached, taken.length) == (0, 16)
    assert world.live(taken.slots[:16]) == [False] * 8 + [True] * 8
    assert world.left == (48, 56)
    assert world.verify().sizes == Sizes(16, 8, 0, 0)


def test_b24_a_prefix_without_a_live_page_is_not_inserted():
    # sgl-project/sglang#22470, variant (b)
    world = world_of(64, 64, 8)
    slots = world.extend([], 20)
    assert world.leave_window(slots, 0) == 16
    taken = world.insert(ABC[:20], slots)
    assert (taken.cached, taken.length, taken.node, taken.slots) == (0, 0, 0, slots)
    world.free(slots)
    assert world.left == (64, 64)
    assert world.verify().sizes == Sizes(0, 0, 0, 0)


@pytest.mark.parametrize(
    ("n", "edge"), [(8, 0), (12, 0), (15, 0), (16, 8), (20, 8), (23, 8), (24, 16), (28, 16)]
)
def test_b25_the_last_leaf_keeps_its_page(n, edge):
    # sgl-project/sglang#29860
    world = world_of(64, 64, 8)
    slots = world.extend([], n)
    assert world.leave_window(slots, 0, insert=n // 8 * 8) == edge
    world.finish(ABC[:n], slots)
    assert world.match(ABC[:n]).length == n // 8 * 8
    kept = n // 8 * 8
    assert world.verify().sizes == Sizes(kept, kept - edge, 0, 0)


def test_b31_an_unfinished_insert_carries_the_frontier():
    # sgl-project/sglang#30845, #29350, #36909
    world = world_of(32, 32)
    slots = world.extend([], 12)
    assert world.leave_window(slots, 0, insert=12) == 8
    taken = world.insert(ABC[:12], slots)
    assert taken.length == 12
    assert world.live(taken.slots) == [False] * 8 + [True] * 4
    assert world.left == (20, 28)
    assert world.verify().sizes == Sizes(12, 4, 0, 0)
    assert world.match(ABC[:8]).length == 0
    assert world.match(ABC[:12]).length == 12


def test_b50_a_long_prompt_goes_into_the_tree_chunk_by_chunk():
    # sgl-project/sglang#31205, #22597: window recycling, here of pages that the tree holds
    world = world_of(64, 16, 4, width=48)
    slots, receipt, peak, done = [], None, 0, 0
    for end in range(8, 41, 8):
        short = 8 - world.left[1]
        if short > 0:
            world.evict(swa_tokens=short)
        slots = world.extend(slots, end)
        peak = max(peak, 16 - world.left[1])
        done = max(done, world.leave_window(slots, done, insert=end))
        taken = world.insert(LONG[:end], slots)
        assert taken.length == end
        slots = taken.slots
        if receipt is not None:
            world.unlock(receipt)
        receipt = world.lock(taken.node)
        done = taken.length
        world.verify()
    assert peak <= 16
    assert world.left[0] == 24
    assert world.match(LONG[:40]).length == 40


# ---- D. prefix match ------------------------------------------------------------------------


@pytest.mark.parametrize(("last", "right"), [(3, 3), (4, 12)])
def test_b36_no_match_across_a_tombstone(last, right):
    # sgl-project/sglang#17061
    world = world_of(32, 32)
    tokens = ABC[: 8 + last]
    world.put(tokens, dead=[3, 4, 7])
    assert world.match(tokens).length == right
    assert world.verify().sizes == Sizes(len(tokens), len(tokens) - 3, 0, 0)


@pytest.mark.parametrize(("dead", "dropped"), [(4, 0), (2, 6)])
def test_b37_the_window_is_counted_from_what_is_left_after_a_drop(dead, dropped):
    # vllm-project/vllm#17398
    world = world_of(32, 32, 2)
    world.put(ABC[:8], dead=range(dead))
    assert world.match(ABC[:8]).length == 8
    assert world.match(ABC[:8], 8 - 2).length == dropped


@pytest.mark.parametrize(("tail", "right"), [(4, 0), (8, 12)])
def test_b38_a_divergence_inside_the_last_page(tail, right):
    # vllm-project/vllm#57610
    world = world_of(32, 32, 4)
    world.put(ABC[:16], dead=range(16 - tail))
    found = world.match([*ABC[:14], 7, 8])
    assert found.length == right
    assert len(found.slots) == right


def test_b39_the_branch_tail_leaves_last():
    # sgl-project/sglang#35515
    world = world_of(32, 32)
    taken = world.put(ABC[:12])
    assert world.evict(swa_tokens=4) == (0, 4)
    assert world.live(taken.slots) == [False] * 4 + [True] * 8
    assert world.match(ABC[:12]).length == 12
    # So it goes on until only the last window is left.
    assert world.evict(swa_tokens=4) == (0, 4)
    assert world.match(ABC[:12]).length == 12
    assert world.verify().sizes == Sizes(12, 4, 0, 0)


def test_b40_one_reused_length_for_both_sides():
    # NVIDIA/TensorRT-LLM#10875, #2983
    world = world_of(32, 32, 4)
    node = world.put(ABC[:12], dead=range(4))
    world.free_swa(node.slots[8:12])
    assert world.live(node.slots) == [False] * 4 + [True] * 4 + [False] * 4
    found = world.match(ABC[:16])
    assert found.length == 8
    receipt = world.lock(found.node)
    assert world.left == (20, 28)
    slots = world.extend(found.slots, 16)
    assert world.left == (12, 20)
    taken = world.insert(ABC[:16], slots)
    world.unlock(receipt)
    assert (taken.cached, taken.length) == (12, 16)
    assert world.left == (16, 20)
    assert world.verify().sizes == Sizes(16, 12, 0, 0)
    assert taken.slots[:12] == node.slots
    assert taken.slots[12:] == slots[12:]


# ---- E. locks and tombstones ----------------------------------------------------------------


@pytest.mark.parametrize("a_evicted", [False, True])
def test_b41_a_receipt_holds_across_an_insert_in_the_middle_of_its_path(a_evicted):
    # sgl-project/sglang#24153
    world = world_of(32, 32)
    node = world.put(ABC[:10])
    receipt = world.lock(node.node)
    assert world.locks(node.slots) == [(1, 0)] * 6 + [(1, 1)] * 4
    copies = world.extend([], 8)
    split = world.insert(ABC[:8], copies)
    assert split.slots == node.slots[:8]
    assert world.locks(node.slots) == [(1, 0)] * 6 + [(1, 1)] * 4
    assert world.sizes == Sizes(0, 6, 10, 4)
    if a_evicted:
        assert world.evict(swa_tokens=6) == (0, 6)
    world.unlock(receipt)
    assert world.locks(node.slots) == [(0, 0)] * 10
    assert world.verify().sizes == Sizes(10, 4 if a_evicted else 10, 0, 0)


def test_b41_a_branch_beside_the_locked_path():
    # sgl-project/sglang#24153, with an insert that really branches off
    world = world_of(32, 32)
    node = world.put(ABC[:10])
    receipt = world.lock(node.node)
    branch = world.put([*ABC[:8], 1, 2, 3])
    assert branch.slots[:8] == node.slots[:8]
    assert world.locks(branch.slots[8:]) == [(0, 0)] * 3
    world.unlock(receipt)
    assert world.locks(node.slots) == [(0, 0)] * 10
    assert world.verify().sizes == Sizes(13, 13, 0, 0)


def test_b44_a_leaf_locked_in_full_alone():
    # kvcache-ai/sglang#49
    world = world_of(16, 16, 4, 8)
    node = world.put(ABC[:8])
    receipt = world.release_swa_lock(world.lock(node.node))
    assert world.left == (8, 8)
    assert world.evict(swa_tokens=8) == (0, 8)
    assert world.left == (8, 16)
    assert world.verify().sizes == Sizes(0, 0, 8, 0)
    world.unlock(receipt)
    assert world.verify().sizes == Sizes(8, 0, 0, 0)
    assert world.evict(full=8) == (8, 0)
    assert world.left == (16, 16)
    world.verify()


def test_b45_an_early_swa_release_is_not_repeated():
    # sgl-project/sglang#28161 (review remark)
    world = world_of(32, 32)
    node = world.put(ABC[:10])
    a, b = node.slots[:4], node.slots[6:]  # B's pages inside its window
    world.lock(world.match(ABC[:4]).node)
    first, second = world.lock(node.node), world.lock(node.node)
    seen = [world.locks(b)]
    first = world.release_swa_lock(first)
    seen.append(world.locks(b))
    world.unlock(first)
    first = world.lock(world.insert(ABC[:10], node.slots).node)
    seen.append(world.locks(b))
    world.unlock(first)
    seen.append(world.locks(b))
    world.unlock(second)
    seen.append(world.locks(b))
    full, of_swa = [2, 2, 2, 1, 0], [2, 1, 2, 1, 0]
    assert seen == [[pair] * 4 for pair in zip(full, of_swa, strict=True)]
    assert world.locks(a) == [(1, 1)] * 4
    assert world.verify().sizes == Sizes(6, 6, 4, 4)


def test_b45_as_stay_one_at_every_step():
    # sgl-project/sglang#28161: the SWA refs of A, read after each step
    world = world_of(32, 32)
    node = world.put(ABC[:10])
    a = node.slots[:4]
    world.lock(world.match(ABC[:4]).node)
    first, second = world.lock(node.node), world.lock(node.node)
    assert [of_swa for _, of_swa in world.locks(a)] == [1] * 4
    first = world.release_swa_lock(first)
    assert [of_swa for _, of_swa in world.locks(a)] == [1] * 4
    first = world.release_swa_lock(first)  # nothing is left of it to release
    assert world.locks(node.slots[6:]) == [(2, 1)] * 4
    for receipt in (first, second):
        world.unlock(receipt)
        assert [of_swa for _, of_swa in world.locks(a)] == [1] * 4


# ---- F. eviction driving, admission ---------------------------------------------------------


def test_b46_each_pools_shortfall_goes_to_evict():
    # sgl-project/sglang#29662, #40309
    world = world_of(32, 12, 1, 2)
    for end in (4, 8, 12):
        found = world.match(ABC[:end])
        slots = world.extend(found.slots, end)
        world.finish(ABC[:end], slots)
    assert world.left == (20, 0)
    world.state, grant = compiled("alloc")(world.state, jnp.int32(4), capacity=world.width)
    assert not bool(grant.ok)
    assert (int(grant.full_short), int(grant.swa_short)) == (0, 4)
    assert world.evict(swa_tokens=int(grant.swa_short)) == (0, 4)
    assert world.left == (20, 4)
    assert world.match(ABC[:12]).length == 12
    world.state, grant = compiled("alloc")(world.state, jnp.int32(4), capacity=world.width)
    assert bool(grant.ok)
    assert world.left == (16, 0)
    world.verify(held=4, held_live=4)


def test_b48_a_locked_prefix_pays_for_its_window():
    # sgl-project/sglang#32379
    world = world_of(32, 16, 4, 8)
    world.put(ABC[:8])
    found = world.match(ABC[:9], 8)
    receipt = world.lock(found.node)
    assert found.length == 8
    need = -(-min(1 + 3, 8) // 4) * 4 + 4
    assert need == 8 == world.left[1]
    slots, done = world.extend(found.slots, 9), 8
    for n in range(10, 13):
        done = world.leave_window(slots, done)
        slots = world.extend(slots, n)
    assert world.verify(held=4, held_live=4).sizes == Sizes(0, 0, 8, 8)
    world.unlock(receipt)
    world.finish(ABC[:12], slots)
    assert world.verify().sizes == Sizes(12, 12, 0, 0)
