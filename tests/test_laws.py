"""The ten laws: one focused test each, and a random walk of all transitions beside the oracle."""

import dataclasses
import functools
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compare import (
    assert_bitwise_equal,
    config_of,
    counts,
    fault_counts,
    free_queue,
    held_pages,
    ints,
    mapping,
)
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from machine import INT_MAX, INT_MIN, AllocatorMachine, long_walk
from oracle import FAULT_KINDS, Sizes
from pair import Ask, Pair, granted, pages_of

import swa_jax as swa

# How many walks: 30 by default, more under the profile "thorough" (see conftest.py).
WALK = settings(
    stateful_step_count=30,
    report_multiple_bugs=False,
    suppress_health_check=[HealthCheck.too_slow],
)

TOKENS = Sizes(24, 16, 1, window=5)
PAGES = Sizes(48, 32, 4, window=6)
BIG_PAGES = Sizes(64, 96, 16, window=16)
ONE_POOL = Sizes(32, 32, 4, window=4, pure=True)
ALL = [TOKENS, PAGES, BIG_PAGES, ONE_POOL]
NAMES = ["tokens", "pages of 4", "pages of 16", "one pool"]
every_size = pytest.mark.parametrize("sizes", ALL, ids=NAMES)


def walker(sizes, max_pages=None):
    return type("Walk", (AllocatorMachine,), {"sizes": sizes, "max_pages": max_pages})


def walk(sizes, max_pages=None):
    case = walker(sizes, max_pages).TestCase
    case.settings = WALK
    return case


TestWalkTokens = walk(TOKENS, max_pages=3)
TestWalkPages = walk(PAGES)
TestWalkBigPages = walk(BIG_PAGES)
TestWalkOnePool = walk(ONE_POOL)


@pytest.mark.parametrize("seed", [1, 2])
@every_size
def test_long_walk(sizes, seed):
    long_walk(walker(sizes, 3 if sizes is TOKENS else None)(), seed, steps=1500)


FREES = [
    "free",
    "free_swa",
    "free_full",
    "free_segment",
    "free_swa_segment",
    "free_swa_grouped",
    "clear_mapping",
]


def frees_for(sizes):
    return FREES[:-1] if sizes.pure else FREES


@every_size
def test_law_01_the_padding_page_is_never_granted_or_freed(sizes):
    pair, page = Pair(sizes), sizes.page_size
    padding = list(range(page)) * 2
    for call in frees_for(sizes):
        before = pair.state
        getattr(pair, call)(padding)
        assert_bitwise_equal(pair.state, before)
    rows: list[int] = []
    while pair.left[0] and pair.left[1]:
        rows += granted(pair.alloc(page))
        rows += pair.extend(0, page) if all(pair.left) else []
        if all(pair.left):
            rows += pair.alloc_decode([1], [-1]).slots[:1]
    assert min(rows) >= page
    assert len(pages_of(rows, page)) == min(sizes.full_pages, sizes.swa_pages)
    assert 0 not in {slot // page for slot in pair.swa_of(rows[: pair.width])}
    for call in frees_for(sizes):
        getattr(pair, call)(padding)
    assert pair.no_faults()
    for first in range(0, len(rows), pair.width):
        pair.free(rows[first : first + pair.width])
    assert pair.left == (sizes.full_tokens, sizes.swa_tokens)


SHORT = {
    "full pool short": Sizes(16, 24, 4),
    "SWA pool short": Sizes(24, 16, 4),
    "both short": Sizes(16, 16, 4),
    "tokens": Sizes(8, 4, 1),
    "one pool": Sizes(16, 16, 4, pure=True),
}


@pytest.mark.parametrize("sizes", SHORT.values(), ids=SHORT)
def test_law_02_a_refused_grant_changes_nothing(sizes):
    """With a partly filled last page, whose tokens must survive. `Pair` compares the bits."""
    pair, page = Pair(sizes), sizes.page_size
    row = pair.extend(0, page + max(1, page // 2))
    while all(pair.left):
        granted(pair.alloc(page))
    before, n = pair.left, len(row)
    for grant in (
        pair.alloc(page),
        pair.alloc_extend(Ask(n, n + page, row[-1])),
        pair.alloc_extend(Ask(0, 0), Ask(n, n + 2 * page, row[-1]), Ask(0, 1)),
        pair.alloc_extend_swa_tail(Ask(n, n + 3 * page, row[-1], 3 * page)),
        pair.alloc_decode([n, 1, 1], [row[-1], -1, -1], [False, True, True]),
    ):
        assert not grant.ok
        assert (grant.full_short > 0) >= (before[0] == 0)
        assert (grant.swa_short > 0) >= (before[1] == 0)
    assert pair.left == before
    assert pair.no_faults()
    assert set(pages_of(row, page)) <= held_pages(pair.state.swa)


@every_size
@given(st.integers(1, 6), st.integers(0, 31), st.booleans())
def test_law_02_arguments_that_cannot_be_right_are_refused(sizes, n, b, in_a_batch):
    pair = Pair(sizes)
    last = pair.extend(0, n)[-1]
    no_length = [
        Ask(n, n - 1, last),
        Ask(-1 - b, n, last),
        Ask(INT_MIN, INT_MAX, last),
        Ask(0, INT_MAX - b),
        Ask(n, n + 33 + b, last),
    ]
    no_tail = [Ask(n, n + 2, last, 3 + b), Ask(n, n + 2, last, -1 - b), Ask(n, n, last, INT_MIN)]
    before = [Ask(0, 1, -1, 1)] * in_a_batch
    grants = [pair.alloc_extend(*before, ask) for ask in no_length]
    grants += [pair.alloc_extend_swa_tail(*before, ask) for ask in no_length + no_tail]
    grants += [pair.alloc(n) for n in (-1 - b, 33 + b, INT_MAX, INT_MIN)]
    grants += [pair.alloc_decode([-b], [last])]
    for grant in grants:
        assert (grant.ok, grant.full_short, grant.swa_short) == (False, 0, 0)
    assert sum(pair.faults.values()) >= len(grants)


@pytest.mark.parametrize("sizes", ALL[1:], ids=NAMES[1:])
@given(st.integers(1, 3), st.sampled_from([0, 1, -1, -2, 100, INT_MAX, INT_MIN]), st.integers(0, 1))
def test_law_02_a_row_goes_on_only_from_its_own_last_slot(sizes, n, off, absolute):
    pair = Pair(sizes)
    slots = pair.extend(0, n)
    last = off if absolute else min(slots[-1] + off, INT_MAX)
    grants = [
        pair.alloc_decode([n + 1], [last]),
        pair.snapshot().alloc_extend(Ask(n, n + 1, last)),
        pair.snapshot().alloc_extend_swa_tail(Ask(n, n + 1, last, 1)),
    ]
    # With one pool, a slot of the padding page is a token that was kept nowhere.
    nowhere = sizes.pure and 0 <= last < sizes.page_size
    assert grants[0].ok == (last == slots[-1] or nowhere)
    two = pair.snapshot().alloc_extend(Ask(n, n + 1, slots[-1]), Ask(n, n + 1, slots[-1]))
    assert not two.ok


@every_size
def test_law_03_a_page_has_one_owner(sizes):
    pair, page = Pair(sizes), sizes.page_size
    rng = np.random.default_rng(7)
    owned: dict[int, list[int]] = {}
    for step in range(60):
        who = int(rng.integers(0, 6))
        slots = owned.get(who, [])
        if slots and rng.random() < 0.3:
            pair.free(slots[::page])
            del owned[who]
        elif (grow := int(rng.integers(1, 7))) + len(slots) <= pair.width:
            grant = pair.alloc_extend(
                Ask(len(slots), len(slots) + grow, slots[-1] if slots else -1)
            )
            owned[who] = slots + (granted(grant) if grant.ok else [])
            if not owned[who]:
                del owned[who]
        pages = [set(pages_of(slots, page)) for slots in owned.values()]
        assert len(set().union(*pages)) == sum(map(len, pages)), step
        held = sum(map(len, pages)) * page
        assert pair.left == (sizes.full_tokens - held, sizes.swa_tokens - held)


@every_size
@given(st.lists(st.integers(-3, 80), max_size=12), st.integers(0, 2))
def test_law_04_a_second_free_only_counts(sizes, hostile, times):
    pair, page = Pair(sizes), sizes.page_size
    slots = granted(pair.alloc(2 * page))
    pair.extend(0, 1)
    pair.free(slots)
    empty_but_one = pair.left
    for _ in range(times):
        pair.free(slots)
        pair.free_swa(slots)
    assert pair.left == empty_but_one
    assert pair.faults.get("double_free", 0) == 4 * times
    for call in frees_for(sizes):
        getattr(pair, call)(hostile)
        assert pair.left[0] <= sizes.full_tokens
        assert pair.left[1] <= sizes.swa_tokens


@every_size
def test_law_04_what_is_not_a_fault(sizes):
    pair, page = Pair(sizes), sizes.page_size
    slots = granted(pair.alloc(2 * page))
    pair.free_swa([slots[0], slots[0], 0, 0])
    pair.free([*slots[::page], slots[1 % page], slots[0], 0])
    assert pair.no_faults()
    pair.free([-1, INT_MIN, INT_MAX, sizes.full_tokens + page, -1])
    assert pair.faults == {"out_of_range": 5}
    slots = granted(pair.alloc(page))
    pair.free_swa(slots)
    pair.free_swa(slots)
    pair.free_swa_segment(slots)
    pair.free_swa_grouped(slots)
    assert pair.faults == {"out_of_range": 5, "unmapped": 3}


def test_law_04_fault_counters_saturate():
    state = swa.init(config_of(PAGES))
    state = dataclasses.replace(state, faults=jnp.full_like(state.faults, INT_MAX - 1))
    for _ in range(3):
        state = swa.free(state, ints([4, 8, -1, -2, INT_MAX]))
        state = swa.free_group_begin(state)
    assert fault_counts(state)["double_free"] == INT_MAX
    assert fault_counts(state)["out_of_range"] == INT_MAX
    assert fault_counts(state)["nested_group"] == INT_MAX
    assert fault_counts(state)["unmapped"] == INT_MAX - 1


@pytest.mark.parametrize("sizes", [PAGES, BIG_PAGES, ONE_POOL], ids=NAMES[1:])
@given(st.data())
def test_law_05_one_token_frees_its_whole_page(sizes, data):
    pair, page = Pair(sizes), sizes.page_size
    slots = granted(pair.alloc(2 * page))
    token = data.draw(st.integers(0, page - 1))
    call = data.draw(st.sampled_from(["free", "free_swa", "free_swa_grouped"]))
    getattr(pair, call)([slots[token]])
    pair.free_group_end()
    assert pair.swa_of(slots[:page]) == [0] * page
    assert all(pair.swa_of(slots[page:]))
    assert pair.left[1] == sizes.swa_tokens - page
    whole = call == "free" or sizes.pure
    assert pair.left[0] == sizes.full_tokens - (page if whole else 2 * page)


@pytest.mark.parametrize("order", ["set first", "clear first"])
@pytest.mark.parametrize("sizes", ALL[:3], ids=NAMES[:3])
def test_law_06_a_group_frees_the_pages_it_saw(sizes, order):
    pair, page = Pair(sizes), sizes.page_size
    old, new = granted(pair.alloc(page)), granted(pair.alloc(page))
    of_old, of_new = pair.swa_of(old), pair.swa_of(new)
    pair.free_group_begin()
    pair.free_swa(old)
    if order == "set first":
        pair.set_mapping(old, of_new)
        pair.clear_mapping(new)
    else:
        pair.clear_mapping(new)
        pair.set_mapping(old, of_new)
    assert pair.left[1] == sizes.swa_tokens - 2 * page
    pair.free_group_end()
    assert pair.left[1] == sizes.swa_tokens - page
    assert pair.swa_of(old) == of_new
    assert free_queue(pair.state.swa)[-1] == of_old[0] // page
    pair.free(old)
    pair.free_full(new)
    assert pair.left == (sizes.full_tokens, sizes.swa_tokens)
    assert pair.no_faults()


@pytest.mark.parametrize("sizes", ALL[:3], ids=NAMES[:3])
@pytest.mark.parametrize("how", ["alloc", "extend", "tail", "no tail", "decode"])
def test_law_07_a_grant_has_only_the_mapping_it_gave(sizes, how):
    """Free pages are damaged on purpose: they still map to the pages of a living request."""
    pair, page = Pair(sizes), sizes.page_size
    living = granted(pair.alloc(page * 2 if page > 1 else 3))
    of_living = pair.swa_of(living)
    to = pages_of(of_living, page)
    stale = {full: to[i % len(to)] for i, full in enumerate(free_queue(pair.state.full))}
    pair.inject_mapping(stale)
    n = min(2 * page, pair.width)
    if how == "alloc":
        slots, mapped = granted(pair.alloc(page)), page
    elif how == "extend":
        slots, mapped = pair.extend(0, n), n
    elif how == "decode":
        slots, mapped = pair.alloc_decode([1], [-1]).slots[:1], 1
    else:
        tail = 1 if how == "tail" else 0
        slots = granted(pair.alloc_extend_swa_tail(Ask(0, n, tail=tail)))
        mapped = page if tail else 0
    got = pair.swa_of(slots)
    assert got[: len(got) - mapped] == [0] * (len(got) - mapped)
    assert all(got[len(got) - mapped :])
    assert not set(pages_of(got, page)) - {0} & set(to)
    left = pair.left
    pair.free_swa(slots)
    pair.free(slots)
    pages = len(pages_of(slots, page))
    swa_pages = len(set(pages_of(got, page)) - {0})
    assert pair.left == (left[0] + pages * page, left[1] + swa_pages * page)
    assert pair.swa_of(living) == of_living
    assert pair.swa_of(slots) == [0] * len(slots)


@every_size
def test_law_08_the_mapping_is_one_to_one_and_keeps_the_offset(sizes):
    pair, page = Pair(sizes), sizes.page_size
    if not sizes.pure:  # put the two pools out of step first
        pair.free(granted(pair.alloc_extend_swa_tail(Ask(0, page))))
    rows = [pair.extend(0, n) for n in (page, 1, page // 2 + 1) if all(pair.left)]
    slots = [slot for row in rows for slot in row]
    got = pair.swa_of(slots)
    assert [slot % page for slot in got] == [slot % page for slot in slots]
    assert len(set(got)) == len(got)
    assert set(pages_of(got, page)) <= held_pages(pair.state.swa)
    assert (got == slots) == sizes.pure
    outside = [0, -1, -2, page - 1, sizes.full_tokens + page, INT_MAX, INT_MIN]
    assert pair.swa_of(outside) == [0, -1, 0, 0, 0, 0, 0]
    by_page = mapping(pair.state)
    assert len(set(by_page.values())) == len(by_page)


def transition_examples(pure):
    """Every public transition with arrays of one length each, as (name, function, arguments)."""
    slots, rows, flags = ints([0] * 32), ints([0] * 4), jnp.zeros(4, bool)
    table = jnp.zeros((4, 32), jnp.int32)
    calls = {
        "alloc": (functools.partial(swa.alloc, capacity=32), (jnp.int32(4),)),
        "alloc_extend": (functools.partial(swa.alloc_extend, capacity=32), (rows,) * 3),
        "alloc_extend_swa_tail": (
            functools.partial(swa.alloc_extend_swa_tail, capacity=32),
            (rows,) * 4,
        ),
        "alloc_decode": (swa.alloc_decode, (rows, rows, flags)),
        "free_group_begin": (swa.free_group_begin, ()),
        "free_group_end": (swa.free_group_end, ()),
        "free_out_of_window": (swa.free_out_of_window, (table, rows, rows)),
        "invariants": (swa.invariants, ()),
        "snapshot": (swa.snapshot, ()),
        "clear": (swa.clear, ()),
        "available_size": (swa.available_size, ()),
    }
    for name in (*FREES[:-1], "translate_full_to_swa"):
        calls[name] = (getattr(swa, name), (slots,))
    if not pure:
        calls["clear_mapping"] = (swa.clear_full_to_swa_mapping, (slots,))
        calls["set_mapping"] = (swa.set_full_to_swa_mapping, (slots, slots))
    return [(name, *call) for name, call in calls.items()]


def primitives(jaxpr):
    for eqn in jaxpr.eqns:
        yield eqn.primitive.name
        for value in jax.tree.leaves(list(eqn.params.values()), is_leaf=_is_jaxpr):
            if _is_jaxpr(value):
                yield from primitives(getattr(value, "jaxpr", value))


def _is_jaxpr(value):
    return hasattr(value, "jaxpr") or hasattr(value, "eqns")


@every_size
def test_law_09_nothing_depends_on_a_value_on_the_host(sizes):
    """Traced from shapes alone, with states of the same shapes out, and no callback inside."""
    config = config_of(sizes)
    state = jax.eval_shape(lambda: swa.init(config))
    for name, call, args in transition_examples(sizes.pure):
        abstract = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), args)
        closed, out = jax.make_jaxpr(call, return_shape=True)(state, *abstract)
        used = set(primitives(closed.jaxpr))
        assert not {each for each in used if "callback" in each or "infeed" in each}, name
        new_state = out[0] if isinstance(out, tuple) else out
        if isinstance(new_state, swa.AllocatorState):
            assert jax.tree.map(_shape, new_state) == jax.tree.map(_shape, state), name


def _shape(leaf):
    return leaf.shape, leaf.dtype


def test_law_09_no_transfer_to_the_host_while_running():
    pair = Pair(PAGES)
    slots = pair.extend(0, 6)
    arrays = ints(slots, 32)
    free = jax.jit(swa.free)
    free(pair.state, arrays)
    with jax.transfer_guard("disallow"):
        state = free(pair.state, arrays)
    assert counts(state) == (48, 32)


@pytest.mark.parametrize("sizes", [PAGES, ONE_POOL], ids=["pages", "one pool"])
def test_law_10_equal_inputs_give_equal_states(sizes):
    """Jitted and not, twice each, with duplicates whose order could matter. More in test_modes."""
    page = sizes.page_size
    state = swa.init(config_of(sizes))
    slots = ints([page, page, page + 1, 2 * page, 0, 2 * page, -1, page], 32)
    table = jnp.broadcast_to(jnp.arange(page, page + 32, dtype=jnp.int32), (4, 32))

    def program(state):
        state, _ = swa.alloc_extend(
            state, ints([0] * 4), ints([1, page, 0, 2]), ints([-1] * 4), capacity=32
        )
        state = swa.free_swa_grouped(state, slots)
        state, _ = swa.free_out_of_window(state, table, ints([30] * 4), ints([0] * 4))
        return swa.free(state, slots)

    eager = program(state)
    for other in (program(state), jax.jit(program)(state), jax.jit(program)(state)):
        assert_bitwise_equal(other, eager)


def test_every_fault_kind_is_reported_under_its_name():
    assert list(swa.faults(swa.init(config_of(PAGES)))) == list(FAULT_KINDS)
    assert "owner" in inspect.signature(swa.free_swa).parameters
