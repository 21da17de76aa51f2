"""The KV of one request on the host and back: the bytes of every token, and what is refused."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ledger_model import Ledger

import swa_jax as swa
from swa_jax import cpu_copy
from swa_jax.counts import held_pages
from swa_jax.cpu_copy import get_cpu_copy, load_cpu_copy
from swa_jax.models.decoder import KVPool
from swa_jax.serving import (
    ServingConfig,
    lift_fence,
    make_requests,
    new_world,
    raise_fence,
    submit,
    world_pools,
)
from swa_jax.serving.hosted import resume_from_host, retract_to_host
from swa_jax.serving.queue import RUNNING

PAGE, PAGES, WINDOW = 4, 16, 6
POOL = swa.PoolConfig(64, 48, PAGE, WINDOW)
SMALL = swa.PoolConfig(64, 32, 2, WINDOW)


def pools_for(pool, fill=0):
    """Layers of several dtypes and shapes."""

    def layer(pages, dtype, *shape):
        count = (pages + 1) * pool.page_size * int(np.prod(shape))
        values = np.arange(fill, fill + count) % 251
        return jnp.asarray(values.reshape(pages + 1, pool.page_size, *shape), dtype)

    full = (
        layer(pool.full_pages, jnp.bfloat16, 2, 3),
        layer(pool.full_pages, jnp.float32),
        layer(pool.full_pages, jnp.int32, 2),
    )
    return KVPool(full, (layer(pool.swa_pages, jnp.float8_e4m3fn, 4),))


def granted(state, length, tail=None, width=PAGES):
    """The state, and the table of a new request, SWA for its last `tail` tokens."""
    tail = length if tail is None else tail
    state, grant = swa.alloc_extend_swa_tail(state, [0], [length], [-1], [tail], capacity=64)
    assert grant.ok
    table = np.zeros(width, np.int32)
    firsts = np.asarray(grant.slots)[: length : state.config.page_size]
    table[: len(firsts)] = firsts
    return state, table


def tokens_of(state, pools, table, length):
    """Plain reading, token by token: rows of full layers, and of SWA layers where there are any."""
    size, to_swa = state.config.page_size, np.asarray(state.full_to_swa)
    full, of_swa = [], []
    for token in range(length):
        slot = int(table[token // size]) + token % size
        page = to_swa[slot // size]
        full.append([np.asarray(layer)[slot // size, slot % size] for layer in pools.full])
        rows = [np.asarray(layer)[page, slot % size] for layer in pools.swa]
        of_swa.append(rows if page else None)
    return full, of_swa


def equal(got, wanted):
    return all(
        a.dtype == b.dtype and a.tobytes() == b.tobytes() for a, b in zip(got, wanted, strict=True)
    )


def assert_is_copy(copy, full, of_swa):
    for token in range(copy.length):
        assert equal([layer[token] for layer in copy.full], full[token])
    for token in range(copy.swa_start, copy.length):
        assert equal([layer[token - copy.swa_start] for layer in copy.swa], of_swa[token])


@settings(max_examples=20, deadline=None, derandomize=True)
@given(
    length=st.integers(0, 24),
    left=st.integers(0, 4),
    swa_from=st.integers(0, 26),
    new_tail=st.integers(0, 24),
    shared=st.integers(0, 6),
    others=st.sampled_from([POOL, SMALL]),
)
def test_every_token_comes_back_bit_for_bit(length, left, swa_from, new_tail, shared, others):
    state, _ = granted(swa.init(POOL), 7)
    state, table = granted(state, length)
    gone = table[:left][: -(-length // PAGE)]
    state = swa.free_swa(state, np.pad(gone, (0, 4 - len(gone))))
    pools = pools_for(POOL, 5)
    full, of_swa = tokens_of(state, pools, table, length)
    copy = get_cpu_copy(state, pools, table, length, swa_from=swa_from)
    dead = min(len(gone) * PAGE, length)
    assert copy.swa_start == min(max(dead, swa_from // PAGE * PAGE), length)
    assert copy.length == length
    assert copy.nbytes == 24 * length + 4 * (length - copy.swa_start)
    assert_is_copy(copy, full, of_swa)
    # Back into other pages, other pools, other page sizes; nobody else's tokens change.
    new_state, other = granted(swa.init(others), 5, width=32)
    new_tail = min(max(new_tail, length - copy.swa_start), length)
    new_state, again = granted(new_state, length, new_tail, 32)
    before = pools_for(others, 77)
    mine = tokens_of(new_state, before, other, 5)
    start = min(shared, length)
    held = tokens_of(new_state, before, again, start)
    after = load_cpu_copy(new_state, jax.tree.map(jnp.copy, before), again, copy, start=start)
    now_full, now_swa = tokens_of(new_state, after, again, length)
    assert all(equal(a, b) for a, b in zip(now_full[start:], full[start:], strict=True))
    for token in range(max(copy.swa_start, start), length):
        assert equal(now_swa[token], of_swa[token])
    still = tokens_of(new_state, after, again, start)
    for was, now in ((mine, tokens_of(new_state, after, other, 5)), (held, still)):
        assert all(equal(a, b) for a, b in zip(now[0], was[0], strict=True))
        assert all(equal(a or [], b or []) for a, b in zip(now[1], was[1], strict=True))


def test_the_padding_page_is_not_written():
    state, table = granted(swa.init(POOL), 9)
    pools = pools_for(POOL)
    copy = get_cpu_copy(state, pools_for(POOL, 3), table, 9)
    before = [np.array(layer[0]) for layer in pools.full + pools.swa]
    after = load_cpu_copy(state, pools, table, copy)
    assert equal([np.asarray(layer[0]) for layer in after.full + after.swa], before)


def test_what_lies_before_a_hole_is_not_copied():
    state, table = granted(swa.init(POOL), 16)
    state = swa.free_swa(state, table[1:2])
    assert get_cpu_copy(state, pools_for(POOL), table, 16).swa_start == 8
    state = swa.free_swa(state, table[3:4])
    copy = get_cpu_copy(state, pools_for(POOL), table, 16)
    assert (copy.swa_start, copy.swa[0].shape) == (16, (0, 4))


def test_a_copy_outlives_what_happens_to_the_pages():
    state, table = granted(swa.init(POOL), 9)
    pools = pools_for(POOL)
    copy = get_cpu_copy(state, pools, table, 9)
    full, of_swa = tokens_of(state, pools, table, 9)
    del state
    jax.jit(lambda pools: jax.tree.map(jnp.zeros_like, pools), donate_argnums=0)(pools)
    assert_is_copy(copy, full, of_swa)


def test_lengths_of_one_power_of_two_share_their_programs(monkeypatch):
    state, table = granted(swa.init(POOL), 32)
    pools, traced, read = pools_for(POOL), [], cpu_copy.read_rows
    get_cpu_copy(state, pools, table, 29)
    monkeypatch.setattr(cpu_copy, "read_rows", lambda *args: traced.append(args) or read(*args))
    for length in range(17, 33):
        get_cpu_copy(state, pools, table, length)
    assert not traced


class TestRefusals:
    state, table = granted(swa.init(POOL), 9)
    pools = pools_for(POOL)

    def copy(self):
        return get_cpu_copy(self.state, self.pools, self.table, 9)

    @pytest.mark.parametrize(
        ("table", "length", "message"),
        [
            (table, -1, "length must be an integer from 0"),
            (table, 65, "table must have 17 pages of 4 for 65 tokens, got 16"),
            (table, 13, r"every page of the table must be held, and the one of tokens 12 \.\. 15"),
            (table + 1, 9, r"must be held, and the one of tokens 0 \.\. 3 is not"),
            (table - 100, 9, "must be held"),
            (table + 1000, 9, "must be held"),
            ([table], 9, "table must be an array of 1 dimension"),
        ],
    )
    def test_what_is_not_held_cannot_be_copied(self, table, length, message):
        with pytest.raises(ValueError, match=message):
            get_cpu_copy(self.state, self.pools, table, length)

    def test_a_copy_of_another_model_does_not_fit(self):
        fewer = KVPool(self.pools.full[:2], self.pools.swa)
        with pytest.raises(ValueError, match="it is of another model"):
            load_cpu_copy(self.state, fewer, self.table, self.copy())
        other = KVPool(self.pools.full, tuple(layer[..., :2] for layer in self.pools.swa))
        with pytest.raises(ValueError, match="the swa layers keep"):
            load_cpu_copy(self.state, other, self.table, self.copy())

    def test_kv_of_other_pools_is_refused(self):
        for pool in (SMALL, swa.PoolConfig(16, 16, PAGE, WINDOW)):
            for call in (
                lambda pools: get_cpu_copy(self.state, pools, self.table, 9),
                lambda pools: load_cpu_copy(self.state, pools, self.table, self.copy()),
            ):
                with pytest.raises(ValueError, match=r"full layer 0 must be \[17, 4, \.\.\.\]"):
                    call(pools_for(pool))

    def test_a_page_serves_once(self):
        table = self.table[[0, 1, 1]]
        with pytest.raises(ValueError, match=f"page {table[1] // PAGE} is twice"):
            get_cpu_copy(self.state, self.pools, table, 9)
        with pytest.raises(ValueError, match="must be there once"):
            load_cpu_copy(self.state, self.pools, table, self.copy())

    def test_a_copy_with_too_few_tokens_is_refused(self):
        copy = self.copy()
        for change in ({"length": 10}, {"swa_start": 1}, {"swa_start": 99}):
            with pytest.raises(ValueError, match=r"copy.swa_start|the copy must have"):
                load_cpu_copy(
                    self.state, self.pools, self.table, dataclasses.replace(copy, **change)
                )

    def test_pages_without_the_window_do_not_fit(self):
        state, table = granted(swa.init(POOL), 9, 5)
        with pytest.raises(ValueError, match="have an SWA side from token 4 on: grant a tail of 9"):
            load_cpu_copy(state, self.pools, table, self.copy())
        load_cpu_copy(state, pools_for(POOL), table, self.copy(), start=4)

    def test_pages_of_others_or_too_few_do_not_fit(self):
        with pytest.raises(ValueError, match="must be held"):
            load_cpu_copy(swa.init(POOL), self.pools, self.table, self.copy())
        with pytest.raises(ValueError, match="table must have 3 pages"):
            load_cpu_copy(self.state, self.pools, self.table[:2], self.copy())
        with pytest.raises(ValueError, match="start must be an integer from 0 to 9"):
            load_cpu_copy(self.state, self.pools, self.table, self.copy(), start=10)


# Of a world whose loop has no prefix cache; with one: test_serving_hosted.py.


def test_a_request_leaves_its_row_and_comes_back_not_behind_a_fence():
    """The row is made by hand, and the loop never runs: it would take long to compile."""
    model = Ledger(WINDOW + 1)
    config = ServingConfig(POOL, 40, max_running=2, prefix_cache=False)
    requests = make_requests([list(range(20))], max_new_tokens=8)
    world, (place,) = submit(config, new_world(model, config, 2), requests)
    state, table = granted(world.allocator, 18, 10, config.table_pages)
    rows, last = world.rows, table[4] + 1
    rows = dataclasses.replace(
        rows,
        request=rows.request.at[1].set(place),
        length=rows.length.at[1].set(18),
        evicted=rows.evicted.at[1].set(8),
        last_loc=rows.last_loc.at[1].set(last),
        table=rows.table.at[1].set(table),
    )
    queue = dataclasses.replace(world.queue, status=world.queue.status.at[place].set(RUNNING))
    kv = jax.tree.map(lambda kv: jnp.arange(kv.size, dtype=kv.dtype).reshape(kv.shape), world.kv)
    world = dataclasses.replace(world, allocator=state, rows=rows, queue=queue, kv=kv)
    world, gone = retract_to_host(model, config, raise_fence(world), int(place))
    assert gone is not None
    assert (gone.copy.length, gone.copy.swa_start) == (18, 8)
    state, others = granted(world.allocator, 28)
    world = dataclasses.replace(world, allocator=state, kv=jax.tree.map(jnp.zeros_like, kv))
    world, ok = resume_from_host(model, config, world, gone)
    assert not ok  # what was freed behind the fence cannot be granted
    world, ok = resume_from_host(model, config, lift_fence(world), gone)
    assert ok
    row, pools = world.rows, world_pools(model, config, world)
    again = get_cpu_copy(world.allocator, pools, row.table[0], 18, swa_from=8)
    assert equal(again.full + again.swa, gone.copy.full + gone.copy.swa)
    assert [int(part[0]) for part in (row.length, row.evicted, row.owned_from)] == [18, 8, 0]
    assert int(row.last_loc[0]) == int(row.table[0, 4]) + 1
    swa.check(swa.free(world.allocator, others))
    assert [int(pages) for pages in held_pages(world.allocator)] == [5 + 7, 3 + 7]
