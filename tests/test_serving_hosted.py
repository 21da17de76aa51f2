"""What the host keeps of a server: requests with their KV, and the whole cache over a restart."""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ledger_model import Ledger
from serving_checks import assert_only_the_cache_holds

import swa_jax as swa
from swa_jax import prefix_cache
from swa_jax.counts import held_pages
from swa_jax.cpu_copy import get_cpu_copy, load_cpu_copy
from swa_jax.saved_state import restore_world, save_world
from swa_jax.serving import (
    FINISH_REASONS,
    ServingConfig,
    cancel,
    finish_reasons,
    hosted,
    make_requests,
    new_world,
    outputs,
    raise_fence,
    release,
    run_steps,
    submit,
    unfinished,
    world_pools,
)
from swa_jax.serving.draft_model import DraftModel
from swa_jax.serving.hosted import resume_from_host, retract_to_host
from swa_jax.serving.queue import HOSTED
from swa_jax.serving.world import NO_REQUEST

WINDOW, PAGE, PLACES = 6, 4, 8
MODEL = Ledger(WINDOW)
POOL = swa.PoolConfig(96, 48, PAGE, WINDOW - 1)


class Pairs(DraftModel):
    """Drafts of a model whose pages are cached by pairs of tokens; keeps what it is told."""

    is_bigram = True
    told: ClassVar[list] = []

    def text_of(self, state, slot, length, following):  # type: ignore[override]
        return {"end": jnp.stack([length, following])}

    def enter_text(self, state, row, slot, length, following, text):
        assert np.array_equal(text["end"], [length, following])
        self.told.append((int(row), int(slot), int(length), int(following)))
        return state


CONFIG = ServingConfig(
    POOL,
    40,
    max_running=3,
    chunk_tokens=8,
    prefill_rows=2,
    max_new_tokens=12,
    draft=Pairs(MODEL, 2),
)


def steps(world, count, config=CONFIG):
    return run_steps(MODEL, None, config, world, count)


def started(prompts, new=12, config=CONFIG):
    """A world with requests, and their places."""
    return asked(new_world(MODEL, config, PLACES), prompts, new, config)


def asked(world, prompts, new=12, config=CONFIG):
    """Always as many requests, since each number of them is a program: the last want nothing."""
    more = PLACES - len(prompts)
    requests = make_requests(
        [*prompts, *[[0]] * more],
        max_new_tokens=[*[new] * len(prompts), *[0] * more],
        prompt_columns=40,
    )
    world, places = submit(config, world, requests)
    return world, [int(place) for place in places][: len(prompts)]


def texts(world, places):
    tokens, lengths = outputs(CONFIG, world, places)
    return [
        row[:n].tolist() for row, n in zip(np.asarray(tokens), np.asarray(lengths), strict=True)
    ]


def kv_of(world, place, config=CONFIG):
    """A copy of what a running request holds."""
    row = np.asarray(world.rows.request).tolist().index(place)
    table, length = world.rows.table[row], int(world.rows.length[row])
    return get_cpu_copy(world.allocator, world_pools(MODEL, config, world), table, length)


def same_kv(now, before):
    """The same bytes, for SWA from where the earlier copy begins."""
    from_there = [layer[before.swa_start - now.swa_start :] for layer in now.swa]
    return now.length == before.length and all(
        a.tobytes() == b.tobytes()
        for a, b in zip([*now.full, *from_there], [*before.full, *before.swa], strict=True)
    )


def some_prompts(count, seed, longest=24):
    """Half of them begin alike."""
    rng = np.random.default_rng(seed)
    begin = rng.integers(0, 97, 9).tolist()
    return [
        (begin if at % 2 else []) + rng.integers(0, 97, rng.integers(1, longest - 9)).tolist()
        for at in range(count)
    ]


def held(world):
    return tuple(int(pages) for pages in jax.device_get(held_pages(world.allocator)))


def assert_sound(world):
    swa.check(world.allocator)
    if world.cache is not None:
        prefix_cache.check(world.cache, world.allocator)


@pytest.mark.parametrize("seed", range(2))
def test_requests_come_and_go_and_every_text_is_its_own(seed):
    config, rng = CONFIG, np.random.default_rng(seed)
    prompts = some_prompts(PLACES, seed)
    world, places = started(prompts)
    waiting, moves = [], 0
    while bool(unfinished(world)) or waiting:
        world = steps(world, int(rng.integers(1, 3)))
        running = [int(place) for place in world.rows.request if place != NO_REQUEST]
        if running and rng.random() < 0.6:
            place = int(rng.choice(running))
            before = held(world)
            world, gone = retract_to_host(MODEL, config, world, place)
            if gone is not None:
                waiting.append(gone)
                assert held(world) <= before
        if waiting and (rng.random() < 0.5 or not bool(unfinished(world))):
            gone = waiting.pop(int(rng.integers(len(waiting))))
            before = jax.tree.map(np.asarray, hosted._without_kv(world))
            world, ok = resume_from_host(MODEL, config, world, gone)
            if ok:
                moves += 1
                assert same_kv(kv_of(world, gone.place), gone.copy)
            else:
                waiting.append(gone)
                after = jax.tree.map(np.asarray, hosted._without_kv(world))
                assert all(map(np.array_equal, jax.tree.leaves(before), jax.tree.leaves(after)))
        assert_sound(world)
    assert moves > 3
    assert texts(world, places) == [MODEL.continuation(p, 12) for p in prompts]
    world = steps(world, 3)
    assert_only_the_cache_holds(world.allocator, world.cache)
    assert figures_of(world)["refused"] == 0


def figures_of(world):
    return {name: int(value) for name, value in vars(world.stats).items()}


def sent_away(world, place, config=CONFIG):
    """The world without a request that runs, and the request."""
    world, gone = retract_to_host(MODEL, config, world, place)
    assert gone is not None
    return world, gone


def one_running(length=20, at=4):
    prompt = list(range(1, length + 1))
    world, (place,) = started([prompt])
    return steps(world, at), place, prompt


def without_cached(world, full=POOL.full_tokens, of_swa=POOL.swa_tokens):
    """The world when its cache has given up so many tokens."""
    cache, allocator, _ = prefix_cache.evict(
        world.cache, world.allocator, full_tokens=full, swa_tokens=of_swa
    )
    return dataclasses.replace(world, cache=cache, allocator=allocator)


def test_its_pages_are_free_meanwhile_and_nothing_is_computed_again():
    world, place, prompt = one_running()
    before = figures_of(world)
    world, gone = sent_away(world, place)
    assert int(world.queue.status[place]) == HOSTED
    assert not bool(unfinished(world))
    world = without_cached(world)
    assert held(world) == (0, 0)
    text = texts(world, [place])
    world = steps(world, 5)  # it is not admitted
    assert (held(world), texts(world, [place])) == ((0, 0), text)
    assert gone.nbytes == gone.copy.nbytes + 8 > 8
    Pairs.told.clear()
    world, ok = resume_from_host(MODEL, CONFIG, world, gone)
    assert ok
    assert int(world.rows.owned_from[0]) == 0
    length = gone.copy.length
    following = (prompt + text[0])[length]
    assert Pairs.told == [(0, int(world.rows.last_loc[0]), length, following)]
    world = steps(world, 100)
    assert texts(world, [place]) == [MODEL.continuation(prompt, 12)]
    after = figures_of(world)
    assert after["prefilled"] == before["prefilled"]
    assert (after["retracted"], after["recomputed"], after["admitted"]) == (1, 0, 2)


def test_only_one_window_of_swa_is_copied():
    world, place, _ = one_running()
    row_length = int(world.rows.length[0])
    _, gone = sent_away(world, place)
    whole = (row_length - 1) // PAGE * PAGE  # by pairs the last token is not cached yet
    kept = (whole - (WINDOW - 1)) // PAGE * PAGE
    assert (gone.copy.length, gone.copy.swa_start) == (row_length, kept)


def test_what_the_cache_still_has_is_shared_and_not_written():
    world, place, prompt = one_running()
    world, gone = sent_away(world, place)
    kv, before = np.array(world.kv[0]), held(world)
    assert world.cache is not None
    in_tree = np.flatnonzero(np.asarray(world.cache.in_tree))
    world, ok = resume_from_host(MODEL, CONFIG, world, gone)
    assert ok
    assert int(world.rows.owned_from[0]) >= 16
    assert held(world)[0] - before[0] <= 2
    assert np.array_equal(np.asarray(world.kv[0])[in_tree], kv[in_tree])
    world = steps(world, 100)
    assert texts(world, [place]) == [MODEL.continuation(prompt, 12)]


def test_a_cancelled_one_is_over_at_once_and_cannot_resume():
    world, place, _ = one_running()
    world, gone = sent_away(world, place)
    world = cancel(world, [place])
    done, reason = finish_reasons(world, [place])
    assert bool(done[0])
    assert FINISH_REASONS[int(reason[0])] == "cancelled"
    world, ok = resume_from_host(MODEL, CONFIG, world, gone)
    assert not ok
    # Nor in the name of a later request at its place.
    world = release(world, list(range(PLACES)))
    requests = make_requests([[1, 2, 3]] * PLACES, max_new_tokens=12, prompt_columns=40)
    world, places = submit(CONFIG, world, requests)
    assert place in places
    world = steps(world, 2)
    world, other = sent_away(world, place)
    assert not resume_from_host(MODEL, CONFIG, world, gone)[1]
    assert resume_from_host(MODEL, CONFIG, world, other)[1]


def test_it_resumes_once():
    world, place, prompt = one_running()
    world, gone = sent_away(world, place)
    world, ok = resume_from_host(MODEL, CONFIG, world, gone)
    assert ok
    world, ok = resume_from_host(MODEL, CONFIG, world, gone)
    assert not ok
    world = steps(world, 100)
    assert texts(world, [place]) == [MODEL.continuation(prompt, 12)]
    assert not resume_from_host(MODEL, CONFIG, world, gone)[1]


def test_only_the_last_leave_of_this_worlds_request_counts():
    world, place, prompt = one_running()
    world, first = sent_away(world, place)
    world, ok = resume_from_host(MODEL, CONFIG, world, first)
    assert ok
    world, last = sent_away(steps(world, 1), place)
    assert last.copy.length > first.copy.length
    other, there, _ = one_running(9)
    other, stranger = sent_away(other, there)
    assert (stranger.place, stranger.ticket) == (last.place, last.ticket)
    longer = dataclasses.replace(last.copy, length=int(world.queue.known[place]))
    for wrong in (first, stranger, dataclasses.replace(last, copy=longer)):
        world, ok = resume_from_host(MODEL, CONFIG, world, wrong)
        assert not ok
    world, ok = resume_from_host(MODEL, CONFIG, world, last)
    assert ok
    world = steps(world, 100)
    assert texts(world, [place]) == [MODEL.continuation(prompt, 12)]


def test_what_does_not_run_is_not_retracted():
    world, place, _ = one_running()
    for other in set(range(PLACES)) - {place}:
        world, gone = retract_to_host(MODEL, CONFIG, world, other)
        assert gone is None
    world = cancel(world, [place])  # it still runs, and ends in the next step
    world, gone = retract_to_host(MODEL, CONFIG, world, place)
    assert gone is None
    with pytest.raises(ValueError, match="place must be an integer from 0 to 7, got 8"):
        retract_to_host(MODEL, CONFIG, world, 8)


def test_it_waits_for_a_row():
    prompts = [list(range(at, at + 12)) for at in range(4)]
    world, places = started(prompts)
    world = steps(world, 3)
    running = [int(place) for place in world.rows.request if place != NO_REQUEST]
    world, gone = sent_away(world, running[0])
    world = steps(world, 1)
    assert NO_REQUEST not in world.rows.request.tolist()
    world, ok = resume_from_host(MODEL, CONFIG, world, gone)
    assert not ok
    while not ok:
        world = steps(world, 1)
        world, ok = resume_from_host(MODEL, CONFIG, world, gone)
    world = steps(world, 200)
    assert texts(world, places) == [MODEL.continuation(prompt, 12) for prompt in prompts]


def test_it_waits_for_memory_that_others_hold():
    world, place, prompt = one_running()
    world, gone = sent_away(world, place)
    world = without_cached(world)
    allocator, grant = swa.alloc(world.allocator, 80, capacity=80)
    assert not grant.ok  # SWA is the smaller pool
    allocator, grant = swa.alloc(world.allocator, 44, capacity=80)
    assert grant.ok
    world = dataclasses.replace(world, allocator=allocator)
    world, ok = resume_from_host(MODEL, CONFIG, world, gone)
    assert not ok
    world = dataclasses.replace(world, allocator=swa.free(world.allocator, grant.slots))
    world, ok = resume_from_host(MODEL, CONFIG, world, gone)
    assert ok
    world = steps(world, 100)
    assert texts(world, [place]) == [MODEL.continuation(prompt, 12)]
    assert_only_the_cache_holds(world.allocator, world.cache)


# Over a restart.


def test_a_server_that_starts_again_has_its_cache(tmp_path):
    prompts = [prompt[:11] for prompt in some_prompts(3, 5)]
    world, places = started(prompts)
    world = steps(world, 200)
    answers = [MODEL.continuation(prompt, 12) for prompt in prompts]
    assert texts(world, places) == answers
    save_world(tmp_path, MODEL, CONFIG, world)
    again = restore_world(tmp_path, MODEL, CONFIG, PLACES)
    assert_only_the_cache_holds(again.allocator, again.cache)
    assert held(again) == held(world)
    turns = [[*prompt, *answer, 3, 4] for prompt, answer in zip(prompts, answers, strict=True)]
    again, places = asked(again, turns)
    world, there = asked(release(world, list(range(PLACES))), turns)
    again, world = steps(again, 200), steps(world, 200)
    wanted = [MODEL.continuation(turn, 12) for turn in turns]
    assert texts(again, places) == texts(world, there) == wanted
    cached = np.asarray(again.queue.cached)[places]
    assert np.array_equal(cached, np.asarray(world.queue.cached)[there])
    assert cached.max() >= 20


def test_what_runs_is_cached_and_what_only_others_could_give_back_is_not_saved(tmp_path):
    prompts = [prompt[:10] for prompt in some_prompts(5, 6)]
    world, _ = started(prompts)
    world = steps(world, 3)
    assert NO_REQUEST not in world.rows.request.tolist()
    assert world.cache is not None
    allocator, grant = swa.alloc(world.allocator, 4, capacity=4)  # somebody else's
    assert grant.ok
    in_tree = np.flatnonzero(np.asarray(world.cache.in_tree))
    cache, receipt = prefix_cache.lock(world.cache, allocator, int(in_tree[-1]))
    world = raise_fence(dataclasses.replace(world, allocator=allocator, cache=cache))
    before = jax.tree.map(np.array, world)
    save_world(tmp_path, MODEL, CONFIG, world)
    after = jax.tree.map(np.asarray, world)
    assert all(map(np.array_equal, jax.tree.leaves(before), jax.tree.leaves(after)))
    again = restore_world(tmp_path, MODEL, dataclasses.replace(CONFIG, prefill_rows=1), PLACES)
    assert_only_the_cache_holds(again.allocator, again.cache)
    assert held(again)[0] >= len(in_tree)
    assert again.cache is not None
    assert int(again.cache.num_receipts) == 0
    unlocked = prefix_cache.unlock(again.cache, receipt)
    assert not np.asarray(unlocked.full_locks).any()
    again, places = asked(again, prompts)
    again = steps(again, 300)
    assert texts(again, places) == [MODEL.continuation(prompt, 12) for prompt in prompts]


def test_another_server_is_refused_by_name(tmp_path):
    save_world(tmp_path, MODEL, CONFIG, new_world(MODEL, CONFIG, PLACES), weights="a")
    restore_world(tmp_path, MODEL, CONFIG, PLACES, weights="a")
    for model, config, weights, message in (
        (MODEL, CONFIG, "b", "made.weights was 'a' and is 'b'"),
        (Ledger(5), CONFIG, "a", "made.model.window was 6 and is 5"),
        (MODEL, CONFIG.with_draft(Pairs(MODEL, 3)), "a", "made.draft.num_drafts was 2 and is 3"),
        (MODEL, dataclasses.replace(CONFIG, max_context=44), "a", "max_prefix_tokens was 44"),
        (MODEL, dataclasses.replace(CONFIG, policy="lfu"), "a", "cache.policy was 'lru'"),
    ):
        with pytest.raises(ValueError, match=f"another configuration: .*{message}"):
            restore_world(tmp_path, model, config, PLACES, weights=weights)
    plain = dataclasses.replace(CONFIG, prefix_cache=False)
    for call in (
        lambda: save_world(tmp_path, MODEL, plain, new_world(MODEL, plain, 1)),
        lambda: restore_world(tmp_path, MODEL, plain, 1),
    ):
        with pytest.raises(ValueError, match="there is nothing to save"):
            call()


# Each known mistake, put back, is seen.


def broken(monkeypatch, **changes):
    """Resumes with some function replaced: is the KV as it was, and then the text as it must be?"""
    hosted._find.clear_cache()  # type: ignore[attr-defined]
    for name, change in changes.items():
        monkeypatch.setattr(hosted, name, change)
    world, place, prompt = one_running()
    world, gone = sent_away(world, place)
    world = without_cached(world)
    # What others write into the pages meanwhile.
    kv = jax.tree.map(lambda kv: jnp.full_like(kv, 7), world.kv)
    world, ok = resume_from_host(MODEL, CONFIG, dataclasses.replace(world, kv=kv), gone)
    assert ok
    same = same_kv(kv_of(world, place), gone.copy)
    world = steps(world, 100)
    hosted._find.clear_cache()  # type: ignore[attr-defined]
    return same, texts(world, [place]) == [MODEL.continuation(prompt, 12)]


def shifted(state, pools, table, copy, *, start):
    return load_cpu_copy(state, pools, table, copy, start=start + PAGE)


MISTAKES = {
    "nothing": ({}, (True, True)),
    "KV is not written": (
        {"load_cpu_copy": lambda s, pools, t, c, *, start: pools},
        (False, False),
    ),
    "a page is taken for shared": ({"load_cpu_copy": shifted}, (False, False)),
    "too little of the window": (
        {"frontier": lambda pool, length, whole: length - length % PAGE},
        (True, False),
    ),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_show(monkeypatch, name):
    changes, seen = MISTAKES[name]
    assert broken(monkeypatch, **changes) == seen
