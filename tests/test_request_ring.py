"""Request rings: who gets one, where a token lives in it, and that the full side pages alone."""

import functools
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import swa_jax as swa
from swa_jax import prefix_cache
from swa_jax.host_cache import HostConfig
from swa_jax.saved_state.leaves import _held_pages
from swa_jax.serving import ServingConfig

CONFIG = swa.PoolConfig.request_ring(64, 3, page_size=4, sliding_window=9, extra_tokens=2)
ONE = swa.PoolConfig.request_ring(32, 2, sliding_window=4)
B, CAPACITY = 4, 16


def no_faults(state):
    swa.check(state)
    assert not any(swa.faults(state).values())


def only(**counts):
    return {kind: counts.get(kind, 0) for kind in swa.FAULT_KINDS}


# ---- the configuration -----------------------------------------------------------------------


def test_a_ring_is_whole_pages_with_a_window_and_what_a_step_writes():
    assert (CONFIG.ring_tokens, CONFIG.swa_units, CONFIG.swa_tokens) == (12, 3, 36)
    assert (ONE.ring_tokens, ONE.swa_units) == (5, 2)
    exact = swa.PoolConfig.request_ring(64, 1, page_size=4, sliding_window=7)
    assert exact.ring_tokens == 8  # the window and the token that sees it
    assert swa.PoolConfig.request_ring(64, 1, page_size=4, sliding_window=8).ring_tokens == 12
    assert swa.PoolConfig(64, 32, 4, 8).swa_units == 8


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: swa.PoolConfig.request_ring(64, 0, sliding_window=4), "requests must be"),
        (lambda: swa.PoolConfig.request_ring(64, 2, sliding_window=0), "sliding_window must"),
        (lambda: swa.PoolConfig.request_ring(65, 2, page_size=4, sliding_window=4), "try 64"),
        (
            lambda: swa.PoolConfig.request_ring(64, 2, sliding_window=4, extra_tokens=-1),
            "extra_tokens must be",
        ),
        (
            lambda: swa.PoolConfig.request_ring(64, 2**28, page_size=4, sliding_window=8),
            "the most for this ring is 178956970 requests",
        ),
        (lambda: swa.PoolConfig(64, 32, 4, 8, ring_tokens=8), "12 or more"),
        (lambda: swa.PoolConfig(64, 32, 4, 8, ring_tokens=12), "swa_tokens a multiple"),
        (lambda: swa.PoolConfig(64, 32, 4, None, ring_tokens=16), "they need sliding_window"),
        (lambda: swa.PoolConfig(64, 32, 4, 8, chunked=True, ring_tokens=16), "neither chunked"),
        (lambda: prefix_cache.init(CONFIG), "cannot have a prefix cache: what a window reads"),
        (lambda: HostConfig.beside(CONFIG, 64, 64), "has no prefix cache"),
        (lambda: ServingConfig(CONFIG, 32), "full and sliding"),
        (lambda: swa.translate_full_to_swa(swa.init(CONFIG), [4]), "see swa_jax.ring_slots"),
        (lambda: swa.set_full_to_swa_mapping(swa.init(CONFIG), [4], [4]), "ring_slots"),
        (lambda: swa.clear_full_to_swa_mapping(swa.init(CONFIG), [4]), "ring_slots"),
        (lambda: swa.page_tables(swa.init(CONFIG), [[4]], [1], [1]), "page_tables needs"),
        (lambda: swa.ring_acquire(swa.init(swa.PoolConfig(64, 32, 4, 8)), [0]), "request rings"),
        (lambda: swa.ring_release(swa.init(swa.PoolConfig(64, 32, 4, 8)), [0]), "request rings"),
        (lambda: swa.ring_slots(swa.PoolConfig(64, 32, 4, 8), [1], [0]), "request rings"),
        (lambda: swa.ring_slots(CONFIG, [1, 2], [0]), "one for each row of positions"),
        (lambda: swa.ring_slots(CONFIG, [1], [0], [1, 2]), "one for each row of positions"),
        (lambda: swa.ring_acquire(swa.init(CONFIG), [0, 0], [True]), "agree in length"),
    ],
)
def test_what_cannot_work_is_refused(call, words):
    with pytest.raises(ValueError, match=words):
        call()


# ---- rings -----------------------------------------------------------------------------------


def test_acquire_is_idempotent_and_all_or_nothing():
    state, grant = swa.ring_acquire(swa.init(CONFIG), [0, 0, 0, 0], [True, True, False, False])
    assert bool(grant.ok)
    assert grant.rings.tolist() == [1, 2, 0, 0]
    assert int(swa.swa_available_size(state)) == 12
    assert int(swa.available_size(state)) == int(swa.full_available_size(state)) == 64
    again, same = swa.ring_acquire(state, grant.rings, [True, True, False, False])
    assert same.rings.tolist() == grant.rings.tolist()
    assert all(map(np.array_equal, jax.tree.leaves(again), jax.tree.leaves(state)))
    after, refused = swa.ring_acquire(state, grant.rings)  # two more rows, one ring
    assert not refused.ok
    assert int(refused.short) == 1
    assert refused.rings.tolist() == grant.rings.tolist()
    assert all(map(np.array_equal, jax.tree.leaves(after), jax.tree.leaves(state)))
    no_faults(after)


def test_rings_that_are_not_the_rows_own_are_refused():
    state, _ = swa.ring_acquire(swa.init(CONFIG), [0, 0])
    for rings, fault in (
        ([3, 0], "out_of_range"),
        ([-1, 0], "out_of_range"),
        ([9, 0], "out_of_range"),
        ([1, 1], "misaligned"),
    ):
        after, grant = swa.ring_acquire(state, rings)
        assert not grant.ok
        assert int(grant.short) == 0
        assert swa.faults(after) == only(**{fault: 1})
        assert int(after.swa.num_free) == 1
        swa.check(after)


def test_release_is_idempotent_and_counts_misuse():
    state, _ = swa.ring_acquire(swa.init(CONFIG), [0, 0])
    state = swa.ring_release(state, [2, 0])
    no_faults(state)
    assert int(swa.swa_available_size(state)) == 24
    state = swa.ring_release(state, [2, 1])  # 2 again
    state = swa.ring_release(state, [4, -7])
    assert swa.faults(state) == only(double_free=1, out_of_range=2)
    assert int(swa.swa_available_size(state)) == 36
    state, grant = swa.ring_acquire(state, [0, 0])
    state = swa.ring_release(state, jnp.full(2, grant.rings[0]))
    assert swa.faults(state) == only(double_free=2, out_of_range=2)
    assert int(swa.swa_available_size(state)) == 24
    swa.check(state)


def test_a_group_queues_rings_as_it_queues_pages():
    state, grant = swa.ring_acquire(swa.init(CONFIG), [0, 0])
    state = swa.ring_release(swa.free_group_begin(state), grant.rings)
    assert int(swa.swa_available_size(state)) == 12
    swa.check(state)
    state = swa.free_group_end(state)
    assert int(swa.swa_available_size(state)) == 36
    no_faults(state)


# ---- the full side alone is paged ------------------------------------------------------------


def test_grants_and_frees_see_the_full_side_alone():
    state = swa.init(CONFIG)
    state, grant = swa.alloc_extend(state, [0, 0], [6, 3], [-1, -1], capacity=CAPACITY)
    assert grant.slots[:9].tolist() == [4, 5, 6, 7, 8, 9, 12, 13, 14]
    last = grant.slots[jnp.array([5, 8])]
    state, step = swa.alloc_decode(state, [7, 4], last)
    assert step.slots.tolist() == [10, 15]
    state, tail = swa.alloc_extend_swa_tail(state, [0], [9], [-1], [2], capacity=CAPACITY)
    state, whole = swa.alloc(state, 8, capacity=CAPACITY)
    assert tail.count == 9
    assert int(swa.full_available_size(state)) == 64 - 4 * 8
    assert int(swa.swa_available_size(state)) == 36
    assert not state.full_to_swa.any()
    before = state
    held = jnp.concatenate([grant.slots, tail.slots, whole.slots])
    state = swa.free_swa(swa.free_swa_grouped(state, held), held)
    state = swa.free_swa(swa.free_swa_segment(state, grant.slots[:4]), held, owner=before)
    state, edge = swa.free_out_of_window(state, held[None, :], [40], [0])
    assert edge.tolist() == [28]
    assert all(map(np.array_equal, jax.tree.leaves(state), jax.tree.leaves(before)))
    state = swa.free_full(state, whole.slots)
    state = swa.free(state, jnp.concatenate([grant.slots, tail.slots]))
    assert int(swa.full_available_size(state)) == 64
    no_faults(state)


def test_want_of_full_pages_is_a_refusal_and_want_of_rings_is_none():
    state, _ = swa.ring_acquire(swa.init(CONFIG), [0, 0, 0])
    state, grant = swa.alloc(state, 48, capacity=64)
    assert bool(grant.ok)
    after, grant = swa.alloc_extend(state, [0], [20], [-1], capacity=32)
    assert (int(grant.full_short), int(grant.swa_short)) == (1, 0)
    no_faults(after)


def test_shares_and_copies_are_of_full_pages():
    state, grant = swa.alloc_extend(swa.init(CONFIG), [0], [6], [-1], capacity=CAPACITY)
    state = swa.share(state, grant.slots)
    state, copies = swa.copy_on_write(state, [6], grant.slots[5:6])
    assert bool(copies.ok)
    assert copies.last_loc.tolist() == [13]
    state, step = swa.alloc_decode(state, [7], copies.last_loc)
    assert step.slots.tolist() == [14]
    state = swa.free(swa.free(state, grant.slots), jnp.array([4, 12]))
    assert int(swa.full_available_size(state)) == 64
    no_faults(state)


def test_a_broken_state_is_told():
    state, _ = swa.alloc(swa.init(CONFIG), 4, capacity=CAPACITY)
    state, _ = swa.ring_acquire(state, [0])
    mapping = state.full_to_swa.at[1].set(1, mode="drop")
    mapped = replace(state, full_to_swa=mapping)
    with pytest.raises(swa.InvariantError, match="no_stale_mapping"):
        swa.check(mapped)


def test_a_ring_costs_a_few_bytes_and_saves_as_its_pages():
    pages = swa.PoolConfig(64, 36, 4, 9)
    assert swa.state_bytes(CONFIG) == swa.state_bytes(pages) - 8 * (9 - 3)
    state, _ = swa.ring_acquire(swa.init(CONFIG), [0, 0, 0])
    state = swa.ring_release(state, [1, 0, 0])
    assert _held_pages(state)["swa"].tolist() == [4, 5, 6, 7, 8, 9]


# ---- where a token lives ---------------------------------------------------------------------


def test_slots_of_positions():
    slots = swa.ring_slots(CONFIG, [1, 3], [[0, 11, 12], [5, 25, -1]])
    assert slots.tolist() == [[4, 15, 4], [28 + 5, 28 + 1, 0]]
    assert swa.ring_slots(CONFIG, [0, 4, -1], [1, 1, 1]).tolist() == [0, 0, 0]
    assert int(swa.ring_slots(CONFIG, 3, 2**31 - 1)) == 28 + (2**31 - 1) % 12
    kept = swa.ring_slots(CONFIG, [1], [list(range(16))], [15])
    assert kept.tolist() == [[0, 0, 0, *range(7, 16), 4, 5, 6, 0]]
    pages = swa.ring_slots(CONFIG, [2], [[0, 4, 8, 12]]) // 4  # a table that a kernel reads
    assert pages.tolist() == [[4, 5, 6, 4]]


@settings(max_examples=15)
@given(
    window=st.integers(1, 12),
    extra=st.integers(0, 5),
    page=st.sampled_from([1, 2, 4]),
    requests=st.integers(1, 4),
    start=st.integers(0, 60),
)
def test_what_lives_at_one_time_never_shares_a_place(window, extra, page, requests, start):
    config = swa.PoolConfig.request_ring(
        32 * page, requests, page_size=page, sliding_window=window, extra_tokens=extra
    )
    with jax.disable_jit():
        live = np.arange(max(0, start - window), start + 1 + extra)
        rings = np.arange(1, requests + 1)
        slots = np.asarray(swa.ring_slots(config, rings, np.tile(live, (requests, 1))))
    assert len(np.unique(slots)) == slots.size
    assert slots.min() >= page
    assert slots.max() < config.swa_tokens + page
    assert (slots % page == live % page).all()


class Window:
    """KV as bytes: every SWA place holds who wrote it, and a window is read back."""

    def __init__(self, config):
        self.config = config
        self.places = np.zeros((config.swa_tokens + config.page_size, 2), np.int64)

    def write(self, ring, who, begin, end):
        position = np.arange(begin, end)
        slots = np.asarray(_padded_slots(self.config, ring, begin, end))
        there = slots > 0
        self.places[slots[there]] = np.stack([np.full(there.sum(), who), position[there]], axis=1)

    def check(self, ring, who, position):
        begin = max(0, position - self.config.sliding_window)
        slots = np.asarray(_padded_slots(self.config, ring, begin, position + 1))
        want = np.stack([np.full(slots.size, who), np.arange(begin, position + 1)], axis=1)
        assert (self.places[slots] == want).all()


def _padded_slots(config, ring, begin, end):
    """One compiled width."""
    position = np.minimum(np.arange(begin, begin + 64), end - 1)
    return swa.ring_slots(config, [ring], position[None, :], [end])[0, : end - begin]


@pytest.mark.parametrize("seed", range(3))
def test_stale_content_is_never_read(seed):
    """Requests come and go; whoever takes a ring over reads nothing of its last owner."""
    draw, kv, state = np.random.default_rng(seed), Window(CONFIG), swa.init(CONFIG)
    rows = [{"ring": 0, "who": 0, "length": 0} for _ in range(B)]
    for step in range(60):
        row = rows[draw.integers(B)]
        if row["ring"] == 0:
            state, grant = swa.ring_acquire(
                state, [r["ring"] for r in rows], [r is row for r in rows]
            )
            if not grant.ok:
                assert sum(r["ring"] > 0 for r in rows) == 3
                continue
            at = [r is row for r in rows].index(True)
            row.update(ring=int(grant.rings[at]), who=step + 1, length=int(draw.integers(1, 40)))
            kv.write(row["ring"], row["who"], 0, row["length"])  # a prompt longer than the ring
        elif draw.random() < 0.2:
            state = swa.ring_release(state, [row["ring"]])
            row.update(ring=0, length=0)
        else:  # one token and its drafts, some of which are taken back
            drafts = int(draw.integers(0, 3))
            begin = row["length"]
            kv.write(row["ring"], row["who"], begin, begin + 1 + drafts)
            for other in range(1 + drafts):
                kv.check(row["ring"], row["who"], begin + other)
            row["length"] += 1 + int(draw.integers(0, drafts + 1))
        for other in rows:
            if other["ring"]:
                kv.check(other["ring"], other["who"], other["length"] - 1)
    no_faults(state)
    state = swa.ring_release(state, [r["ring"] for r in rows])
    assert int(swa.swa_available_size(state)) == 36


# ---- against a plain model, and in every mode ------------------------------------------------


@pytest.mark.parametrize("seed", range(2))
def test_random_calls_against_a_plain_model(seed):
    draw, state = np.random.default_rng(seed), swa.init(CONFIG)
    free, pending, held, group = [1, 2, 3], [], set(), False
    for _ in range(120):
        kind = draw.choice(["acquire", "release", "begin", "end"], p=[0.45, 0.45, 0.05, 0.05])
        if kind == "acquire":
            rings = draw.choice([0, 0, 0, 1, 2, 3], size=B)
            state, grant = swa.ring_acquire(state, rings)
            own = [ring for ring in rings.tolist() if ring]
            good = len(set(own)) == len(own) and set(own) <= held
            wants = B - len(own)
            assert bool(grant.ok) == (good and wants <= len(free))
            assert int(grant.short) == (max(0, wants - len(free)) if good else 0)
            if grant.ok:
                new, free = free[:wants], free[wants:]
                held |= set(new)
                assert [
                    r for r, old in zip(grant.rings.tolist(), rings, strict=True) if not old
                ] == new
        elif kind == "release":
            rings = draw.integers(-1, 5, size=B)
            state = swa.ring_release(state, rings)
            gone = [ring for ring in dict.fromkeys(rings.tolist()) if ring in held]
            held -= set(gone)
            (pending if group else free).extend(gone)
        else:
            group = kind == "begin"
            state = swa.free_group_begin(state) if group else swa.free_group_end(state)
            if not group:
                free, pending = free + pending, []
        assert int(swa.swa_available_size(state)) == 12 * len(free)
        swa.check(state)


def _life(state, rings):
    """A few requests start, step and end, with traced values alone."""
    state, grant = swa.ring_acquire(state, rings)
    state, pages = swa.alloc_extend(state, [0, 0], [5, 2], [-1, -1], capacity=8)
    state, step = swa.alloc_decode(state, [6, 3], pages.slots[jnp.array([4, 6])])
    slots = swa.ring_slots(state.config, grant.rings, jnp.array([5, 2]))
    state = swa.free(state, pages.slots)
    return swa.ring_release(state, grant.rings), (slots, step.slots, grant.rings)


def test_equal_bits_in_every_mode():
    state, none = swa.init(CONFIG), jnp.zeros(2, jnp.int32)
    want = jax.tree.leaves(_life(state, none))
    with jax.disable_jit():
        plain, grant = swa.ring_acquire(state, none)
        plain = swa.ring_release(plain, grant.rings)
    jitted, same = swa.ring_acquire(state, none)
    jitted = swa.ring_release(jitted, same.rings)
    leaves = [jax.tree.leaves(pair) for pair in ((plain, grant), (jitted, same))]
    assert all(map(np.array_equal, *leaves))
    jitted = jax.jit(_life, donate_argnums=0)(swa.snapshot(state), none)
    assert all(map(np.array_equal, jax.tree.leaves(jitted), want))
    states = jax.tree.map(lambda leaf: jnp.stack([leaf, leaf]), state)
    both = jax.vmap(functools.partial(_life, rings=none))(states)
    for batch, leaf in zip(jax.tree.leaves(both), want, strict=True):
        assert np.array_equal(batch[1], leaf)
    swa.check(both[0])
    last, _ = jax.lax.scan(lambda s, _: _life(s, none), state, length=5)
    no_faults(last)
    assert int(swa.full_available_size(last)) == 64


def test_a_call_that_cannot_be_lacks_nothing():
    state = swa.init(swa.PoolConfig.request_ring(32, 2, page_size=4, sliding_window=4))
    _, grant = swa.ring_acquire(state, [9, 0, 0, 0])
    assert (bool(grant.ok), int(grant.short)) == (False, 0)
    _, grant = swa.ring_acquire(state, [0, 0, 0])
    assert (bool(grant.ok), int(grant.short)) == (False, 1)
