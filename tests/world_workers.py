"""Two workers of a pair, each a process of its own, to be killed.

    python world_workers.py prefill PORT    serves one decode side after another
    python world_workers.py decode STAGE  listens, says where, decodes; kills itself at a stage
    python world_workers.py ask STAGE     the same without a model: it asks, pulls and forgets

The model's KV is the text, so that a wrong page shows in the next token.
"""

import contextlib
import dataclasses
import json
import os
import signal
import sys
import time
from multiprocessing.connection import Listener

import jax
import numpy as np
from ledger_model import Ledger
from serving_checks import assert_only_the_cache_holds, figures

import swa_jax as swa
from swa_jax import disagg
from swa_jax.disagg.bundles import BundleSize, HostAsk, bundle_shape, host_pieces
from swa_jax.disagg.decode_peer import ARRIVED, ASKED, READY
from swa_jax.disagg.decode_worker import DecodeWorker
from swa_jax.disagg.jobs import Job
from swa_jax.disagg.prefill_worker import PrefillWorker
from swa_jax.disagg.processes import join_prefill, serve_prefill
from swa_jax.disagg.transfer import TransferReceiver
from swa_jax.serving import ServingConfig, new_world
from swa_jax.serving.model import as_model

KEY = "WORLD_TEST_KEY"
PIECE = "piece"  # one of several has come
WINDOW, LONGEST, NEW = 6, 30, 8
MODEL = Ledger(WINDOW)
SIZE = BundleSize(pieces=2, full_tokens=8, swa_tokens=8)
DECODE_POOL = swa.PoolConfig(80, 32, 4, WINDOW - 1)
DECODE = ServingConfig(
    DECODE_POOL, LONGEST + NEW, max_running=2, chunk_tokens=16, max_new_tokens=NEW
)


def prefill_config():
    """Smaller pages, and the window that the other side's need."""
    pool = swa.PoolConfig(72, 40, 2, WINDOW - 1)
    pool = dataclasses.replace(pool, sliding_window=disagg.prefill_window(pool, DECODE_POOL, 0))
    return dataclasses.replace(DECODE, pool=pool, role="prefill")


def prefill_worker(**changes):
    config = dataclasses.replace(prefill_config(), **changes)
    return PrefillWorker(MODEL, config, None, places=6, size=SIZE)


def decode_worker():
    return DecodeWorker(MODEL, DECODE, None, places=6, reservations=3, size=SIZE)


def jobs(first, count=6):
    """Prompts of several pieces; every second begins like the one before it."""
    rng = np.random.default_rng(first)
    lengths = rng.integers(20, LONGEST, count)
    prompts = [rng.integers(0, 97, int(length)).tolist() for length in lengths]
    for index in range(1, count, 2):
        prompts[index] = (prompts[index - 1][:9] + prompts[index])[:LONGEST]
    return [Job(first + index, tuple(prompt), NEW) for index, prompt in enumerate(prompts)]


def text(job):
    return tuple(MODEL.continuation(job.prompt, NEW))


def check_clean(worker):
    """Laws hold, nothing was misused, and only the cache holds anything."""
    assert_only_the_cache_holds(worker.world.allocator, worker.world.cache)
    assert figures(worker.world)["refused"] == 0
    if isinstance(worker, DecodeWorker):
        inbox = worker.arrivals.inbox
        assert [int(pages) for pages in disagg.reserved_pages(inbox)] == [0, 0]
        disagg.check(inbox, worker.world.allocator, worker.world.cache, others=(0, 0))


class At:
    """Calls something when some job gets to a stage for the second time that one does.

    Args:
      stage: of `DecodePeer`, or PIECE.
      act: what is to be done.
    """

    def __init__(self, stage, act):
        self.stage, self.act, self.count = stage, act, 0
        self.asked = set()

    def __call__(self, name, stage):
        if stage == ASKED:
            stage = PIECE if name in self.asked else ASKED
            self.asked.add(name)
        self.count += stage == self.stage
        if stage == self.stage and self.count == 2:
            self.act()
        return False


def run(peer, seconds=240):
    """Outcomes by name, once every job has one."""
    end, outcomes = time.monotonic() + seconds, {}
    while peer.open_jobs:
        assert time.monotonic() < end, "it hangs"
        if peer.is_waiting:
            peer.wait(0.01)
        outcomes |= {outcome.name: outcome for outcome in peer.turn()}
    return outcomes | {outcome.name: outcome for outcome in peer.turn()}


def kill_myself():
    os.kill(os.getpid(), signal.SIGKILL)


def prefill(port):
    port, worker = int(port), prefill_worker()
    while True:
        with contextlib.suppress(OSError, EOFError):  # nobody listens yet, or nobody any more
            serve_prefill(worker, ("127.0.0.1", port), os.environ[KEY].encode())
            check_clean(worker)
            print("served", flush=True)


def decode(stage):
    worker = decode_worker()
    with Listener(("127.0.0.1", 0), authkey=os.environ[KEY].encode()) as listener:
        print(listener.address[1], flush=True)
        with listener.accept() as channel:
            peer = join_prefill(worker, channel, on_stage=At(stage, kill_myself))
            peer.submit(jobs(0))
            outcomes = run(peer)
            peer.close()
    check_clean(worker)
    print(json.dumps([outcomes[job.name].tokens for job in jobs(0)]), flush=True)


def ask(stage):
    shape = bundle_shape(
        as_model(MODEL), DECODE, SIZE, jax.eval_shape(lambda: new_world(MODEL, DECODE, 6))
    )
    wanted = jobs(0, DECODE.max_running)
    with Listener(("127.0.0.1", 0), authkey=os.environ[KEY].encode()) as listener:
        print(listener.address[1], flush=True)
        with listener.accept() as channel:
            receiver = TransferReceiver(channel.recv().address)
            channel.send(("submit", wanted))
            kill_at(stage, "submitted")
            ready = set()
            while len(ready) < len(wanted):
                ready.update(channel.recv()[1])
            kill_at(stage, READY)
            asks = [(job.name, ask_for(len(job.prompt) - 1)) for job in wanted]
            channel.send(("ask", asks))
            kill_at(stage, ASKED)
            left = sum(len(host_pieces(one, SIZE)) for _, one in asks)
            while left:
                kind, offered, names = channel.recv()
                assert kind == "bundle"
                receiver.fetch(offered, shape).take()
                left -= len(names)
                kill_at(stage, PIECE)
            kill_at(stage, ARRIVED)
            channel.send(("arrived", [job.name for job in wanted]))
            channel.send(("bye",))


def ask_for(length):
    """All full KV, and SWA for the end."""
    return HostAsk(0, 1, 0, max(0, length - 2 * WINDOW) // 4 * 4, length)


def kill_at(wanted, stage):
    if wanted == stage:
        kill_myself()


if __name__ == "__main__":
    {"prefill": prefill, "decode": decode, "ask": ask}[sys.argv[1]](sys.argv[2])
