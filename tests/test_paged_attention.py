"""Attention over pages: against its definition, and JAX's kernels against it."""

import dataclasses
import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from interpreted_kernel import interpreted_tpu_kernel
from jax.experimental.pallas.ops.tpu import ragged_paged_attention
from plain_attention import Case, make_case, plain_attention

from swa_jax.models.decoder import paged_attention, pallas_attention
from swa_jax.models.decoder.paged_attention import attend_pages
from swa_jax.models.decoder.pallas_attention import (
    attend_pages_gpu,
    attend_pages_tpu,
    choose_attention,
    gpu_kernel_fits,
    tpu_kernel_fits,
)

QUERIES, TOKENS, ROWS = 5, 48, 4
SCALE = 0.4
SINKS = np.linspace(-1.0, 2.0, 6).astype(np.float32)
SMALL = {"heads": 2, "group": 3, "dim": 8}
STATIC = ("scale", "window", "softcap", "block_tokens")

attend = jax.jit(attend_pages, static_argnames=STATIC)

# Rows of (tokens before, new tokens): decode, a chunk, a whole prompt, a row that is off.
MIXED = [(37, 1), (20, 5), (0, 4), (11, 0)]
each_page_size = pytest.mark.parametrize("page_size", [1, 4, 16])
rows_of_tokens = st.lists(
    st.tuples(st.integers(0, TOKENS - QUERIES), st.integers(0, QUERIES)),
    min_size=ROWS,
    max_size=ROWS,
)


def small_case(seed, rows=MIXED, page_size=4, window=None, **changes) -> Case:
    """A case of the shapes that most tests share."""
    shapes = {"queries": QUERIES, "table": TOKENS // page_size, **SMALL, **changes}
    dead_below = None if window is None else window - 1
    rng = np.random.default_rng(seed)
    return make_case(rng, rows, page_size=page_size, dead_below=dead_below, **shapes)


def assert_close(got, want, tolerance=2e-6):
    chex.assert_tree_all_finite(got)
    np.testing.assert_allclose(np.asarray(got, np.float64), want, rtol=0, atol=tolerance)


@each_page_size
@pytest.mark.parametrize("window", [None, 3, 20])
@pytest.mark.parametrize(
    ("tree", "extras"),
    [(False, False), (False, True), (True, True)],
    ids=["causal", "causal, softcap, sinks", "tree, softcap, sinks"],
)
def test_agrees_with_the_definition(page_size, window, tree, extras):
    options = {"scale": SCALE, "window": window, "softcap": 1.5 if extras else None}

    @settings(max_examples=6)
    @given(rows_of_tokens, st.integers(0, 2**32 - 1))
    def agrees(rows, seed):
        case = small_case(seed, rows, page_size, window, tree=tree)
        got = attend(
            *case.arrays(), **options, sinks=jnp.asarray(SINKS) if extras else None, block_tokens=16
        )
        assert_close(got, plain_attention(case, **options, sinks=SINKS if extras else None))

    agrees()


@pytest.mark.parametrize(("heads", "group"), [(1, 1), (3, 1), (1, 4)])
def test_any_grouping_of_heads(heads, group):
    case = small_case(1, heads=heads, group=group)
    assert_close(attend(*case.arrays(), scale=SCALE), plain_attention(case, scale=SCALE))


def test_the_size_of_a_block_does_not_matter():
    case = small_case(2, [(43, 5), (40, 1), (0, 5), (9, 2)])
    want = plain_attention(case, scale=SCALE)
    for block_tokens in (1, 12, 48, 1000):
        assert_close(attend(*case.arrays(), scale=SCALE, block_tokens=block_tokens), want)


def test_large_scores_do_not_overflow():
    case = small_case(3)
    case = dataclasses.replace(case, q=case.q * 1e4)
    got = attend(*case.arrays(), scale=SCALE, block_tokens=16)
    assert_close(got, plain_attention(case, scale=SCALE))


@pytest.mark.parametrize("window", [None, 3, 20])
def test_nothing_that_nobody_sees_is_looked_at(window):
    clean, dirty = (
        small_case(4, page_size=16, window=window, garbage=garbage) for garbage in (0.0, np.nan)
    )
    got = [attend(*case.arrays(), scale=SCALE, window=window) for case in (clean, dirty)]
    chex.assert_trees_all_equal(*got)
    chex.assert_tree_all_finite(got[1])


def test_rows_and_queries_that_are_off_give_zeros():
    case = small_case(5)
    got = np.asarray(attend(*case.arrays(), scale=SCALE, sinks=jnp.asarray(SINKS)))
    on = np.arange(QUERIES) < case.q_lens[:, None]
    assert not got[~on].any()
    assert got[on].all()


def test_a_chain_is_the_causal_tree():
    case = small_case(6, window=7)
    chain = np.broadcast_to(np.tri(QUERIES, dtype=bool), (ROWS, QUERIES, QUERIES))
    as_tree = dataclasses.replace(case, tree_mask=chain)
    got = [attend(*each.arrays(), scale=SCALE, window=7) for each in (case, as_tree)]
    chex.assert_trees_all_close(*got, rtol=0, atol=1e-6)


def test_branches_stand_at_one_position():
    """Two drafts for the same place see the same window, though they lie one behind the other."""
    case = small_case(7, [(8, 3)] * ROWS, page_size=1, window=4)
    fork = np.zeros((ROWS, QUERIES, QUERIES), bool)
    fork[:, [0, 1, 1, 2, 2], [0, 0, 1, 0, 2]] = True
    positions = case.positions.copy()
    positions[:, 2] = positions[:, 1]
    q = case.q.copy()
    q[:, 2] = q[:, 1]
    kv_layer = case.kv_layer.copy()
    kv_layer[case.pages[:, 10]] = kv_layer[case.pages[:, 9]]
    case = dataclasses.replace(case, q=q, kv_layer=kv_layer, positions=positions, tree_mask=fork)
    got = attend(*case.arrays(), scale=SCALE, window=4)
    chex.assert_trees_all_close(got[:, 1], got[:, 2], rtol=0, atol=1e-6)


def test_a_window_counts_positions_not_places():
    """Of the chain 0, 2, 3, 4 beside the branch 1, token 4 is two positions behind token 2."""
    case = small_case(12, [(8, QUERIES)] * ROWS, tree=True)
    parents = [None, 0, 0, 2, 3]
    mask, depths = np.eye(QUERIES, dtype=bool), [0, 1, 1, 2, 3]
    for node, parent in enumerate(parents):
        mask[node] |= mask[parent] if parent is not None else False
    case = dataclasses.replace(
        case,
        tree_mask=np.broadcast_to(mask, (ROWS, QUERIES, QUERIES)),
        positions=np.broadcast_to(8 + np.array(depths, np.int32), case.positions.shape),
    )
    got = attend(*case.arrays(), scale=SCALE, window=2)
    assert_close(got, plain_attention(case, scale=SCALE, window=2))


def test_half_precision_pools():
    case = small_case(8, garbage=1e4)
    q, kv_layer, pages, batch = case.arrays()
    q, kv_layer = q.astype(jnp.bfloat16), kv_layer.astype(jnp.bfloat16)
    got = attend(q, kv_layer, pages, batch, scale=SCALE)
    assert got.dtype == jnp.bfloat16
    rounded = dataclasses.replace(
        case, q=np.asarray(q, np.float32), kv_layer=np.asarray(kv_layer, np.float32)
    )
    assert_close(got.astype(jnp.float32), plain_attention(rounded, scale=SCALE), 2e-2)
    wide = attend(q.astype(jnp.float32), kv_layer, pages, batch, scale=SCALE)
    assert_close(wide, plain_attention(rounded, scale=SCALE))


def temporary_bytes(table, dtype, queries=1):
    """Memory of a compiled call over a pool of table * ROWS pages of 16 tokens."""
    batch = small_case(0, [(1, 1)] * ROWS, queries=queries).batch
    q = jax.ShapeDtypeStruct((ROWS, queries, 4, 16), dtype)
    kv_layer = jax.ShapeDtypeStruct((table * ROWS + 1, 16, 4, 16), dtype)
    pages = jax.ShapeDtypeStruct((ROWS, table), jnp.int32)
    compiled = attend.lower(q, kv_layer, pages, batch, scale=1.0, block_tokens=64).compile()
    analysis = compiled.memory_analysis()
    assert analysis is not None
    return analysis.temp_size_in_bytes, kv_layer.size * kv_layer.dtype.itemsize


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_memory_follows_the_block_not_the_table(dtype):
    short, _ = temporary_bytes(16, dtype)
    long, pool = temporary_bytes(256, dtype)
    assert long < 1.1 * short + 4096
    assert long < pool / 4


def blocks_walked(monkeypatch, case, **options):
    """How many blocks of keys one call loads."""
    count, load = [], paged_attention._load

    def counting(*args):
        jax.debug.callback(lambda: count.append(1))
        return load(*args)

    with monkeypatch.context() as patch:
        patch.setattr(paged_attention, "_load", counting)
        jax.block_until_ready(attend_pages(*case.arrays(), scale=SCALE, block_tokens=4, **options))
        jax.effects_barrier()
    return len(count)


def test_walks_to_the_longest_row_and_no_further(monkeypatch):
    walked = functools.partial(blocks_walked, monkeypatch)
    assert walked(small_case(9, [(15, 1), (3, 5), (0, 1), (40, 0)])) == 4
    assert walked(small_case(9, [(16, 1), (3, 5), (0, 1), (40, 0)])) == 5
    assert walked(small_case(9, [(16, 0), (3, 0), (0, 0), (40, 0)])) == 0
    # Tokens 35 .. 42 are two or three pages of 4, wherever the other rows' windows stand.
    assert walked(small_case(9, [(38, 5), (3, 5), (0, 1), (0, 0)], window=4), window=4) == 3
    assert walked(small_case(9, [(39, 1), (3, 1), (0, 1), (0, 0)], window=4), window=4) == 1


def test_lengths_and_trees_do_not_recompile():
    @jax.jit
    @chex.assert_max_traces(n=1)
    def once(q, kv_layer, pages, batch):
        return attend_pages(q, kv_layer, pages, batch, scale=SCALE, window=3)

    for seed, rows in enumerate(([(1, 1)] * ROWS, MIXED, [(40, 5), (0, 0), (3, 2), (0, 1)])):
        once(*small_case(seed, rows, window=3, tree=True).arrays())


def test_64_bit_mode_changes_nothing():
    case = small_case(10, window=3, tree=True)
    want = attend(*case.arrays(), scale=SCALE, window=3)
    with jax.enable_x64(True):
        got = attend(*case.arrays(), scale=SCALE, window=3)
    assert got.dtype == jnp.float32
    np.testing.assert_array_equal(np.asarray(got), np.asarray(want))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q": jnp.zeros((ROWS, QUERIES, 8))}, r"q\[R, Q, Hq, D\]"),
        ({"q": jnp.zeros((ROWS, QUERIES, 5, 8))}, "divide the query heads"),
        ({"q": jnp.zeros((ROWS, QUERIES, 6, 4))}, "of the same size"),
        ({"q": jnp.zeros((ROWS, 2, 6, 8))}, "same rows and queries"),
        ({"kv_layer": jnp.zeros((5, 4, 3, 8))}, "K and V"),
        ({"pages": jnp.zeros((3, 12), jnp.int32)}, "same rows and queries"),
        ({"sinks": jnp.zeros(2)}, "one a query head"),
        ({"window": 0}, "window must be at least 1"),
        ({"block_tokens": 0}, "block_tokens must be at least 1"),
    ],
)
def test_refuses_what_does_not_fit(change, message):
    names = ("q", "kv_layer", "pages", "batch")
    arguments = dict(zip(names, small_case(11).arrays(), strict=True)) | {"scale": 1.0} | change
    with pytest.raises(ValueError, match=message):
        attend_pages(**arguments)


# --- JAX's kernels --------------------------------------------------------------------------------

# Rows that are off stand first, between others, and last: the TPU kernel must not stumble on them.
TPU_ROWS = [(0, 0), (14, 1), (7, 0), (0, 0), (3, 4), (0, 3), (20, 2), (9, 0)]
TPU_SHAPES = {"queries": 4, "page_size": 4, "table": 6, "heads": 2, "group": 2, "dim": 128}


def tpu_case(seed, rows, window=None, **changes) -> Case:
    shapes = {**TPU_SHAPES, **changes}
    dead_below = None if window is None else window - 1
    rng = np.random.default_rng(seed)
    return make_case(rng, rows, dead_below=dead_below, garbage=100.0, **shapes)


def by_tpu_kernel(case, **options):
    with interpreted_tpu_kernel():
        return attend_pages_tpu(
            *case.arrays(), scale=0.1, pages_per_block=2, queries_per_block=4, **options
        )


@pytest.mark.parametrize("window", [None, 3, 9])
def test_the_tpu_kernel_agrees(window):
    case = tpu_case(20, TPU_ROWS, window)
    options = {"window": window, "softcap": 2.0 if window == 3 else None}
    want = attend(*case.arrays(), scale=0.1, **options)
    assert_close(want, plain_attention(case, scale=0.1, **options))
    assert_close(by_tpu_kernel(case, **options), np.asarray(want))


def test_the_tpu_kernel_agrees_in_each_block_of_heads():
    """The kernel takes so many heads in two turns, and starts again at the first row."""
    case = tpu_case(26, TPU_ROWS, heads=8, group=1)
    assert_close(by_tpu_kernel(case), plain_attention(case, scale=0.1))


def test_the_tpu_kernel_does_not_run_for_nobody(monkeypatch):
    """It would fetch a page and end without waiting for it, which an interpreter does not mind."""
    runs = []

    def counting(packed, *_, **__):
        jax.debug.callback(lambda: runs.append(1))
        return packed

    monkeypatch.setattr(ragged_paged_attention, "ragged_paged_attention", counting)
    off = tpu_case(21, [(4, 0)] * len(TPU_ROWS))
    assert not np.asarray(attend_pages_tpu(*off.arrays(), scale=0.1)).any()
    jax.effects_barrier()
    assert len(runs) == 0
    attend_pages_tpu(*tpu_case(21, TPU_ROWS).arrays(), scale=0.1)
    jax.effects_barrier()
    assert len(runs) == 1


@pytest.mark.parametrize(("page_size", "dim", "softcap"), [(1, 16, None), (4, 64, 1.5)])
def test_the_gpu_kernel_agrees(page_size, dim, softcap):
    rows = [(37, 1), (20, 1), (0, 1), (11, 0)]
    case = small_case(22, rows, page_size, queries=1, dim=dim, garbage=100.0)
    options = {"scale": 0.1, "softcap": softcap}
    want = attend(*case.arrays(), **options)
    assert_close(want, plain_attention(case, **options))
    assert_close(attend_pages_gpu(*case.arrays(), **options, interpret=True), np.asarray(want))


def test_the_gpu_kernel_compiles_to_triton():
    arrays = small_case(23, [(9, 1)] * ROWS, queries=1, dim=64).arrays()
    traced = jax.jit(functools.partial(attend_pages_gpu, scale=0.1)).trace(*arrays)
    assert "triton" in traced.lower(lowering_platforms=("cuda",)).as_text()


def test_what_kernels_cannot_do_is_done_without_them(monkeypatch):
    """Every call that a kernel refuses must come out as `attend_pages` has it."""
    fell_back = []

    def recording(*args, **options):
        fell_back.append(options)
        return attend_pages(*args, **options)

    monkeypatch.setattr(pallas_attention, "attend_pages", recording)
    case = small_case(24, window=3)
    for other in (attend_pages_tpu, attend_pages_gpu):
        got = other(*case.arrays(), scale=SCALE, window=3, softcap=1.5, sinks=jnp.asarray(SINKS))
        want = plain_attention(case, scale=SCALE, window=3, softcap=1.5, sinks=SINKS)
        assert_close(got, want)
    assert len(fell_back) == 2


def test_what_each_kernel_takes():
    case = tpu_case(25, TPU_ROWS)
    q, kv_layer, _, batch = case.arrays()
    tree = dataclasses.replace(batch, tree_mask=jnp.ones((8, 4, 4), bool))
    sinks = jnp.zeros(4)
    assert tpu_kernel_fits(q, kv_layer, batch, None)
    assert not tpu_kernel_fits(q, kv_layer, batch, sinks)
    assert not tpu_kernel_fits(q, kv_layer, tree, None)
    assert not tpu_kernel_fits(q, kv_layer.astype(jnp.bfloat16), batch, None)
    assert not tpu_kernel_fits(q[..., :64], kv_layer[..., :64], batch, None)
    assert not tpu_kernel_fits(q, jnp.zeros((9, 4, 6, 128)), batch, None)
    assert not gpu_kernel_fits(q, kv_layer, batch, None, None)
    one = q[:, :1]
    assert gpu_kernel_fits(one, kv_layer, batch, None, None)
    assert not gpu_kernel_fits(one, kv_layer, batch, 4, None)
    assert not gpu_kernel_fits(one, kv_layer, batch, None, sinks)
    assert not gpu_kernel_fits(one, kv_layer, tree, None, None)
    assert not gpu_kernel_fits(one[..., :96], kv_layer[..., :96], batch, None, None)


def test_each_backend_has_its_attention():
    assert choose_attention() is attend_pages  # tests run on the CPU
    assert choose_attention("tpu") is attend_pages_tpu
    assert {choose_attention(name) for name in ("gpu", "cuda", "rocm")} == {attend_pages_gpu}
