"""What a replayed step decides before it does anything, beside plain Python: made-up worlds."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import swa_jax as swa
from swa_jax.replay.admit import _fits, _may_admit, promised_pages
from swa_jax.replay.grow import decode_demand, plan_growth
from swa_jax.replay.release import held_slots, is_done, newest_row
from swa_jax.replay.world import Load, LoopConfig, new_world

ROWS, LOAD, PAGE, WINDOW = 4, 6, 4, 7
POOLS = {
    "two pools": swa.PoolConfig(64, 40, PAGE, WINDOW),
    "pure SWA": swa.PoolConfig.pure_swa(40, PAGE, WINDOW),
}
MOST = 3  # SWA pages: a window of 7 and the next token touch no more


def worlds(seed: int, count: int):
    """Rows, requests and pools with anything in them."""
    rng = np.random.default_rng(seed)
    for _ in range(count):
        request = rng.permutation(LOAD)[:ROWS]
        request[rng.random(ROWS) < rng.choice([0.2, 0.8])] = -1
        length = np.where(request < 0, 0, rng.integers(0, 24, ROWS))
        prefill = np.where(request < 0, 0, np.maximum(length + rng.integers(-5, 12, ROWS), 0))
        waiting = rng.random(LOAD) < 0.5
        waiting[request[request >= 0]] = False
        yield {
            "request": request.tolist(),
            "length": length.tolist(),
            "prefill": prefill.tolist(),
            "evicted": (np.maximum(length - rng.integers(0, 20, ROWS), 0) // PAGE * PAGE).tolist(),
            "waiting": waiting.astype(int).tolist(),
            "progress": rng.integers(1, 30, LOAD).tolist(),
            "final": rng.integers(1, 30, LOAD).tolist(),
            "free": rng.integers(0, 14, 2).tolist(),
        }


def decisions(config, empty, plain, owned_from):
    """Everything that is compared, by name."""
    allocator = dataclasses.replace(
        empty.allocator,
        full=dataclasses.replace(empty.allocator.full, num_free=plain["free"][0]),
        swa=dataclasses.replace(empty.allocator.swa, num_free=plain["free"][1]),
    )
    rows = {name: plain[name] for name in ("request", "length", "prefill", "evicted")}
    table = jnp.arange(1, ROWS * config.table_pages + 1, dtype=jnp.int32).reshape(ROWS, -1)
    world = dataclasses.replace(
        empty,
        allocator=allocator,
        rows=dataclasses.replace(empty.rows, table=table, **rows),
        waiting=plain["waiting"] > 0,
        progress=plain["progress"],
    )
    demand = decode_demand(config, world)
    return {
        "promised": promised_pages(config, world.rows),
        "fits": [_fits(config, world, jnp.int32(request)) for request in range(LOAD)],
        "may admit": _may_admit(config, world),
        "decoding": demand.decoding,
        "decode pages": demand.pages,
        "decode fits": demand.fits,
        "tokens": plan_growth(config, world, demand),
        "done": is_done(Load(plain["progress"], plain["final"]), world.rows),
        "newest": newest_row(world.rows),
        "held": [held_slots(config, world.rows, jnp.int32(row), owned_from) for row in range(ROWS)],
    }


def pages(tokens):
    return -(-tokens // PAGE)


def tokens_by_hand(plain, decoding, left, chunk):
    """A token for who decodes; then chunks, the oldest request first, until one is cut short."""
    tokens = [int(one) for one in decoding]
    order = sorted(range(ROWS), key=lambda row: plain["request"][row])
    for row in order:
        length, lacks = plain["length"][row], plain["prefill"][row] - plain["length"][row]
        if plain["request"][row] < 0 or lacks <= 0 or not chunk:
            continue
        want = min(lacks, chunk)
        tokens[row] = min(want, -length % PAGE + left * PAGE)
        left -= pages(length + want) - pages(length)
        chunk = chunk - want if tokens[row] == want else 0
    return tokens


def by_hand(config, plain, owned_from):
    """The same decisions as `decisions`, row by row."""
    pure = config.pool.pure_swa_pool
    runs = [row for row in range(ROWS) if plain["request"][row] >= 0]
    length, prefill = plain["length"], plain["prefill"]
    free = [plain["free"][1]] * 2 if pure else plain["free"]
    full_promised = swa_promised = 0
    for row in runs:
        if length[row] < prefill[row]:
            full_promised += pages(prefill[row]) - pages(length[row])
            own = pages(length[row]) - pages(plain["evicted"][row])
            swa_promised += max(0, min(pages(prefill[row]), MOST) - own)

    def fits(request):
        need, count = pages(plain["progress"][request]), len(runs)
        of_swa = min(need, MOST)
        full = of_swa + swa_promised if pure else need + full_promised
        return not runs or (full + count <= free[0] and of_swa + swa_promised + count <= free[1])

    oldest = next((place for place, waits in enumerate(plain["waiting"]) if waits), None)
    decoding = [row in runs and length[row] >= prefill[row] for row in range(ROWS)]
    new_pages = sum(one and length[row] % PAGE == 0 for row, one in enumerate(decoding))
    table = np.arange(1, ROWS * config.table_pages + 1).reshape(ROWS, -1)
    held = []
    for row in range(ROWS):
        first = max(owned_from, plain["evicted"][row]) if pure else owned_from
        starts = range(0, config.table_pages * PAGE, PAGE)
        mine = [first <= start < length[row] for start in starts]
        held.append(np.where(mine, table[row], 0).tolist())
    return {
        "promised": (full_promised, swa_promised),
        "fits": [fits(request) for request in range(LOAD)],
        "may admit": oldest is not None and len(runs) < ROWS and fits(oldest),
        "decoding": decoding,
        "decode pages": new_pages,
        "decode fits": new_pages <= min(free),
        "tokens": tokens_by_hand(
            plain, decoding, max(min(free) - new_pages, 0), config.chunk_tokens
        ),
        "done": [
            row in runs and length[row] >= plain["final"][plain["request"][row]]
            for row in range(ROWS)
        ],
        "newest": int(np.argmax(plain["request"])),
        "held": held,
    }


@pytest.mark.parametrize("pool", POOLS.values(), ids=POOLS)
def test_every_decision_is_what_the_rows_say(pool):
    config = LoopConfig(pool, max_running=ROWS, chunk_tokens=9, table_pages=8)
    ones = jnp.ones(LOAD, jnp.int32)
    empty = new_world(config, Load(ones, ones), ones > 0)
    decide = jax.jit(lambda plain, owned_from: decisions(config, empty, plain, owned_from))
    for number, plain in enumerate(worlds(7, 150)):
        owned_from = number % 4 * PAGE
        on_device = {name: jnp.asarray(values, jnp.int32) for name, values in plain.items()}
        got = decide(on_device, jnp.int32(owned_from))
        right = by_hand(config, plain, owned_from)
        for name, answer in right.items():
            assert jax.tree.map(lambda leaf: leaf.tolist(), got[name]) == answer, (name, plain)
