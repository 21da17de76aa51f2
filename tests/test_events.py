"""Block events of the prefix cache: the tree can be rebuilt from nothing else."""

import dataclasses
import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from prefix_pair import World

import swa_jax as swa
from swa_jax import prefix_cache as pc
from swa_jax.models import get_model
from swa_jax.prefix_cache.events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    block_hash,
    empty_record,
    prefix_hashes,
    tree_events,
)
from swa_jax.replay.driver import ReplaySettings, run_replay
from swa_jax.replay.event_log import EventLog
from swa_jax.replay.trace import Trace

A, B = list(range(100, 112)), list(range(200, 212))


class Follower:
    """What a router knows: every block's prefix, from events alone."""

    def __init__(self):
        self.prefixes = {}  # hash -> (namespace, all tokens up to the block's end)

    def take(self, event):
        kind = event["type"]
        if kind == "AllBlocksCleared":
            self.prefixes.clear()
        elif kind == "BlockRemoved":
            for name in event["block_hashes"]:
                gone = self.prefixes.pop(name)
                hanging = [p for p in self.prefixes.values() if p[1][: len(gone[1])] == gone[1]]
                assert not any(space == gone[0] for space, _ in hanging), "left before its child"
        else:
            size, above = event["block_size"], event["parent_block_hash"]
            space, before = event["lora_id"] or 0, ()
            if above is not None:
                known, before = self.prefixes[above]  # a parent is stored before its child
                assert known == space
            tokens = event["token_ids"]
            assert len(tokens) == size * len(event["block_hashes"])
            for index, name in enumerate(event["block_hashes"], 1):
                assert name not in self.prefixes, "stored twice"
                self.prefixes[name] = (space, (*before, *tokens[: index * size]))

    @property
    def held(self):
        return set(self.prefixes.values())


def fields(event):
    return {"type": type(event).__name__} | dataclasses.asdict(event)


def cached_prefixes(cache):
    """(namespace, tokens) of every node, read off the arrays."""
    tree = {name: np.asarray(getattr(cache, name)) for name in ("parent", "namespace", "tokens")}
    size, found = cache.config.pool.page_size, set()
    for page in np.flatnonzero(np.asarray(cache.in_tree)).tolist():
        tokens, at = (), page
        while at:
            tokens, at = (*tree["tokens"][at][:size].tolist(), *tokens), int(tree["parent"][at])
        found.add((int(tree["namespace"][page]), tokens))
    return found


class Watched:
    """A small cache whose events are followed."""

    def __init__(self, full=16, page=2, **options):
        self.world = World(swa.PoolConfig(full, full, page, 4), **options)
        self.record, self.follower = empty_record(self.world.cache.config), Follower()

    def look(self) -> list[Any]:
        self.record, events = tree_events(self.record, self.world.cache)
        for event in events:
            self.follower.take(fields(event))
        assert self.follower.held == cached_prefixes(self.world.cache)
        return events


def test_an_insert_is_one_event_with_its_blocks_in_order():
    watched = Watched()
    watched.world.put(A[:6])
    names = prefix_hashes(A[:6], 2)
    assert watched.look() == [BlockStored(tuple(names), None, tuple(A[:6]), 2, None)]
    assert watched.look() == []


def test_a_branch_names_its_parent_and_nothing_that_was_there():
    watched = Watched()
    watched.world.put(A[:4])
    watched.look()
    watched.world.put(A[:4] + B[:2])
    names = prefix_hashes(A[:4] + B[:2], 2)
    assert watched.look() == [BlockStored((names[2],), names[1], tuple(B[:2]), 2, None)]


def test_several_inserts_between_two_looks():
    watched = Watched()
    watched.world.put(A[:4])
    watched.world.put(A[:8])  # follows what came before, so it is told together
    watched.world.put(B[:2])
    watched.world.put(A[:2] + B[:2])
    names = prefix_hashes(A[:8], 2)
    first, second, third = watched.look()
    assert first.block_hashes == tuple(names)
    assert second.parent_block_hash is None
    assert third.parent_block_hash == names[0]


def test_what_leaves_goes_before_what_it_hung_from():
    watched = Watched()
    watched.world.put(A[:8])
    watched.look()
    watched.world.evict(full=6)
    names = prefix_hashes(A[:8], 2)
    assert watched.look() == [BlockRemoved((names[3], names[2], names[1]))]
    watched.world.evict(full=2)
    assert watched.look() == [BlockRemoved((names[0],))]
    assert not watched.follower.held


def test_a_page_with_another_content_is_removed_first_and_then_stored():
    watched = Watched(full=8, page=2)
    watched.world.put(A[:8])
    watched.look()
    pages = set(watched.world.nodes().values())
    watched.world.evict(full=8)
    watched.world.put(B[:8])
    assert set(watched.world.nodes().values()) == pages  # all pages are in use again
    assert watched.look() == [
        BlockRemoved(tuple(reversed(prefix_hashes(A[:8], 2)))),
        BlockStored(tuple(prefix_hashes(B[:8], 2)), None, tuple(B[:8]), 2, None),
    ]


def test_what_left_and_came_back_is_told_both_ways():
    watched = Watched(full=8, page=2)
    watched.world.put(A[:8])
    watched.look()
    watched.world.evict(full=8)
    watched.world.put(A[:8])
    assert [type(event) for event in watched.look()] == [BlockRemoved, BlockStored]


def test_a_tombstone_stays_stored():
    watched = Watched(full=16, page=2)
    watched.world.put(A[:12])
    watched.look()
    watched.world.evict(swa_tokens=4)
    assert len(watched.world.tombstones()) == 2
    assert watched.look() == []


def test_namespaces_share_no_hash():
    watched = Watched()
    watched.world.put(A[:4])
    watched.world.put(A[:4], ns=7)
    bare, tenant = watched.look()
    assert (bare.lora_id, tenant.lora_id) == (None, 7)
    assert not set(bare.block_hashes) & set(tenant.block_hashes)
    assert list(tenant.block_hashes) == prefix_hashes(A[:4], 2, namespace=7)


def test_pairs_are_hashed_whole_and_told_as_tokens():
    watched = Watched(is_bigram=True)
    watched.world.put(A[:5])
    [event] = watched.look()
    assert event.token_ids == tuple(A[:4])
    first = block_hash(None, A[0:3])
    assert event.block_hashes == (first, block_hash(first, A[2:5]))


def test_equal_hashes_on_the_device_change_nothing():
    watched = Watched(hash_bits=0)
    for tokens in (A[:4], B[:4], A[:2] + B[:2]):
        watched.world.put(tokens)
    assert len({name for event in watched.look() for name in event.block_hashes}) == 5


def test_a_reset_clears_all():
    watched = Watched()
    watched.world.put(A[:4])
    watched.look()
    world = watched.world
    world.cache, world.state = pc.reset(world.cache), swa.clear(world.state)
    assert watched.look() == [AllBlocksCleared()]
    world.put(A[:6])
    watched.look()
    world.cache, world.state = pc.reset(world.cache), swa.clear(world.state)
    world.put(B[:2])  # on a page and at a clock that both were there before
    assert [type(event) for event in watched.look()] == [BlockRemoved, BlockStored]
    world.cache, world.state = pc.reset(world.cache), swa.clear(world.state)
    for tokens in (A[:2], A[:4], B[:4]):
        world.put(tokens)
    watched.look()


def test_any_program_can_be_followed():
    rng = np.random.default_rng(3)
    watched = Watched(full=32, page=2)
    kinds = set()
    for step in range(150):
        world = watched.world
        if rng.random() < 0.65:
            length = 2 * int(rng.integers(1, 6))
            tokens = rng.integers(0, 2, length).tolist()
            world.evict(full=length)
            world.put(tokens, ns=int(rng.integers(0, 2)))
        else:
            world.evict(full=int(rng.integers(0, 12)), swa_tokens=int(rng.integers(0, 12)))
        if step % int(rng.integers(1, 4)) == 0:
            kinds |= {type(event) for event in watched.look()}
    assert kinds == {BlockStored, BlockRemoved}


def test_hashes_are_the_same_in_every_process():
    # By `printf 'namespace 0\1\0\0\0\2\0\0\0' | b2sum -l 64`, bytes from the last to the first,
    # and the same of that sum followed by two more tokens.
    assert prefix_hashes([1, 2, 3, -4, 5], 2) == [0x313C9EBABDD7BF7D, 0x733A5A5346BB69ED]
    assert len(set(prefix_hashes([7] * 20, 2))) == 10


# ---- the file -------------------------------------------------------------------------------


def looked_at(cache, step=0) -> Any:
    """What `EventLog.look` looks at of a loop's carry."""
    world = SimpleNamespace(tally=SimpleNamespace(steps=jnp.int32(step)))
    return SimpleNamespace(cache=cache, world=world)


def test_lines_are_numbered_batches(tmp_path):
    watched, log = Watched(), EventLog("--events", str(tmp_path / "e.jsonl"))
    with log.writing():
        for step, tokens in enumerate((A[:2], A[:2], A[:4])):
            watched.world.put(tokens)
            log.look(looked_at(watched.world.cache, step * 10))
        assert [path.name[:9] for path in tmp_path.iterdir()] == [".swa-jax-"]
    lines = [json.loads(line) for line in (tmp_path / "e.jsonl").read_text().splitlines()]
    assert [(line["seq"], line["step"], line["ts"]) for line in lines] == [(0, 0, 0.0), (1, 20, 20)]
    one, two = prefix_hashes(A[:4], 2)
    [event] = lines[1]["events"]
    assert event == {
        "type": "BlockStored",
        "block_hashes": [two],
        "parent_block_hash": one,
        "token_ids": A[2:4],
        "block_size": 2,
        "lora_id": None,
        "lora_name": None,
        "medium": None,
    }


def test_a_failure_leaves_the_old_file(tmp_path):
    file = tmp_path / "e.jsonl"
    file.write_text("old")
    log = EventLog("--events", str(file))
    with pytest.raises(AttributeError), log.writing():
        log.look(looked_at(None))
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("e.jsonl", "old")]


def test_a_pipe_is_written_to_at_once(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    reader = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    watched, log = Watched(), EventLog("--events", str(tmp_path / "pipe"))
    watched.world.put(A[:4])
    with log.writing():
        log.look(looked_at(watched.world.cache))
        assert json.loads(os.read(reader, 10_000))["seq"] == 0
    os.close(reader)
    with pytest.raises(RuntimeError, match="inside"):
        EventLog("--events", str(tmp_path / "e")).look(looked_at(watched.world.cache))


def test_a_full_disk():
    if not Path("/dev/full").exists():
        pytest.skip("no /dev/full here")
    watched, log = Watched(), EventLog("--events", "/dev/full")
    watched.world.put(A[:4])
    said = "--events /dev/full: cannot be written: No space left"
    with pytest.raises(ValueError, match=said), log.writing():
        log.look(looked_at(watched.world.cache))


# ---- a whole replay -------------------------------------------------------------------------


def small_trace():
    """Prompts that share prefixes, more than the pools can keep."""
    ids = ([1, 2, 3], [1, 2, 4], [5, 6], [1, 2, 3, 7], [8, 9, 10], [5, 6, 11], [1, 2], [12])
    prompts = [8 * len(blocks) - 2 * (number % 3) for number, blocks in enumerate(ids)]
    return Trace(
        name="small",
        source_format="mooncake",
        arrival_ms=np.zeros(len(ids), np.int64),
        prompt_lens=np.array(prompts, np.int32),
        output_lens=np.array([6, 1, 9, 3, 12, 2, 5, 4], np.int32),
        hash_ids=tuple(np.array(blocks, np.int64) for blocks in ids),
        block_tokens=8,
    )


def test_the_tree_of_a_replay_can_be_rebuilt(tmp_path):
    log = EventLog("--events", str(tmp_path / "e.jsonl"))
    looks = []

    def look(carry):
        log.look(carry)
        looks.append((int(carry.world.tally.steps), cached_prefixes(carry.cache)))

    pool, settings = swa.PoolConfig(64, 48, 4, 8), ReplaySettings(2, 16, slice_steps=1)
    with log.writing():
        result = run_replay(small_trace(), get_model("gpt-oss-20b"), pool, settings, on_slice=look)
    lines = [json.loads(line) for line in (tmp_path / "e.jsonl").read_text().splitlines()]
    assert [line["seq"] for line in lines] == list(range(len(lines)))
    follower, batches = Follower(), {line["step"]: line["events"] for line in lines}
    for step, held in looks:  # not only the last tree: that of every look
        for event in batches.pop(step, []):
            follower.take(event)
        assert follower.held == held
    assert not batches
    assert len(follower.held) == result.reuse.cached_full_pages > 0
    removed = [e for line in lines for e in line["events"] if e["type"] == "BlockRemoved"]
    assert 0 < sum(len(e["block_hashes"]) for e in removed) <= result.reuse.evicted_full_pages
