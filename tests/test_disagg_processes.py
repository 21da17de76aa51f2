"""Prefill in another process, with a draft head; here KV is spread over two devices by heads."""

import json
import os
import signal
import subprocess
import sys
from multiprocessing.connection import Listener
from pathlib import Path

import disagg_child as both
import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from served_models import DenseGreedy
from serving_checks import assert_only_the_cache_holds, figures

from swa_jax import disagg
from swa_jax.disagg.decode_peer import ASKED
from swa_jax.disagg.decode_worker import DecodeWorker
from swa_jax.disagg.jobs import LOST, Job
from swa_jax.disagg.processes import join_prefill
from swa_jax.serving import new_world, with_world_pools, world_pools


class Watching(DecodeWorker):
    """Counts the requests that get a row with a text from which the head can go on."""

    known = 0

    def seat(self, jobs):
        before = set(self._places.values())
        good = super().seat(jobs)
        rows = self.world.rows
        new = np.isin(rows.request, list(set(self._places.values()) - before))
        slots = np.asarray(self.world.draft.slot)[: new.shape[0]]
        self.known += int((new & (slots > 0) & (slots == rows.last_loc)).sum())
        return good


HERE = Path(__file__).parent
PATHS = (HERE, HERE.parent)
MESH = Mesh(np.array(jax.devices()[:2]), ("heads",))
EVERYWHERE = NamedSharding(MESH, PartitionSpec())


@pytest.fixture(scope="module")
def worker():
    world = new_world(both.MODEL, both.DECODE, 8)
    pools = world_pools(both.MODEL, both.DECODE, world)
    by_heads = jax.device_put(pools, NamedSharding(MESH, PartitionSpec(None, None, "heads")))
    world = with_world_pools(both.MODEL, both.DECODE, jax.device_put(world, EVERYWHERE), by_heads)
    params, draft_params = jax.device_put(both.params(), EVERYWHERE)
    worker = Watching(
        both.MODEL,
        both.DECODE,
        params,
        draft_params=draft_params,
        places=8,
        reservations=4,
        size=both.SIZE,
        world=world,
    )
    worker.arrivals = jax.device_put(worker.arrivals, EVERYWHERE)
    return worker


@pytest.fixture(scope="module")
def prefill():
    """A process that connects again and again, and where it connects."""
    key = os.urandom(16).hex()
    with Listener(("127.0.0.1", 0), authkey=key.encode()) as listener:
        process = subprocess.Popen(
            [sys.executable, str(Path(both.__file__)), str(listener.address[1])],
            stdout=subprocess.PIPE,
            text=True,
            env={
                **os.environ,
                both.KEY: key,
                "PYTHONPATH": os.pathsep.join(map(str, PATHS)),
                "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",  # it compiles more than it computes
            },
        )
        yield process, listener
        process.kill()
        process.communicate()


def jobs(first, count):
    rng = np.random.default_rng(first)
    lengths = rng.integers(2, both.LONGEST + 1, count)
    prompts = [tuple(rng.integers(0, 61, int(length)).tolist()) for length in lengths]
    return [Job(first + index, prompt, both.NEW) for index, prompt in enumerate(prompts)]


def turn(peer):
    if peer.is_waiting:
        peer.wait(0.01)
    return {outcome.name: outcome for outcome in peer.turn()}


def assert_nothing_is_held(worker):
    assert_only_the_cache_holds(worker.world.allocator, worker.world.cache)
    assert disagg.reserved_pages(worker.arrivals.inbox) == (0, 0)
    assert figures(worker.world)["refused"] == 0


@pytest.mark.long
def test_tokens_are_those_of_a_dense_pass_and_nothing_is_left_on_either_side(worker, prefill):
    process, listener = prefill
    wanted, outcomes = jobs(0, 12), {}
    with listener.accept() as channel:
        peer = join_prefill(worker, channel, sharding=EVERYWHERE)
        peer.submit(wanted)
        peer.cancel([3])
        while peer.open_jobs:
            outcomes |= turn(peer)
        outcomes |= turn(peer)
        peer.close()
    dense = DenseGreedy(both.MODEL, both.params()[0], both.LONGEST + both.NEW)
    for job in wanted:
        right = [] if job.name == 3 else dense(job.prompt, both.NEW)
        assert list(outcomes[job.name].tokens) == right
    assert_nothing_is_held(worker)
    assert json.loads(process.stdout.readline()) == {"held": [0, 0], "faults": 0}
    assert figures(worker.world)["prefilled"] == 0
    assert worker.known == len(wanted) - 1  # the first step has drafts
    # The KV is still spread by heads.
    assert all(
        leaf.sharding.spec[2] == "heads"
        for leaf in jax.tree.leaves(world_pools(both.MODEL, both.DECODE, worker.world))
    )


def test_a_prefill_process_that_is_killed_leaves_nothing_behind(worker, prefill):
    process, listener = prefill
    asked, outcomes = [], {}

    def on_stage(name, stage):
        asked.extend([name] * (stage == ASKED))
        return False

    wanted = jobs(100, 8)
    with listener.accept() as channel:
        peer = join_prefill(worker, channel, on_stage=on_stage, sharding=EVERYWHERE)
        peer.submit(wanted)
        while not asked:
            outcomes |= turn(peer)
        process.send_signal(signal.SIGKILL)
        while peer.open_jobs:
            outcomes |= turn(peer)
    outcomes |= turn(peer)
    assert not peer.open
    assert {outcome.reason for outcome in outcomes.values()} <= {"length", LOST}
    assert len(outcomes) == len(wanted)
    assert LOST in {outcome.reason for outcome in outcomes.values()}
    while worker.running:
        worker.turn()
    assert_nothing_is_held(worker)
    peer.submit(jobs(200, 2))  # there is nobody
    assert [outcome.reason for outcome in peer.turn()] == [LOST, LOST]
