"""Page tables: what the state says, in the form that ragged paged attention reads."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.experimental.pallas.ops.tpu.ragged_paged_attention import dynamic_validate_inputs
from plain_attention import make_case

import swa_jax as swa
from swa_jax.models.decoder.paged_attention import attend_pages
from swa_jax.page_table import first_slots, page_tables, window_page_tables

ROWS, WIDE, QUERIES = 4, 48, 6  # rows, tokens that a table holds, most new tokens
CONFIGS = {
    "page 1, window 5": swa.PoolConfig(256, 256, 1, sliding_window=5),
    "page 4, window 3": swa.PoolConfig(256, 256, 4, sliding_window=3),
    "page 4, window 9": swa.PoolConfig(256, 256, 4, sliding_window=9),
    "page 16, window 9": swa.PoolConfig(256, 256, 16, sliding_window=9),
    "page 4, chunks of 8": swa.PoolConfig(256, 256, 4, sliding_window=8, chunked=True),
    "page 4, one pool": swa.PoolConfig.pure_swa(256, 4, sliding_window=9),
    "page 4, no window": swa.PoolConfig(256, 256, 4),
}
each_config = pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
lengths = st.lists(
    st.tuples(st.integers(0, WIDE - QUERIES), st.integers(0, QUERIES)),
    min_size=ROWS,
    max_size=ROWS,
)


@functools.partial(jax.jit, static_argnums=0)
def grow(config, before, new):
    """A state in which rows hold `before` tokens, have dropped what left the window, hold `new`.

    Returns it with int32[R, WIDE] slots of their tokens.
    """
    state, nothing = swa.init(config), jnp.zeros(ROWS, jnp.int32)
    table = jnp.zeros((ROWS, WIDE), jnp.int32)
    # Another owner's pages in front, so that a row's full and SWA pages differ.
    state, _ = swa.alloc(state, 16, capacity=16)
    table, state = extend(state, table, nothing, before)
    if config.sliding_window is not None:
        state, _ = swa.free_out_of_window(state, table, before, nothing)
    table, state = extend(state, table, before, before + new)
    return state, table


def extend(state, table, old, new):
    rows, tokens = jnp.arange(ROWS, dtype=jnp.int32), jnp.arange(WIDE, dtype=jnp.int32)[None, :]
    last = table.at[rows, jnp.maximum(old - 1, 0)].get(mode="fill", fill_value=0)
    state, grant = swa.alloc_extend(state, old, new, last, capacity=ROWS * WIDE)
    added = (tokens >= old[:, None]) & (tokens < new[:, None])
    place = (jnp.cumsum(added.reshape(-1)) - 1).reshape(added.shape)
    return jnp.where(added, grant.slots[place], table), state


def columns(rows):
    """int32[R] tokens before, new tokens."""
    return tuple(jnp.array(column, jnp.int32) for column in zip(*rows, strict=True))


def plain_tables(state, table, held, new):
    """Lists of full and SWA pages of each row, straight from the arrays."""
    size, mapping = state.config.page_size, np.asarray(state.full_to_swa)
    full = []
    for slots, tokens, count in zip(np.asarray(table), held, new, strict=True):
        full.append([int(slots[t]) // size for t in range(0, tokens, size)] if count else [])
    return full, [[int(mapping[page]) for page in row] for row in full]


def padded(rows, width):
    return [row[:width] + [0] * (width - len(row)) for row in rows]


def check_rows_of(tables, lens, new):
    """`kv_lens`, `cu_q_lens` and `num_seqs`, for rows of `lens` tokens as the table has them."""
    on = [count > 0 for count in new]
    assert tables.kv_lens.tolist() == [
        length if is_on else 1 for length, is_on in zip(lens, on, strict=True)
    ]
    assert tables.cu_q_lens.tolist() == np.cumsum([0, *new]).tolist()
    assert tables.num_seqs.tolist() == [
        max((i + 1 for i, is_on in enumerate(on) if is_on), default=0)
    ]
    chex.assert_type([tables.kv_lens, tables.cu_q_lens, tables.num_seqs], jnp.int32)


@each_config
def test_both_sides_are_what_the_state_says(config):
    width = -(-WIDE // config.page_size)

    @settings(max_examples=8)
    @given(lengths)
    def agrees(rows):
        before, new = columns(rows)
        state, table = grow(config, before, new)
        swa.check(state)
        held = (before + new).tolist()
        slots = first_slots(table, page_size=config.page_size)
        tables = page_tables(state, slots, before + new, new)
        full, windowed = plain_tables(state, table, held, new.tolist())
        assert tables.full_page_indices.tolist() == padded(full, width)
        assert tables.swa_page_indices.tolist() == padded(windowed, width)
        check_rows_of(tables, held, new.tolist())

    agrees()


@each_config
def test_the_window_is_cut_to_its_live_pages(config):
    size = config.page_size
    most = -(-WIDE // size)
    if config.sliding_window is not None:
        most = min(most, -(-(config.sliding_window + QUERIES) // size) + 1)

    @settings(max_examples=8)
    @given(lengths)
    def agrees(rows):
        before, new = columns(rows)
        state, table = grow(config, before, new)
        held = before + new
        slots = first_slots(table, page_size=size)
        tables = window_page_tables(state, slots, held, new, max_queries=QUERIES)
        _, windowed = plain_tables(state, table, held.tolist(), new.tolist())
        live = [[page for page in row if page] for row in windowed]
        assert tables.swa_page_indices.tolist() == padded(live, most)
        dead = [sum(page == 0 for page in row) * size for row in windowed]
        assert tables.shift.tolist() == dead
        check_rows_of(tables, (held - tables.shift).tolist(), new.tolist())

    agrees()


@each_config
def test_the_kernels_own_checks_pass(config):
    before, new = columns([(30, 6), (9, 0), (0, 3), (41, 1)])
    state, table = grow(config, before, new)
    slots = first_slots(table, page_size=config.page_size)
    tables = page_tables(state, slots, before + new, new)
    cut = window_page_tables(state, slots, before + new, new, max_queries=QUERIES)
    q = jnp.zeros((ROWS * QUERIES, 4, 128))
    for pages, rows in (
        (tables.full_page_indices, tables),
        (tables.swa_page_indices, tables),
        (cut.swa_page_indices, cut),
    ):
        pool = jnp.zeros((config.full_pages + 1, config.page_size, 4, 128))
        dynamic_validate_inputs(q, pool, rows.kv_lens, pages, rows.cu_q_lens, rows.num_seqs)


def test_attention_is_the_same_over_a_cut_window():
    """Window and causal mask look at differences of places only, so a shift changes nothing."""
    rows, window = [(30, 5), (9, 1), (0, 5), (20, 3)], 6
    case = make_case(
        np.random.default_rng(0),
        rows,
        queries=5,
        page_size=4,
        table=12,
        heads=1,
        group=2,
        dim=4,
        dead_below=window - 1,
    )
    # A state whose mapping gives the case's own pages, page by page.
    pages = jnp.asarray(case.pages)
    config = swa.PoolConfig(400, 400, 4, sliding_window=window - 1)
    state = swa.init(config)
    slots = jnp.arange(1, pages.size + 1, dtype=jnp.int32).reshape(pages.shape)
    mapping = state.full_to_swa.at[slots.reshape(-1)].set(pages.reshape(-1), mode="drop")
    state = swa.AllocatorState(**{**vars(state), "full_to_swa": mapping})

    cut = window_page_tables(state, slots * 4, case.kv_lens, case.q_lens, max_queries=5)
    assert cut.swa_page_indices.shape == (4, 4)
    q, kv_layer, _, batch = case.arrays()
    shifted = case.__class__(
        **{
            **vars(case),
            "kv_lens": np.asarray(cut.kv_lens),
            "positions": case.positions - np.asarray(cut.shift)[:, None],
        }
    ).batch
    options = {"scale": 0.5, "window": window}
    want = attend_pages(q, kv_layer, pages, batch, **options)
    got = attend_pages(q, kv_layer, cut.swa_page_indices, shifted, **options)
    chex.assert_trees_all_close(got, want, rtol=0, atol=1e-6)


def test_rows_that_are_off_hold_one_token_of_the_padding_page():
    """The kernel fetches a page for each row, and waits for it only if the row holds a token."""
    config = CONFIGS["page 4, window 9"]
    state, table = grow(config, *columns([(9, 0), (20, 2), (0, 0), (7, 0)]))
    slots = first_slots(table, page_size=4)
    tables = page_tables(state, slots, [9, 22, 0, 7], [0, 2, 0, 0])
    assert tables.kv_lens.tolist() == [1, 22, 1, 1]
    assert tables.cu_q_lens.tolist() == [0, 0, 2, 2, 2]
    assert tables.num_seqs.tolist() == [2]
    assert not np.asarray(tables.full_page_indices)[[0, 2, 3]].any()
    below = page_tables(state, slots, [9, 22, 0, -5], [-3, 2, 0, 1])
    assert below.cu_q_lens.tolist() == [0, 0, 2, 2, 3]
    assert not np.asarray(below.full_page_indices)[[0, 2, 3]].any()
    nobody = page_tables(state, slots, [9, 22, 0, 7], [0, 0, 0, 0])
    assert nobody.num_seqs.tolist() == [0]
    assert not np.asarray(nobody.swa_page_indices).any()


def test_foreign_slots_are_no_page():
    config = swa.PoolConfig(16, 16, 4, sliding_window=4)
    state, _ = swa.alloc(swa.init(config), 16, capacity=16)
    slots = [[4, -1, 2**31 - 1, 20, 16, 0]]
    tables = page_tables(state, slots, [24], [24])
    assert tables.full_page_indices.tolist() == [[1, 0, 0, 0, 4, 0]]
    assert tables.swa_page_indices.tolist() == [[1, 0, 0, 0, 4, 0]]


def test_a_page_that_left_the_window_is_not_its_next_owners():
    """In a pure SWA pool such a page is granted again, while its old row still names it."""
    state, grant = swa.alloc(swa.init(swa.PoolConfig.pure_swa(24, 4, 5)), 24, capacity=24)
    slots = grant.slots[None, ::4]
    state, evicted = swa.free_out_of_window(state, grant.slots[None, :], [24], [0])
    assert evicted.tolist() == [16]
    state, other = swa.alloc(state, 16, capacity=16)
    assert set(other.slots.tolist()) == set(grant.slots[:16].tolist())
    tables = page_tables(state, slots, [24], [1])
    assert tables.swa_page_indices.tolist() == [[0, 0, 0, 0, 5, 6]]


def test_a_row_longer_than_the_table_ends_with_it():
    state, _ = swa.alloc(swa.init(CONFIGS["page 4, window 9"]), 16, capacity=16)
    tables = page_tables(state, [[4, 8]], [30], [1])
    assert tables.full_page_indices.tolist() == [[1, 2]]


def test_lengths_do_not_recompile_and_nothing_reaches_the_host():
    config = CONFIGS["page 4, window 9"]

    @jax.jit
    @chex.assert_max_traces(n=1)
    def both(state, table, held, new):
        slots = first_slots(table, page_size=4)
        cut = window_page_tables(state, slots, held, new, max_queries=QUERIES)
        return page_tables(state, slots, held, new), cut

    for rows in ([(30, 6)] * ROWS, [(0, 0)] * ROWS, [(1, 1), (0, 2), (30, 0), (42, 6)]):
        before, new = columns(rows)
        state, table = grow(config, before, new)
        with jax.transfer_guard("disallow"):
            jitted = both(state, table, before + new, new)
        slots = first_slots(table, page_size=4)
        eager = (
            page_tables(state, slots, before + new, new),
            window_page_tables(state, slots, before + new, new, max_queries=QUERIES),
        )
        chex.assert_trees_all_equal(jitted, eager)


def test_first_slots_takes_every_page_of_an_uneven_table():
    table = jnp.arange(2 * 10, dtype=jnp.int32).reshape(2, 10)
    assert first_slots(table, page_size=4).tolist() == [[0, 4, 8], [10, 14, 18]]
    assert first_slots(table, page_size=1).tolist() == table.tolist()


def test_refuses_what_does_not_fit():
    state = swa.init(CONFIGS["page 4, window 9"])
    with pytest.raises(ValueError, match="max_queries must be at least 1"):
        window_page_tables(state, [[0]], [0], [0], max_queries=0)
    one = jax.eval_shape(lambda s: window_page_tables(s, [[0]], [0], [0], max_queries=1), state)
    assert one.kv_lens.shape == (1,)
    with pytest.raises(ValueError, match="agree in length"):
        page_tables(state, [[0]], [0, 0], [0])
    with pytest.raises(ValueError, match="must hold integers"):
        page_tables(state, jnp.zeros((1, 1)), [0], [0])
    with pytest.raises(ValueError, match="page_size must be at least 1"):
        first_slots([[0]], page_size=0)
