"""Logits over paged KV are those of the dense forward pass, however the tokens were dealt out."""

import functools
from dataclasses import replace
from typing import Any

import decoder_server as server
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import swa_jax as swa
from swa_jax.models import PagedBatch, forward, init_kv, random_params, write_kv

CLOSE = 1e-4


def model(config, **changes):
    config = replace(config, **changes)
    return config, params_of(replace(config, sliding_window=5))


@functools.cache
def params_of(config):
    return random_params(config, jax.random.key(3))


def dense(config, params, tokens):
    return np.asarray(forward(config, params, jnp.asarray(tokens, jnp.int32)))


def texts(rows, length, seed=0):
    return np.random.default_rng(seed).integers(0, 97, (rows, length))


def serve_all(rows, tokens, *, decode_steps=False):
    """float32[R, T, V] logits of teacher-forced rows: chunked prompts, then a token at a time.

    Rows that decode take part in the chunks of the others, as continuous batching has it. With
    `decode_steps` the steps without a chunk are an engine's decode steps, of one query a row.
    """
    length, chunk, prompt_lens = tokens.shape[1], 5, np.array([31, 7, 1])
    logits = np.zeros((*tokens.shape, 97), np.float32)
    while (rows.lens < length).any():
        prefill = np.minimum(chunk, prompt_lens - rows.lens)
        takes = np.where(prefill > 0, prefill, np.minimum(1, length - rows.lens))
        ends = rows.lens + takes
        spans = zip(tokens, rows.lens, ends, strict=True)
        news = [text[start:end].tolist() for text, start, end in spans]
        starts, queries = rows.lens, 1 if decode_steps and takes.max() == 1 else chunk
        answer = rows.step(news, queries)
        for row, (start, take) in enumerate(zip(starts, takes, strict=True)):
            logits[row, start : start + take] = answer[row, :take]
    return logits


@pytest.mark.parametrize(
    ("config", "page", "window", "swa_pages", "decode_steps"),
    [
        # A pool of three windows and a chunk each, a fraction of the 3 x 40 tokens in all.
        (server.GEMMA, 1, 5, 3 * 4 + 15, False),
        (server.GEMMA, 4, 11, 3 * 4 + 6, True),
        (server.GEMMA, 16, 5, 6, False),
        (server.GPT_OSS, 4, 11, 3 * 4 + 6, False),
        (server.GPT_OSS, 16, 20, 8, True),
    ],
)
def test_prefill_in_chunks_and_decode_match_the_dense_pass(
    config, page, window, swa_pages, decode_steps
):
    config, params = model(config, sliding_window=window)
    pool = swa.PoolConfig(192, swa_pages * page, page, config.past_window)
    rows = server.Server(config, params, pool, 3)
    tokens = texts(3, 40)
    logits = serve_all(rows, tokens, decode_steps=decode_steps)
    assert np.abs(logits - dense(config, params, tokens)).max() < CLOSE
    swa.check(rows.state)
    assert not any(swa.faults(rows.state).values())
    assert len(rows.swa_pages_written) > len(set(rows.swa_pages_written))  # used again
    held = swa_pages * page - int(swa.swa_available_size(rows.state))
    assert held <= 3 * (-(-config.past_window // page) + 1) * page


def test_a_page_that_is_used_again_shows_when_the_window_is_one_short():
    # The allocator keeps W past tokens; a model that reads one more must see another's KV.
    config, params = model(server.GEMMA, sliding_window=6)
    pool = swa.PoolConfig(192, 3 * 4 + 15, 1, sliding_window=4)
    with pytest.raises(ValueError, match="sliding_window=5"):
        init_kv(config, pool)
    rows = server.Server(replace(config, sliding_window=5), params, pool, 3)
    rows.config = config
    tokens = texts(3, 40)
    assert np.abs(serve_all(rows, tokens) - dense(config, params, tokens)).max() > 100 * CLOSE


def test_a_pure_swa_model_over_one_pool():
    config, params = model(server.GEMMA, layer_kinds="SS")
    pool = swa.PoolConfig.pure_swa(3 * 8 + 20, 4, config.past_window)
    rows = server.Server(config, params, pool, 3)
    assert rows.kv.full == ()
    tokens = texts(3, 40)
    assert np.abs(serve_all(rows, tokens) - dense(config, params, tokens)).max() < CLOSE


POOL = swa.PoolConfig(192, (3 * 4 + 6) * 4, 4, sliding_window=10)  # also one of those above


def test_a_row_that_is_off_writes_nothing_and_changes_nobody():
    config, params = model(server.GPT_OSS, sliding_window=11)
    tokens = texts(3, 40)
    rows = server.Server(config, params, POOL, 3)
    rows.step([text[:5].tolist() for text in tokens], 5)
    before = jax.tree.map(np.asarray, rows.kv)
    answer = rows.step([[], tokens[1, 5:7].tolist(), []], 5)
    assert np.abs(answer[1, :2] - dense(config, params, tokens)[1, 5:7]).max() < CLOSE
    changed = [
        np.argwhere((old != np.asarray(new)).any(axis=(2, 3))).tolist()
        for old, new in zip(jax.tree.leaves(before), jax.tree.leaves(rows.kv), strict=True)
    ]
    full = rows.table[1, 5:7]
    swa_slots = np.asarray(swa.translate_full_to_swa(rows.state, full))
    places = [
        sorted([slot // 4, slot % 4] for slot in slots.tolist()) for slots in (full, swa_slots)
    ]
    assert changed == places
    assert not any(np.asarray(layer[0]).any() for layer in jax.tree.leaves(rows.kv))  # padding


def test_a_draft_tree_gives_each_branch_the_logits_of_its_own_text():
    config, params = model(server.GEMMA, sliding_window=11)
    text = texts(1, 14)[0].tolist()
    rows = server.Server(config, params, POOL, 3)
    for start in (0, 5, 10):
        rows.step([text[start : start + 5], [], []], 5)
    root, left, left_leaf, right, right_leaf = 5, 11, 12, 13, 14
    mask = np.zeros((3, 5, 5), bool)
    for place, seen in enumerate([[0], [0, 1], [0, 1, 2], [0, 3], [0, 3, 4]]):
        mask[0, place, seen] = True
    positions = np.zeros((3, 5), np.int32)
    positions[0] = [14, 15, 16, 15, 16]
    tree = {"positions": jnp.asarray(positions), "tree_mask": jnp.asarray(mask)}
    answer = rows.step([[root, left, left_leaf, right, right_leaf], [], []], 5, **tree)[0]
    branches = [[*text, root, left, left_leaf], [*text, root, right, right_leaf]]
    first, second = dense(config, params, branches)
    expected = np.stack([first[14], first[15], first[16], second[15], second[16]])
    assert np.abs(answer - expected).max() < CLOSE


def test_bfloat16_stays_near_float32():
    config, params = model(server.GEMMA, sliding_window=11)
    half = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), params)
    tokens = texts(3, 40)
    rows = server.Server(config, half, POOL, 3, dtype=jnp.bfloat16)
    logits = serve_all(rows, tokens)
    assert rows.kv.full[0].dtype == jnp.bfloat16
    expected = dense(config, params, tokens)
    for answer in (logits, dense(config, half, tokens)):
        assert np.abs(answer - expected).mean() < 0.05 * expected.std()


def test_a_step_writes_a_donated_pool_in_place():
    config, params = model(server.GPT_OSS)
    kv: Any = init_kv(config, swa.PoolConfig(2**14, 2**14, 4, 4))
    ints = functools.partial(jnp.zeros, dtype=jnp.int32)
    new, one, pages = ints((3, 5)), ints(3), ints((3, 16))
    batch = PagedBatch(new, new, one, one, new, new, pages, pages)
    lowered = server.step_logits.lower(config, params, kv, batch)
    memory = lowered.compile().memory_analysis()
    assert memory is not None
    assert memory.alias_size_in_bytes == sum(layer.nbytes for layer in jax.tree.leaves(kv))
    assert memory.temp_size_in_bytes < kv.full[0].nbytes / 4


def test_kv_goes_to_its_slots_and_nowhere_else():
    layer = jnp.full((3, 4, 4, 2), 7.0)
    k = jnp.arange(12.0).reshape(3, 2, 2)
    after = np.asarray(write_kv(layer, jnp.array([5, 0, 11]), k, -k)).reshape(12, 4, 2)
    # K of head h at 2h, V at 2h + 1.
    assert after[5].tolist() == [[0, 1], [0, -1], [2, 3], [-2, -3]]
    assert after[11].tolist() == [[8, 9], [-8, -9], [10, 11], [-10, -11]]
    assert (np.delete(after, [5, 11], axis=0) == 7).all()
    for slot in (-1, -12, 12):  # no location, and outside
        assert (write_kv(layer, jnp.array([slot, 0, 0]), k, k) == 7).all()


@pytest.mark.parametrize(
    ("pool", "message"),
    [
        (swa.PoolConfig.pure_swa(64, 4, 4), "no KV for full layers, and the model has 1"),
        (swa.PoolConfig(64, 64, 4, 3), "use PoolConfig.*sliding_window=4"),
        (swa.PoolConfig(64, 64, 4, 8, chunked=True), "in chunks"),
    ],
)
def test_pools_that_lose_what_the_model_reads_are_refused(pool, message):
    with pytest.raises(ValueError, match=message):
        init_kv(server.GEMMA, pool)


def test_layers_get_the_pages_of_their_kind():
    kv: Any = init_kv(server.GEMMA, swa.PoolConfig(64, 32, 4, 4), jnp.bfloat16)
    assert [layer.shape for layer in kv.full] == [(17, 4, 4, 16)]
    assert [layer.shape for layer in kv.swa] == [(9, 4, 4, 16)] * 2
    assert {layer.dtype for layer in jax.tree.leaves(kv)} == {jnp.dtype(jnp.bfloat16)}
