"""What must hold in every recorded replay, whatever its requests: pages, steps and the end."""

from __future__ import annotations

from typing import Any

import numpy as np
from replay_record import History, Load, Shape


def held_ids(pool: Any) -> set[int]:
    return set((np.flatnonzero(~np.asarray(pool.free)[1:]) + 1).tolist())


def row_pages(shape: Shape, world: Any, row: int) -> tuple[list[int], list[int]]:
    """Full and SWA pages that a row's table and the mapping say it holds."""
    size, pure = shape.sizes.page_size, shape.sizes.pure
    length, evicted = int(world.rows.length[row]), int(world.rows.evicted[row])
    count = -(-length // size)
    firsts = np.asarray(world.rows.table[row][:count])
    assert (firsts % size == 0).all()
    full = (firsts // size).tolist()
    live = full[evicted // size :]
    mapped = [int(world.allocator.full_to_swa[page]) for page in live]
    assert all(mapped), "a page in the window has no SWA side"
    if pure:
        assert mapped == live
        return live, live  # pages before the frontier are gone, and may be another row's
    gone = [int(world.allocator.full_to_swa[page]) for page in full[: evicted // size]]
    assert not any(gone), "a page that left the window kept its SWA side"
    return full, mapped


def check_world(shape: Shape, world: Any) -> None:
    """Every page that is held has exactly one row that names it, and every row only its own."""
    allocator, size = world.allocator, shape.sizes.page_size
    rows = [row for row in range(shape.max_running) if world.rows.request[row] >= 0]
    full: list[int] = []
    window: list[int] = []
    for row in rows:
        mine, live = row_pages(shape, world, row)
        full += mine
        window += live
        if world.rows.length[row] > 0:
            last = int(world.rows.last_loc[row])
            assert last // size == mine[-1]
            assert last % size == (int(world.rows.length[row]) - 1) % size
    assert len(full) == len(set(full)), "two rows name one full page"
    assert len(window) == len(set(window)), "two rows name one SWA page"
    assert set(window) == held_ids(allocator.swa), "SWA pages held by nobody, or not held"
    if not shape.sizes.pure:
        assert set(full) == held_ids(allocator.full), "full pages held by nobody, or not held"
    assert int(world.tally.refused) == 0
    assert not np.asarray(allocator.faults).any()


def check_laws(history: History) -> None:
    broken = {name: np.flatnonzero(~np.asarray(holds)) for name, holds in history.laws.items()}
    assert not {name: steps for name, steps in broken.items() if steps.size}


def check_steps(load: Load, history: History) -> None:
    """Each step against the one before: who grew, who left, and who had to."""
    tally, before = history.worlds.tally, {}
    completed = retracted = 0
    for index, after in enumerate(history.lengths):
        gone = {number: tokens for number, tokens in before.items() if number not in after}
        done = [number for number, tokens in gone.items() if tokens == load.finals[number]]
        sent_back = set(gone) - set(done)
        assert int(tally.completed[index]) - completed == len(done)
        # One that is admitted and retracted in the same step is in neither.
        assert len(sent_back) <= int(tally.retracted[index]) - retracted
        completed, retracted = int(tally.completed[index]), int(tally.retracted[index])
        stayed = set(before) & set(after)
        assert all(after[number] >= before[number] for number in stayed)
        assert all(old < new for old in stayed for new in sent_back), "not the newest went"
        if before and min(before) not in done:
            oldest = min(before)
            assert after[oldest] > before[oldest], "the oldest request made no progress"
        waits = np.flatnonzero(history.worlds.waiting[index])
        assert not after or not len(waits) or max(after) < min(waits), "overtaken"
        before = after


def check_end(shape: Shape, load: Load, history: History) -> None:
    allocator = history.last.allocator
    assert not history.last.waiting.any()
    assert int(history.last.tally.completed) == len(load.prompts) - len(load.rejected)
    assert int(allocator.swa.num_free) == shape.sizes.swa_pages
    assert int(allocator.swa.num_pending) == int(allocator.full.num_pending) == 0
    assert allocator.swa.free[1:].all()
    if not shape.sizes.pure:
        assert int(allocator.full.num_free) == shape.sizes.full_pages
        assert allocator.full.free[1:].all()
    assert not allocator.full_to_swa.any()
    assert not allocator.faults.any()
