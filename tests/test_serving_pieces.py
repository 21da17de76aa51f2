"""What a serving step decides before it does anything, beside plain Python: many made-up worlds."""

import dataclasses
import importlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ledger_model import Ledger
from served_models import tiny

import swa_jax as swa
from swa_jax.prefix_cache import Match
from swa_jax.serving import NGramDraft, ServingConfig, new_world
from swa_jax.serving.admit import _seat, promise_fits, promised
from swa_jax.serving.chunk import plan_chunk
from swa_jax.serving.decode import _note, _Outcome, _with_new
from swa_jax.serving.moved_slots import MovedSlots
from swa_jax.serving.queue import RUNNING, WAITING
from swa_jax.serving.ready import ready_rows
from swa_jax.serving.requests import LENGTH, STOP
from swa_jax.serving.rollback import Kept
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
from swa_jax.serving.verify import Verified

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


def test_in_one_budget_the_last_request_gives_way_if_nobody_else_holds_pages():
    pool = swa.PoolConfig.unified(34 * 128, tiny(6, layer_kinds="SFS"), 2)
    config = ServingConfig(pool, 24, max_running=2, prefill_rows=1, prefix_cache=False)
    empty = new_world(Ledger(8), config, 3)
    all_free = int(empty.allocator.full.num_free)

    def may_retract(lengths, held, *, fenced=False):
        rows = dataclasses.replace(
            empty.rows,
            request=jnp.asarray([0 if n else -1 for n in lengths], jnp.int32),
            length=jnp.asarray(lengths, jnp.int32),
        )
        full = dataclasses.replace(empty.allocator.full, num_free=jnp.int32(all_free - held))
        allocator = dataclasses.replace(
            empty.allocator, full=full, group_open=jnp.asarray(fenced, bool)
        )
        return bool(
            _may_retract(config, dataclasses.replace(empty, rows=rows, allocator=allocator))
        )

    assert may_retract([0, 7], held=4)  # alone: begun again, it may fit
    assert not may_retract([0, 7], held=5)  # who holds the fifth page may give it back
    assert may_retract([2, 7], held=6)
    assert not may_retract([0, 0], held=0)
    assert not may_retract([0, 7], held=4, fenced=True)
    assert not may_retract([2, 7], held=5, fenced=True)


@jax.jit
def noted(world, tokens, slots, count, stops):
    """What the loop writes down of a pass that gave int32[R, D] tokens, `count` of them kept."""
    outcome = _Outcome(Verified(jnp.zeros_like(tokens), tokens, count), count, stops)
    nothing = MovedSlots(jnp.zeros(1, jnp.int32), jnp.zeros(1, jnp.int32))
    kept = Kept(slots, world.rows.table + 1, nothing, nothing)
    return _note(CONFIG, world, outcome, kept), _with_new(world, outcome)


def test_new_tokens_are_noted_where_they_belong():
    rng = np.random.default_rng(6)
    for plain in worlds(6, 60):
        place, length, limit = plain["request"], plain["length"], plain["limit"]
        most = [
            limit[at] - plain["known"][at] if at >= 0 and plain["known"][at] - n == 1 else 0
            for at, n in zip(place, length, strict=True)
        ]
        count = [int(rng.integers(0, min(n, 3) + 1)) for n in most]
        stops, new = rng.random(ROWS) < 0.4, rng.integers(1, 90, (ROWS, 3))
        slots, texts = rng.integers(4, 60, (ROWS, 3)), rng.integers(1, 90, (PLACES, 48))
        known, reason = list(plain["known"]), list(plain["reason"])
        last, seen, right = [7] * ROWS, [texts[max(at, 0)].copy() for at in place], texts.copy()
        for row, tokens in enumerate(count):
            if tokens:
                at, end = place[row], length[row] + 1 + tokens
                right[at, end - tokens : end] = seen[row][end - tokens : end] = new[row, :tokens]
                known[at], last[row] = end, slots[row, tokens - 1]
                ends = STOP if stops[row] else LENGTH if end >= limit[at] else 0
                reason[at] = max(reason[at], ends)
        world = on_device(plain)
        queue = dataclasses.replace(world.queue, tokens=jnp.asarray(texts, jnp.int32))
        rows = dataclasses.replace(world.rows, last_loc=jnp.full(ROWS, 7, jnp.int32))
        world = dataclasses.replace(world, queue=queue, rows=rows)
        numbers = (jnp.asarray(each, jnp.int32) for each in (new, slots, count))
        after, view = noted(world, *numbers, jnp.asarray(stops))
        assert after.queue.tokens.tolist() == right.tolist()
        assert view.tolist() == [each.tolist() for each in seen]
        assert (after.queue.known.tolist(), after.queue.reason.tolist()) == (known, reason)
        assert after.rows.length.tolist() == [n + k for n, k in zip(length, count, strict=True)]
        assert after.rows.last_loc.tolist() == last
        assert (after.rows.table == world.rows.table + 1).all()


@jax.jit
def seated(world, row, place, length, slots):
    return _seat(CONFIG, world, row, place, Match(length, slots, jnp.int32(0)))


@pytest.mark.parametrize("row", [*range(ROWS), ROWS])
def test_a_request_takes_a_row_on_top_of_its_match_or_none(row):
    rng = np.random.default_rng(row)
    fields = ("request", "length", "evicted", "last_loc", "owned_from", "table")
    for place in range(PLACES):
        length, before = int(rng.integers(0, 4)) * PAGE, rng.integers(-1, 9, PLACES)
        slots = np.where(np.arange(48) < length, rng.integers(1, 60, 48), 0)
        queue = {"cached": before, "prompt_lens": np.full(PLACES, 9), "status": [WAITING] * PLACES}
        queue = {name: jnp.asarray(value, jnp.int32) for name, value in queue.items()}
        world = dataclasses.replace(EMPTY, queue=dataclasses.replace(EMPTY.queue, **queue))
        after = seated(
            world, *(jnp.asarray(each, jnp.int32) for each in (row, place, length, slots))
        )
        right = {name: np.array(getattr(EMPTY.rows, name)) for name in fields}
        status, cached = [WAITING] * PLACES, before.tolist()
        if row < ROWS:
            first = slots[::PAGE][: CONFIG.table_pages]
            last = int(slots[length - 1]) if length else -1
            for name, value in zip(fields, (place, length, length, last, length), strict=False):
                right[name][row] = value
            right["table"][row] = np.pad(first, (0, CONFIG.table_pages - len(first)))
            status[place] = RUNNING
            cached[place] = min(length, 9) if before[place] < 0 else cached[place]
        for name, value in right.items():
            assert getattr(after.rows, name).tolist() == value.tolist(), name
        assert (after.queue.status.tolist(), after.queue.cached.tolist()) == (status, cached)
        counts = [int(after.stats.admitted), int(after.stats.cached)]
        assert counts == [int(row < ROWS), length * (row < ROWS)]


@pytest.mark.parametrize(
    ("stuck", "others", "right"),
    [
        (0, 1, [0, 0, 1]),
        (1, 0, [0, 0, 1]),
        (2, 0, [1, 0, 2]),
        (9, 0, [1, 0, 2]),
        (3, 1, [1, 1, 3]),
        (9, 1, [1, 1, 3]),
        (9, 2, [1, 2, 4]),
    ],
)
def test_windows_are_left_once_and_the_last_request_stays(stuck, others, right, monkeypatch):
    """Lock releases, retractions and evictions, while it is stuck up to so many evictions."""
    room = importlib.import_module("swa_jax.serving.room")
    for place, name in enumerate(("_release_passed", "_retract_newest", "_evict_short")):
        monkeypatch.setattr(room, name, lambda _, counts, at=place: counts.at[at].add(1))
    monkeypatch.setattr(room, "is_stuck", lambda _, counts: counts[2] < stuck)
    monkeypatch.setattr(room, "_may_retract", lambda _, counts: counts[1] < others)
    assert room.make_room(CONFIG, jnp.zeros(3, jnp.int32)).tolist() == right
