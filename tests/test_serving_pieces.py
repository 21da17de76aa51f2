"""What a serving step decides before it does anything, beside plain Python: many made-up worlds."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ledger_model import Ledger

import swa_jax as swa
from swa_jax.serving import NGramDraft, ServingConfig, new_world
from swa_jax.serving.admit import promise_fits, promised
from swa_jax.serving.chunk import plan_chunk
from swa_jax.serving.ready import ready_rows
from swa_jax.serving.room import (
    _may_retract,
    _short,
    decode_tokens,
    draft_rows,
    drafts_fit,
    fitting_rows,
    is_stuck,
    newest_row,
    oldest_pages,
)

ROWS, PLACES, PAGE = 4, 5, 4
CONFIG = ServingConfig(
    swa.PoolConfig(64, 40, PAGE, 7),
    48,
    max_running=ROWS,
    chunk_tokens=6,
    prefill_rows=2,
    prefix_cache=False,
    draft=NGramDraft(2, 1),
)
EMPTY = new_world(Ledger(8), CONFIG, PLACES)


def worlds(seed: int, count: int):
    """Worlds with any rows, as plain lists."""
    rng = np.random.default_rng(seed)
    for number in range(count):
        known = rng.integers(1, 30, PLACES)
        request = rng.permutation(PLACES)[:ROWS]
        request[rng.random(ROWS) < (0.3, 0.7)[number % 2]] = -1
        lacks = np.where(rng.random(ROWS) < 0.4, 1, rng.integers(1, 12, ROWS))
        length = np.maximum(known[request] - lacks, 0)
        known[request[request >= 0]] = (length + lacks)[request >= 0]
        free = rng.integers(0, 8, 2)
        yield {
            "request": request.tolist(),
            "length": np.where(request < 0, 0, length).tolist(),
            "evicted": np.where(request < 0, 0, length // 2 // PAGE * PAGE).tolist(),
            "known": known.tolist(),
            "ticket": rng.permutation(PLACES).tolist(),
            "limit": (known + rng.integers(1, 5, PLACES)).tolist(),
            "reason": (rng.random(PLACES) < 0.2).astype(int).tolist(),
            "free": free.tolist(),
            "pending": rng.integers(0, 3, 2).tolist(),
            "group_open": bool(rng.random() < 0.3),
            "counts": rng.integers(0, 6, ROWS).tolist(),
            "ask": (int(rng.integers(1, 24)), int(rng.integers(0, 3)) * PAGE),
        }


def on_device(plain):
    """The same world as the loop has it."""
    ints = {name: jnp.asarray(value, jnp.int32) for name, value in plain.items() if name != "ask"}
    pools = [
        dataclasses.replace(pool, num_free=ints["free"][side], num_pending=ints["pending"][side])
        for side, pool in enumerate((EMPTY.allocator.full, EMPTY.allocator.swa))
    ]
    allocator = dataclasses.replace(
        EMPTY.allocator, full=pools[0], swa=pools[1], group_open=ints["group_open"] > 0
    )
    rows = {name: ints[name] for name in ("request", "length", "evicted")}
    queue = {name: ints[name] for name in ("known", "ticket", "limit", "reason")}
    return dataclasses.replace(
        EMPTY,
        allocator=allocator,
        rows=dataclasses.replace(EMPTY.rows, **rows),
        queue=dataclasses.replace(EMPTY.queue, **queue),
    )


def decisions(config, world, counts, known, cached):
    """Everything that is compared, by name."""
    yes, no = jnp.ones((), bool), jnp.zeros((), bool)
    chunk = plan_chunk(config, world, world.allocator.full.num_free)
    return {
        "promised": promised(config, world),
        "fits": promise_fits(config, world, known, cached),
        "decode tokens": (decode_tokens(config, world, no), decode_tokens(config, world, yes)),
        "draft rows": draft_rows(config, world),
        "oldest pages": oldest_pages(config, world),
        "fitting": fitting_rows(world, counts),
        "drafts fit": drafts_fit(config, world),
        "short": _short(config, world),
        "stuck": is_stuck(config, world),
        "newest": newest_row(world),
        "may retract": _may_retract(config, world),
        "ready": ready_rows(config, world),
        "chunk": (chunk.rows, chunk.counts),
    }


def pages(tokens):
    return -(-tokens // PAGE)


def dealt(rows, lefts, room, chunk):
    """Tokens that each of `rows` (lengths) prefills with `room` new pages, until one is cut."""
    counts = []
    for length, left in zip(rows, lefts, strict=True):
        want = min(left, chunk)
        count = min(want, -length % PAGE + room * PAGE)
        counts.append(count)
        room = room - (pages(length + count) - pages(length)) if count == want else 0
        if count < want:
            break
    return counts + [0] * (len(rows) - len(counts))


def by_hand(config, plain):
    """The same decisions as `decisions`, row by row."""
    only_prefills, num_drafts = config.role == "prefill", config.num_drafts
    free, low = plain["free"], min(plain["free"])
    place = plain["request"]
    runs = [row for row in range(ROWS) if place[row] >= 0]
    length = plain["length"]

    def of(name, row):
        return plain[name][place[row]]

    lacks = [of("known", row) - length[row] if row in runs else 0 for row in range(ROWS)]
    window = CONFIG.min_swa_pages
    full_promised = swa_promised = 0
    for row in runs:
        if lacks[row] > 1:
            whole = pages(of("known", row))
            need = whole - pages(length[row])
            own = pages(length[row]) - plain["evicted"][row] // PAGE
            full_promised += need
            swa_promised += max(0, min(need, min(whole, window) - own))
    known, cached = plain["ask"]
    full_need = pages(known) - cached // PAGE
    swa_need = min(pages(known), window, full_need)
    fits = full_need + full_promised + len(runs) <= free[0]
    fits = fits and swa_need + swa_promised + len(runs) <= free[1]

    decodes = [lacks[row] == 1 and not only_prefills for row in range(ROWS)]
    drafts = [
        num_drafts > 0 and decodes[row] and of("limit", row) - length[row] > 2  # two may come
        for row in range(ROWS)
    ]
    plainly = [int(one) for one in decodes]
    boldly = [one + num_drafts * more for one, more in zip(plainly, drafts, strict=True)]

    def grown(counts):
        return sum(pages(n + more) - pages(n) for n, more in zip(length, counts, strict=True))

    by_age = sorted(runs, key=lambda row: of("ticket", row))
    waits = [row for row in by_age if lacks[row] > 1]
    oldest = int(bool(waits) and by_age[0] == waits[0] and length[waits[0]] % PAGE == 0)
    chunks = [min(max(lack - 1, 0), CONFIG.chunk_tokens) for lack in lacks]
    wanted = grown(chunks) + grown(boldly)

    def counts_of(room):
        front = waits[: CONFIG.prefill_rows]
        lefts = [lacks[row] - 1 for row in front]
        found = dealt([length[row] for row in front], lefts, room, CONFIG.chunk_tokens)
        return found + [0] * (CONFIG.prefill_rows - len(front))

    ready = [
        only_prefills and row in runs and not of("reason", row) and lacks[row] == 1
        for row in range(ROWS)
    ]
    idle = not any(decodes) and not any(counts_of(low))
    return {
        "promised": (full_promised, swa_promised),
        "fits": fits or not runs,
        "decode tokens": (plainly, boldly),
        "draft rows": drafts,
        "oldest pages": oldest,
        "drafts fit": grown(boldly) + oldest <= low,
        "short": tuple(wanted - free[side] - plain["pending"][side] for side in range(2)),
        "stuck": bool(runs) and (grown(plainly) + oldest > low or idle) and not any(ready),
        "newest": by_age[-1] if runs else 0,
        "may retract": len(runs) > 1 and not plain["group_open"],
        "ready": ready,
        "chunk": (waits[: CONFIG.prefill_rows], counts_of(free[0])),
        "fitting": fitting_by_hand(plain),
    }


def fitting_by_hand(plain):
    """The oldest rows get what they ask for, as long as there are pages of both kinds."""
    asks = [row for row in range(ROWS) if plain["counts"][row]]
    counts, room = [0] * ROWS, min(plain["free"])
    for row in sorted(asks, key=lambda row: plain["ticket"][max(plain["request"][row], 0)]):
        length, more = plain["length"][row], plain["counts"][row]
        room -= pages(length + more) - pages(length)
        counts[row] = more if room >= 0 else 0
    return counts


CONFIGS = {
    "both": CONFIG,
    "prefill": dataclasses.replace(CONFIG, role="prefill"),
    "no drafts": dataclasses.replace(CONFIG, draft=None),
}
LONG = pytest.param(CONFIGS["no drafts"], marks=pytest.mark.long)


@pytest.mark.parametrize("config", [CONFIG, CONFIGS["prefill"], LONG], ids=CONFIGS)
def test_every_decision_is_what_the_rows_say(config):
    decide = jax.jit(lambda *arguments: decisions(config, *arguments))
    answers = set()
    for plain in worlds(3, 200):
        plain["counts"] = [
            count if place >= 0 else 0
            for count, place in zip(plain["counts"], plain["request"], strict=True)
        ]
        asked = [jnp.asarray(each, jnp.int32) for each in (plain["counts"], *plain["ask"])]
        got = jax.tree.map(lambda leaf: leaf.tolist(), decide(on_device(plain), *asked))
        right = by_hand(config, plain)
        rows, counts = got["chunk"]
        got["chunk"] = (rows[: len(right["chunk"][0])], counts)
        for name, answer in right.items():
            assert got[name] == answer, (name, plain)
        answers |= {(name, right[name]) for name in ("fits", "drafts fit", "stuck", "may retract")}
    assert len(answers) == 8  # both answers of each were met
